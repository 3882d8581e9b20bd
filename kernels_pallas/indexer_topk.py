"""The keys with the largest logits of the lightning indexer, on TPUs.

A chunk of tiles is processed at a time: their logits, then their top k. The whole matrix of logits never exists.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import IndexerTopk
from ragged_attention.kernels_pallas import _indexer, top_k_indices
from ragged_attention.kernels_pallas._blocks import LARGEST_INT, cdiv, expect_sizes

FEATURES = _indexer.FEATURES | {"candidate_blocks", "candidate_block_size"}
CHUNK_BYTES = 64 << 20  # maximum size of a chunk's logits, unless a single tile's are larger


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile(_indexer.Tile):
    """The tunable parameters.

    Args:
        num_keys_per_block, num_queries_per_block, vmem_limit_bytes: as in `indexer_logits`.
        num_rows_per_chunk: maximum rows of logits in memory at a time, except that one tile may have more.
        num_rows_per_block: as in `top_k_indices`.
    """

    num_rows_per_chunk: int = 1024
    num_rows_per_block: int = top_k_indices.ROWS

    def __post_init__(self) -> None:
        _indexer.Tile.__post_init__(self)
        expect_sizes(self, num_rows_per_chunk=(1, LARGEST_INT))
        self.selection()

    def selection(self) -> top_k_indices.Tile:
        return top_k_indices.Tile(num_rows_per_block=self.num_rows_per_block, vmem_limit_bytes=self.vmem_limit_bytes)


def why_not(call: IndexerTopk) -> str | None:
    return _indexer.why_not(call) or top_k_indices.too_wide(call.columns)


def heuristic(call: IndexerTopk) -> Tile:
    tile, width = _indexer.heuristic(call), _indexer.width_of(call)
    return Tile(
        num_keys_per_block=tile.num_keys_per_block,
        num_queries_per_block=tile.num_queries_per_block,
        num_rows_per_chunk=max(1, CHUNK_BYTES // (4 * max(width, 1))),
        num_rows_per_block=top_k_indices.rows_that_fit(LARGEST_INT, call.columns),
    )


def run(call: IndexerTopk, tile: Tile, launch: Any) -> Any:
    """Positions [T, top_k]."""
    if _indexer.sees_nothing(call):
        return jnp.full((call.num_tokens, call.top_k), -1, jnp.int32)
    rows, pieces = _indexer.rows_of(call, tile.num_queries_per_block), _indexer.pieces_of(call, tile)
    width, tiles = _indexer.width_of(call), len(rows.seq)
    together = min(max(1, tile.num_rows_per_chunk // tile.num_queries_per_block), tiles)

    def select(chunk: tuple[Any, ...]) -> Any:
        token, starts, stops, seq = chunk
        part = _indexer.Rows(token=token, starts=starts, stops=stops, seq=seq, of_token=None)
        logits = _indexer.logits_of(call, pieces, part, tile).reshape(-1, width)
        starts, stops = starts.reshape(-1), stops.reshape(-1)
        if call.relative:
            logits = _indexer.from_own_start(call, logits, starts)
            starts, stops = jnp.zeros_like(starts), stops - starts
        if call.candidate_blocks is not None:
            logits = jnp.where(_listed(call, token.reshape(-1)), logits, -jnp.inf)
        return top_k_indices.largest(logits, call.top_k, starts, stops, tile.selection())

    arrays = (rows.token, rows.starts, rows.stops, rows.seq)
    chunks = [_indexer.pad_rows(array, -tiles % together).reshape(-1, together, *array.shape[1:]) for array in arrays]
    selected = lax.map(select, tuple(chunks)).reshape(-1, call.top_k)
    return _indexer.by_token(selected, rows, call.num_tokens, -1)


def _listed(call: Any, token: Any) -> Any:
    """A mask of the columns in the candidate blocks of tokens [R], bool [R, columns]."""
    size = min(call.candidate_block_size, call.columns)
    blocks = cdiv(call.columns, size)
    lists = call.candidate_blocks[token]
    lists = jnp.where((lists >= 0) & (lists < blocks), lists, blocks)
    table = jnp.zeros((len(token), blocks + 1), bool).at[jnp.arange(len(token))[:, None], lists].set(True)
    return jnp.repeat(table[:, :blocks], size, axis=1)[:, : call.columns]
