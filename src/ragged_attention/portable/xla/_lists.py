"""Attention of queries that each have their own list of slots of a latent cache.

Queries are processed in tiles. A tile loops over its lists, a block of entries at a time, up to the length of its
longest list. Only listed rows are gathered, one block at a time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.jax_shared.axes import fori_loop
from ragged_attention.portable.xla._latents import Latents
from ragged_attention.portable.xla._pages import BITS, stored_at
from ragged_attention.portable.xla._ragged import at
from ragged_attention.portable.xla._softmax import Softmax, wide
from ragged_attention.portable.xla._tile import Tile


class Lists(NamedTuple):
    """A list of cache slots for each of R queries."""

    latents: Latents
    slots: jax.Array  # i32 [R, N]
    lens: jax.Array  # i32 [R], the number of leading entries that count


def tile_for(num_queries: int, topk: int, width: int) -> Tile:
    """Blocks that fit a core's cache; several queries per tile if lists are short."""
    block_kv = min(512, topk)
    block_q = max(1, min(64, num_queries, 2**17 // (block_kv * width)))
    return Tile(block_q=block_q, block_kv=block_kv)


def lens_within(lens: Any, shape: tuple[int, ...], topk: int) -> jax.Array:
    """List lengths clamped to [0, topk], broadcast to `shape` and flattened; None means `topk`."""
    lens = jnp.full((), topk, jnp.int32) if lens is None else jnp.clip(lens, 0, topk)
    return jnp.broadcast_to(lens.reshape(lens.shape + (1,) * (len(shape) - lens.ndim)), shape).reshape(-1)


def slots_by_head(call: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The slots [R, N], list lengths [R] and KV heads [R] of a sparse prefill or its gradient.

    Each KV head has its own lists, so each of the T tokens counts as K queries: R = T * K.
    """
    num_tokens, num_kv_heads = call.num_tokens, call.num_kv_heads
    lens = lens_within(call.topk_lens, (num_tokens, num_kv_heads), call.topk)
    heads = jnp.tile(jnp.arange(num_kv_heads, dtype=jnp.int32), num_tokens)
    return call.indices.reshape(-1, call.topk), lens, heads


def attend(
    q: jax.Array, all_lists: list[Lists], heads: jax.Array, sinks: jax.Array | None, scale: float, d_v: int,
    tile: Tile, dtype: Any, soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Out [R, G, d_v] in `dtype`, max_logits [R, G] and lse [R, G] of queries q [R, G, D].

    Query r belongs to KV head `heads[r]`; `sinks` is [K, G].
    """
    dtype = jnp.dtype(dtype)
    num_queries, group = q.shape[:2]
    size = min(tile.block_q, num_queries)

    def attend_tile(first: jax.Array) -> tuple[jax.Array, ...]:
        row = jnp.minimum(first + jnp.arange(size, dtype=jnp.int32), num_queries - 1)
        head = at(heads, row)
        queries, row = lax.optimization_barrier((q, row))  # else XLA would convert all of q before the loop
        queries = stored_at(queries, row)
        state = Softmax.empty(size, group, d_v=d_v, dtype=wide(q.dtype))
        for lists in all_lists:
            state = _over(lists, state, queries, row, head, scale, soft_cap, tile.block_kv)
        out, lse = state.finished(None if sinks is None else at(sinks, head))
        # Returned as bits, because XLA's CPU compiler would convert all of a bfloat16 array to update a part of it.
        return lax.bitcast_convert_type(out.astype(dtype), BITS[dtype.itemsize]), state.m_i, lse

    firsts = jnp.arange(0, num_queries, size, dtype=jnp.int32)
    out, max_logits, lse = (part.reshape(-1, *part.shape[2:])[:num_queries] for part in lax.map(attend_tile, firsts))
    return lax.bitcast_convert_type(out, dtype), max_logits, lse


def _over(
    lists: Lists, state: Softmax, q: jax.Array, row: jax.Array, head: jax.Array, scale: float,
    soft_cap: float | None, block_kv: int,
) -> Softmax:  # fmt: skip
    """The state after adding the keys in the lists of a tile's queries; `row` has the queries' indices."""
    lens = at(lists.lens, row)
    topk = lists.slots.shape[1]
    block_kv = min(block_kv, topk)

    def step(block: jax.Array, state: Softmax) -> Softmax:
        index = block * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
        slot = at(lists.slots, row[:, None], jnp.minimum(index, topk - 1))
        keys, seen = lists.latents.at_slots(slot, head[:, None], index < lens[:, None])
        return state.extended(q.astype(keys.dtype), keys, seen[:, None], scale, soft_cap)

    return fori_loop(jnp.int32(0), (lens.max() + (block_kv - 1)) // block_kv, step, state)
