"""The blocks with the largest scores for each token and index head."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.calls import dtype_name
from ragged_attention.reference.block_scores import FEATURES as FEATURES_OF_SCORES
from ragged_attention.reference.block_scores import block_scores
from ragged_attention.reference.top_k_blocks import FEATURES as FEATURES_OF_TOP_K
from ragged_attention.reference.top_k_blocks import top_k_blocks

FEATURES = FEATURES_OF_SCORES | FEATURES_OF_TOP_K
BATCH_INVARIANT = True


def select_blocks(
    q: ArrayLike, keys: ArrayLike, top_k: int, *, init_blocks: int = 0, local_blocks: int = 0, **others: Any
) -> NDArray[np.int32]:
    """Blocks [T, H, top_k], ascending and padded with -1; `others` are the arguments of `block_scores`."""
    return top_k_blocks(block_scores(q, keys, **others), top_k, init_blocks=init_blocks, local_blocks=local_blocks)


def run(call: Any, tile: Any, launch: Any) -> Any:
    formats = {"q_dtype": dtype_name(call.q), "key_dtype": call.key_dtype}
    return launch.on_host(select_blocks, call, call.results(), **formats)
