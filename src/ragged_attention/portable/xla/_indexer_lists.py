"""The lightning indexer over lists of packed keys: tiles of tokens, and blocks of entries."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.jax_shared.axes import fori_loop
from ragged_attention.portable.xla._lists import tile_for
from ragged_attention.portable.xla._pages import stored_at
from ragged_attention.portable.xla._ragged import at, put
from ragged_attention.portable.xla._softmax import dot
from ragged_attention.portable.xla._tile import Tile


def tile_of_lists(call: Any) -> Tile:
    """A tile whose keys, gathered for each token, fit a core's cache."""
    return tile_for(max(call.num_tokens, 1), max(call.columns, 1), call.head_dim)


def listed_keys(call: Any, row: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The keys f32 [B, n, D] of entries `index` [n] in the lists of tokens `row` [B], their scales and indices.

    The last result is a mask [B, n] of entries that name a key; the keys and scales of all others are 0.
    """
    count, num_keys = call.columns, call.keys.shape[0]
    slots = at(call.indices, row[:, None], jnp.minimum(index, count - 1))
    seen = (index < count) & (slots >= 0) & (slots < num_keys)
    slots = jnp.where(seen, slots, 0)
    keys, slots = lax.optimization_barrier((call.keys, slots))  # else XLA would convert all keys before the loop
    values = jnp.where(seen[..., None], stored_at(keys, slots).astype(jnp.float32), 0.0)
    scales = jnp.ones(slots.shape, jnp.float32) if call.key_scale is None else at(call.key_scale, slots)
    return values, jnp.where(seen, scales, 0.0), slots, seen


def listed_logits(call: Any, tile: Tile) -> jax.Array:
    """Logits f32 [T, L] of the keys that tokens list, -inf for entries that name no key."""
    logits = jnp.full((call.num_tokens, call.columns), -jnp.inf, jnp.float32)
    if 0 in (*logits.shape, call.keys.shape[0]):
        return logits
    size, block_kv = min(tile.block_q, call.num_tokens), min(tile.block_kv, call.columns)

    def on_tile(index: jax.Array, logits: jax.Array) -> jax.Array:
        row = jnp.minimum(index * size, call.num_tokens - size) + jnp.arange(size, dtype=jnp.int32)
        all_q, row = lax.optimization_barrier((call.q, row))
        q, weights = stored_at(all_q, row).astype(jnp.float32), at(call.weights, row)

        def step(block: jax.Array, rows: jax.Array) -> jax.Array:
            first = jnp.minimum(block * block_kv, call.columns - block_kv)
            keys, scales, _, seen = listed_keys(call, row, first + jnp.arange(block_kv, dtype=jnp.int32))
            products = jnp.maximum(dot("thd,tnd->thn", q, keys), 0.0)  # relu that keeps NaN
            sums = jnp.where(seen, dot("th,thn->tn", weights, products) * scales, -jnp.inf)
            return lax.dynamic_update_slice(rows, sums, (jnp.int32(0), first))

        rows = jnp.full((size, call.columns), -jnp.inf, jnp.float32)
        rows = fori_loop(jnp.int32(0), jnp.int32(-(-call.columns // block_kv)), step, rows)
        return put(logits, rows, row, jnp.full(size, True))

    return fori_loop(jnp.int32(0), jnp.int32(-(-call.num_tokens // size)), on_tile, logits)
