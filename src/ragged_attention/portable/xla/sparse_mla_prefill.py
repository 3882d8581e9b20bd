"""Sparse MLA prefill on plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import SparseMlaPrefill
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._latents import Latents
from ragged_attention.portable.xla._lists import Lists, attend, lens_within, tile_for
from ragged_attention.portable.xla._tile import Tile as Tile

FEATURES = frozenset({
    "sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "cache_layout", "deterministic", "out_dtype",
})  # fmt: skip


def heuristic(call: SparseMlaPrefill) -> Tile:
    return tile_for(call.num_tokens * call.num_kv_heads, call.topk, call.d_qk)


def run(call: SparseMlaPrefill, tile: Tile, launch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A token is a query for each KV head, which has a list of its own."""
    rows = call.out_shape[:2]
    if 0 in (call.num_tokens, call.num_slots):
        nothing = jnp.full(rows, -jnp.inf, call.lse_dtype)
        return jnp.zeros(call.out_shape, call.result_dtype), nothing, nothing
    num_tokens, num_kv_heads = call.num_tokens, call.num_kv_heads
    q = call.q.reshape(num_tokens * num_kv_heads, -1, call.d_qk)
    lists = Lists(
        Latents(call.kv, call.kv_format),
        call.indices.reshape(-1, call.topk),
        lens_within(call.topk_lens, (num_tokens, num_kv_heads), call.topk),
    )
    heads = jnp.tile(jnp.arange(num_kv_heads, dtype=jnp.int32), num_tokens)
    sinks = None if call.sinks is None else call.sinks.reshape(num_kv_heads, -1)
    out, max_logits, lse = attend(q, [lists], heads, sinks, call.scale, call.d_v, tile, call.result_dtype)
    return out.reshape(call.out_shape), max_logits.reshape(rows), lse.reshape(rows)
