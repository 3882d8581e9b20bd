"""The gradient of sparse MLA prefill in plain jax operations.

Queries are processed a few at a time. As in the forward pass, the cache rows in their lists are gathered block by
block. The gradients of all cache rows accumulate in one array.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import SparseMlaPrefillBackward
from ragged_attention.jax_shared.axes import fori_loop
from ragged_attention.portable.xla import _framework
from ragged_attention.portable.xla._latents import Latents
from ragged_attention.portable.xla._lists import slots_by_head, tile_for
from ragged_attention.portable.xla._ragged import at, put
from ragged_attention.portable.xla._softmax import RowTerms, dot, wide
from ragged_attention.portable.xla._sums import added
from ragged_attention.portable.xla._tile import Tile as Tile

Arrays = tuple[jax.Array, ...]
FEATURES = frozenset({"d_lse", "sm_scale", "d_v", "sinks", "topk_lens", "deterministic"})


def why_not(call: SparseMlaPrefillBackward) -> str | None:
    if (rows := call.num_slots * call.num_kv_heads) >= 2**31:
        return f"numbers rows in int32, got {rows}"
    return _framework.why_not(call)


def heuristic(call: SparseMlaPrefillBackward) -> Tile:
    return tile_for(call.num_tokens * call.num_kv_heads, call.topk, call.d_qk)


def run(call: SparseMlaPrefillBackward, tile: Tile, launch: Any) -> Arrays:
    given = [array for array in (call.q, call.kv, call.sinks) if array is not None]
    if 0 in (call.num_tokens, call.num_slots):
        return tuple(map(jnp.zeros_like, given))
    num_kv_heads, dtype = call.num_kv_heads, wide(call.q.dtype)
    queries = _queries(call)
    size = min(tile.block_q, len(queries.head))

    def on_tile(index: jax.Array, results: Arrays) -> Arrays:
        dq, d_rows, d_sinks = results
        first = jnp.minimum(index * size, len(queries.head) - size)
        row = first + jnp.arange(size, dtype=jnp.int32)
        own = row >= index * size
        some = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, first, size), queries)
        dq_of_tile, d_rows, d_sinks_of_tile = _tile(call, some, own, tile.block_kv, d_rows)
        is_head = some.head == jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
        d_sinks += dot("kb,bg->kg", is_head.astype(dtype), d_sinks_of_tile)
        return put(dq, dq_of_tile, row, own), d_rows, d_sinks

    shapes = queries.q.shape, (call.num_slots * num_kv_heads, call.d_qk), (num_kv_heads, call.group)
    tiles = -(-len(queries.head) // size)
    results = tuple(jnp.zeros(shape, dtype) for shape in shapes)
    gradients = fori_loop(jnp.int32(0), jnp.int32(tiles), on_tile, results)[: len(given)]
    return tuple(array.reshape(like.shape).astype(like.dtype) for array, like in zip(gradients, given, strict=True))


class Queries(NamedTuple):
    """R queries: each has the query heads [G, ...] of one token and KV head, which share a list."""

    q: jax.Array
    d_out: jax.Array
    out: jax.Array
    lse: jax.Array  # [R, G]
    d_lse: jax.Array | None
    slots: jax.Array  # i32 [R, N]
    lens: jax.Array  # i32 [R]
    head: jax.Array  # i32 [R]


def _queries(call: SparseMlaPrefillBackward) -> Queries:
    def by_query(array: jax.Array) -> jax.Array:
        return array.reshape(-1, call.group, *array.shape[2:])

    q, d_out, out, lse = map(by_query, (call.q, call.d_out, call.out, call.lse))
    slots, lens, heads = slots_by_head(call)
    return Queries(q, d_out, out, lse, None if call.d_lse is None else by_query(call.d_lse), slots, lens, heads)


def _tile(
    call: SparseMlaPrefillBackward, queries: Queries, own: jax.Array, block_kv: int, d_rows: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq [B, G, D], `d_rows` [slots * K, D] with the gradients of `own` queries added, and d_sinks [B, G]."""
    dtype, num_kv_heads = d_rows.dtype, call.num_kv_heads
    live = own[:, None] & (queries.lse != -jnp.inf)
    # Zeros, because a NaN in a row that is not live would reach `d_rows`.
    q = jnp.where(live[..., None], queries.q, 0).astype(dtype)
    sinks = None if call.sinks is None else at(call.sinks.reshape(num_kv_heads, -1), queries.head)
    d_out, out = queries.d_out.astype(dtype), queries.out.astype(dtype)
    terms = RowTerms.of(d_out, out, queries.lse, queries.d_lse, sinks, live)
    latents, block_kv = Latents(call.kv, call.kv_format), min(block_kv, call.topk)

    def step(block: jax.Array, state: Arrays) -> Arrays:
        dq, d_rows = state
        index = block * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
        slots = at(queries.slots, slice(None), jnp.minimum(index, call.topk - 1))
        wanted = own[:, None] & (index < queries.lens[:, None])
        rows, seen = latents.at_slots(slots, queries.head[:, None], wanted)
        rows = rows.astype(dtype)
        values = rows[..., : call.d_v]
        logits = dot("bgd,bnd->bgn", q, rows) * call.scale
        weights = terms.weights(jnp.where(seen[:, None], logits, -jnp.inf))
        d_products = terms.d_logits(weights, values) * call.scale
        more = dot("bgn,bgd->bnd", d_products, q)
        more = more.at[..., : call.d_v].add(dot("bgn,bgd->bnd", weights, terms.d_out))
        where = jnp.where(seen, slots * num_kv_heads + queries.head[:, None], len(d_rows)).reshape(-1)
        sort = call.deterministic and call.device.platform != "cpu"
        d_rows = added(d_rows, where, more.reshape(len(where), -1), sort=sort)
        return dq + dot("bgn,bnd->bgd", d_products, rows), d_rows

    count = (jnp.where(own, queries.lens, 0).max() + (block_kv - 1)) // block_kv
    dq, d_rows = fori_loop(jnp.int32(0), count, step, (jnp.zeros_like(q), d_rows))
    return dq, d_rows, terms.d_sinks
