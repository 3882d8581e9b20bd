"""MLA decode on plain jax operations.

A dense call goes through in tiles of a sequence's query tokens. A tile walks over the keys it can see, a block at a
time, so the cost follows the lengths and not the tables. The schedule is of no use here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import MlaDecode
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._latents import Latents
from ragged_attention.portable.xla._lists import Lists, attend, lens_within, tile_for
from ragged_attention.portable.xla._pages import BITS
from ragged_attention.portable.xla._ragged import at
from ragged_attention.portable.xla._softmax import Softmax
from ragged_attention.portable.xla._tile import Tile as Tile

FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sinks", "topk_lens", "extra_kv_cache",
    "extra_indices", "extra_topk_lens", "schedule", "cache_format", "cache_layout",
})  # fmt: skip


def heuristic(call: MlaDecode) -> Tile:
    """Up to 256 rows per KV head; blocks that stay in a core's cache."""
    if call.sparse:
        return tile_for(call.num_seqs * call.num_q_tokens, max(call.topk, call.extra_topk), call.d_qk)
    block_q = max(1, min(64, 256 * call.num_kv_heads // call.num_q_heads))
    return Tile(block_q=block_q, block_kv=max(64, min(512, 2**19 // (call.num_kv_heads * call.d_qk))))


def run(call: MlaDecode, tile: Tile, launch: Any) -> tuple[jax.Array, jax.Array]:
    del launch  # XLA launches
    caches = (call.kv_cache, call.extra_kv_cache)
    if 0 in (call.num_seqs, call.capacity) or all(cache is None or len(cache) == 0 for cache in caches):
        return jnp.zeros(call.out_shape, call.q.dtype), jnp.full(call.lse_shape, -jnp.inf, jnp.float32)
    out, lse = _sparse(call, tile) if call.sparse else _dense(call, tile)
    return out.reshape(call.out_shape), lse.reshape(call.num_seqs, call.num_q_tokens, -1).swapaxes(1, 2)


def _sparse(call: MlaDecode, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Out [S * Q, H, d_v] and lse [S * Q, H]: each query token is a query with a list of its own."""
    shape = call.q.shape[:2]
    given = [
        (call.kv_cache, call.layout, call.indices, call.topk_lens),
        (call.extra_kv_cache, call.extra_layout, call.extra_indices, call.extra_topk_lens),
    ]
    lists = [
        Lists(Latents(cache, layout), slots.reshape(-1, slots.shape[2]), lens_within(lens, shape, slots.shape[2]))
        for cache, layout, slots, lens in given
        if cache is not None and len(cache)
    ]
    q = call.q.reshape(-1, *call.q.shape[2:])
    heads = jnp.zeros(len(q), jnp.int32)
    sinks = None if call.sinks is None else call.sinks[None]
    out, _, lse = attend(q, lists, heads, sinks, call.scale, call.d_v, tile)
    return out, lse


def _dense(call: MlaDecode, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Out [S, Q, H, d_v] and lse [S, Q, H]."""
    num_seqs, num_q_tokens = call.q.shape[:2]
    size = min(tile.block_q, num_q_tokens)
    tiles = -(-num_q_tokens // size)

    def attend_tile(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = jnp.minimum(index % tiles * size + jnp.arange(size, dtype=jnp.int32), num_q_tokens - 1)
        out, lse = _attend(call, index // tiles, token, min(tile.block_kv, call.capacity))
        # As bits: XLA's CPU compiler would convert all of a bfloat16 array to update a part of it.
        return lax.bitcast_convert_type(out.astype(call.q.dtype), BITS[call.q.dtype.itemsize]), lse

    parts = lax.map(attend_tile, jnp.arange(num_seqs * tiles, dtype=jnp.int32))
    out, lse = (part.reshape(num_seqs, -1, *part.shape[2:])[:, :num_q_tokens] for part in parts)
    return lax.bitcast_convert_type(out, call.q.dtype), lse


def _attend(call: MlaDecode, seq: jax.Array, token: jax.Array, block_kv: int) -> tuple[jax.Array, jax.Array]:
    """Out [N, H, d_v] and lse [N, H], float32, of some query tokens of a sequence."""
    size, num_kv_heads, group = len(token), call.num_kv_heads, call.num_q_heads // call.num_kv_heads
    q, row = lax.optimization_barrier((call.q, seq))  # otherwise all of q is converted ahead of the loop
    q = at(lax.bitcast_convert_type(q, BITS[q.dtype.itemsize]), row, token)
    q = lax.bitcast_convert_type(q, call.q.dtype).reshape(size, num_kv_heads, group, call.d_qk)
    q = q.swapaxes(0, 1).reshape(num_kv_heads, -1, call.d_qk)
    kv_len = jnp.clip(at(call.kv_lens, seq), 0, call.capacity)
    visible = jnp.broadcast_to(kv_len, token.shape)
    if call.causal:
        visible = jnp.maximum(kv_len - (call.num_q_tokens - 1 - token), 0)
    stop = visible.max()
    latents = Latents(call.kv_cache, call.layout)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]

    def step(block: jax.Array, state: Softmax) -> Softmax:
        key = block * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
        column = jnp.minimum(key // call.page_size, call.page_indices.shape[1] - 1)
        keys, there = latents.read(at(call.page_indices, seq, column), key % call.page_size, heads, key < stop)
        seen = jnp.repeat(key < visible[:, None], group, axis=0)  # [size * group, N]
        return state.extended(q.astype(keys.dtype), keys, there[:, None] & seen, call.scale)

    state = Softmax.of_no_keys(num_kv_heads, size * group, d_v=call.d_v)
    state = lax.fori_loop(jnp.int32(0), (stop + (block_kv - 1)) // block_kv, step, state)
    sinks = None if call.sinks is None else jnp.tile(call.sinks.reshape(num_kv_heads, group), size)
    out, lse = state.finished(sinks)
    shape = (num_kv_heads, size, group)
    return (
        out.reshape(*shape, -1).swapaxes(0, 1).reshape(size, call.num_q_heads, -1),
        lse.reshape(shape).swapaxes(0, 1).reshape(size, call.num_q_heads),
    )
