"""Selects the blocks of keys with the largest scores for each token and index head on a CPU."""

from ragged_attention.portable.numba._blocks_call import KERNEL, SCORES_FEATURES, Tile, heuristic, invariant_tile, run
from ragged_attention.portable.numba._call import cannot_run as why_not

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
FEATURES = SCORES_FEATURES | {"init_blocks", "local_blocks"}
