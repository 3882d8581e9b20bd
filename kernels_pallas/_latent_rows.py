"""Conversion of the bytes of latent rows to matrix operands, for every cache format whose rows are contiguous.

The kernel has a row as integers, one byte per lane, and computes on its columns in the order that suits the bytes:

- An 8-bit code becomes a number in the lane of its byte.
- A byte of 4-bit codes holds an even and an odd column. The kernel has all even columns first, then all odd ones.
- A rotary column stays in the lane of its low byte, so every other lane after the scales holds one.

`reorder` puts the columns of the queries in that order, and `restore` undoes it for the columns of the result.

float32 scales are not multiplied with codes, because bfloat16 operands could not hold the products exactly. Instead,
the scale of a group of columns is multiplied into the group's part of the logits, and into the weights of the group's
values. 8-bit scales have so few significant bits that bfloat16 holds every product of code and scale exactly, so the
operands are dequantised values.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import CacheFormat, dtype_name
from ragged_attention.kernels_pallas._blocks import LANES, product, round_up

FLOAT_BITS = {  # the number of bits of the exponent and of the mantissa
    "float16": (5, 10), "float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2), "float4_e2m1fn": (2, 1),
}  # fmt: skip


def refusal(form: CacheFormat) -> str | None:
    """Why the kernels do not take caches of a format, or None."""
    if form.planar:
        return f"takes caches that have the bytes of a token together, got {form.name!r} by pages"
    if form.folded and (form.packed_codes or form.group != LANES):
        return f"takes float32 scales of {LANES} 8-bit codes each, got {form.group} codes of {form.codes}"
    return None


def words_of(cache: Any) -> Any:
    """The cache in a dtype that a kernel can load: float16 and all 8-bit dtypes are viewed as integers."""
    if dtype_name(cache) == "float16":
        return lax.bitcast_convert_type(cache, jnp.int16)
    return lax.bitcast_convert_type(cache, jnp.uint8) if cache.dtype.itemsize == 1 else cache


def tail_lanes(form: CacheFormat) -> int:
    """The number of lanes for the bytes of a row after its values: scales and rotary columns."""
    return round_up(form.token_bytes - form.value_bytes, LANES)


def value_columns(form: CacheFormat, d_v: int) -> int:
    """The number of accumulator columns that `restore` needs for `d_v` result columns."""
    if form.rotary and d_v > form.values:
        return form.values + tail_lanes(form)
    if form.packed_codes:
        return form.values
    return round_up(d_v, LANES) if form.folded else d_v


def reorder(q: Any, form: CacheFormat) -> Any:
    """Queries [..., d_qk] with their columns in the kernel's order, and zeros in lanes that hold no column."""
    if not (form.packed_codes or form.rotary):
        return q
    first, rotary = q[..., : form.values], (q[..., form.values :] if form.rotary else None)
    if form.packed_codes:
        first = jnp.concatenate([first[..., ::2], first[..., 1::2]], axis=-1)
    if rotary is None:
        return first
    rotary = jnp.stack([rotary, jnp.zeros_like(rotary)], axis=-1).reshape(*rotary.shape[:-1], -1)
    scales = form.padded_scale_bytes
    rotary = jnp.pad(rotary, [(0, 0)] * (q.ndim - 1) + [(scales, tail_lanes(form) - scales - 2 * form.rotary)])
    return jnp.concatenate([first, rotary], axis=-1)


def restore(out: Any, form: CacheFormat, d_v: int) -> Any:
    """The inverse of `reorder`: the first `d_v` columns of results, moved from the kernel's order to the cache's."""
    if not (form.packed_codes or form.rotary):
        return out[..., :d_v]
    first = out[..., : form.values]
    if form.packed_codes:
        first = jnp.stack(jnp.split(first, 2, axis=-1), axis=-1).reshape(first.shape)
    if d_v <= form.values:
        return first[..., :d_v]
    rotary = out[..., form.values + form.padded_scale_bytes :: 2]
    return jnp.concatenate([first, rotary[..., : d_v - form.values]], axis=-1)


def operands(raw: Any, form: CacheFormat, dtype: Any) -> list[tuple[Any, Any]]:
    """Matrix operands of `dtype` with columns in the kernel's order, from rows of integers, and their scales.

    The rows are [keys, bytes], or [keys, d_qk] if they are not quantised. Each operand [keys, ...] has a part of the
    columns, and a scale [1, keys] for these columns, or None if they need no scale.
    """
    if not form.quantized:
        return [(numbers(raw, form.codes).astype(dtype), None)]
    codes, tail = raw[:, : form.value_bytes], raw[:, form.value_bytes :]
    parts: list[tuple[Any, Any]]
    pairs: Any = _pairs(_padded(tail, tail_lanes(form))) if form.folded or form.rotary else None
    if form.folded:
        scales = pltpu.bitcast(pairs | (_left(pairs, 2) << 16), jnp.float32)[:, :LANES].T
        values = numbers(codes, form.codes).astype(dtype)
        groups = range(form.num_groups)
        parts = [(values[:, form.group * g : form.group * (g + 1)], scales[4 * g : 4 * g + 1]) for g in groups]
    else:
        scales = numbers(_padded(tail[:, : form.scale_bytes], LANES), form.scales)
        scales = _per_byte(scales, form)
        columns = (codes & 0xF, codes >> 4) if form.packed_codes else (codes,)
        products = [numbers(half, form.codes) * scales for half in columns]
        parts = [((jnp.concatenate(products, axis=1) if len(products) > 1 else products[0]).astype(dtype), None)]
    if form.rotary:
        lane, begin = lax.broadcasted_iota(jnp.int32, pairs.shape, 1), form.padded_scale_bytes
        is_rotary = (lane >= begin) & (lane < begin + 2 * form.rotary) & (lane % 2 == begin % 2)
        rotary = pltpu.bitcast(jnp.where(is_rotary, pairs << 16, 0), jnp.float32)
        parts.append((rotary.astype(dtype), None))
    return parts


def numbers(raw: Any, dtype: str) -> Any:
    """The float32 numbers whose bits in `dtype` are the integers `raw`. 8-bit numbers are exact in bfloat16, too.

    A float8_e8m0fnu code is the exponent of a float32, and the last code is NaN. The smallest number, 2**-127, becomes
    0: it is subnormal in float32, so the matrix unit would flush it.
    """
    if dtype == "int8":
        return ((raw << 24) >> 24).astype(jnp.float32)
    if dtype == "float8_e8m0fnu":
        return pltpu.bitcast(jnp.where(raw == 0xFF, 0x7FC00000, raw << 23), jnp.float32)
    exponent, mantissa = FLOAT_BITS[dtype]
    return from_bits(raw, exponent=exponent, mantissa=mantissa)


def from_bits(raw: Any, *, exponent: int, mantissa: int) -> Any:
    """The float32 values of 4- to 16-bit floats, given as integers. No intermediate value is subnormal in float32."""
    magnitude = raw & ((1 << (exponent + mantissa)) - 1)
    up, bias = 23 - mantissa, 127 - ((1 << (exponent - 1)) - 1)
    smallest = 2.0 ** (bias + 1 - 127)
    normal = pltpu.bitcast((magnitude << up) + (bias << 23), jnp.float32)
    subnormal = pltpu.bitcast((magnitude << up) | ((bias + 1) << 23), jnp.float32) - jnp.float32(smallest)
    value = jnp.where(magnitude < (1 << mantissa), subnormal, normal)
    if exponent == 5:
        infinite = pltpu.bitcast((magnitude << up) | 0x7F800000, jnp.float32)
        value = jnp.where(magnitude >= (31 << mantissa), infinite, value)
    elif exponent == 4:  # e4m3 has one NaN and no infinity; e2m1 has neither
        value = jnp.where(magnitude == (1 << (exponent + mantissa)) - 1, jnp.float32(jnp.nan), value)
    return jnp.where((raw >> (exponent + mantissa)) != 0, -value, value)


def _padded(raw: Any, lanes: int) -> Any:
    """Integers [keys, n] with zeros appended to fill `lanes`."""
    if raw.shape[1] == lanes:
        return raw
    return jnp.concatenate([raw, jnp.zeros((raw.shape[0], lanes - raw.shape[1]), jnp.int32)], axis=1)


def _left(lanes: Any, count: int) -> Any:
    """The values, moved `count` lanes to the left."""
    return pltpu.roll(lanes, lanes.shape[1] - count, 1)


def _pairs(tail: Any) -> Any:
    """The little-endian 16-bit number that each byte forms with the next byte."""
    return tail | (_left(tail, 1) << 8)


def _per_byte(scales: Any, form: CacheFormat) -> Any:
    """The scale of each byte of codes [keys, value_bytes], from the scales of the groups [keys, LANES].

    This is a product with a matrix that has a single 1 in each column. A NaN scale spreads to the whole row, but that
    row's logits are NaN anyway, because they sum over all columns.
    """
    shape = (LANES, form.value_bytes)
    scale, byte = lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)
    selects = jnp.where(scale == byte // (form.value_bytes // form.num_groups), 1.0, 0.0).astype(jnp.bfloat16)
    return product(scales.astype(jnp.bfloat16), selects)
