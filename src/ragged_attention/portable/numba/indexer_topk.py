"""The keys with the largest logits in the lightning indexer, on a CPU."""

from ragged_attention.portable.numba._call import cannot_run as why_not
from ragged_attention.portable.numba._indexer_call import (
    FEATURES_OF_LOGITS,
    KERNEL,
    Tile,
    heuristic,
    invariant_tile,
    run,
)

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
FEATURES = FEATURES_OF_LOGITS | {"candidate_blocks", "candidate_block_size"}
