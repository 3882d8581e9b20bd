"""Paged decode over heads-first pages on a CPU: one query per sequence."""

from typing import Any

from ragged_attention.calls import PagedAttention
from ragged_attention.portable.numba import _call, _sequences
from ragged_attention.portable.numba._call import KERNEL as KERNEL
from ragged_attention.portable.numba._call import Tile as Tile
from ragged_attention.portable.numba._call import heuristic as heuristic

FEATURES = frozenset({"sm_scale", "soft_cap"})


def why_not(call: PagedAttention) -> str | None:
    return _call.cannot_run(call)


def run(call: PagedAttention, tile: Tile, launch: Any) -> Any:
    ragged = call.as_ragged(kv_lens=call.lengths)
    return _call.run(ragged, tile, launch, layout=_sequences.ONE_EACH, scales=call.scales, axes="KPGD")["out"]
