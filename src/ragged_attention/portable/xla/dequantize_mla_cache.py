"""Dequantises a latent cache in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import DequantizeMlaCache
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._latents import all_rows, dequantized

FEATURES = frozenset({"format", "dtype", "cache_layout"})


def run(call: DequantizeMlaCache, tile: Any, launch: Any) -> jax.Array:
    if len(call.cache) == 0:
        return jnp.zeros(call.out_shape, call.dtype)
    return dequantized(all_rows(call.cache, call.kv_format), call.kv_format).astype(call.dtype)
