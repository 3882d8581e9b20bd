"""The lightning indexer on plain jax operations: rows of logits tile by tile, and the choice from them.

A tile is some tokens that follow each other, of one sequence where keys lie in pages. It walks over the columns that
its tokens see, a block at a time, and blocks that none of them sees are skipped; both loops count at run time. What
is kept of a tile is its logits, never the products of all heads with all keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import IndexerTopk
from ragged_attention.jax_shared.axes import cond, fori_loop
from ragged_attention.portable.xla._latents import spans
from ragged_attention.portable.xla._pages import addresses_of, stored_at
from ragged_attention.portable.xla._ragged import at, put, sequences, walk_tiles
from ragged_attention.portable.xla._tile import Tile

LARGEST = 2**31 - 1
PRODUCTS = 2**24  # q . key at a time, at most
LOGITS = 2**22  # of a tile
UNIT = 4  # bytes of a page's scales, and what its values are a multiple of
FEATURES = frozenset({
    "key_scale", "starts", "stops", "relative", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "ratio",
})  # fmt: skip


def heuristic(call: Any) -> Tile:
    """About 1024 rows of all heads; no more tokens than sequences have in the mean, or than have few logits."""
    mean = -(-call.num_tokens // max(call.kv_lens.shape[0], 1)) if call.paged else call.num_tokens
    few = max(LOGITS // max(call.columns, call.keys.shape[0] if call.relative else 1, 1), 1)
    block_q = max(min(1024 // call.num_heads, few, mean, 64), 1)
    return Tile(block_q=block_q, block_kv=max(min(512, PRODUCTS // (block_q * call.num_heads)), 1))


class Seen(NamedTuple):
    """The tokens of a tile and the columns that each sees: those from `starts` on, before `stops`."""

    row: jax.Array  # i32 [size]
    own: jax.Array  # bool [size]; the others are of another tile, and see nothing here
    starts: jax.Array  # i32 [size]
    stops: jax.Array
    seq: jax.Array  # whose pages the keys lie in; 0 where they are packed


Rows = Callable[[Seen, jax.Array], jax.Array]


def over_tiles(call: Any, tile: Tile, results: jax.Array, rows: Rows) -> jax.Array:
    """The results [T, ...] with `rows` of every tile in them, given its logits [size, width].

    Columns are those of `seen`: rows of packed keys, even if relative, or positions in pages.
    """
    if 0 in (call.num_tokens, call.columns, call.keys.shape[0]):
        return results
    if not call.paged:
        return _packed_tiles(call, tile, results, rows)
    results = _paged_tiles(call, tile, 1, results, rows)
    size = max(2, min(tile.block_q, call.num_tokens))
    return _paged_tiles(call, tile, size, results, rows) if call.num_tokens > 1 else results


def _packed_tiles(call: Any, tile: Tile, results: jax.Array, rows: Rows) -> jax.Array:
    limit, size = call.keys.shape[0], min(tile.block_q, call.num_tokens)
    starts, stops = (jnp.clip(edges, 0, min(limit, LARGEST)) for edges in (call.starts, call.stops))
    stops = jnp.maximum(starts, stops)
    if call.relative:
        stops = starts + jnp.minimum(stops - starts, min(call.columns, LARGEST))

    def add(index: jax.Array, results: jax.Array) -> jax.Array:
        first = jnp.minimum(index * size, call.num_tokens - size)
        row = first + jnp.arange(size, dtype=jnp.int32)
        seen = Seen(row, jnp.full(size, True), at(starts, row), at(stops, row), jnp.int32(0))
        return put(results, rows(seen, _logits(call, seen, limit, tile.block_kv)), row, seen.own)

    return fori_loop(0, -(-call.num_tokens // size), add, results)


def _paged_tiles(call: Any, tile: Tile, size: int, results: jax.Array, rows: Rows) -> jax.Array:
    """The rows of the sequences of one token (`size` 1), or of all longer ones, by tiles of `size` tokens."""
    seqs = sequences(call.kv_lens, call.cu_q_lens, call.num_seqs, call.num_tokens, call.token_capacity)

    def add(seq: jax.Array, first: jax.Array, row: jax.Array, results: jax.Array) -> jax.Array:
        stop = at(seqs.stops, seq)
        own = (row >= first) & (row < stop)
        tokens = jnp.maximum(at(seqs.kv_lens, seq) - (stop - row) + 1, 0)
        stops = jnp.where(own, tokens // min(call.ratio, LARGEST), 0)
        seen = Seen(row, own, jnp.zeros_like(row), stops, seq)
        return put(results, rows(seen, _logits(call, seen, call.columns, tile.block_kv)), row, own)

    return walk_tiles(seqs.starts, seqs.stops, seqs.taken(size), size, call.num_tokens, add, results)


def _logits(call: Any, seen: Seen, width: int, block_kv: int) -> jax.Array:
    """Logits [size, width] of a tile, -inf where a token does not see the key."""
    size, block_kv = len(seen.row), min(block_kv, width)
    some = seen.stops > seen.starts
    low, high = jnp.where(some, seen.starts, width).min(), jnp.where(some, seen.stops, 0).max()
    q, weights = _queries(call, seen.row)
    candidates = (
        _Candidates(call, seen) if isinstance(call, IndexerTopk) and call.candidate_blocks is not None else None
    )
    unseen = jnp.full((size, block_kv), -jnp.inf, jnp.float32)

    def step(block: jax.Array, logits: jax.Array) -> jax.Array:
        first = jnp.minimum(low + block * block_kv, width - block_kv)
        column = first + jnp.arange(block_kv, dtype=jnp.int32)
        visible = (column >= seen.starts[:, None]) & (column < seen.stops[:, None])
        if candidates is not None:
            visible &= candidates.listed(column)

        def look() -> jax.Array:
            keys, scales, known = _keys(call, seen.seq, column)
            products = jnp.maximum(_dot("thd,kd->thk", q, keys.astype(q.dtype)), 0.0)  # which keeps NaN
            found = _dot("th,thk->tk", weights, products)
            found = found if scales is None else found * scales
            return jnp.where(visible & known, found, -jnp.inf)

        found = cond(visible.any(), look, unseen)
        return lax.dynamic_update_slice(logits, found, (jnp.int32(0), first))

    count = (jnp.maximum(high - low, 0) + (block_kv - 1)) // block_kv
    return fori_loop(jnp.int32(0), count, step, jnp.full((size, width), -jnp.inf, jnp.float32))


def _dot(letters: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(letters, one, other, preferred_element_type=jnp.float32, precision="highest")


def _queries(call: Any, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of q in a dtype that holds them and the keys exactly, and their weights."""
    narrow = {call.q.dtype.name, call.key_dtype} <= {"bfloat16", "float8_e4m3fn"}
    q, row = lax.optimization_barrier((call.q, row))  # otherwise all of q is converted ahead of the loop
    return stored_at(q, row).astype(jnp.bfloat16 if narrow else jnp.float32), at(call.weights, row)


def _keys(call: Any, seq: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Keys [n, D] in columns [n], their scales [n], and which of them lie on a page that exists."""
    keys, scales = call.keys, call.key_scale
    where, known = (column,), jnp.full(column.shape, True)
    if call.paged:
        *where, known = addresses_of(call.page_indices, seq, column, known, *keys.shape[:2])
    # Without the barrier XLA moves the conversion of the keys out of the loop, onto all of them.
    keys, where = lax.optimization_barrier((keys, tuple(where)))
    if call.bytes:
        page, offset = where
        units = keys.reshape(keys.shape[0], -1, UNIT)
        count = call.head_dim // UNIT
        values = lax.bitcast_convert_type(spans(units, page, offset * count, count), jnp.float8_e4m3fn)
        stored = spans(units, page, call.page_size * count + offset, 1)
        return values, lax.bitcast_convert_type(stored, jnp.float32), known
    return stored_at(keys, *where), None if scales is None else at(scales, *where), known


class _Candidates:
    """The blocks of positions that the tokens of a tile list."""

    def __init__(self, call: Any, seen: Seen) -> None:
        self.size = min(call.candidate_block_size, call.columns)  # one that holds all holds no more
        self.count = -(-call.columns // self.size)
        self.first = seen.starts if call.relative else jnp.zeros_like(seen.starts)
        lists = at(call.candidate_blocks, seen.row)
        lists = jnp.where((lists >= 0) & (lists < self.count), lists, self.count)
        self.rows = jnp.arange(len(lists), dtype=jnp.int32)[:, None]
        self.table = jnp.zeros((len(lists), self.count + 1), bool).at[self.rows, lists].set(True)

    def listed(self, column: jax.Array) -> jax.Array:
        """Which columns [n] each token lists, bool [size, n]; anything where a token does not see them."""
        block = (column - self.first[:, None]) // self.size
        return at(self.table, self.rows, jnp.clip(block, 0, self.count - 1))


def from_own_start(logits: jax.Array, seen: Seen, columns: int) -> jax.Array:
    """Logits [size, N] of packed keys as [size, columns], each row from its own start."""
    column = jnp.arange(columns, dtype=jnp.int32)
    key = jnp.minimum(column, LARGEST - seen.starts[:, None]) + seen.starts[:, None]
    own = jnp.take_along_axis(logits, jnp.minimum(key, logits.shape[1] - 1), axis=1, mode="promise_in_bounds")
    return jnp.where(column < (seen.stops - seen.starts)[:, None], own, -jnp.inf)


def largest(logits: jax.Array, top_k: int) -> jax.Array:
    """The columns i32 [R, top_k] of the largest logits [R, n] in ascending order, then -1.

    `lax.top_k` takes the first of equal ones, so columns are given to it in reverse; some devices order -0.0 and 0.0.
    """
    columns, count = logits.shape[1], min(top_k, logits.shape[1])
    values = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.where(logits == 0, 0.0, logits))
    values, index = lax.top_k(values[:, ::-1], count)
    chosen = jnp.where(values > -jnp.inf, columns - 1 - index, columns)
    chosen = jnp.pad(lax.sort(chosen), ((0, 0), (0, top_k - count)), constant_values=columns)
    return jnp.where(chosen < columns, chosen, -1)
