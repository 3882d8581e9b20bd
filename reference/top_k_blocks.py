"""Selects the blocks with the largest scores for each token and head, and blocks that are always selected."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._indexer import largest
from ragged_attention.reference._kv_layout import widened

FEATURES = frozenset({"init_blocks", "local_blocks"})
BATCH_INVARIANT = True


def top_k_blocks(scores: ArrayLike, top_k: int, *, init_blocks: int = 0, local_blocks: int = 0) -> NDArray[np.int32]:
    """Blocks [T, H, top_k], ascending and padded with -1.

    The query's own block is the last one whose score is not -inf.
    """
    scores = widened(scores)
    num_tokens, num_heads, num_blocks = scores.shape
    rows = scores.reshape(num_tokens * num_heads, num_blocks)
    block = np.arange(num_blocks)
    own = np.max(np.where(rows != -np.inf, block, -1), axis=1, initial=-1)[:, None]
    forced = (block < init_blocks) | (block > own - local_blocks)
    return largest(rows, top_k, forced).reshape(num_tokens, num_heads, top_k)


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(top_k_blocks, call, call.results())
