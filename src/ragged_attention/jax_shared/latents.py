"""Encodes latent rows as the bytes of a quantised cache, bit for bit like `reference/`, for the backends in jax.

Where rounding matters, the arithmetic uses integers, because XLA flushes subnormal numbers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ragged_attention.calls import CacheFormat
from ragged_attention.jax_shared.pages import codes, per_head, quotient, stored_bits
from ragged_attention.jax_shared.scaled_rows import e2m1_codes, packed

INFINITY, NAN = np.uint32(0x7F800000), np.uint32(0x7FC00000)
LEAST_SCALE = np.float32(1e-4).view(np.uint32)


class Stored(NamedTuple):
    """The bytes of quantised rows, uint8."""

    values: jax.Array  # [..., values]
    scales: jax.Array  # [..., bytes]
    rotary: jax.Array  # [..., 2 * rotary]


def new_rows(call: Any, kv: jax.Array) -> jax.Array:
    """The rows [T, K, D] of a write as its latent cache stores them, in unsigned integers.

    The rows of a plain cache are [T, K, columns]. The rows of a quantised cache are bytes [T, bytes], in the order in
    which the cache stores them.
    """
    layout = call.kv_format
    if not layout.quantized:
        parts, scales = jnp.split(kv, (call.rope_start,), axis=-1), (call.kv_scale, call.rope_scale)
        scales = [None if scale is None else per_head(scale, call.num_kv_heads) for scale in scales]
        bits = [stored_bits(part, scale, call.cache.dtype) for part, scale in zip(parts, scales, strict=True)]
        return bits[0] if call.rope_scale is None else jnp.concatenate(bits, axis=-1)
    stored = quantized(kv[:, 0], layout, bool(call.power_of_two_scales))
    parts = stored.values, stored.scales, stored.rotary
    if layout.planar:
        parts = stored.values, stored.rotary, stored.scales
    return jnp.concatenate(parts, axis=-1)


def quantized(rows: jax.Array, layout: CacheFormat, power_of_two_scales: bool) -> Stored:
    """The bytes of rows [..., d_qk]. The bytes of the scales include padding."""
    shape = rows.shape[:-1]
    groups = rows[..., : layout.values].astype(jnp.float32).reshape(*shape, -1, layout.group)
    if layout.packed_codes:
        magnitudes = lax.bitcast_convert_type(groups, jnp.uint32) & 0x7FFFFFFF  # integers in order of size, NaN last
        values, stored = _to_e2m1(groups, magnitudes.max(axis=-1))
    else:
        values, scales = quantized_groups(groups, power_of_two_scales)
        if layout.scales == "float8_e8m0fnu":
            exponents = jnp.where(scales >= INFINITY, 255, scales >> 23).astype(jnp.uint8)
            padding = layout.token_bytes - layout.row_bytes - layout.num_groups
            stored = jnp.pad(exponents, [(0, 0)] * len(shape) + [(0, padding)])
        else:
            stored = lax.bitcast_convert_type(scales, jnp.uint8).reshape(*shape, -1)
    # Slice the bits: XLA may convert bfloat16 to float32 and back, which changes NaNs.
    rotary = lax.bitcast_convert_type(_bfloat16_bits(rows)[..., layout.values :], jnp.uint8)
    return Stored(values.reshape(*shape, -1), stored, rotary.reshape(*shape, -1))


def quantized_groups(groups: jax.Array, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    """The codes of float32 groups [..., group], as uint8, and the bits of their scales [...], as uint32."""
    magnitudes = lax.bitcast_convert_type(groups, jnp.uint32) & 0x7FFFFFFF  # integers in order of size, NaN last
    scales = _scales(magnitudes.max(axis=-1), power_of_two)
    scaled = quotient(groups, lax.bitcast_convert_type(scales, jnp.float32)[..., None])
    scaled = jnp.where(jnp.isnan(scaled), jnp.float32(np.nan), scaled)  # a NaN's sign differs by device
    return codes(scaled, 3, 7, 448.0), scales


def _scales(largest: jax.Array, power_of_two: bool) -> jax.Array:
    """The bits of the groups' scales. `largest` holds the bits of each group's largest magnitude."""
    scale = quotient(lax.bitcast_convert_type(largest, jnp.float32), jnp.float32(448.0))
    bits = jnp.where(largest >= INFINITY, largest, lax.bitcast_convert_type(scale, jnp.uint32))
    bits = jnp.maximum(bits, LEAST_SCALE)
    if power_of_two:
        bits = jnp.where(bits < INFINITY, (bits + 0x7FFFFF) >> 23 << 23, bits)
    return jnp.where(bits > INFINITY, NAN, bits)


def _to_e2m1(groups: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bytes of 4-bit groups and of their scales; `largest` holds the bits of each group's largest magnitude."""
    scale = quotient(lax.bitcast_convert_type(largest, jnp.float32), jnp.float32(6.0))
    scale = jnp.clip(jnp.where(largest > INFINITY, jnp.float32(1), scale), jnp.float32(2.0**-9), jnp.float32(448.0))
    nan = largest > INFINITY
    stored = jnp.where(nan, jnp.uint8(0x7F), codes(scale, 3, 7, 448.0))
    divisor = lax.bitcast_convert_type(jnp.where(nan, jnp.uint8(0x38), stored), jnp.float8_e4m3fn).astype(jnp.float32)
    scaled = quotient(groups, divisor[..., None])
    four_bits = jnp.where(nan[..., None], jnp.uint8(0), e2m1_codes(scaled))
    return packed(four_bits.reshape(*groups.shape[:-2], -1)), stored


def _bfloat16_bits(values: jax.Array) -> jax.Array:
    """Values rounded to bfloat16, ties to even, as uint16; a NaN keeps its sign and becomes quiet."""
    if values.dtype == jnp.bfloat16:
        own = lax.bitcast_convert_type(values, jnp.uint16)
        return jnp.where((own & 0x7FFF) > 0x7F80, own | 0x40, own)
    bits = lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return jnp.where((bits & 0x7FFFFFFF) > INFINITY, (bits >> 16) | 0x40, rounded).astype(jnp.uint16)
