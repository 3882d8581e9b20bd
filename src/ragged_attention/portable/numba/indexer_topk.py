"""Selects the keys with the largest logits of the lightning indexer on a CPU."""

from ragged_attention.portable.numba._call import cannot_run as why_not
from ragged_attention.portable.numba._indexer_call import KERNEL, LOGITS_FEATURES, Tile, heuristic, invariant_tile, run

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
FEATURES = LOGITS_FEATURES - {"indices"} | {"candidate_blocks", "candidate_block_size"}
