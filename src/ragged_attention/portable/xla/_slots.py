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


def page_of_last(page: jax.Array, offset: jax.Array, num_pages: int, page_size: int) -> jax.Array:
    """The page of each token that is the last one for its slot, elsewhere `num_pages`; so no two rows are mixed."""
    token = jnp.arange(len(page), dtype=jnp.int32)
    last = jnp.full((num_pages, page_size), -1, jnp.int32).at[page, offset].max(token, mode="drop")
    return jnp.where(last.at[page, offset].get(mode="fill", fill_value=-1) == token, page, num_pages)


def put_units(cache: jax.Array, units: jax.Array, page: jax.Array, offset: jax.Array, *, behind: int) -> jax.Array:
    """The cache with `units` [T, U, bytes] of tokens in it, where a page that does not exist is skipped.

    So many of the last units of each token, which hold its scales, stand `behind` the other units of all in a page.
    """
    count, unit = units.shape[1:]
    own = count - behind
    index = offset[:, None] * own + jnp.arange(own, dtype=jnp.int32)
    if behind:
        scales = cache.shape[1] * own + offset[:, None] * behind + jnp.arange(behind, dtype=jnp.int32)
        index = jnp.concatenate([index, scales], axis=1)
    # In the cache's own shape: reshaped it would be copied.
    where = jnp.stack([jnp.broadcast_to(page[:, None], index.shape), index // count, index % count * unit], axis=-1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0, 1, 2), scatter_dims_to_operand_dims=(0, 1, 3)
    )
    new = lax.bitcast_convert_type(units, cache.dtype)
    return lax.scatter(cache, where, new, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)
