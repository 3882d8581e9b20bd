"""Chunked prefill over heads-first pages on a CPU, with the queries of one sequence."""

from typing import Any

from ragged_attention.calls import PrefillAttention
from ragged_attention.portable.numba import _call, _sequences
from ragged_attention.portable.numba._call import KERNEL, Tile, heuristic, invariant_tile, why_not

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
FEATURES = frozenset({"sm_scale", "soft_cap", "sliding_window", "align"})
LAYOUTS = {"chunk": _sequences.CHUNK_START, "end": _sequences.CHUNK_END}


def run(call: PrefillAttention, tile: Tile, launch: Any) -> Any:
    ragged = call.as_ragged(kv_lens=call.length)
    return _call.run(ragged, tile, launch, layout=LAYOUTS[call.align], scales=call.scales, axes="head page slot")["out"]
