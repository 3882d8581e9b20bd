"""Computes the scores of blocks of keys on a CPU."""

from ragged_attention.portable.numba._blocks_call import KERNEL, Tile, heuristic, invariant_tile, run
from ragged_attention.portable.numba._blocks_call import SCORES_FEATURES as FEATURES
from ragged_attention.portable.numba._call import cannot_run as why_not

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
