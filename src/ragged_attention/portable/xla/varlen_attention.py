"""Attention over packed sequences in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import VarlenAttention
from ragged_attention.portable.xla._softmax import (
    Softmax,
    biased,
    dot,
    larger_or_nan,
    largest_or_nan,
    logits_of,
    wide,
)
from ragged_attention.portable.xla._tile import Tile as Tile
from ragged_attention.portable.xla._varlen import (
    Keys,
    Queries,
    heads_first,
    over_keys,
    over_tiles,
    tables_first,
    tokens_first,
)
from ragged_attention.portable.xla._varlen import heuristic as heuristic
from ragged_attention.portable.xla._varlen import why_not as why_not

FEATURES = frozenset({
    "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes",
    "relative_bias", "key_ranges", "selected", "block_size", "return_max_logits", "deterministic",
})  # fmt: skip


def run(call: VarlenAttention, tile: Tile, launch: Any) -> tuple[jax.Array, ...]:
    num_kv_heads, dtype = call.num_kv_heads, wide(call.q.dtype)
    q, k, v = (heads_first(array, num_kv_heads, dtype) for array in (call.q, call.k, call.v))
    k, v = k[:, :, 0], v[:, :, 0]
    sinks, slopes = (
        None if heads is None else heads.reshape(num_kv_heads, call.group) for heads in (call.sinks, call.alibi_slopes)
    )

    tables = tables_first(call, dtype)

    def on_tile(queries: Queries, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows = queries.rows(q)

        def on_keys(keys: Keys, state: Softmax) -> Softmax:
            products = dot("hrd,hnd->hrn", rows, keys.rows(k))
            logits = logits_of(products, call.scale, call.soft_cap)
            logits = biased(logits, call, *queries.biases(slopes, tables), keys.distance)
            state = state.with_largest(products, call.scale, keys.seen)
            return state.updated(jnp.where(keys.seen, logits, -jnp.inf), keys.rows(v))

        requested = call.return_max_logits
        state = Softmax.empty(*rows.shape[:2], d_v=call.v_head_dim, dtype=dtype, keeps_largest=requested)
        state = over_keys(call, tile, queries, on_keys, state)
        parts = state.finished(None if sinks is None else jnp.tile(sinks, len(queries.row)))
        written = tuple(queries.put(whole, part) for whole, part in zip(results, parts, strict=False))
        if state.largest is None:
            return written
        largest = largest_or_nan(state.largest.reshape(num_kv_heads, -1, call.group), axis=1)
        return *written, larger_or_nan(results[2], largest)

    shape = (num_kv_heads, call.num_q_tokens, call.group)
    nothing = jnp.zeros((*shape, call.v_head_dim), dtype), jnp.full(shape, -jnp.inf, dtype)
    if call.return_max_logits:
        nothing += (jnp.full((num_kv_heads, call.group), -jnp.inf, dtype),)
    out, lse, *others = over_tiles(call, tile, on_tile, nothing)
    return tokens_first(out, call.q.dtype), tokens_first(lse, dtype), *(each.reshape(-1) for each in others)
