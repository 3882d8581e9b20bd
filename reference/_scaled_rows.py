"""K and V rows whose scales are stored in scale pages: their values, and the quantisation of new rows in a write.

The docstring of `write_kv_pages` has the rules of quantisation. Its arithmetic is in float32, step by step as on a
device.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.reference._kv_layout import (
    Bytes,
    Float64,
    decode,
    decode_e2m1,
    e8m0_values,
    encode,
    encode_e2m1,
    widened,
)

Float32 = NDArray[np.float32]

# The divisor of a row's largest magnitude, by the dtype of its codes. 224 is less than the largest e4m3fnuz, 240.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0, "float8_e5m2": 57344.0}
LEAST_SCALE = np.float32(1e-6)
LARGEST_ZERO = np.float32(32768)
ZERO_BITS = np.uint32(15)  # the bits of a float32 scale that hold a zero point


# ---- values


def values_of(pages: ArrayLike, scale_pages: ArrayLike | None, form: KvFormat) -> Float64:
    """The values [..., K, D] of stored rows [..., K, W]; `scale_pages` is [..., K, n], or None without scales."""
    codes = decoded_codes(np.asarray(pages), form)
    if scale_pages is None:
        return codes
    scales, zeros = scales_and_zeros(np.asarray(scale_pages), form)
    grouped = codes.reshape(*scales.shape, codes.shape[-1] // scales.shape[-1])
    with np.errstate(invalid="ignore"):  # zero times an infinite scale is NaN
        return ((grouped - zeros[..., None]) * scales[..., None]).reshape(codes.shape)


def decoded_codes(pages: NDArray[Any], form: KvFormat) -> Float64:
    """The decoded codes, one number for each column."""
    if form.codes == "uint4":
        return widened(np.stack([pages & 0xF, pages >> 4], axis=-1).reshape(*pages.shape[:-1], 2 * pages.shape[-1]))
    return decode_e2m1(pages) if form.packed_codes else decode(pages, form.codes)


def scales_and_zeros(scale_pages: NDArray[Any], form: KvFormat) -> tuple[Float64, Float64]:
    """The scales of rows or of their blocks, [..., n], and the zero points, which are 0 if the format has none."""
    if form.zero == "stored":
        scales, zeros = np.moveaxis(widened(scale_pages), -1, 0)[..., None]
        return scales, zeros
    if form.zero == "mantissa":
        bits = scale_pages.astype(np.float32).view(np.uint32)
        return widened((bits & ~ZERO_BITS).view(np.float32)), widened(bits & ZERO_BITS)
    scales = e8m0_values(scale_pages) if form.scales == "float8_e8m0fnu" else decode(scale_pages, form.scales)
    return scales, np.zeros(scales.shape)


# ---- quantisation


def quantized(rows: NDArray[Any], scale: Float32, form: KvFormat) -> tuple[NDArray[Any], NDArray[Any]]:
    """The codes [T, K, W] and the scales [T, K, n] that are stored for new rows [T, K, D].

    `scale` [K] is the `k_scale` or `v_scale` of each KV head, by which attention multiplies the stored values. A NaN
    makes the scale of its row or block NaN, and the codes 0.
    """
    with np.errstate(all="ignore"):
        if form.scales == "float8_e4m3fn":
            return _in_blocks_of_e4m3(rows.astype(np.float32), scale[:, None, None], form)
        rows = rows.astype(np.float32) / scale[:, None]
        if form.group:
            return _in_blocks_of_powers(rows, form)
        return _shifted(rows, form) if form.zero else _symmetric(rows, form)


def _symmetric(rows: Float32, form: KvFormat) -> tuple[NDArray[Any], Float32]:
    """Codes without a zero point, with one scale for each row."""
    largest = np.float32(LARGEST[form.codes])
    scales = np.maximum(np.abs(rows).max(axis=-1, keepdims=True) / largest, LEAST_SCALE)
    scaled = np.nan_to_num(rows * (np.float32(1) / scales), nan=0.0, posinf=np.inf, neginf=-np.inf)
    if form.codes == "int8":
        return np.clip(half_away(scaled), -128, 127).astype(np.int8), _without_payload(scales)
    return encode(np.clip(scaled, -largest, largest), form.codes), _without_payload(scales)


def _shifted(rows: Float32, form: KvFormat) -> tuple[Bytes, NDArray[Any]]:
    """Codes from 0 to 15, with one zero point and one scale for each row."""
    least, most = rows.min(axis=-1, keepdims=True), rows.max(axis=-1, keepdims=True)
    scales = np.maximum((most - least) / np.float32(15), LEAST_SCALE)
    if form.zero == "stored":  # otherwise the zero point could exceed the range of float16
        scales = np.maximum(scales, np.maximum(most, -least) / LARGEST_ZERO)
    # Unlike a negation, the subtraction from 0 never gives -0.
    zeros, inverse, finite = np.float32(0) - least / scales, np.float32(1) / scales, np.isfinite(scales)
    if form.zero == "mantissa":
        zeros = np.clip(half_away(zeros), 0, 15)
        codes = half_away(rows * inverse + zeros)
        bits = np.where(finite, zeros, 0).astype(np.uint32) | (_without_payload(scales).view(np.uint32) & ~ZERO_BITS)
        stored: NDArray[Any] = bits.view(np.float32)
    else:
        codes = np.rint(rows * inverse + zeros)
        stored = np.concatenate([_without_payload(scales), np.where(finite, zeros, 0)], axis=-1).astype(form.scales)
    return _packed(np.where(finite, np.clip(np.nan_to_num(codes, nan=0.0), 0, 15), 0).astype(np.uint8)), stored


def _in_blocks_of_e4m3(rows: Float32, scale: Float32, form: KvFormat) -> tuple[Bytes, Bytes]:
    """e2m1 codes with an e4m3 scale for each block."""
    blocks = _blocks(rows, form)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    scales = np.where(scale > 0, largest / (np.float32(6) * scale), np.float32(0))
    stored = encode(np.where(np.isnan(largest), np.float32(np.nan), scales), form.scales)
    factors = decode(stored, form.scales).astype(np.float32)
    inverse = np.where(factors > 0, np.float32(1) / (factors * scale), np.float32(0))
    scaled = (blocks * inverse).astype(np.float32)
    codes = np.where(np.isnan(factors) | np.isnan(scaled), 0, encode_e2m1(scaled))
    return _packed(codes.astype(np.uint8).reshape(rows.shape)), stored[..., 0]


def _in_blocks_of_powers(rows: Float32, form: KvFormat) -> tuple[Bytes, Bytes]:
    """e4m3 or e2m1 codes with a power of two as the scale of each block."""
    blocks = _blocks(rows, form)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    # The largest magnitude is m * 2 ** e. e is raised by one if m >= 1.75 for e2m1 codes, and if m > 1.75 for e4m3.
    added, steps = (0x200000, 2) if form.packed_codes else (0x1FFFFF, 8)
    raised = (largest.view(np.int32) + added) >> 23
    exponents = np.clip(raised - 127 - steps, -127, 127)
    beyond = raised == 255 if form.packed_codes else np.isinf(largest)
    exponents = np.where(beyond, 127, exponents)
    scaled = np.ldexp(blocks, -exponents).astype(np.float32)
    invalid = np.isnan(largest)
    codes = encode_e2m1(scaled) if form.packed_codes else encode(scaled, form.codes)
    codes = np.where(invalid, 0, codes).astype(np.uint8).reshape(rows.shape)
    stored = np.where(invalid, 0xFF, exponents + 127).astype(np.uint8)[..., 0]
    return _packed(codes) if form.packed_codes else codes, stored


def _blocks(rows: Float32, form: KvFormat) -> Float32:
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // form.group, form.group)


def half_away(numbers: Float32) -> Float32:
    """Numbers rounded to integers as vLLM does: half is added to their magnitude, and the fraction is cut off."""
    return np.trunc(numbers + np.where(numbers >= 0, np.float32(0.5), np.float32(-0.5)))


def _without_payload(scales: Float32) -> Float32:
    """The scales, with the same bits for every NaN."""
    return np.where(np.isnan(scales), np.float32(np.nan), scales)


def _packed(codes: Bytes) -> Bytes:
    """4-bit codes, two in a byte, with the even column in the low half."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
