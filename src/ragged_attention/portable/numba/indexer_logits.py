"""The lightning indexer's logits on a CPU."""

from typing import Any

from ragged_attention.calls import IndexerLogits
from ragged_attention.portable.numba import _indexer_call
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._indexer_call import FEATURES_OF_LOGITS as FEATURES
from ragged_attention.portable.numba._indexer_call import KERNEL as KERNEL
from ragged_attention.portable.numba._indexer_call import Tile as Tile
from ragged_attention.portable.numba._indexer_call import heuristic as heuristic
from ragged_attention.portable.numba._indexer_call import invariant_tile as invariant_tile

__all__ = ["FEATURES"]
why_not = cannot_run


def run(call: IndexerLogits, tile: Tile, launch: Any) -> Any:
    return _indexer_call.run(call, tile, launch)["logits"]
