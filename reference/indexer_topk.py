"""The keys with the largest logits of the lightning indexer, for each query token."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.calls import dtype_name
from ragged_attention.reference._indexer import largest
from ragged_attention.reference.indexer_logits import FEATURES as FEATURES_OF_LOGITS
from ragged_attention.reference.indexer_logits import indexer_logits

FEATURES = FEATURES_OF_LOGITS - {"indices"} | {"candidate_blocks", "candidate_block_size"}
BATCH_INVARIANT = True


def indexer_topk(
    q: ArrayLike,
    keys: ArrayLike,
    weights: ArrayLike,
    top_k: int,
    *,
    candidate_blocks: ArrayLike | None = None,
    candidate_block_size: int | None = None,
    **others: Any,
) -> NDArray[np.int32]:
    """Positions [T, top_k], ascending and padded with -1; `others` are the arguments of `indexer_logits`."""
    logits = indexer_logits(q, keys, weights, **others)
    if candidate_blocks is not None:
        assert candidate_block_size is not None
        blocks = np.arange(logits.shape[1]) // candidate_block_size
        listed = [np.isin(blocks, row) for row in np.asarray(candidate_blocks)]
        logits = np.where(np.array(listed).reshape(logits.shape), logits, -np.inf)
    return largest(logits, top_k)


def run(call: Any, tile: Any, launch: Any) -> Any:
    formats = {"q_dtype": dtype_name(call.q), "key_dtype": call.key_dtype}
    return launch.on_host(indexer_topk, call, call.results(), **formats)
