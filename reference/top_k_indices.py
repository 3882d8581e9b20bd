"""Selects the columns of each row's largest logits."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._indexer import largest
from ragged_attention.reference._kv_layout import widened

FEATURES = frozenset({"starts", "stops"})
BATCH_INVARIANT = True


def top_k_indices(
    logits: ArrayLike, top_k: int, starts: ArrayLike | None = None, stops: ArrayLike | None = None
) -> NDArray[np.int32]:
    """Columns [T, top_k], ascending and padded with -1; a row selects only columns in [start, stop)."""
    logits = widened(logits)
    columns = np.arange(logits.shape[1])
    counts = np.ones(logits.shape, bool)
    if starts is not None:
        counts &= columns >= np.asarray(starts)[:, None]
    if stops is not None:
        counts &= columns < np.asarray(stops)[:, None]
    return largest(np.where(counts, logits, -np.inf), top_k)


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(top_k_indices, call, call.results())
