"""Cuts packed sequences into tiles of queries, each of which loops over the keys that it can see, a block at a time.

The numbers of tiles and blocks are run-time values, so the cost depends on the visible keys, not on the shapes. Memory
holds the arrays, one tile and one block. Arrays are heads-first and in the compute dtype. The query heads of one KV
head are rows of one matrix, so keys and values are never repeated.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import VarlenCall
from ragged_attention.jax_shared.axes import fori_loop
from ragged_attention.jax_shared.logits import window_of
from ragged_attention.jax_shared.pages import bounds_of
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._ragged import at, put, walk_tiles
from ragged_attention.portable.xla._ranges import Ranges
from ragged_attention.portable.xla._selected import Selected
from ragged_attention.portable.xla._tile import Tile


def heuristic(call: VarlenCall) -> Tile:
    """Tiles of about the mean query length, from 8 to 64 tokens, and blocks that fit a core's cache.

    Tiles of more than 8 tokens have at most 256 rows per KV head.
    """
    mean, longest = -(-call.num_q_tokens // max(call.num_seqs, 1)), call.num_kv_tokens
    if call.max_q_len is not None:
        mean = min(mean, call.max_q_len)
    if call.max_kv_len is not None:
        longest = min(longest, call.max_kv_len)
    block_q = max(8, min(64, 256 // call.group, 1 << max(mean - 1, 0).bit_length()))
    floats = call.num_kv_heads * (call.head_dim + call.v_head_dim)
    block_kv = max(64, min(256, 2**20 // floats))
    return Tile(block_q=block_q, block_kv=max(1, min(block_kv, longest)))


def heads_first(array: jax.Array, num_kv_heads: int, dtype: Any) -> jax.Array:
    """An array [T, K * G, ...] transposed to [K, T, G, ...]."""
    num_tokens, num_heads, *rest = array.shape
    return array.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, *rest).swapaxes(0, 1).astype(dtype)


def tokens_first(array: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `heads_first`."""
    num_kv_heads, num_tokens, group, *rest = array.shape
    return array.swapaxes(0, 1).reshape(num_tokens, num_kv_heads * group, *rest).astype(dtype)


def tables_first(call: VarlenCall, dtype: Any) -> jax.Array | None:
    """`relative_bias` as [K, T, G, B], or [K, G, B] if all queries share it."""
    if (table := call.relative_bias) is None:
        return None
    if table.ndim == 3:
        return heads_first(table, call.num_kv_heads, dtype)
    return table.reshape(call.num_kv_heads, call.group, -1).astype(dtype)


def tables_as_given(tables: jax.Array, call: VarlenCall) -> jax.Array:
    """The inverse of `tables_first`."""
    like = call.relative_bias
    return tokens_first(tables, like.dtype) if tables.ndim == 4 else tables.reshape(like.shape).astype(like.dtype)


class Queries(NamedTuple):
    """One tile: `size` consecutive rows of q, and the rows [start, stop) of k that they may see."""

    row: jax.Array  # i32 [size]
    own: jax.Array  # bool [size]; True for rows whose results this tile writes
    last: jax.Array  # i32 [size], the key at a row's own position, as a row index of k
    start: jax.Array
    stop: jax.Array
    ranges: Ranges | None  # the keys that each row sees, counted from the sequence's first key
    lists: Selected | None  # the blocks of keys that each row may see, counted likewise
    first_key: jax.Array  # the sequence's first key, as a row index of k

    def rows(self, array: jax.Array) -> jax.Array:
        """The tile's rows [K, size * G, ...] of an array [K, T, G, ...]."""
        some = lax.dynamic_slice_in_dim(array, self.row[0], len(self.row), axis=1)
        return some.reshape(some.shape[0], -1, *some.shape[3:])

    def biases(self, slopes: jax.Array | None, table: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
        """The tile's slopes [K, size * G] and tables [K, size * G, B].

        `slopes` is [K, G], and `table` has the form of `tables_first`.
        """
        count = len(self.row)
        rows = None if slopes is None else jnp.tile(slopes, count)
        if table is None:
            return rows, None
        return rows, self.rows(table) if table.ndim == 4 else jnp.tile(table, (1, count, 1))

    def put(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        """An array [K, T, G, ...] with the tile's own rows replaced by those of `part` [K, size * G, ...]."""
        return put(whole, part, self.row, self.own, axis=1)


class Keys(NamedTuple):
    """One block: `size` consecutive rows of k and v from `first` on, and masks of those that the tile sees."""

    first: jax.Array
    size: int
    seen: jax.Array  # bool [K or 1, query rows, size]: whether a query row sees a key, for a KV head or for all
    any_seen: jax.Array  # bool [K or 1, size, 1]: whether any query row sees a key
    distance: jax.Array  # i32 [query rows, size], a key's position minus that of a row's query

    def rows(self, array: jax.Array) -> jax.Array:
        """The block's rows [K, size, ...] of an array [K, T, ...]; unseen rows, which may hold NaN, are 0."""
        return jnp.where(self.any_seen, lax.dynamic_slice_in_dim(array, self.first, self.size, axis=1), 0)

    def add(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        """An array [K, T, ...] with `part` [K, size, ...] added to the block's rows."""
        old = lax.dynamic_slice_in_dim(whole, self.first, self.size, axis=1)
        return lax.dynamic_update_slice_in_dim(whole, old + part, self.first, axis=1)


# ---- the gradient of `relative_bias`
#
# The sums of a tile are [K, G, M + B + M], or [K, size * G, M + B + M] if each query has its own table. They have
# a margin of M columns on both sides, where M is the number of columns that the rows of a tile and the keys of a block
# use. Between the first and the last column, a row has at most one key in each column. So gradients are gathered, not
# scattered, and the order of sums is fixed.


def _sizes(call: VarlenCall, tile: Tile) -> tuple[int, int]:
    """The rows of a tile, and the keys of a block."""
    return min(tile.block_q, call.num_q_tokens), min(tile.block_kv, call.num_kv_tokens)


def no_sums(call: VarlenCall, tile: Tile, dtype: Any) -> jax.Array:
    """The sums of a tile that has not visited any key."""
    (size, num_keys), table = _sizes(call, tile), call.relative_bias
    rows = call.group * (1 if table.ndim == 2 else size)
    return jnp.zeros((call.num_kv_heads, rows, table.shape[-1] + 2 * (size + num_keys - 1)), dtype)


def add_to_sums(sums: jax.Array, call: VarlenCall, keys: Keys, d_logits: jax.Array) -> jax.Array:
    """The sums with the gradients of a block's logits [K, size * G, keys] added."""
    width = call.relative_bias.shape[-1]
    margin = (sums.shape[-1] - width) // 2

    def of_tables(array: jax.Array) -> jax.Array:
        """An array [K, size * G, ...], summed over the queries if they share the tables."""
        num_kv_heads, rows, *rest = array.shape
        return array if sums.shape[1] == rows else array.reshape(num_kv_heads, -1, call.group, *rest).sum(axis=1)

    columns = call.bias_at_own - keys.distance  # [size * G, keys], not clamped
    first = columns[0, -1]  # columns ascend by rows and descend by keys
    some = first + jnp.arange(margin, dtype=jnp.int32)
    key = columns[:, :1] - some
    hidden = (key < 0) | (key >= keys.size) | (some <= 0) | (some >= width - 1)
    picked = jnp.take_along_axis(d_logits, jnp.clip(key, 0, keys.size - 1)[None], axis=-1)
    at = jnp.clip(first + margin, 0, margin + width)
    old = lax.dynamic_slice_in_dim(sums, at, margin, axis=-1)
    sums = lax.dynamic_update_slice_in_dim(sums, old + of_tables(jnp.where(hidden, 0, picked)), at, axis=-1)
    columns = jnp.clip(columns, 0, width - 1)
    for end in {0, width - 1}:
        sums = sums.at[..., margin + end].add(of_tables(jnp.where(columns == end, d_logits, 0).sum(axis=-1)))
    return sums


def in_tables(sums: jax.Array, tables: jax.Array, queries: Queries) -> jax.Array:
    """The gradients of all tables, in the form of `tables_first`, with those of a tile added."""
    width = tables.shape[-1]
    gradients = lax.slice_in_dim(sums, (sums.shape[-1] - width) // 2, (sums.shape[-1] + width) // 2, axis=-1)
    return queries.put(tables, gradients) if tables.ndim == 4 else tables + gradients


# ---- loops


def over_tiles(call: VarlenCall, tile: Tile, step: Callable[[Queries, Any], Any], state: Any) -> Any:
    """`state` after `step(queries, state)` for each tile of each sequence, in order."""
    if 0 in (call.num_q_tokens, call.num_kv_tokens, call.num_seqs):
        return state
    size, _ = _sizes(call, tile)
    q_starts, q_stops = bounds_of(call.cu_q_lens, call.num_q_tokens)
    kv_starts, kv_stops = bounds_of(call.cu_kv_lens, call.num_kv_tokens)

    def one(seq: jax.Array, first: jax.Array, row: jax.Array, state: Any) -> Any:
        stop, kv_start, kv_stop = at(q_stops, seq), at(kv_starts, seq), at(kv_stops, seq)
        last_row = jnp.minimum(first + size, stop) - 1
        last = kv_stop - (stop - row)  # the last query is aligned with the last key
        start, end, own = kv_start, kv_stop, (row >= first) & (row <= last_row)
        if call.causal:
            end = jnp.clip(kv_stop - (stop - last_row) + 1, kv_start, kv_stop)
        if (window := window_of(call, call.num_kv_tokens)) is not None:
            start = jnp.maximum(kv_stop - (stop - first) - (window - 1), kv_start)
        ranges = Ranges.of_tile(call, row, own, kv_stop - kv_start)
        lists = Selected.of_tile(call, row, own, kv_stop - kv_start)
        return step(Queries(row, own, last, start, end, ranges, lists, kv_start), state)

    return walk_tiles(q_starts, q_stops, kv_stops > kv_starts, size, call.num_q_tokens, one, state)


def over_keys(call: VarlenCall, tile: Tile, queries: Queries, step: Callable[[Keys, Any], Any], state: Any) -> Any:
    """`state` after `step(keys, state)` for each block of the keys that a tile sees."""
    (_, size), window = _sizes(call, tile), window_of(call, call.num_kv_tokens)
    ranges, lists = queries.ranges, queries.lists

    def one(wanted: jax.Array, state: Any) -> Any:
        first = jnp.minimum(wanted, call.num_kv_tokens - size)
        key = first + jnp.arange(size, dtype=jnp.int32)
        seen = queries.own[:, None] & (key >= wanted) & (key < queries.stop)
        if ranges is not None:
            seen &= ranges.see(key - queries.first_key)
        if call.causal:
            seen &= key <= queries.last[:, None]
        if window is not None:
            seen &= key > queries.last[:, None] - window
        seen = seen[None] if lists is None else seen & lists.see(key - queries.first_key)
        by_row = functools.partial(jnp.repeat, repeats=call.group, axis=-2)
        distance = by_row(key - queries.last[:, None])
        return step(Keys(first, size, by_row(seen), seen.any(axis=1)[..., None], distance), state)

    def from_first(key: jax.Array, state: Any) -> Any:
        """`one` for a block that begins at `key`, counted from the sequence's first key."""
        return one(queries.first_key + key, state)

    if lists is not None:
        start, stop = queries.start - queries.first_key, queries.stop - queries.first_key
        return lists.over_blocks(start, stop, size, from_first, state)
    if ranges is not None:
        return ranges.over_blocks(size, from_first, state)
    count = (jnp.maximum(queries.stop - queries.start, 0) + (size - 1)) // size
    return fori_loop(jnp.int32(0), count, lambda block, state: one(queries.start + block * size, state), state)
