"""Paged decode over heads-first pages on a CPU, with one query per sequence."""

from typing import Any

from ragged_attention.calls import PagedAttention
from ragged_attention.portable.numba import _call, _sequences
from ragged_attention.portable.numba._call import KERNEL as KERNEL
from ragged_attention.portable.numba._call import Tile as Tile
from ragged_attention.portable.numba._call import heuristic as heuristic
from ragged_attention.portable.numba._call import invariant_tile as invariant_tile
from ragged_attention.portable.numba._call import why_not as why_not

FEATURES = frozenset({"sm_scale", "soft_cap"})


def run(call: PagedAttention, tile: Tile, launch: Any) -> Any:
    ragged = call.as_ragged(kv_lens=call.lengths)
    return _call.run(ragged, tile, launch, layout=_sequences.ONE_EACH, scales=call.scales, axes="head page slot")["out"]
