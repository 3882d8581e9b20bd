"""Attention over heads-first pages [K, P, G, D]: ragged paged attention with blocks gathered from such pages."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import HeadsFirstCall
from ragged_attention.jax_shared.scaled_rows import values_of
from ragged_attention.portable.xla import ragged_paged_attention
from ragged_attention.portable.xla._pages import addresses_of, stored_at
from ragged_attention.portable.xla._tile import Tile
from ragged_attention.portable.xla.ragged_paged_attention import attention


class HeadsFirstBlocks:
    """`Blocks` that gathers K and V from heads-first pages [K, P, G, ...]."""

    def __init__(self, call: HeadsFirstCall, page_indices: jax.Array) -> None:
        self.call = call
        self.page_indices = page_indices

    def read(self, seq: jax.Array, key: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        call = self.call
        page, offset, valid = addresses_of(self.page_indices, seq, key, wanted, call.num_pages, call.page_size)
        # Without the barrier, XLA would convert the whole cache before the caller's loop.
        arrays, scales, page, offset = lax.optimization_barrier((call.arrays, call.scales, page, offset))
        k, v = (stored_at(array, slice(None), page, offset) for array in arrays)
        if call.quantized:
            k_scales, v_scales = (stored_at(array, slice(None), page, offset) for array in scales)
            k, v = values_of(k, k_scales, call.row_format), values_of(v, v_scales, call.row_format)
        else:
            k = k.astype(call.q.dtype)
        return k, jnp.where(valid[:, None], v.astype(jnp.float32), 0.0), valid


def heuristic(call: HeadsFirstCall) -> Tile:
    return ragged_paged_attention.heuristic(call.as_ragged())


def attend(call: HeadsFirstCall, tile: Tile, page_indices: jax.Array, **indices: Any) -> jax.Array:
    """The result of a heads-first call; `page_indices` and `indices` are index arrays of the equivalent ragged call."""
    ragged = call.as_ragged(page_indices=page_indices, **indices)
    return attention(ragged, tile, HeadsFirstBlocks(call, page_indices))[0]
