"""Decodes rows of K and V that are stored with scales, and quantises new rows for a write.

`write_kv_pages` documents the rules. The codes and scales are bit for bit those of `reference/_scaled_rows.py`. XLA may
flush subnormal numbers, divide inexactly, and fuse a product with a sum without rounding the product. So exponents are
computed as integers, quotients by `quotient`, and a product is clipped before anything is added to it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.jax_shared.pages import FORMATS, codes, per_head, quotient, stored_bits

INFINITY, NAN, HALF_NAN = np.uint32(0x7F800000), np.uint32(0x7FC00000), np.uint16(0x7E00)
MAGNITUDE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign
LARGEST_FLOAT = np.finfo(np.float32).max
SMALLEST = np.finfo(np.float32).tiny
DOUBLED_E2M1 = np.uint32(0xC8643210)  # twice the 8 magnitudes, 4 bits each: 0, 1, 2, 3, 4, 6, 8, 12
# The divisor of a row's largest magnitude, by the dtype of its codes. 224 is less than the largest e4m3fnuz, 240.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0, "float8_e5m2": 57344.0}
LEAST_SCALE, LARGEST_ZERO = np.float32(1e-6), np.float32(32768)
ZERO_BITS = np.uint32(15)  # the bits of a float32 scale that hold a zero point


# ---- values


def values_of(stored: jax.Array, scales: jax.Array | None, form: KvFormat) -> jax.Array:
    """The float32 values [..., D] of stored rows [..., W]. `scales` [..., n] is None if the format has no scales."""
    values = decoded_codes(stored, form)
    if scales is None:
        return values
    factors, zeros = scales_and_zeros(scales, form)
    count = factors[0].shape[-1]
    groups = values.reshape(*values.shape[:-1], count, values.shape[-1] // count)
    if zeros is not None:
        groups = groups - zeros[..., None]
    for factor in factors:
        groups = groups * factor[..., None]
    return groups.reshape(values.shape)


def decoded_codes(stored: jax.Array, form: KvFormat) -> jax.Array:
    """The numbers that codes stand for, one for each column, in float32."""
    if not form.packed_codes:
        return stored.astype(jnp.float32)
    return nibbles(stored).astype(jnp.float32) if form.codes == "uint4" else e2m1_values(stored)


def scales_and_zeros(scales: jax.Array, form: KvFormat) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Factors [..., n] whose product is the scale of a row or block; the zero points, None if the format has none."""
    if form.zero == "stored":
        return (scales[..., :1].astype(jnp.float32),), scales[..., 1:].astype(jnp.float32)
    if form.zero == "mantissa":
        bits = lax.bitcast_convert_type(scales, jnp.uint32)
        return (lax.bitcast_convert_type(bits & ~ZERO_BITS, jnp.float32),), (bits & ZERO_BITS).astype(jnp.float32)
    if form.scales == "float8_e8m0fnu":
        return e8m0_factors(lax.bitcast_convert_type(scales, jnp.uint8)), None
    return (scales.astype(jnp.float32),), None


def e8m0_factors(stored: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two normal numbers whose product is the power of two that an e8m0 code, as uint8, stands for; NaN for 0xFF.

    A single factor could be subnormal: the smallest power is 2**-127.
    """
    exponents = stored.astype(jnp.int32) - 127
    first = jnp.where(stored == 0xFF, jnp.float32(np.nan), _power(exponents >> 1))
    return first, _power(exponents - (exponents >> 1))


def e2m1_values(stored: jax.Array) -> jax.Array:
    """Bytes [..., n] as float32 values [..., 2 n]; a byte's low 4 bits hold the first of its two values."""
    pairs = nibbles(stored).astype(jnp.uint32)
    magnitude = ((DOUBLED_E2M1 >> ((pairs & 7) << 2)) & 15).astype(jnp.float32) * 0.5
    return lax.bitcast_convert_type(lax.bitcast_convert_type(magnitude, jnp.uint32) | (pairs >> 3 << 31), jnp.float32)


def nibbles(stored: jax.Array) -> jax.Array:
    """The 4-bit codes [..., 2 n] of bytes [..., n], as uint8."""
    return jnp.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], 2 * stored.shape[-1])


def packed(four_bits: jax.Array) -> jax.Array:
    """4-bit codes [..., 2 n], as uint8, in bytes [..., n], with the even column in the low half."""
    pairs = four_bits.reshape(*four_bits.shape[:-1], four_bits.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


# ---- quantisation


def new_rows(call: Any, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """The bits of K [T, K, D] and V [T, K, D_v] as rows of each array of `call.caches`, in unsigned integers.

    8-bit K and V are copied unchanged, for any scales. Rows of combined pages are [T, 2K, W], others [T, K, W].
    """
    stored = [
        _stored_row(call, *side)
        for side in ((k, call.k_scale, call.k_format), (v, call.v_scale, call.v_format))
    ]  # fmt: skip
    rows = [bits for bits, _ in stored]
    if call.combined:
        rows = [jnp.stack(rows, axis=2).reshape(len(k), -1, rows[0].shape[-1])]
    return rows + [scales for _, scales in stored if scales is not None]


def _stored_row(call: Any, tokens: jax.Array, scale: Any, form: KvFormat) -> tuple[jax.Array, jax.Array | None]:
    """The bits that pages store for new rows, and those of scale pages, or None if the format has no scales."""
    scale = None if scale is None else per_head(scale, call.num_kv_heads)
    if form.scaled:
        return quantized(tokens, scale, form)
    if tokens.dtype.itemsize == 1:
        return lax.bitcast_convert_type(tokens, jnp.uint8), None
    return stored_bits(tokens, scale, form.codes), None


def quantized(rows: jax.Array, scale: jax.Array | None, form: KvFormat) -> tuple[jax.Array, jax.Array]:
    """The bits of the codes [..., K, W] and of the scales [..., K, n] that are stored for new rows [..., K, D].

    `scale` [K] multiplies the values of each KV head; None stands for 1. A NaN makes the scale of its row or block NaN,
    and the codes 0.
    """
    rows = rows.astype(jnp.float32)
    if form.scales == "float8_e4m3fn":
        return _in_blocks_of_e4m3(rows, scale, form)
    if scale is not None:
        rows = quotient(rows, scale[:, None])
    if form.group:
        return _in_blocks_of_powers(rows, form)
    return _shifted(rows, form) if form.zero else _symmetric(rows, form)


def _symmetric(rows: jax.Array, form: KvFormat) -> tuple[jax.Array, jax.Array]:
    """Codes symmetric about zero, and one scale for each row."""
    largest = LARGEST[form.codes]
    reach = _magnitudes(rows).max(axis=-1, keepdims=True)
    scales = jnp.maximum(quotient(_float(reach), jnp.float32(largest)), LEAST_SCALE)
    scaled = rows * _inverse(scales)
    invalid = (reach > INFINITY) | jnp.isnan(scaled)
    scaled = jnp.where(invalid, 0, jnp.clip(scaled, -LARGEST_FLOAT, LARGEST_FLOAT))
    if form.codes == "int8":
        stored = lax.bitcast_convert_type(jnp.clip(half_away(scaled), -128, 127).astype(jnp.int8), jnp.uint8)
    else:
        stored = stored_bits(jnp.clip(scaled, -largest, largest), None, form.codes)
    return stored, _scale_bits(scales)


def _shifted(rows: jax.Array, form: KvFormat) -> tuple[jax.Array, jax.Array]:
    """Codes from 0 to 15, and a scale and a zero point for each row."""
    invalid = (_magnitudes(rows) >= INFINITY).any(axis=-1, keepdims=True)
    least, most = _extremes(rows)
    scales = jnp.maximum(quotient(most - least, jnp.float32(15)), LEAST_SCALE)
    if form.zero == "stored":  # so that the zero point is within the range of float16
        scales = jnp.maximum(scales, jnp.maximum(most, -least) * (1 / LARGEST_ZERO))
    invalid |= ~jnp.isfinite(scales)
    zeros = 0 - _quotient_of_small(least, scales)
    zeros = jnp.clip(half_away(zeros), 0, 15) if form.zero == "mantissa" else zeros
    sums = jnp.clip(rows * _inverse(scales), -LARGEST_FLOAT, LARGEST_FLOAT) + zeros
    numbers = half_away(sums) if form.zero == "mantissa" else jnp.rint(sums)
    numbers = jnp.where(invalid, 0, jnp.clip(numbers, 0, 15)).astype(jnp.uint8)
    zeros = jnp.where(invalid, 0, zeros)
    if form.zero == "mantissa":
        return packed(numbers), (_scale_bits(scales) & ~ZERO_BITS) | zeros.astype(jnp.uint32)
    if form.scales == "float32":
        return packed(numbers), jnp.concatenate([_scale_bits(scales), _bits(zeros)], axis=-1)
    stored = lax.bitcast_convert_type(jnp.concatenate([scales, zeros], axis=-1).astype(form.scales), jnp.uint16)
    return packed(numbers), jnp.where(stored & 0x7FFF > 0x7C00, HALF_NAN, stored)


def _in_blocks_of_e4m3(rows: jax.Array, scale: jax.Array | None, form: KvFormat) -> tuple[jax.Array, jax.Array]:
    """e2m1 codes, and an e4m3 scale for each block."""
    blocks = _blocks(rows, form)
    reach = _magnitudes(blocks).max(axis=-1)
    factor = jnp.float32(1) if scale is None else jnp.where(scale < SMALLEST, 0, scale)[:, None]
    scales = jnp.where(factor > 0, quotient(_float(reach), 6 * factor), 0)
    stored = codes(jnp.where(reach > INFINITY, jnp.float32(np.nan), scales), *FORMATS[form.scales])
    factors = lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(jnp.float32)
    inverse = jnp.where(factors > 0, _inverse(factors * factor), 0)
    four_bits = jnp.where((reach > INFINITY)[..., None], 0, e2m1_codes(blocks * inverse[..., None]))
    return packed(four_bits.reshape(rows.shape)), stored


def _in_blocks_of_powers(rows: jax.Array, form: KvFormat) -> tuple[jax.Array, jax.Array]:
    """e4m3 or e2m1 codes, and a power of two as the scale of each block."""
    blocks = _blocks(rows, form)
    reach = _magnitudes(blocks).max(axis=-1)
    # The largest magnitude is m * 2 ** e. e is increased by one if m >= 1.75 for e2m1, or if m > 1.75 for e4m3.
    added, steps = (0x200000, 2) if form.packed_codes else (0x1FFFFF, 8)
    raised = ((reach + np.uint32(added)) >> 23).astype(jnp.int32)
    beyond = raised == 255 if form.packed_codes else reach == INFINITY
    exponents = jnp.where(beyond, 127, jnp.clip(raised - 127 - steps, -127, 127))
    scaled, invalid = _times_power(blocks, -exponents[..., None]), reach > INFINITY
    numbers = e2m1_codes(scaled) if form.packed_codes else stored_bits(scaled, None, form.codes)
    numbers = jnp.where(invalid[..., None], 0, numbers).astype(jnp.uint8).reshape(rows.shape)
    stored = jnp.where(invalid, 0xFF, exponents + 127).astype(jnp.uint8)
    return packed(numbers) if form.packed_codes else numbers, stored


def e2m1_codes(values: jax.Array) -> jax.Array:
    """The 4-bit codes of float32 values, rounded to nearest, ties to even, saturating; 0 for NaN.

    A code counts the midpoints between neighbouring e2m1 values that are below the magnitude. At a midpoint, the even
    code wins.
    """
    magnitude = jnp.abs(values)
    code = jnp.zeros(values.shape, jnp.uint8)
    for index, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (magnitude >= middle if index % 2 else magnitude > middle).astype(jnp.uint8)
    code |= (_bits(values) >> 31 << 3).astype(jnp.uint8)
    return jnp.where(jnp.isnan(values), jnp.uint8(0), code)


def half_away(numbers: jax.Array) -> jax.Array:
    """Numbers rounded to integers as vLLM does: half is added to their magnitude, and the fraction is cut off."""
    return jnp.trunc(numbers + jnp.where(numbers >= 0, 0.5, -0.5).astype(jnp.float32))


def _blocks(rows: jax.Array, form: KvFormat) -> jax.Array:
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // form.group, form.group)


def _bits(numbers: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(numbers, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _magnitudes(numbers: jax.Array) -> jax.Array:
    """The bits of the magnitudes, which are in order of size, with NaN last."""
    return _bits(numbers) & MAGNITUDE


def _extremes(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest number of each row [..., D], both [..., 1]. Bits are compared as integers."""
    bits = lax.bitcast_convert_type(rows, jnp.int32)
    ordered = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    extremes = ordered.min(axis=-1, keepdims=True), ordered.max(axis=-1, keepdims=True)
    least, most = (_float(each ^ ((each >> 31) & np.int32(0x7FFFFFFF))) for each in extremes)
    return least, most


def _scale_bits(scales: jax.Array) -> jax.Array:
    """The bits of scales, with one pattern for NaN."""
    return jnp.where(jnp.isnan(scales), NAN, _bits(scales))


def _inverse(numbers: jax.Array) -> jax.Array:
    return quotient(jnp.ones_like(numbers), numbers)


def _quotient_of_small(numbers: jax.Array, divisors: jax.Array) -> jax.Array:
    """The quotients of `numbers`, which may be subnormal. Numbers below 1 are multiplied by 2**64 for the division."""
    small = jnp.abs(numbers) < 1
    enlarged = jnp.where(small, _times_power(numbers, jnp.int32(64)), numbers)
    return quotient(enlarged, divisors) * jnp.where(small, np.float32(2.0**-64), np.float32(1))


def _times_power(numbers: jax.Array, exponents: jax.Array) -> jax.Array:
    """Numbers, which may be subnormal, times 2**exponents, for exponents from -127 to 127.

    The power is the product of two factors, because a single factor could be subnormal. A subnormal result may be 0.
    """
    magnitudes = _magnitudes(numbers)
    subnormal = magnitudes < 0x800000
    exponents = exponents - jnp.where(subnormal, 149, 0)
    normal = jnp.where(subnormal, magnitudes.astype(jnp.float32), _float(magnitudes))
    first = exponents >> 1
    product = normal * _power(jnp.maximum(first, -126)) * _power(jnp.maximum(exponents - first, -126))
    return _float(_bits(product) | (_bits(numbers) & ~MAGNITUDE))


def _power(exponents: jax.Array) -> jax.Array:
    """2**exponents, for exponents from -126 to 127."""
    return _float(((exponents + 127) << 23).astype(jnp.uint32))
