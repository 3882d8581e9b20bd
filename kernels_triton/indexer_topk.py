"""The lightning indexer's top-k keys in Triton: kernels compute the logits, then select the largest.

Only the logits of one chunk of tokens are in memory at a time. In each row, only the logits of seen keys are read.
Unless tokens have candidate blocks, only these logits are written, too.
"""

import dataclasses
from typing import Any

from ragged_attention.calls import IndexerTopk
from ragged_attention.kernels_triton import indexer_logits, top_k_indices
from ragged_attention.kernels_triton._tiles import cdiv, expect_between

FEATURES = indexer_logits.FEATURES - {"indices"} | {"candidate_blocks", "candidate_block_size"}
CHUNK_BYTES = 64 * 2**20  # maximum size of a chunk's logits, unless a single token's are larger
ALIGNMENT = 64  # rows of logits have a multiple of this many elements
MAX_CANDIDATES = 2**30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile(indexer_logits.Tile):
    """The tunable sizes of the logits kernel and of the selection."""

    chunk: int = 1024  # tokens whose logits are in memory at one time
    select_block: int = 2048
    select_num_warps: int = 4
    num_splits: int = 1

    def __post_init__(self) -> None:
        indexer_logits.Tile.__post_init__(self)
        expect_between(self, chunk=(1, 2**31 - 1))
        self.selection()

    def selection(self) -> top_k_indices.Tile:
        return top_k_indices.Tile(block=self.select_block, num_warps=self.select_num_warps, num_splits=self.num_splits)


def why_not(call: IndexerTopk) -> str | None:
    if call.candidate_blocks is not None:
        size = indexer_logits.candidate_size(call)
        if (candidates := call.candidate_blocks.shape[1] * size) > MAX_CANDIDATES:
            return f"expected candidate_blocks of at most {MAX_CANDIDATES} positions, got {candidates}"
    return indexer_logits.why_not(call)


def heuristic(call: IndexerTopk) -> Tile:
    return tile_for(call, indexer_logits.decodes(call))


def invariant_tile(call: IndexerTopk) -> Tile:
    return tile_for(call, False)


def tile_for(call: Any, walk: bool) -> Tile:
    columns = row_stride(call)
    chunk = max(1, min(CHUNK_BYTES // (4 * columns), call.num_tokens))
    logits = indexer_logits.tile_for(call, walk)
    selection = top_k_indices.tile_for(call, chunk, call.columns)
    return Tile(
        **dataclasses.asdict(logits),
        chunk=chunk,
        select_block=selection.block,
        select_num_warps=selection.num_warps,
        num_splits=selection.num_splits,
    )


def row_stride(call: Any) -> int:
    return cdiv(max(call.columns, 1), ALIGNMENT) * ALIGNMENT


def run(call: IndexerTopk, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns the positions. All chunks share the memory for logits."""
    work, width = indexer_logits.work_of(call, launch), row_stride(call)
    rows = min(tile.chunk, max(call.num_tokens, 1))
    logits: Any = None
    positions: Any = None
    for first in range(0, max(call.num_tokens, 1), rows):
        count = min(rows, call.num_tokens - first)
        if call.candidate_blocks is not None:
            logits = indexer_logits.filled(work, launch, rows, width, logits)
        logits = indexer_logits.enqueue(work, tile, launch, first, count, width, logits, rows=rows, fill=False)
        token_rows = top_k_indices.LogitRows(
            logits=logits,
            num_rows=count,
            row_stride=width,
            columns=work.tables["num_kv_tokens"],
            tables=(*work.arrays[4:6], *work.arrays[7:]),
            numbers={name: number for name, number in work.tables.items() if name != "num_kv_tokens"},
            counted="seen",
            sight=work.sight,
            first_token=first,
        )
        positions = top_k_indices.enqueue(token_rows, call.top_k, call.num_tokens, tile.selection(), launch, positions)
    return positions
