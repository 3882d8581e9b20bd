"""MLA decode in plain jax operations. Dense calls are computed as ragged latent attention; a schedule is ignored."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import MlaDecode
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._latents import Latents
from ragged_attention.portable.xla._lists import Lists, attend, lens_within, tile_for
from ragged_attention.portable.xla._tile import Tile as Tile
from ragged_attention.portable.xla.ragged_mla_attention import attend as attend_ragged

FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks",
    "topk_lens", "extra_kv_cache", "extra_indices", "extra_topk_lens", "schedule", "cache_format", "cache_layout",
    "out_dtype",
})  # fmt: skip


def heuristic(call: MlaDecode) -> Tile:
    """Tiles of up to 256 rows per KV head; blocks that fit a core's cache."""
    if call.sparse:
        return tile_for(call.num_seqs * call.num_q_tokens, max(call.topk, call.extra_topk), call.d_qk)
    block_q = max(1, min(64, 256 * call.num_kv_heads // call.num_q_heads))
    return Tile(block_q=block_q, block_kv=max(64, min(512, 2**19 // (call.num_kv_heads * call.d_qk))))


def run(call: MlaDecode, tile: Tile, launch: Any) -> tuple[jax.Array, jax.Array]:
    caches = (call.kv_cache, call.extra_kv_cache)
    if 0 in (call.num_seqs, call.capacity) or all(cache is None or len(cache) == 0 for cache in caches):
        return jnp.zeros(call.out_shape, call.result_dtype), jnp.full(call.lse_shape, -jnp.inf, jnp.float32)
    out, lse = _sparse(call, tile) if call.sparse else _dense(call, tile)
    return out.reshape(call.out_shape), lse.reshape(call.num_seqs, call.num_q_tokens, -1).swapaxes(1, 2)


def _sparse(call: MlaDecode, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Out [S * Q, H, d_v] and lse [S * Q, H], where each query token has its own lists."""
    shape = call.q.shape[:2]
    caches = [
        (call.kv_cache, call.kv_format, call.indices, call.topk_lens),
        (call.extra_kv_cache, call.extra_kv_format, call.extra_indices, call.extra_topk_lens),
    ]
    lists = [
        Lists(Latents(cache, layout), slots.reshape(-1, slots.shape[2]), lens_within(lens, shape, slots.shape[2]))
        for cache, layout, slots, lens in caches
        if cache is not None and len(cache)
    ]
    q = call.q.reshape(-1, *call.q.shape[2:])
    heads = jnp.zeros(len(q), jnp.int32)
    sinks = None if call.sinks is None else call.sinks[None]
    out, _, lse = attend(q, lists, heads, sinks, call.scale, call.d_v, tile, call.result_dtype, call.soft_cap)
    return out, lse


def _dense(call: MlaDecode, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Out [S * Q, H, d_v] and lse [S * Q, H], computed as ragged attention with Q queries per sequence."""
    count = call.num_q_tokens
    edges = jnp.arange(0, (call.num_seqs + 1) * count, count, dtype=jnp.int32)
    out, lse, _ = attend_ragged(call, tile, count, q=call.q.reshape(-1, *call.q.shape[2:]), cu_q_lens=edges)
    return out, lse
