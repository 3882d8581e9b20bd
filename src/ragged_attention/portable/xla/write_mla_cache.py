"""Writes this step's latent rows to the pages, in plain jax operations."""

from typing import Any

import jax

from ragged_attention.calls import WriteMlaCache
from ragged_attention.jax_shared.latents import new_rows
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._latents import UNIT, planar_units
from ragged_attention.portable.xla._slots import addresses_of, page_of_last, put, put_units

FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "kv_scale", "rope_scale", "d_v",
    "power_of_two_scales", "cache_format", "cache_layout",
})  # fmt: skip


def written(call: Any, kv: jax.Array) -> jax.Array:
    """The new cache of a call, with rows at the tokens' slots, in the old memory if that is donated."""
    cache = call.cache
    if 0 in (len(kv), len(cache)):
        return cache
    page, offset = addresses_of(call)
    page = page_of_last(page, offset, len(cache), call.page_size)
    layout, rows = call.kv_format, new_rows(call, kv)
    if not layout.quantized:
        return put(cache, rows, page, offset)
    num_scale_units = planar_units(layout)[1] if layout.planar else 0
    return put_units(cache, rows.reshape(len(kv), -1, UNIT), page, offset, num_scale_units=num_scale_units)


def run(call: WriteMlaCache, tile: Any, launch: Any) -> jax.Array:
    return written(call, call.kv)
