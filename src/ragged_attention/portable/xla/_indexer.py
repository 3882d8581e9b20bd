"""The lightning indexer in plain jax operations: the logits, for tiles of tokens, and the top-k selection.

A tile is a few consecutive tokens, which belong to one sequence if the keys lie in pages. A tile loops over the columns
that its tokens see, a block at a time, and skips blocks that none of them sees; the number of blocks is a run-time
value. Memory holds the logits of one tile, never the products of all heads with all keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import BlocksCall, IndexerTopk
from ragged_attention.jax_shared.axes import cond, fori_loop
from ragged_attention.portable.xla._latents import spans
from ragged_attention.portable.xla._pages import addresses_of, stored_at
from ragged_attention.portable.xla._ragged import at, put, sequences, walk_tiles
from ragged_attention.portable.xla._softmax import dot
from ragged_attention.portable.xla._tile import Tile

LARGEST_INT32 = 2**31 - 1
MAX_PRODUCTS = 2**24  # maximum products q . key in memory
MAX_LOGITS = 2**22  # maximum size of a tile's logits; a tile of one token may exceed it
UNIT = 4  # bytes; a key's scale takes one unit, its values take several
FEATURES = frozenset({
    "key_scale", "starts", "stops", "relative", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "ratio",
})  # fmt: skip


def heuristic(call: Any) -> Tile:
    """Tiles limited to 1024 (token, head) rows, 64 tokens, the mean query length and MAX_LOGITS logits."""
    mean = -(-call.num_tokens // max(call.kv_lens.shape[0], 1)) if call.paged else call.num_tokens
    few = max(MAX_LOGITS // max(call.columns, call.keys.shape[0] if call.relative else 1, 1), 1)
    block_q = max(min(1024 // call.num_heads, few, mean, 64), 1)
    return Tile(block_q=block_q, block_kv=max(min(512, MAX_PRODUCTS // (block_q * call.num_heads)), 1))


class Seen(NamedTuple):
    """The tokens of a tile; each sees the columns [start, stop)."""

    row: jax.Array  # i32 [size], the tokens' rows of q
    own: jax.Array  # bool [size]; True for tokens whose results this tile writes
    starts: jax.Array  # i32 [size]
    stops: jax.Array  # i32 [size]
    seq: jax.Array  # the sequence whose pages hold the keys; 0 for packed keys


Rows = Callable[[Seen, jax.Array], jax.Array]


def over_tiles(call: Any, tile: Tile, results: jax.Array, rows: Rows) -> jax.Array:
    """`results` [T, ...], with each tile's rows replaced by `rows(seen, logits)`.

    A tile's logits are [size, width], or [size, H, width] if each head has its own. A column is a position if keys are
    in pages, else the index of a packed key, even if `call.relative` asks for results that count from a token's start.
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
    starts, stops = packed_ranges(call)

    def add(index: jax.Array, results: jax.Array) -> jax.Array:
        first = jnp.minimum(index * size, call.num_tokens - size)
        row = first + jnp.arange(size, dtype=jnp.int32)
        seen = Seen(row, jnp.full(size, True), at(starts, row), at(stops, row), jnp.int32(0))
        return put(results, rows(seen, _logits(call, seen, limit, tile.block_kv)), row, seen.own)

    return fori_loop(0, -(-call.num_tokens // size), add, results)


def packed_ranges(call: Any) -> tuple[jax.Array, jax.Array]:
    """The packed keys [start, stop) that each token sees, clamped to the keys and columns that exist, i32 [T]."""
    limit = call.keys.shape[0]
    starts, stops = (jnp.clip(edges, 0, min(limit, LARGEST_INT32)) for edges in (call.starts, call.stops))
    stops = jnp.maximum(starts, stops)
    if call.relative:
        stops = starts + jnp.minimum(stops - starts, min(call.columns, LARGEST_INT32))
    return starts, stops


def _paged_tiles(call: Any, tile: Tile, size: int, results: jax.Array, rows: Rows) -> jax.Array:
    """Compute the results of the sequences with one query token if `size` is 1, else of those with more.

    A sequence is computed in tiles of `size` tokens.
    """
    seqs = sequences(call.kv_lens, call.cu_q_lens, call.num_seqs, call.num_tokens, call.token_capacity)

    def add(seq: jax.Array, first: jax.Array, row: jax.Array, results: jax.Array) -> jax.Array:
        stop = at(seqs.stops, seq)
        own = (row >= first) & (row < stop)
        tokens = jnp.maximum(at(seqs.kv_lens, seq) - (stop - row) + 1, 0)
        stops = jnp.where(own, tokens // min(call.ratio, LARGEST_INT32), 0)
        seen = Seen(row, own, jnp.zeros_like(row), stops, seq)
        return put(results, rows(seen, _logits(call, seen, call.columns, tile.block_kv)), row, own)

    return walk_tiles(seqs.starts, seqs.stops, seqs.tiled_by(size), size, call.num_tokens, add, results)


class Scorer(NamedTuple):
    """Computes the logits of a tile's tokens, of all heads together or of each head."""

    heads: tuple[int, ...]  # (num_heads,) if the logits have an axis of heads, else ()
    score: Callable[[jax.Array, jax.Array | None], jax.Array]  # takes keys [n, ..., D], scales [n, ...]


def _logits(call: Any, seen: Seen, width: int, block_kv: int) -> jax.Array:
    """The logits [size, ..., width] of a tile, -inf if a key is unseen by the token or not its candidate."""
    size, block_kv = len(seen.row), min(block_kv, width)
    sees_keys = seen.stops > seen.starts
    low, high = jnp.where(sees_keys, seen.starts, width).min(), jnp.where(sees_keys, seen.stops, 0).max()
    heads, score = _each_head(call, seen.row) if isinstance(call, BlocksCall) else _heads_together(call, seen.row)
    has_candidates = isinstance(call, IndexerTopk) and call.candidate_blocks is not None
    candidates = _Candidates(call, seen) if has_candidates else None
    unseen = jnp.full((size, *heads, block_kv), -jnp.inf, jnp.float32)

    def step(block: jax.Array, logits: jax.Array) -> jax.Array:
        first = jnp.minimum(low + block * block_kv, width - block_kv)
        column = first + jnp.arange(block_kv, dtype=jnp.int32)
        visible = (column >= seen.starts[:, None]) & (column < seen.stops[:, None])
        if candidates is not None:
            visible &= candidates.listed(column)

        def compute() -> jax.Array:
            keys, scales, valid = _keys(call, seen.seq, column)
            shown = (visible & valid).reshape(size, *(1 for _ in heads), block_kv)
            return jnp.where(shown, score(keys, scales), -jnp.inf)

        new = cond(visible.any(), compute, unseen)
        return lax.dynamic_update_slice(logits, new, (*(jnp.int32(0) for _ in unseen.shape[1:]), first))

    count = (jnp.maximum(high - low, 0) + (block_kv - 1)) // block_kv
    logits = jnp.full((*unseen.shape[:-1], width), -jnp.inf, jnp.float32)
    return fori_loop(jnp.int32(0), count, step, logits)


def _queries(call: Any, row: jax.Array) -> jax.Array:
    """The queries of the tokens `row`, in a dtype that represents them and the keys exactly."""
    narrow = {call.q.dtype.name, call.key_dtype} <= {"bfloat16", "float8_e4m3fn"}
    q, row = lax.optimization_barrier((call.q, row))  # else XLA would convert all of q before the loop
    return stored_at(q, row).astype(jnp.bfloat16 if narrow else jnp.float32)


def _heads_together(call: Any, row: jax.Array) -> Scorer:
    """A `Scorer` of the weighted sum of all heads' products; negative products count as 0."""
    q, weights = _queries(call, row), at(call.weights, row)

    def score(keys: jax.Array, scales: jax.Array | None) -> jax.Array:
        products = jnp.maximum(dot("thd,kd->thk", q, keys.astype(q.dtype)), 0.0)  # relu that keeps NaN
        sums = dot("th,thk->tk", weights, products)
        return sums if scales is None else sums * scales

    return Scorer((), score)


def _each_head(call: Any, row: jax.Array) -> Scorer:
    """A `Scorer` of the products of each head, [size, H, n]; heads may share keys."""
    q = _queries(call, row).reshape(len(row), call.num_kv_heads, call.group, call.head_dim)

    def score(keys: jax.Array, scales: jax.Array | None) -> jax.Array:
        rows = keys.reshape(len(keys), call.num_kv_heads, call.head_dim).astype(q.dtype)
        products = dot("tkgd,nkd->tkgn", q, rows)
        if scales is not None:
            products *= scales.reshape(len(keys), -1).T[:, None]
        return products.reshape(len(row), call.num_heads, len(keys))

    return Scorer((call.num_heads,), score)


def _keys(call: Any, seq: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """The keys [n, ..., D] in columns [n], their scales [n, ...] or None, and a mask [n] of keys on valid pages."""
    keys, scales = call.keys, call.key_scale
    address, valid = (column,), jnp.full(column.shape, True)
    if call.paged:
        *address, valid = addresses_of(call.page_indices, seq, column, valid, *keys.shape[:2])
    # Without the barrier, XLA would convert all keys before the loop.
    keys, address = lax.optimization_barrier((keys, tuple(address)))
    if call.bytes:
        page, offset = address
        units = keys.reshape(keys.shape[0], -1, UNIT)
        count = call.head_dim // UNIT
        values = lax.bitcast_convert_type(spans(units, page, offset * count, count), jnp.float8_e4m3fn)
        stored = spans(units, page, call.page_size * count + offset, 1)
        return values, lax.bitcast_convert_type(stored, jnp.float32), valid
    return stored_at(keys, *address), None if scales is None else at(scales, *address), valid


class _Candidates:
    """Each token's candidate blocks, of `size` consecutive positions each; a token selects no other position."""

    def __init__(self, call: Any, seen: Seen) -> None:
        self.size = min(call.candidate_block_size, call.columns)
        self.count = -(-call.columns // self.size)
        self.first = seen.starts if call.relative else jnp.zeros_like(seen.starts)
        lists = at(call.candidate_blocks, seen.row)
        lists = jnp.where((lists >= 0) & (lists < self.count), lists, self.count)
        self.rows = jnp.arange(len(lists), dtype=jnp.int32)[:, None]
        self.table = jnp.zeros((len(lists), self.count + 1), bool).at[self.rows, lists].set(True)

    def listed(self, column: jax.Array) -> jax.Array:
        """Bool [tokens, n]: whether `column` [n] is a candidate of the token; arbitrary for keys that are unseen."""
        block = (column - self.first[:, None]) // self.size
        return at(self.table, self.rows, jnp.clip(block, 0, self.count - 1))


def from_own_start(logits: jax.Array, seen: Seen, columns: int) -> jax.Array:
    """Logits [size, N] of packed keys as [size, columns], in which a token's column 0 is the first key that it sees."""
    column = jnp.arange(columns, dtype=jnp.int32)
    key = jnp.minimum(column, LARGEST_INT32 - seen.starts[:, None]) + seen.starts[:, None]
    shifted = jnp.take_along_axis(logits, jnp.minimum(key, logits.shape[1] - 1), axis=1, mode="promise_in_bounds")
    return jnp.where(column < (seen.stops - seen.starts)[:, None], shifted, -jnp.inf)


def largest(logits: jax.Array, top_k: int) -> jax.Array:
    """The columns i32 [R, top_k] of the largest logits [R, n], ascending and padded with -1.

    Of equal logits the larger column is selected. `lax.top_k` prefers the first, so it gets the columns in reverse.
    Some devices order -0.0 before 0.0, so every zero becomes 0.0.
    """
    columns, count = logits.shape[1], min(top_k, logits.shape[1])
    values = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.where(logits == 0, 0.0, logits))
    values, index = lax.top_k(values[:, ::-1], count)
    selected = jnp.where(values > -jnp.inf, columns - 1 - index, columns)
    selected = jnp.pad(lax.sort(selected), ((0, 0), (0, top_k - count)), constant_values=columns)
    return jnp.where(selected < columns, selected, -1)
