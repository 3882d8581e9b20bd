"""Quantises indexer keys in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import QuantizeIndexerKeys
from ragged_attention.jax_shared.latents import quantized_groups
from ragged_attention.portable.xla._framework import why_not as why_not

FEATURES = frozenset({"power_of_two"})


def run(call: QuantizeIndexerKeys, tile: Any, launch: Any) -> tuple[jax.Array, jax.Array]:
    codes, scales = quantized_groups(call.k.astype(jnp.float32), bool(call.power_of_two))
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), lax.bitcast_convert_type(scales, jnp.float32)
