"""The blocks of keys with the largest scores, in Triton: kernels compute the scores, then select the largest.

Only the scores of one chunk of tokens are in memory at a time.
"""

import dataclasses
from typing import Any

from ragged_attention.calls import SelectBlocks
from ragged_attention.kernels_triton import _blocks, top_k_indices
from ragged_attention.kernels_triton._blocks import FEATURES as FEATURES_OF_SCORES
from ragged_attention.kernels_triton._blocks import why_not as why_not
from ragged_attention.kernels_triton._tiles import cdiv, expect_between

FEATURES = FEATURES_OF_SCORES | {"init_blocks", "local_blocks"}
CHUNK_BYTES = 64 * 2**20  # maximum size of a chunk's scores, unless a single token's are larger
ALIGNMENT = 64  # rows of scores have a multiple of this many elements


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile(_blocks.Tile):
    """The tunable sizes of the score kernel and of the selection."""

    chunk: int = 1024  # tokens whose scores are in memory at one time
    select_block: int = 2048
    select_num_warps: int = 4
    num_splits: int = 1

    def __post_init__(self) -> None:
        _blocks.Tile.__post_init__(self)
        expect_between(self, chunk=(1, 2**31 - 1))
        self.selection()

    def selection(self) -> top_k_indices.Tile:
        return top_k_indices.Tile(block=self.select_block, num_warps=self.select_num_warps, num_splits=self.num_splits)


def heuristic(call: SelectBlocks) -> Tile:
    return _tile_for(call, _blocks.heuristic(call))


def invariant_tile(call: SelectBlocks) -> Tile:
    return _tile_for(call, _blocks.invariant_tile(call))


def _tile_for(call: SelectBlocks, scores: _blocks.Tile) -> Tile:
    chunk = max(1, min(CHUNK_BYTES // (4 * call.num_heads * row_stride(call)), call.num_tokens))
    selection = _blocks.selection_tile(call, chunk * call.num_heads)
    return Tile(
        **dataclasses.asdict(scores),
        chunk=chunk,
        select_block=selection.block,
        select_num_warps=selection.num_warps,
        num_splits=selection.num_splits,
    )


def row_stride(call: SelectBlocks) -> int:
    return cdiv(max(call.num_blocks, 1), ALIGNMENT) * ALIGNMENT


def run(call: SelectBlocks, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns the blocks. All chunks share the memory for scores."""
    rows, width = min(tile.chunk, max(call.num_tokens, 1)), row_stride(call)
    shape = (rows, call.num_heads, width)
    scores: Any = None
    blocks: Any = None
    for first in range(0, max(call.num_tokens, 1), rows):
        count = min(rows, call.num_tokens - first)
        scores = _blocks.enqueue_scores(call, tile, launch, first, count, shape, scores)
        if call.init_blocks or call.local_blocks:
            scores = _blocks.enqueue_raised(call, launch, scores, count * call.num_heads, shape, in_place=True)
        blocks = _blocks.enqueue_selection(call, scores, first, count, width, tile.selection(), launch, blocks)
    return blocks
