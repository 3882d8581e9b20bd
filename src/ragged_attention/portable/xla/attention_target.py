"""The target of an indexer in plain jax operations, for tiles of tokens and blocks of their keys."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import AttentionTarget
from ragged_attention.jax_shared.axes import fori_loop
from ragged_attention.portable.xla import _indexer
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._indexer import from_own_start, packed_ranges
from ragged_attention.portable.xla._indexer_lists import listed_keys, tile_of_lists
from ragged_attention.portable.xla._pages import stored_at
from ragged_attention.portable.xla._ragged import at, put
from ragged_attention.portable.xla._softmax import dot
from ragged_attention.portable.xla._tile import Tile as Tile

FEATURES = frozenset({"indices", "sm_scale", "topk_lens", "starts", "stops", "relative", "max_keys"})


def heuristic(call: AttentionTarget) -> Tile:
    return tile_of_lists(call) if call.listed else _indexer.heuristic(call)


def run(call: AttentionTarget, tile: Tile, launch: Any) -> jax.Array:
    target = jnp.zeros((call.num_tokens, call.columns), jnp.float32)
    if 0 in (*target.shape, call.keys.shape[0]):
        return target
    if call.topk_lens is not None:
        counted = jnp.arange(call.columns, dtype=jnp.int32) < call.topk_lens[:, None]
        call = dataclasses.replace(call, indices=jnp.where(counted, call.indices, -1), topk_lens=None)
    size = min(tile.block_q, call.num_tokens)

    def on_tile(index: jax.Array, target: jax.Array) -> jax.Array:
        row = jnp.minimum(index * size, call.num_tokens - size) + jnp.arange(size, dtype=jnp.int32)
        return put(target, _tile(call, tile.block_kv, row), row, jnp.full(size, True))

    return fori_loop(jnp.int32(0), jnp.int32(-(-call.num_tokens // size)), on_tile, target)


def _tile(call: AttentionTarget, block_kv: int, row: jax.Array) -> jax.Array:
    """The targets [B, columns] of the tokens `row` [B]."""
    width = call.columns if call.listed else call.keys.shape[0]
    block_kv, size = min(block_kv, width), len(row)
    all_q, row = lax.optimization_barrier((call.q, row))  # else XLA would convert all of q before the loop
    q, lse = stored_at(all_q, row).astype(jnp.float32), at(call.lse, row)[..., None]
    if call.listed:
        starts, stops = jnp.zeros_like(row), jnp.full_like(row, width)
    else:
        starts, stops = (at(edges, row) for edges in packed_ranges(call))
    sees = stops > starts
    low, high = jnp.where(sees, starts, width).min(), jnp.where(sees, stops, 0).max()

    def step(block: jax.Array, sums: jax.Array) -> jax.Array:
        first = jnp.minimum(low + block * block_kv, width - block_kv)
        index = first + jnp.arange(block_kv, dtype=jnp.int32)
        visible = (index >= starts[:, None]) & (index < stops[:, None])
        if call.listed:
            keys, _, _, visible = listed_keys(call, row, index)
            products = dot("thd,tnd->thn", q, keys)
        else:
            array, index = lax.optimization_barrier((call.keys, index))
            products = dot("thd,nd->thn", q, stored_at(array, index).astype(jnp.float32))
        # A head without keys, whose lse is -inf, adds nothing.
        weights = jnp.exp(products * call.scale - jnp.where(lse == -jnp.inf, jnp.inf, lse))
        return lax.dynamic_update_slice(sums, jnp.where(visible, weights.sum(1), 0.0), (jnp.int32(0), first))

    count = (jnp.maximum(high - low, 0) + (block_kv - 1)) // block_kv
    sums = fori_loop(jnp.int32(0), count, step, jnp.zeros((size, width), jnp.float32))
    if call.relative:
        sums = jnp.maximum(from_own_start(sums, _indexer.Seen(row, sees, starts, stops, jnp.int32(0)), call.columns), 0)
    total = sums.sum(1, keepdims=True)
    return jnp.where(total > 0, sums / total, 0.0)
