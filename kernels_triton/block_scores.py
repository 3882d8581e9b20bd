"""The scores of blocks of keys in Triton, with the score kernel of `_blocks`."""

from typing import Any

from ragged_attention.calls import BlockScores
from ragged_attention.kernels_triton._blocks import FEATURES as FEATURES
from ragged_attention.kernels_triton._blocks import Tile as Tile
from ragged_attention.kernels_triton._blocks import enqueue_scores
from ragged_attention.kernels_triton._blocks import heuristic as heuristic
from ragged_attention.kernels_triton._blocks import invariant_tile as invariant_tile
from ragged_attention.kernels_triton._blocks import why_not as why_not


def run(call: BlockScores, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns the scores."""
    (result,) = call.results()
    return enqueue_scores(call, tile, launch, 0, call.num_tokens, result.shape)
