"""Chunked prefill over heads-first pages in Triton: the ragged operation's kernels with one sequence."""

from typing import Any

from ragged_attention.calls import PrefillAttention
from ragged_attention.kernels_triton import _heads_first
from ragged_attention.kernels_triton._heads_first import heuristic as heuristic
from ragged_attention.kernels_triton._heads_first import invariant_tile as invariant_tile
from ragged_attention.kernels_triton._tiles import launchable
from ragged_attention.kernels_triton.ragged_paged_attention import Tile as Tile
from ragged_attention.kernels_triton.ragged_paged_attention import tile_kernel

FEATURES = frozenset({"sm_scale", "soft_cap", "sliding_window", "align"})


def why_not(call: PrefillAttention) -> str | None:
    return launchable(call, tile_kernel)


def run(call: PrefillAttention, tile: Tile, launch: Any) -> Any:
    return _heads_first.attend(call, tile, launch, call.length, call.align)
