"""Dequantises rows of K or V in plain jax operations."""

from typing import Any

import jax

from ragged_attention.calls import DequantizeKv
from ragged_attention.jax_shared.pages import per_head
from ragged_attention.jax_shared.scaled_rows import values_of
from ragged_attention.portable.xla._framework import why_not as why_not

FEATURES = frozenset({"scales", "scale", "dtype"})


def run(call: DequantizeKv, tile: Any, launch: Any) -> jax.Array:
    values = values_of(call.codes, call.scales_of_rows, call.kv_format)
    if call.scale is not None:
        values = values * per_head(call.scale, call.num_kv_heads)[:, None]
    (result,) = call.results()
    return values.reshape(result.shape).astype(result.dtype)
