"""Chunked prefill over heads-first pages in Triton: the ragged operation's kernels, for one sequence."""

from typing import Any

from ragged_attention.kernels_triton import heads_first
from ragged_attention.kernels_triton.blocks import launchable
from ragged_attention.kernels_triton.heads_first import heuristic as heuristic
from ragged_attention.kernels_triton.ragged_paged_attention import Tile as Tile

FEATURES = frozenset({"sm_scale", "soft_cap", "sliding_window", "align"})


def why_not(call: Any) -> str | None:
    return launchable(call, heads_first.scaled_kernel)


def run(call: Any, tile: Tile, launch: Any) -> Any:
    return heads_first.attend(call, tile, launch, call.length, call.align)
