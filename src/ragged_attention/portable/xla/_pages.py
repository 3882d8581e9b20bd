"""Reads blocks of keys and values from the pages."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.jax_shared.pages import BITS as BITS
from ragged_attention.portable.xla._ragged import at


def addresses_of(
    page_indices: jax.Array, seq: jax.Array, key: jax.Array, wanted: jax.Array, num_pages: int, page_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The page and offset of positions `key` [N], and a mask of those `wanted` on valid pages; others get page 0."""
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
        """K [K, N, D] and V [K, N, D_v] at positions `key` [N], and a mask of those `wanted` and on a valid page.

        V is float32. It is 0 where the mask is False, because a weight of 0 does not remove a NaN.
        """
        ...


class KeyValueBlocks:
    """`Blocks` that gathers K and V from pages [P, G, ...], and converts K to `dtype`."""

    def __init__(self, kv_pages: Any, page_indices: jax.Array, dtype: Any) -> None:
        self.arrays = tuple(kv_pages) if isinstance(kv_pages, tuple | list) else (kv_pages,)
        self.page_indices = page_indices
        self.dtype = dtype

    def read(self, seq: jax.Array, key: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        num_pages, page_size = self.arrays[0].shape[:2]
        page, offset, valid = addresses_of(self.page_indices, seq, key, wanted, num_pages, page_size)
        # Without the barrier, XLA would convert the whole cache before the caller's loop.
        arrays, page, offset = lax.optimization_barrier((self.arrays, page, offset))
        rows = [at(lax.bitcast_convert_type(array, BITS[array.dtype.itemsize]), page, offset) for array in arrays]
        if len(rows) == 1:  # K and V interleaved by head
            both = rows[0].reshape(len(key), -1, 2, rows[0].shape[-1]).transpose(2, 1, 0, 3)
            k, v = both[0], both[1]
        else:
            k, v = (array.swapaxes(0, 1) for array in rows)
        k, v = (lax.bitcast_convert_type(array, arrays[0].dtype) for array in (k, v))
        return k.astype(self.dtype), jnp.where(valid[:, None], v.astype(jnp.float32), 0.0), valid
