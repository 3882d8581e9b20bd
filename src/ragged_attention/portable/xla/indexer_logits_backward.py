"""The gradient of the lightning indexer's logits in plain jax operations.

Tokens are processed in tiles, and a tile loops over blocks of keys. If tokens have ranges, all tokens of a tile share a
block. If tokens have lists, each token gathers its own keys. Products are recomputed. The gradients of all
keys accumulate in one array.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import IndexerLogitsBackward
from ragged_attention.jax_shared.axes import fori_loop
from ragged_attention.portable.xla import _indexer
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._indexer import packed_ranges
from ragged_attention.portable.xla._indexer_lists import listed_keys, tile_of_lists
from ragged_attention.portable.xla._pages import stored_at
from ragged_attention.portable.xla._ragged import at, put
from ragged_attention.portable.xla._softmax import dot
from ragged_attention.portable.xla._sums import added
from ragged_attention.portable.xla._tile import Tile as Tile

Arrays = tuple[jax.Array, ...]
FEATURES = frozenset({"key_scale", "starts", "stops", "relative", "max_keys", "indices"})


def heuristic(call: IndexerLogitsBackward) -> Tile:
    return tile_of_lists(call) if call.listed else _indexer.heuristic(call)


def run(call: IndexerLogitsBackward, tile: Tile, launch: Any) -> Arrays:
    shapes = [like.shape for like in (call.q, call.keys, call.weights)]
    results = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    if 0 not in (call.num_tokens, call.columns, call.keys.shape[0]):
        size = min(tile.block_q, call.num_tokens)
        starts, stops = (None, None) if call.listed else packed_ranges(call)

        def on_tile(index: jax.Array, results: Arrays) -> Arrays:
            row = jnp.minimum(index * size, call.num_tokens - size) + jnp.arange(size, dtype=jnp.int32)
            own = row >= index * size
            ranges = None if starts is None or stops is None else (at(starts, row), at(stops, row))
            return _add_tile(call, tile.block_kv, Tokens.of(call, row, own, ranges), results)

        results = fori_loop(jnp.int32(0), jnp.int32(-(-call.num_tokens // size)), on_tile, results)
    d_q, d_keys, d_weights = results
    return d_q.astype(call.q.dtype), d_keys.astype(call.keys.dtype), d_weights


class Tokens(NamedTuple):
    """The tokens of a tile. The queries and weights of a token that sees no key are 0, because they may hold NaN."""

    row: jax.Array  # i32 [B], the tokens' rows of q
    own: jax.Array  # bool [B]; True for tokens whose gradients this tile computes
    starts: jax.Array  # i32 [B]; a token sees the keys [start, stop), or its list has entries [start, stop)
    stops: jax.Array
    q: jax.Array  # f32 [B, H, D]
    weights: jax.Array  # f32 [B, H]

    @classmethod
    def of(cls, call: Any, row: jax.Array, own: jax.Array, ranges: tuple[jax.Array, jax.Array] | None) -> "Tokens":
        if ranges is None:
            entries = at(call.indices, row)
            named = ((entries >= 0) & (entries < call.keys.shape[0])).any(1)
            ranges = jnp.zeros_like(row), jnp.where(named, call.columns, 0).astype(jnp.int32)
        starts, stops = ranges
        stops = jnp.where(own, stops, starts)
        sees = (stops > starts)[:, None]
        all_q, row = lax.optimization_barrier((call.q, row))  # else XLA would convert all of q before the loop
        q = jnp.where(sees[..., None], stored_at(all_q, row).astype(jnp.float32), 0.0)
        return cls(row, own, starts, stops, q, jnp.where(sees, at(call.weights, row), 0.0))


def _add_tile(call: Any, block_kv: int, tokens: Tokens, results: Arrays) -> Arrays:
    """The results after a tile: its queries' and weights' gradients are inserted, and those of the keys are added."""
    width = call.columns if call.listed else call.keys.shape[0]
    block_kv, num_keys = min(block_kv, width), call.keys.shape[0]
    sees = tokens.stops > tokens.starts
    low, high = jnp.where(sees, tokens.starts, width).min(), jnp.where(sees, tokens.stops, 0).max()
    d_logits = at(call.d_logits, tokens.row)
    form = "tnd" if call.listed else "nd"

    def step(block: jax.Array, state: Arrays) -> Arrays:
        d_q, d_keys, d_weights = state
        index = low + block * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
        visible = (index >= tokens.starts[:, None]) & (index < tokens.stops[:, None])
        if call.listed:
            keys, scales, slots, named = listed_keys(call, tokens.row, index)
            visible &= named
        else:
            keys, scales, slots = _keys_at(call, index, visible.any(0))
        column = index - (tokens.starts[:, None] if call.relative else 0)
        column = jnp.clip(jnp.broadcast_to(column, visible.shape), 0, call.columns - 1)
        towards = jnp.take_along_axis(d_logits, column, axis=1, mode="promise_in_bounds")
        d_sums = jnp.where(visible, towards * scales, 0.0)
        products = dot(f"thd,{form}->thn", tokens.q, keys)
        positive = products > 0
        d_products = jnp.where(positive, tokens.weights[..., None] * d_sums[:, None], 0.0)
        d_rows = dot(f"thn,thd->{form}", d_products, tokens.q).reshape(-1, call.head_dim)
        where = jnp.where(visible if call.listed else visible.any(0), slots, num_keys).reshape(-1)
        return (
            d_q + dot(f"thn,{form}->thd", d_products, keys),
            added(d_keys, where, d_rows, sort=call.listed and call.device.platform != "cpu"),
            d_weights + dot("thn,tn->th", jnp.where(positive, products, 0.0), d_sums),
        )

    count = (jnp.maximum(high - low, 0) + (block_kv - 1)) // block_kv
    state = jnp.zeros_like(tokens.q), results[1], jnp.zeros_like(tokens.weights)
    d_q, d_keys, d_weights = fori_loop(jnp.int32(0), count, step, state)
    return put(results[0], d_q, tokens.row, tokens.own), d_keys, put(results[2], d_weights, tokens.row, tokens.own)


def _keys_at(call: Any, index: jax.Array, seen: jax.Array) -> Arrays:
    """The keys f32 [n, D] at `index` [n], their scales, and the indices; keys and scales that are not `seen` are 0."""
    keys, index = lax.optimization_barrier((call.keys, jnp.minimum(index, call.keys.shape[0] - 1)))
    values = jnp.where(seen[:, None], stored_at(keys, index).astype(jnp.float32), 0.0)
    scales = jnp.ones(index.shape, jnp.float32) if call.key_scale is None else at(call.key_scale, index)
    return values, jnp.where(seen, scales, 0.0), index
