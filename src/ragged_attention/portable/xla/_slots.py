"""Writes rows to their slots in the pages; a row whose page is out of range is skipped.

XLA's CPU compiler has no scatter for bfloat16 and 8-bit floats: it would convert the whole cache to float32 and back.
On a CPU, `jnp.where` therefore selects old or new bits for every element, in one loop that changes the cache in place.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.jax_shared.pages import addresses_of_slots, addresses_of_tokens
from ragged_attention.portable.xla._ragged import at


def addresses_of(call: Any) -> tuple[jax.Array, jax.Array]:
    """The page and the offset of each new token, from its slot or the tables; page `num_pages` if it has none."""
    if call.slot_mapping is None:
        return addresses_of_tokens(call, call.num_tokens)
    return addresses_of_slots(call.slot_mapping, call.num_pages, call.page_size)


def page_of_last(page: jax.Array, offset: jax.Array, num_pages: int, page_size: int) -> jax.Array:
    """`page`, but `num_pages` for a token whose slot a later token also has: so the bytes of two tokens never mix."""
    token = jnp.arange(len(page), dtype=jnp.int32)
    last = jnp.full((num_pages, page_size), -1, jnp.int32).at[page, offset].max(token, mode="drop")
    return jnp.where(last.at[page, offset].get(mode="fill", fill_value=-1) == token, page, num_pages)


def put(pages: jax.Array, bits: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    """`pages` after `pages[page, offset] = bits`."""
    if pages.dtype.name in ("float32", "float16", "int8", "uint8"):
        return _scatter(pages, bits, page, offset)
    return lax.platform_dependent(pages, bits, page, offset, cpu=_select, default=_scatter)


def _scatter(pages: jax.Array, bits: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    return pages.at[page, offset].set(lax.bitcast_convert_type(bits, pages.dtype), mode="drop")


def _select(pages: jax.Array, bits: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    tokens = _tokens(pages, len(bits), page, offset)
    pages, bits, tokens = lax.optimization_barrier((pages, bits, tokens))
    rows = at(bits, jnp.maximum(tokens, 0))
    selected = jnp.where((tokens >= 0)[..., None, None], rows, lax.bitcast_convert_type(pages, bits.dtype))
    return lax.bitcast_convert_type(selected, pages.dtype)


def _tokens(pages: jax.Array, num_tokens: int, page: jax.Array, offset: jax.Array) -> jax.Array:
    """The token that is written to each slot, i32 [P, G]; -1 if none is."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    return jnp.full(pages.shape[:2], -1, jnp.int32).at[page, offset].set(token, mode="drop")


def put_units(
    cache: jax.Array, units: jax.Array, page: jax.Array, offset: jax.Array, *, num_scale_units: int
) -> jax.Array:
    """The cache after the tokens' bytes, `units` [T, U, bytes], are written to it.

    A token's last `num_scale_units` units are its scales. A page stores them after all tokens' other units.
    """
    scatter = functools.partial(_scatter_units, num_scale_units=num_scale_units)
    if cache.dtype in (jnp.uint8, jnp.int8):
        return scatter(cache, units, page, offset)
    select = functools.partial(_select_units, num_scale_units=num_scale_units)
    return lax.platform_dependent(cache, units, page, offset, cpu=select, default=scatter)


def _scatter_units(
    cache: jax.Array, units: jax.Array, page: jax.Array, offset: jax.Array, *, num_scale_units: int
) -> jax.Array:
    count, unit = units.shape[1:]
    num_others = count - num_scale_units
    index = offset[:, None] * num_others + jnp.arange(num_others, dtype=jnp.int32)
    if num_scale_units:
        scales = offset[:, None] * num_scale_units + jnp.arange(num_scale_units, dtype=jnp.int32)
        index = jnp.concatenate([index, cache.shape[1] * num_others + scales], axis=1)
    # The scatter uses the cache's own shape, because a reshaped cache would be copied.
    where = jnp.stack([jnp.broadcast_to(page[:, None], index.shape), index // count, index % count * unit], axis=-1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0, 1, 2), scatter_dims_to_operand_dims=(0, 1, 3)
    )
    new = lax.bitcast_convert_type(units, cache.dtype)
    return lax.scatter(cache, where, new, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)


def _select_units(
    cache: jax.Array, units: jax.Array, page: jax.Array, offset: jax.Array, *, num_scale_units: int
) -> jax.Array:
    page_size, (count, unit) = cache.shape[1], units.shape[1:]
    index = jnp.arange(page_size * count, dtype=jnp.int32)
    slot, part = index // count, index % count  # a unit's slot in the page, and its index within the token
    if num_scale_units:
        num_others = count - num_scale_units
        scale = index - page_size * num_others
        slot = jnp.where(scale < 0, index // num_others, scale // num_scale_units)
        part = jnp.where(scale < 0, index % num_others, num_others + scale % num_scale_units)
    tokens = _tokens(cache, len(units), page, offset)
    cache, units, tokens = lax.optimization_barrier((cache, units, tokens))
    token = at(tokens, slice(None), slot)[..., None]
    new = at(units, jnp.maximum(token, 0), part[:, None], jnp.arange(unit, dtype=jnp.int32)).reshape(cache.shape)
    written = jnp.broadcast_to(token >= 0, (*token.shape[:2], unit)).reshape(cache.shape)
    return lax.bitcast_convert_type(jnp.where(written, new, lax.bitcast_convert_type(cache, jnp.uint8)), cache.dtype)
