"""Computes the lightning indexer's logits on a CPU."""

from ragged_attention.portable.numba._call import cannot_run as why_not
from ragged_attention.portable.numba._indexer_call import KERNEL, Tile, heuristic, invariant_tile, run
from ragged_attention.portable.numba._indexer_call import LOGITS_FEATURES as FEATURES

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
