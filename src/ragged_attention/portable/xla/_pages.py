"""Reads blocks of keys and values from the pages."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.jax_shared.pages import BITS as BITS
from ragged_attention.jax_shared.scaled_rows import values_of
from ragged_attention.portable.xla._ragged import at


def addresses_of(
    page_indices: jax.Array, seq: jax.Array, key: jax.Array, wanted: jax.Array, num_pages: int, page_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The page and offset of positions `key` [N], and a mask of `wanted` positions on valid pages.

    Other positions get page 0.
    """
    column = jnp.minimum(key // page_size, page_indices.shape[1] - 1)
    page = at(page_indices, seq, column)
    valid = wanted & (page >= 0) & (page < num_pages)
    return jnp.where(valid, page, 0), key % page_size, valid


def stored_at(array: jax.Array, *index: Any) -> jax.Array:
    """`array[index]`, in bounds, by a gather of bits: XLA on a CPU would convert a whole 16-bit array to float32."""
    bits = lax.bitcast_convert_type(array, BITS[array.dtype.itemsize])
    return lax.bitcast_convert_type(at(bits, *index), array.dtype)


class Blocks(Protocol):
    """Gathers K and V at some positions of a sequence, heads first."""

    def read(self, seq: jax.Array, key: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """K [K, N, D] and V [K, N, D_v] at positions `key` [N], and a mask of `wanted` positions on valid pages.

        V is float32. It is 0 where the mask is False, because a weight of 0 does not remove a NaN.
        """
        ...


class KeyValueBlocks:
    """`Blocks` that gathers K and V from pages [P, G, ...] and scale pages.

    K has the dtype of the call's queries if it has no scales, and is float32 otherwise.
    """

    def __init__(self, call: Any) -> None:
        self.call = call

    def read(self, seq: jax.Array, key: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        call = self.call
        page, offset, valid = addresses_of(call.page_indices, seq, key, wanted, call.num_pages, call.page_size)
        # Without the barrier, XLA would convert the whole cache before the caller's loop.
        caches, page, offset = lax.optimization_barrier((tuple(call.caches), page, offset))
        rows = [at(lax.bitcast_convert_type(array, BITS[array.dtype.itemsize]), page, offset) for array in caches]
        if call.scaled:  # else XLA would gather a scale again for each element of its block
            rows = lax.optimization_barrier(rows)
        if call.combined:  # K and V interleaved by head
            both = rows[0].reshape(len(key), -1, 2, rows[0].shape[-1])
            rows[:1], caches = [both[:, :, 0], both[:, :, 1]], (caches[0], *caches)
        # [K, N, ...] of each array
        by_head = (
            lax.bitcast_convert_type(bits.swapaxes(0, 1), array.dtype) for bits, array in zip(rows, caches, strict=True)
        )
        k, v = next(by_head), next(by_head)
        k_scales, v_scales = (None if array is None else next(by_head) for array in call.scale_pages)
        k = k.astype(call.q.dtype) if k_scales is None else values_of(k, k_scales, call.k_format)
        v = values_of(v, v_scales, call.v_format)
        return k, jnp.where(valid[:, None], v, 0.0), valid
