"""Sparse MLA prefill in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import SparseMlaPrefill
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._latents import Latents
from ragged_attention.portable.xla._lists import Lists, attend, slots_by_head, tile_for
from ragged_attention.portable.xla._tile import Tile as Tile

FEATURES = frozenset({
    "sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "cache_layout", "deterministic", "out_dtype",
})  # fmt: skip


def heuristic(call: SparseMlaPrefill) -> Tile:
    return tile_for(call.num_tokens * call.num_kv_heads, call.topk, call.d_qk)


def run(call: SparseMlaPrefill, tile: Tile, launch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = call.out_shape[:2]
    if 0 in (call.num_tokens, call.num_slots):
        nothing = jnp.full(rows, -jnp.inf, call.lse_dtype)
        return jnp.zeros(call.out_shape, call.result_dtype), nothing, nothing
    q = call.q.reshape(-1, call.group, call.d_qk)
    slots, lens, heads = slots_by_head(call)
    lists = [Lists(Latents(call.kv, call.kv_format), slots, lens)]
    sinks = None if call.sinks is None else call.sinks.reshape(-1, call.group)
    out, max_logits, lse = attend(q, lists, heads, sinks, call.scale, call.d_v, tile, call.result_dtype)
    return out.reshape(call.out_shape), max_logits.reshape(rows), lse.reshape(rows)
