"""Quantises rows of K or V in plain jax operations."""

from typing import Any

import jax
from jax import lax

from ragged_attention.calls import QuantizeKv
from ragged_attention.jax_shared.pages import per_head
from ragged_attention.jax_shared.scaled_rows import quantized
from ragged_attention.portable.xla._framework import why_not as why_not

FEATURES = frozenset({"scale", "zero", "scales_dtype"})


def run(call: QuantizeKv, tile: Any, launch: Any) -> tuple[jax.Array, ...]:
    rows = call.x.reshape(call.num_tokens, call.num_kv_heads, call.x.shape[-1])
    scale = None if call.scale is None else per_head(call.scale, call.num_kv_heads)
    return tuple(
        lax.bitcast_convert_type(bits, result.dtype).reshape(result.shape)
        for bits, result in zip(quantized(rows, scale, call.kv_format), call.results(), strict=True)
    )
