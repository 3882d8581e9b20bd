"""Quantises a latent cache in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import QuantizeMlaCache
from ragged_attention.jax_shared.latents import quantized
from ragged_attention.portable.xla._framework import why_not as why_not

FEATURES = frozenset({"power_of_two_scales", "cache_layout"})


def run(call: QuantizeMlaCache, tile: Any, launch: Any) -> jax.Array:
    layout = call.kv_format
    num_pages = len(call.kv)
    if num_pages == 0:
        return jnp.zeros(call.out_shape, jnp.uint8)
    stored = quantized(call.kv, layout, bool(call.power_of_two_scales))
    if not layout.planar:
        return jnp.concatenate([stored.values, stored.scales, stored.rotary], axis=-1)
    data = jnp.concatenate([stored.values, stored.rotary], axis=-1).reshape(num_pages, -1)
    return jnp.concatenate([data, stored.scales.reshape(num_pages, -1)], axis=-1).reshape(call.out_shape)
