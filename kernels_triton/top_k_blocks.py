"""The blocks with the largest scores of each token and head in Triton, selected by the kernels of `top_k_indices`."""

from typing import Any

from ragged_attention.calls import TopKBlocks
from ragged_attention.kernels_triton import _blocks
from ragged_attention.kernels_triton._tiles import launchable
from ragged_attention.kernels_triton.top_k_indices import Tile as Tile

FEATURES = frozenset({"init_blocks", "local_blocks"})
BATCH_INVARIANT = True  # results do not depend on the tile


def why_not(call: TopKBlocks) -> str | None:
    return launchable(call, _blocks.raise_kernel)


def heuristic(call: TopKBlocks) -> Tile:
    return _blocks.selection_tile(call, call.num_tokens * call.num_heads)


def run(call: TopKBlocks, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns the blocks."""
    given, rows = launch.packed(call.scores), call.num_tokens * call.num_heads
    scores = _blocks.enqueue_raised(call, launch, given, rows, tuple(call.scores.shape), in_place=False)
    return _blocks.enqueue_selection(call, scores, 0, call.num_tokens, call.num_blocks, tile, launch)
