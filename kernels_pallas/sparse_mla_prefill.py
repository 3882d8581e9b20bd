"""Sparse MLA prefill on TPUs by the kernel in `_latent`: each KV head of each query token is a job."""

from typing import Any

import jax.numpy as jnp

from ragged_attention.kernels_pallas import _latent
from ragged_attention.kernels_pallas._latent import Tile as Tile
from ragged_attention.kernels_pallas._latent import why_not as why_not

FEATURES = frozenset({
    "sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "cache_layout", "deterministic", "out_dtype",
})  # fmt: skip


def heuristic(call: Any) -> Tile:
    return Tile(num_keys_per_block=_latent.keys_per_block(call.topk))


def run(call: Any, tile: Tile, launch: Any) -> tuple[Any, Any, Any]:
    """Out, max_logits and lse."""
    rows = call.out_shape[:2]
    if 0 in (call.num_tokens, call.num_slots):
        nothing = jnp.full(rows, -jnp.inf, jnp.float32)
        return jnp.zeros(call.out_shape, call.result_dtype), nothing, nothing
    num_tokens, num_kv_heads = call.num_tokens, call.num_kv_heads
    slots = _latent.valid_slots(call.indices, call.topk_lens, call.num_slots)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    numbers = jnp.where(slots >= 0, slots * num_kv_heads + heads, -1)
    work = _latent.Work(
        call=call,
        q=call.q.reshape(num_tokens * num_kv_heads, -1, call.d_qk),
        keys=_latent.selected_rows(call.kv, numbers.reshape(-1, call.topk)),
        sinks=None if call.sinks is None else call.sinks.reshape(num_kv_heads, -1),
    )
    out, max_logits, lse = _latent.run(work, tile)
    return out.reshape(call.out_shape), max_logits.reshape(rows), lse.reshape(rows)
