"""Ragged paged attention in plain jax operations.

The queries of a sequence are cut into tiles of tokens. A tile loops over the keys that it can see, a block at a time,
with an online softmax. The numbers of tiles and of blocks are run-time values, so the cost depends on the visible keys.
One block of K and V is gathered at a time. Sequences of one query get tiles of one token, so that decode has no padded
rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import RaggedPagedAttention
from ragged_attention.jax_shared.axes import fori_loop
from ragged_attention.jax_shared.logits import window_of
from ragged_attention.jax_shared.pages import per_head
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._pages import BITS, Blocks, KeyValueBlocks
from ragged_attention.portable.xla._ragged import at, put, sequences, walk_tiles
from ragged_attention.portable.xla._ranges import Ranges
from ragged_attention.portable.xla._selected import Selected
from ragged_attention.portable.xla._softmax import (
    Softmax,
    biased,
    dot,
    larger_or_nan,
    largest_or_nan,
    logits_of,
)
from ragged_attention.portable.xla._tile import Tile as Tile

LEAST_KEYS = 64  # minimum keys in a block for tiles of one row with lists; else the loop costs more than keys
FEATURES = frozenset({
    "num_seqs", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes", "relative_bias",
    "k_scale", "v_scale", "k_scale_pages", "v_scale_pages", "return_lse", "return_max_logits", "draft_mask",
    "key_ranges", "selected", "block_size", "out_dtype",
})  # fmt: skip


def heuristic(call: RaggedPagedAttention) -> Tile:
    """Tiles of about the mean query length, from 8 to 64 tokens, and blocks that fit a core's cache.

    Tiles of more than 8 tokens have at most 256 rows per KV head.
    """
    mean = -(-call.num_tokens // max(call.max_num_seqs, 1))
    block_q = max(8, min(64, 256 // call.group, 1 << (mean - 1).bit_length() if mean else 1))
    floats = call.num_kv_heads * (call.head_dim + call.v_head_dim)
    block_kv = max(64, min(512 if block_q == 8 else 256, 2**20 // floats))
    return Tile(block_q=block_q, block_kv=block_kv)


def run(call: RaggedPagedAttention, tile: Tile, launch: Any) -> Any:
    out, lse, max_logits = attention(call, tile, KeyValueBlocks(call))
    return call.requested(out=out, lse=lse, max_logits=max_logits)


def attention(
    call: RaggedPagedAttention, tile: Tile, blocks: Blocks, num_q_tokens: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Out, lse and, if the call requests it, max_logits of a call; `blocks` reads K and V.

    `num_q_tokens` is the number of queries per sequence, if known.
    """
    dtype = jnp.dtype(call.result_dtype)
    # A bfloat16 `out` is kept as bits, because XLA's CPU compiler would convert all of it to update a part.
    out = jnp.zeros(call.out_shape, BITS[2] if dtype == jnp.bfloat16 else dtype)
    lse = jnp.full(call.out_shape[:2], -jnp.inf, jnp.float32)
    max_logits = jnp.full(call.num_q_heads, -jnp.inf, jnp.float32) if call.return_max_logits else None
    results: Any = out, lse, max_logits
    if 0 not in (call.num_tokens, call.max_num_seqs, call.num_pages, call.page_indices.shape[1]):
        block_kv = min(tile.block_kv, call.capacity)
        if num_q_tokens in (None, 1):
            listed_kv = block_kv if call.block_size is None else min(block_kv, max(call.block_size, LEAST_KEYS))
            results = _attend_in_tiles(call, blocks, 1, listed_kv, results)
        if (longest := call.num_tokens if num_q_tokens is None else num_q_tokens) > 1:
            size = max(2, min(tile.block_q, longest))
            results = _attend_in_tiles(call, blocks, size, block_kv, results)
    out, lse, max_logits = results
    return lax.bitcast_convert_type(out, dtype), lse, max_logits


class Queries(NamedTuple):
    """One tile: `size` consecutive rows of q, of which only the rows [first, stop) belong to it and are written."""

    seq: jax.Array
    first: jax.Array
    stop: jax.Array
    row: jax.Array  # i32 [size]
    aligned: jax.Array  # i32 [size], the position; negative if the row precedes its sequence's first key
    position: jax.Array  # i32 [size], like `aligned`, but -1 if that is negative
    first_new: jax.Array  # the position of the sequence's first query; negative if there are more queries than keys

    @property
    def own(self) -> jax.Array:
        return (self.row >= self.first) & (self.row < self.stop)


def _attend_in_tiles(call: RaggedPagedAttention, blocks: Blocks, size: int, block_kv: int, results: Any) -> Any:
    """Compute the results of the sequences with one query token if `size` is 1, else of those with more.

    A sequence is computed in tiles of `size` tokens.
    """
    seqs = sequences(call.kv_lens, call.cu_q_lens, call.num_seqs, call.num_tokens, call.capacity)

    def attend(seq: jax.Array, first: jax.Array, row: jax.Array, results: Any) -> Any:
        stop, kv_len = at(seqs.stops, seq), at(seqs.kv_lens, seq)
        aligned = kv_len - (stop - row)
        position = jnp.maximum(aligned, -1)
        first_new = kv_len - (stop - at(seqs.starts, seq))
        tile = Queries(seq, first, jnp.minimum(stop, first + size), row, aligned, position, first_new)
        (*rows, max_logits), (*parts, largest) = results, _attend(call, blocks, tile, kv_len, block_kv)
        written = (
            put(whole, lax.bitcast_convert_type(part, whole.dtype), row, tile.own)
            for whole, part in zip(rows, parts, strict=True)
        )
        return *written, None if largest is None else larger_or_nan(max_logits, largest)

    return walk_tiles(seqs.starts, seqs.stops, seqs.tiled_by(size), size, call.num_tokens, attend, results)


def _visible_range(call: RaggedPagedAttention, tile: Queries, kv_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first key that any row of the tile may see, and one past the last."""
    start, stop = jnp.int32(0), kv_len
    if call.causal and call.draft_mask is None and call.key_ranges is None:
        stop = jnp.clip(tile.position[tile.stop - 1 - tile.row[0]] + 1, 0, kv_len)
    if (window := window_of(call, call.capacity)) is not None:
        start = jnp.maximum(tile.position[tile.first - tile.row[0]] - (window - 1), 0)
    return start, stop


def _rows_of(call: RaggedPagedAttention, tile: Queries) -> jax.Array:
    """The tile's queries, [K, size * group, D]."""
    q, row = lax.optimization_barrier((call.q, tile.row[0]))  # else XLA would convert all of q before the loop
    q = lax.dynamic_slice_in_dim(lax.bitcast_convert_type(q, BITS[q.dtype.itemsize]), row, len(tile.row))
    q = lax.bitcast_convert_type(q, call.q.dtype).reshape(-1, call.num_kv_heads, call.group, call.head_dim)
    return q.swapaxes(0, 1).reshape(call.num_kv_heads, -1, call.head_dim)


def _attend(
    call: RaggedPagedAttention, blocks: Blocks, tile: Queries, kv_len: jax.Array, block_kv: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Out [size, H, D_v], lse [size, H] and, if the call requests it, max_logits [H] of one tile."""
    size, num_kv_heads, group = len(tile.row), call.num_kv_heads, call.group
    q = _rows_of(call, tile)
    ranges = Ranges.of_tile(call, tile.row, tile.own, kv_len)
    lists = Selected.of_tile(call, tile.row, tile.own, kv_len)
    start, stop = _visible_range(call, tile, kv_len)
    window, scale = window_of(call, call.capacity), per_head(call.k_scale, num_kv_heads) * jnp.float32(call.scale)

    def step(first: jax.Array, state: Softmax) -> Softmax:
        key = first + jnp.arange(block_kv, dtype=jnp.int32)
        k, v, seen = blocks.read(tile.seq, key, key < stop)
        products = dot("hrd,hkd->hrk", q, k)
        logits = logits_of(products, scale[:, None, None], call.soft_cap)
        logits = biased(logits, call, slopes, table, jnp.repeat(key - tile.aligned[:, None], group, axis=0))
        seen = jnp.broadcast_to(seen, (size, block_kv))
        if ranges is not None:
            seen &= ranges.see(key)
        elif call.draft_mask is not None:
            seen &= _drafted(call.draft_mask, tile, key)
        elif call.causal:
            seen &= key <= tile.position[:, None]
        if window is not None:
            seen &= key > tile.position[:, None] - window
        seen = seen[None] if lists is None else seen & lists.see(key)  # [K or 1, size, block_kv]
        if call.draft_mask is not None or ranges is not None or lists is not None:
            # Clear values that no row sees, because 0 * NaN is NaN.
            v = jnp.where((seen & tile.own[:, None]).any(axis=1)[..., None], v, 0)
        own = jnp.repeat(seen & tile.own[:, None], group, axis=1)  # a tile's other rows belong to other tiles
        state, seen = state.with_largest(products, scale[:, None, None], own), jnp.repeat(seen, group, axis=1)
        return state.updated(jnp.where(seen, logits, -jnp.inf), v, any_hidden=call.v_format.scaled)

    def by_row(heads: jax.Array | None) -> jax.Array | None:
        """One number per query head, [H], repeated for each row as [K, size * group]."""
        return None if heads is None else jnp.tile(heads.reshape(num_kv_heads, group), size)

    def table_of_rows() -> jax.Array | None:
        """The rows of `relative_bias` [K, size * group, B]."""
        if (table := call.relative_bias) is None:
            return None
        rows = jnp.broadcast_to(table, (size, *table.shape)) if table.ndim == 2 else slice_rows(table)
        rows = rows.reshape(size, num_kv_heads, group, -1).swapaxes(0, 1)
        return rows.reshape(num_kv_heads, size * group, -1)

    def slice_rows(array: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, tile.row[0], size)

    def by_token(rows: jax.Array) -> jax.Array:
        """Rows [K, size * group, ...] transposed to [size, H, ...]."""
        inner = rows.shape[2:]
        return rows.reshape(num_kv_heads, size, group, *inner).swapaxes(0, 1).reshape(size, -1, *inner)

    count = (jnp.maximum(stop - start, 0) + (block_kv - 1)) // block_kv
    keeps = bool(call.return_max_logits)
    state = Softmax.empty(num_kv_heads, size * group, d_v=call.v_head_dim, keeps_largest=keeps)
    sinks, slopes = by_row(call.sinks), by_row(call.alibi_slopes)
    table = table_of_rows()
    if lists is not None:
        state = lists.over_blocks(start, stop, block_kv, step, state)
    elif ranges is not None:
        state = ranges.over_blocks(block_kv, step, state)
    else:
        state = fori_loop(jnp.int32(0), count, lambda block, state: step(start + block * block_kv, state), state)
    out, lse = state.finished(sinks, per_head(call.v_scale, num_kv_heads)[:, None])
    largest = None if state.largest is None else largest_or_nan(by_token(state.largest), axis=0)
    return by_token(out).astype(call.result_dtype), by_token(lse), largest


def _drafted(mask: jax.Array, tile: Queries, key: jax.Array) -> jax.Array:
    """Bool [size, keys]: True if the key is of an earlier step, or the draft mask [T, W] lets the tile's row see it."""
    rows = lax.dynamic_slice_in_dim(mask, tile.row[0], len(tile.row))
    rows = jnp.pad(rows, ((0, 0), (0, 1)))  # tokens beyond the mask are hidden
    new = key - tile.first_new
    return (new < 0) | rows[:, jnp.clip(new, 0, mask.shape[1])]
