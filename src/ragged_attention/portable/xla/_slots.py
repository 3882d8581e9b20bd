"""Writing rows to their slots in the pages."""

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.portable.xla._ragged import at


def put(pages: jax.Array, bits: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    """`pages[page, offset] = bits`, where a page that does not exist is skipped."""
    if pages.dtype.name in ("float32", "float16", "int8"):
        return _scatter(pages, bits, page, offset)
    return lax.platform_dependent(pages, bits, page, offset, cpu=_select, default=_scatter)


def _scatter(pages: jax.Array, bits: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    return pages.at[page, offset].set(lax.bitcast_convert_type(bits, pages.dtype), mode="drop")


def _select(pages: jax.Array, bits: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    """The same as a choice, slot by slot, between old and new bits.

    XLA's CPU compiler has no scatter for bfloat16 and 8-bit floats: it would convert the whole cache to float32 and
    back. This compiles to one loop that touches, in place, only what changes.
    """
    tokens = jnp.full(pages.shape[:2], -1, jnp.int32)
    tokens = tokens.at[page, offset].set(jnp.arange(len(bits), dtype=jnp.int32), mode="drop")
    pages, bits, tokens = lax.optimization_barrier((pages, bits, tokens))
    rows = at(bits, jnp.maximum(tokens, 0))
    chosen = jnp.where((tokens >= 0)[..., None, None], rows, lax.bitcast_convert_type(pages, bits.dtype))
    return lax.bitcast_convert_type(chosen, pages.dtype)
