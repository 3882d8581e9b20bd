"""The keys with the largest logits in the lightning indexer, on a CPU."""

from typing import Any

from ragged_attention.calls import IndexerTopk
from ragged_attention.portable.numba import _indexer_call
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._indexer_call import FEATURES_OF_LOGITS
from ragged_attention.portable.numba._indexer_call import KERNEL as KERNEL
from ragged_attention.portable.numba._indexer_call import Tile as Tile
from ragged_attention.portable.numba._indexer_call import heuristic as heuristic
from ragged_attention.portable.numba._indexer_call import invariant_tile as invariant_tile

FEATURES = FEATURES_OF_LOGITS | {"candidate_blocks", "candidate_block_size"}
why_not = cannot_run


def run(call: IndexerTopk, tile: Tile, launch: Any) -> Any:
    return _indexer_call.run(
        call, tile, launch, top_k=call.top_k, candidates=call.candidate_blocks,
        candidate_size=call.candidate_block_size or 0,
    )["indices"]  # fmt: skip
