"""Quantisation of new rows of K and V. Each row gets one scale, or one scale for each block of its columns.

The rules are those of `write_kv_pages`. Every step is float32 arithmetic of IEEE 754, so that all devices store the
same bytes: divisions are rounded once, and no product is fused with a sum.
"""

import triton
import triton.language as tl

from ragged_attention.kernels_triton._formats import (
    e4m3_values,
    encode_float4,
    encode_float8,
)
from ragged_attention.kernels_triton._formats import encode as encoded

NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)


@triton.jit
def half_away(numbers):
    """Numbers rounded to integers: 0.5 is added to their magnitude, and the fraction is cut off."""
    return tl.where(numbers >= 0, tl.floor(numbers + 0.5), tl.ceil(numbers - 0.5))


@triton.jit
def to_even(numbers):
    """Numbers of magnitudes below 2^22 rounded to integers, ties to even."""
    return (numbers + 12582912.0) - 12582912.0


@triton.jit
def product(a, b):
    """a * b, or 0 if it is NaN. The test separates the product from sums that could be fused with it."""
    exact = a * b
    return tl.where(exact == exact, exact, 0.0)


@triton.jit
def as_numbers(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def symmetric(rows, invalid, LARGEST: tl.constexpr, FORMAT: tl.constexpr):
    """(codes, scales [rows]) of rows quantised symmetrically about zero. `invalid` rows get codes 0 and scale NaN."""
    scales = tl.maximum(tl.div_rn(tl.max(tl.abs(rows), 1), LARGEST), 1e-6)
    scaled = product(rows, tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)[:, None])
    if FORMAT == "int8":
        codes = tl.minimum(tl.maximum(half_away(scaled), -128.0), 127.0).to(tl.int8)
    else:
        codes = encoded(tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST), FORMAT, tl.uint8)
    codes = tl.where(invalid[:, None], 0, codes)
    return codes, tl.where(invalid, as_numbers(tl.full(scales.shape, NAN_BITS, tl.uint32)), scales)


@triton.jit
def shifted(rows, exists, invalid, ZERO: tl.constexpr):
    """(codes from 0 to 15, scales [rows], zero points [rows]) of rows, each quantised about its zero point.

    If ZERO is "mantissa", the lowest bits of the scales hold the zero points.
    """
    least = tl.min(tl.where(exists, rows, float("inf")), 1)
    most = tl.max(tl.where(exists, rows, float("-inf")), 1)
    scales = tl.maximum(tl.div_rn(most - least, 15.0), 1e-6)
    if ZERO == "stored":
        scales = tl.maximum(scales, tl.maximum(most, -least) * (1.0 / 32768.0))
    finite = (scales < float("inf")) & (invalid == 0)
    zeros = 0.0 - tl.div_rn(least, scales)  # never -0, even if a row's least number is 0 or -0
    inverse = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
    if ZERO == "mantissa":
        zeros = tl.minimum(tl.maximum(half_away(zeros), 0.0), 15.0)
        codes = half_away(product(rows, inverse[:, None]) + zeros[:, None])
    else:
        sums = product(rows, inverse[:, None]) + zeros[:, None]
        codes = to_even(tl.minimum(tl.maximum(sums, 0.0), 15.0))
    codes = tl.minimum(tl.maximum(codes, 0.0), 15.0)
    codes = tl.where(finite[:, None] & exists, codes, 0.0).to(tl.uint8)
    zeros = tl.where(finite, zeros, 0.0)
    bits = tl.where(invalid, NAN_BITS, scales.to(tl.uint32, bitcast=True))
    if ZERO == "mantissa":
        bits = (bits & 0xFFFFFFF0) | zeros.to(tl.uint32)
    return codes, as_numbers(bits), zeros


@triton.jit
def in_blocks_of_e4m3(blocks, invalid, scale):
    """(e2m1 codes, e4m3 scales [rows, blocks]) of rows given as `blocks` [rows, blocks, columns]."""
    largest = tl.max(tl.abs(blocks), 2)
    known = scale > 0
    divisor = 6.0 * tl.where(known, scale, 1.0)
    quotients = tl.where(known, tl.div_rn(largest, divisor + tl.zeros_like(largest)), 0.0)
    stored = tl.where(invalid, 0x7F, encode_float8(quotients, 3, 7, 0x7E)).to(tl.uint8)
    factors = e4m3_values(stored)
    used = tl.where(factors > 0, factors * scale, 1.0)
    inverse = tl.where(factors > 0, tl.div_rn(tl.full(used.shape, 1.0, tl.float32), used), 0.0)
    return encode_float4(blocks * inverse[:, :, None]), stored


@triton.jit
def power_of_two(exponents):
    return as_numbers(((exponents + 127) << 23).to(tl.uint32))


@triton.jit
def in_blocks_of_powers(blocks, invalid, PACKED: tl.constexpr):
    """(e2m1 codes if PACKED, else e4m3 codes; e8m0 scales [rows, blocks]) of `blocks` [rows, blocks, columns]."""
    largest = tl.max(tl.abs(blocks), 2)
    # The largest magnitude is m * 2^e. The exponent becomes e + 1 if m >= 1.75 (PACKED) or m > 1.75 (otherwise).
    ADDED: tl.constexpr = 0x200000 if PACKED else 0x1FFFFF
    STEPS: tl.constexpr = 2 if PACKED else 8
    raised = ((largest.to(tl.uint32, bitcast=True) + ADDED) >> 23).to(tl.int32)
    exponents = tl.minimum(tl.maximum(raised - 127 - STEPS, -127), 127)
    beyond = raised == 255 if PACKED else largest == float("inf")
    exponents = tl.where(beyond, 127, exponents)
    half = exponents // 2  # scaled in two steps, since 2^-127 is subnormal
    scaled = blocks * power_of_two(-half)[:, :, None] * power_of_two(half - exponents)[:, :, None]
    codes = encode_float4(scaled) if PACKED else encode_float8(scaled, 3, 7, 0x7E)
    return codes, tl.where(invalid, 0xFF, exponents + 127).to(tl.uint8)


@triton.jit
def in_pairs(codes):
    """4-bit codes [rows, columns], two in a byte, with the even column in the low half."""
    even, odd = tl.split(tl.reshape(codes.to(tl.uint8), [codes.shape[0], codes.shape[1] // 2, 2]))
    return even | (odd << 4)
