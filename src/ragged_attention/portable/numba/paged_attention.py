"""Paged decode over heads-first pages on a CPU, with one query per sequence."""

from typing import Any

from ragged_attention.calls import PagedAttention
from ragged_attention.portable.numba import _call, _sequences
from ragged_attention.portable.numba._call import KERNEL, Tile, heuristic, invariant_tile, why_not

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
FEATURES = frozenset({"sm_scale", "soft_cap"})


def run(call: PagedAttention, tile: Tile, launch: Any) -> Any:
    ragged = call.as_ragged(kv_lens=call.lengths)
    return _call.run(ragged, tile, launch, layout=_sequences.ONE_EACH, scales=call.scales, axes="head page slot")["out"]
