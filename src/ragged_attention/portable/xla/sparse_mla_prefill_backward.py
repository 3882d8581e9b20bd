"""The gradient of sparse MLA prefill on plain jax operations.

A few queries at a time gather the rows they list once more, a block of entries at a time, and what they contribute to
these is added to one array of sums.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import SparseMlaPrefillBackward
from ragged_attention.jax_shared.axes import fori_loop
from ragged_attention.portable.xla import _framework
from ragged_attention.portable.xla._latents import Latents
from ragged_attention.portable.xla._lists import lens_within, tile_for
from ragged_attention.portable.xla._ragged import at, put
from ragged_attention.portable.xla._softmax import RowTerms, dot, wide
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
    """A token is a query for each KV head, which has a list of its own."""
    given = [array for array in (call.q, call.kv, call.sinks) if array is not None]
    if 0 in (call.num_tokens, call.num_slots):
        return tuple(map(jnp.zeros_like, given))
    num_kv_heads, dtype = call.num_kv_heads, wide(call.q.dtype)
    queries = _queries(call)
    size = min(tile.block_q, len(queries.head))

    def on_tile(index: jax.Array, results: Arrays) -> Arrays:
        dq, d_rows, d_sinks = results
        wanted = index * size
        first = jnp.minimum(wanted, len(queries.head) - size)
        row = first + jnp.arange(size, dtype=jnp.int32)
        some = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, first, size), queries)
        of_queries, d_rows, of_sinks = _tile(call, some, row >= wanted, tile.block_kv, d_rows)
        is_head = some.head == jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
        d_sinks += dot("kb,bg->kg", is_head.astype(dtype), of_sinks)
        return put(dq, of_queries, row, row >= wanted), d_rows, d_sinks

    group = call.num_q_heads // num_kv_heads
    results = (
        jnp.zeros(queries.q.shape, dtype),
        jnp.zeros((call.num_slots * num_kv_heads, call.d_qk), dtype),
        jnp.zeros((num_kv_heads, group), dtype),
    )
    tiles = -(-len(queries.head) // size)
    dq, d_rows, d_sinks = fori_loop(jnp.int32(0), jnp.int32(tiles), on_tile, results)
    found = (dq, d_rows, d_sinks)[: len(given)]
    return tuple(array.reshape(like.shape).astype(like.dtype) for array, like in zip(found, given, strict=True))


class Queries(NamedTuple):
    """Per query [R]: a token's query heads [R, G, ...] of one KV head, and their list."""

    q: jax.Array
    d_out: jax.Array
    out: jax.Array
    lse: jax.Array  # [R, G]
    d_lse: jax.Array | None
    slots: jax.Array  # i32 [R, N]
    lens: jax.Array  # i32 [R]
    head: jax.Array  # i32 [R]


def _queries(call: SparseMlaPrefillBackward) -> Queries:
    num_tokens, num_kv_heads = call.num_tokens, call.num_kv_heads
    rows = num_tokens * num_kv_heads

    def of_queries(array: jax.Array) -> jax.Array:
        return array.reshape(rows, -1, *array.shape[2:])

    q, d_out, out, lse = map(of_queries, (call.q, call.d_out, call.out, call.lse))
    return Queries(
        q,
        d_out,
        out,
        lse,
        None if call.d_lse is None else of_queries(call.d_lse),
        call.indices.reshape(rows, -1),
        lens_within(call.topk_lens, (num_tokens, num_kv_heads), call.topk),
        jnp.tile(jnp.arange(num_kv_heads, dtype=jnp.int32), num_tokens),
    )


def _tile(
    call: SparseMlaPrefillBackward, queries: Queries, own: jax.Array, block_kv: int, d_rows: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq [B, G, D] and d_sinks [B, G] of some queries; `d_rows` [slots * K, D] with what their `own` ones add."""
    dtype, num_kv_heads = d_rows.dtype, call.num_kv_heads
    live = own[:, None] & (queries.lse != -jnp.inf)
    q = jnp.where(live[..., None], queries.q, 0).astype(dtype)  # otherwise a NaN of theirs would reach the rows
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
        found = dot("bgn,bgd->bnd", d_products, q)
        found = found.at[..., : call.d_v].add(dot("bgn,bgd->bnd", weights, terms.d_out))
        where = jnp.where(seen, slots * num_kv_heads + queries.head[:, None], len(d_rows)).reshape(-1)
        d_rows = _added(call, d_rows, where, found.reshape(len(where), -1))
        return dq + dot("bgn,bnd->bgd", d_products, rows), d_rows

    count = (jnp.where(own, queries.lens, 0).max() + (block_kv - 1)) // block_kv
    dq, d_rows = fori_loop(jnp.int32(0), count, step, (jnp.zeros_like(q), d_rows))
    return dq, d_rows, terms.d_sinks


def _added(call: SparseMlaPrefillBackward, total: jax.Array, where: jax.Array, rows: jax.Array) -> jax.Array:
    """The sums [M, D] with rows [n, D] added at `where` [n], which is M for those that do not count.

    XLA adds them one after the other on a CPU, but on GPUs in any order. There a fixed order takes a sort, after which
    rows of one index are neighbours that a scan adds up in the same pairs each time, and each index is written once.
    """
    if not call.deterministic or call.device.platform == "cpu":
        return total.at[where].add(rows, mode="drop")
    order = jnp.argsort(where, stable=True)
    where, rows = where[order], rows[order]
    begins = jnp.concatenate([jnp.ones(1, bool), where[1:] != where[:-1]])

    def join(left: Arrays, right: Arrays) -> Arrays:
        return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])

    _, sums = lax.associative_scan(join, (begins[:, None], rows))
    ends = jnp.concatenate([begins[1:], jnp.ones(1, bool)])
    # Indices beyond the last one, all different, for the rows that are not the last of their index.
    spread = len(total) + jnp.arange(len(where), dtype=where.dtype)
    where = jnp.where(ends & (where < len(total)), where, spread)
    return total.at[where].add(sums, mode="drop", unique_indices=True)
