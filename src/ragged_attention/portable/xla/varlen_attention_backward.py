"""The gradient of attention over packed sequences in plain jax operations.

The weights are computed again, from the log-sum-exp. Tiles are processed in order, so the order of every sum is fixed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import VarlenAttentionBackward
from ragged_attention.portable.xla._softmax import RowTerms, biased, dot, logits_of, wide
from ragged_attention.portable.xla._tile import Tile as Tile
from ragged_attention.portable.xla._varlen import (
    Keys,
    Queries,
    add_to_sums,
    heads_first,
    in_tables,
    no_sums,
    over_keys,
    over_tiles,
    tables_as_given,
    tables_first,
    tokens_first,
)
from ragged_attention.portable.xla._varlen import heuristic as heuristic
from ragged_attention.portable.xla._varlen import why_not as why_not

Arrays = tuple[jax.Array, ...]
FEATURES = frozenset({
    "d_lse", "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes",
    "relative_bias", "key_ranges", "selected", "block_size", "return_d_relative_bias", "deterministic",
})  # fmt: skip


def run(call: VarlenAttentionBackward, tile: Tile, launch: Any) -> tuple[jax.Array | None, ...]:
    num_kv_heads, group, dtype = call.num_kv_heads, call.group, wide(call.q.dtype)

    by_head = functools.partial(heads_first, num_kv_heads=num_kv_heads, dtype=dtype)
    q, k, v, d_out, out, lse = map(by_head, (call.q, call.k, call.v, call.d_out, call.out, call.lse))
    d_lse = None if call.d_lse is None else by_head(call.d_lse)
    k, v = k[:, :, 0], v[:, :, 0]
    sinks, slopes = (
        None if heads is None else heads.reshape(num_kv_heads, group) for heads in (call.sinks, call.alibi_slopes)
    )

    tables = tables_first(call, dtype)

    def on_tile(queries: Queries, results: Any) -> Any:
        dq, dk, dv, d_sinks, d_bias = results
        lse_of_rows = queries.rows(lse)
        live = jnp.repeat(queries.own, group) & (lse_of_rows != -jnp.inf)
        rows = jnp.where(live[..., None], queries.rows(q), 0)  # a NaN in a row that is not live would reach dk
        terms = RowTerms.of(
            queries.rows(d_out), queries.rows(out), lse_of_rows, None if d_lse is None else queries.rows(d_lse),
            None if sinks is None else jnp.tile(sinks, len(queries.row)), live,
        )  # fmt: skip

        def on_keys(keys: Keys, state: Any) -> Any:
            dq, dk, dv, sums = state
            some_k, some_v = keys.rows(k), keys.rows(v)
            logits = logits_of(dot("hrd,hnd->hrn", rows, some_k), call.scale, call.soft_cap)
            moved = biased(logits, call, *queries.biases(slopes, tables), keys.distance)
            weights = terms.weights(jnp.where(keys.seen, moved, -jnp.inf))
            d_logits = terms.d_logits(weights, some_v)
            if sums is not None:
                sums = add_to_sums(sums, call, keys, d_logits)
            d_products = d_logits * call.scale
            if call.soft_cap is not None:
                d_products *= 1 - jnp.square(logits / call.soft_cap)
            dv = keys.add(dv, dot("hrn,hrd->hnd", weights, terms.d_out))
            dk = keys.add(dk, dot("hrn,hrd->hnd", d_products, rows))
            return dq + dot("hrn,hnd->hrd", d_products, some_k), dk, dv, sums

        sums = None if d_bias is None else no_sums(call, tile, dtype)
        dq_of_tile, dk, dv, sums = over_keys(call, tile, queries, on_keys, (jnp.zeros_like(rows), dk, dv, sums))
        if d_bias is not None:
            d_bias = in_tables(sums, d_bias, queries)
        d_sinks += terms.d_sinks.reshape(num_kv_heads, -1, group).sum(axis=1)
        return queries.put(dq, dq_of_tile), dk, dv, d_sinks, d_bias

    d_bias = jnp.zeros_like(tables) if tables is not None and call.has_d_relative_bias else None
    nothing = (*map(jnp.zeros_like, (q, k, v)), jnp.zeros((num_kv_heads, group), dtype), d_bias)
    dq, dk, dv, d_sinks, d_bias = over_tiles(call, tile, on_tile, nothing)
    gradients = tuple(tokens_first(array, call.q.dtype) for array in (dq, dk[:, :, None], dv[:, :, None]))
    d_bias = None if d_bias is None else tables_as_given(d_bias, call)
    return *gradients, None if call.sinks is None else d_sinks.reshape(-1), d_bias
