"""Quantises this step's indexer keys and writes them to the indexer's pages, in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import WriteIndexerCache
from ragged_attention.jax_shared.latents import quantized_groups
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._indexer import UNIT
from ragged_attention.portable.xla._slots import addresses_of, page_of_last, put_units

FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "power_of_two"})


def run(call: WriteIndexerCache, tile: Any, launch: Any) -> jax.Array:
    """The new cache, in the old cache's memory if that is donated."""
    cache, k = call.cache, call.k
    if 0 in (len(k), len(cache)):
        return cache
    page, offset = addresses_of(call)
    page = page_of_last(page, offset, len(cache), call.page_size)
    codes, scales = quantized_groups(k.astype(jnp.float32), bool(call.power_of_two))
    units = jnp.concatenate([codes, lax.bitcast_convert_type(scales, jnp.uint8)], axis=-1).reshape(len(k), -1, UNIT)
    return put_units(cache, units, page, offset, num_scale_units=1)
