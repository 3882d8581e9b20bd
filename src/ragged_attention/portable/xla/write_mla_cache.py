"""This step's latent rows into the pages, on plain jax operations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import WriteMlaCache
from ragged_attention.jax_shared.latents import new_rows
from ragged_attention.jax_shared.pages import addresses_of_slots, addresses_of_tokens
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._latents import UNIT, planar_units
from ragged_attention.portable.xla._ragged import at
from ragged_attention.portable.xla._slots import page_of_last, put, put_units

FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "kv_scale", "power_of_two_scales",
    "cache_format", "cache_layout",
})  # fmt: skip


def run(call: WriteMlaCache, tile: Any, launch: Any) -> jax.Array:
    """The new cache, in the old one's memory where that is donated."""
    cache, kv = call.cache, call.kv
    if 0 in (len(kv), len(cache)):
        return cache
    if call.slot_mapping is None:
        page, offset = addresses_of_tokens(call, call.num_tokens)
    else:
        page, offset = addresses_of_slots(call.slot_mapping, call.num_pages, call.page_size)
    page = page_of_last(page, offset, len(cache), call.page_size)
    layout, rows = call.kv_format, new_rows(call)
    if not layout.quantized:
        return put(cache, rows, page, offset)
    units = rows.reshape(len(kv), -1, UNIT)
    behind = planar_units(layout)[1] if layout.planar else 0
    if cache.dtype in (jnp.uint8, jnp.int8):
        return put_units(cache, units, page, offset, behind=behind)
    ways = {"cpu": _select, "default": put_units}
    ways = {name: functools.partial(way, behind=behind) for name, way in ways.items()}
    return lax.platform_dependent(cache, units, page, offset, **ways)


def _select(cache: jax.Array, units: jax.Array, page: jax.Array, offset: jax.Array, *, behind: int) -> jax.Array:
    """The same as a choice, unit by unit, between old and new bytes; see `_slots.put`."""
    num_pages, page_size = cache.shape[:2]
    count = units.shape[1]
    index = jnp.arange(page_size * count, dtype=jnp.int32)
    owner, part = index // count, index % count
    if behind:
        own = count - behind
        late = index - page_size * own
        owner = jnp.where(late < 0, index // own, late // behind)
        part = jnp.where(late < 0, index % own, own + late % behind)
    tokens = jnp.full((num_pages, page_size), -1, jnp.int32)
    tokens = tokens.at[page, offset].set(jnp.arange(len(units), dtype=jnp.int32), mode="drop")
    cache, units, tokens = lax.optimization_barrier((cache, units, tokens))
    token = at(tokens, slice(None), owner)[..., None]
    new = at(units, jnp.maximum(token, 0), part[:, None], jnp.arange(UNIT, dtype=jnp.int32)).reshape(cache.shape)
    written = jnp.broadcast_to(token >= 0, (*token.shape[:2], UNIT)).reshape(cache.shape)
    return lax.bitcast_convert_type(jnp.where(written, new, lax.bitcast_convert_type(cache, jnp.uint8)), cache.dtype)
