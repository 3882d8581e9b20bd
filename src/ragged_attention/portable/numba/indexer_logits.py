"""The lightning indexer's logits on a CPU."""

from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._indexer_call import FEATURES_OF_LOGITS as FEATURES
from ragged_attention.portable.numba._indexer_call import KERNEL as KERNEL
from ragged_attention.portable.numba._indexer_call import Tile as Tile
from ragged_attention.portable.numba._indexer_call import heuristic as heuristic
from ragged_attention.portable.numba._indexer_call import invariant_tile as invariant_tile
from ragged_attention.portable.numba._indexer_call import run as run

__all__ = ["FEATURES"]
why_not = cannot_run
