"""New rows of K and V as codes and scales, by the rules that `write_kv_pages` documents.

Every step is rounded to float32 as the reference rounds it, so that bytes do not depend on the machine.
"""

from typing import Any

import numpy as np

from ragged_attention.portable.numba import _formats
from ragged_attention.portable.numba._formats import (
    E4M3,
    FLOAT16,
    FLOAT32,
    INT8,
    code_of_e4m3,
    code_of_float16,
    number_at,
)
from ragged_attention.portable.numba._latent_rows import E2M1, E8M0, e2m1_code, largest_magnitude
from ragged_attention.portable.numba._records import up_to
from ragged_attention.portable.numba._scaled_rows import MANTISSA, is_finite
from ragged_attention.portable.numba._vectors import (
    FLOATS,
    LANES,
    between,
    bits_of_float,
    compiled,
    constant,
    fill,
    float_at,
    float_of,
    function_of,
    inlined,
    larger_or_nan,
    largest_or_nan,
    load,
    set_byte,
    set_float,
    set_int16,
    splat,
    store,
    truncated,
    vector,
    where_less,
    zero,
)

# The divisor of a row's largest magnitude, by the format of codes. For float8_e4m3fnuz it is 224, as in vLLM, although
# the largest number of this format is 240.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e4m3fnuz": 224.0}
LEAST_SCALE, LARGEST_ZERO, LARGEST_E2M1 = np.float32(1e-6), np.float32(32768), np.float32(6)
NAN = np.float32(np.nan)


# ---- scales


@compiled
def store_scale(code, target, scale):
    """Store one scale or zero point in a format of scales; every NaN is stored as the same bits."""
    scale = NAN if scale != scale else scale
    if code == FLOAT32:
        set_float(target, 0, scale)
    elif code == FLOAT16:
        set_int16(target, 0, code_of_float16(scale))
    else:
        set_byte(target, 0, code_of_e4m3(scale))


# ---- codes


@function_of(vector, vector)
def without_nan(builder: Any, a: Any) -> Any:
    """`a`, with each NaN replaced by 0."""
    return builder.select(builder.fcmp_unordered("uno", a, a), constant(FLOATS, 0.0), a)


@inlined
def half_away(a):
    """Numbers of magnitude below 2 ** 30 rounded to integers: add half to the magnitude, then truncate."""
    return truncated(a + where_less(a, splat(0.0), splat(-0.5), splat(0.5)))


@inlined
def to_even(a):
    """Numbers of magnitude below 2 ** 22 rounded to the nearest integers, ties to even."""
    step = splat(1.5 * 2**23)
    return a + step - step


@compiled
def pack_integers(row, target, columns):
    """Store numbers from 0 to 15 in half a byte each."""
    for pair in range(columns // 2):
        set_byte(target, pair, int(float_at(row, 2 * pair)) | int(float_at(row, 2 * pair + 1)) << 4)


@inlined
def e2m1_of(value):
    """The e2m1 code of a number; 0 for NaN."""
    return e2m1_code(value) if value == value else 0


@compiled
def pack_e2m1(row, target, columns, factor):
    for pair in range(columns // 2):
        even, odd = float_at(row, 2 * pair) * factor, float_at(row, 2 * pair + 1) * factor
        set_byte(target, pair, e2m1_of(even) | e2m1_of(odd) << 4)


# ---- rows


@compiled
def quantize_about_zero(side, row, columns, largest, target, scales):
    """Store 8-bit codes without a zero point, with one scale for the row."""
    high, whole = largest_magnitude(row, columns), up_to(columns, LANES)
    scale = high if high != high else max(high / np.float32(largest), LEAST_SCALE)
    inverse, most = splat(np.float32(1) / scale), np.float32(largest)
    for index in range(0, whole, LANES):
        scaled = without_nan(load(row, index) * inverse)
        if side.codes == INT8:
            store(row, index, half_away(between(scaled, np.float32(-128), np.float32(127))))
        else:
            store(row, index, between(scaled, -most, most))
    _formats.narrow(side.codes, row, target, columns, 1.0)
    store_scale(side.scale_codes, scales, scale)


@compiled
def quantize_from_least(side, row, columns, target, scales):
    """Store codes from 0 to 15 with one scale and one zero point for the row."""
    high, low, whole = load(row, 0), load(row, 0) * splat(-1.0), up_to(columns, LANES)
    for index in range(LANES, whole, LANES):
        each = load(row, index)
        high, low = larger_or_nan(high, each), larger_or_nan(low, each * splat(-1.0))
    most, negated_least = largest_or_nan(high), largest_or_nan(low)
    scale = (most + negated_least) / np.float32(15)
    if scale == scale:
        scale = max(scale, LEAST_SCALE)
        if side.zero != MANTISSA:
            scale = max(scale, max(most, negated_least) / LARGEST_ZERO)
    finite = is_finite(scale)
    point = negated_least / scale + np.float32(0) if finite else np.float32(0)  # adding 0 turns -0 into 0
    if side.zero == MANTISSA:
        whole_point = np.int64(min(max(point, np.float32(0)), np.float32(15)) + np.float32(0.5))
        stored, point = NAN if scale != scale else scale, np.float32(whole_point)
        set_float(scales, 0, float_of(bits_of_float(stored) & 0xFFFFFFF0 | whole_point))
    else:
        store_scale(side.scale_codes, scales, scale)
        store_scale(side.scale_codes, scales + side.scale_step, point)
    if not finite:
        zero(target, columns // 2)
        return
    inverse, points = splat(np.float32(1) / scale), splat(point)
    for index in range(0, whole, LANES):
        scaled = between(load(row, index) * inverse + points, np.float32(0), np.float32(15))
        store(row, index, truncated(scaled + splat(0.5)) if side.zero == MANTISSA else to_even(scaled))
    pack_integers(row, target, columns)


@compiled
def quantize_by_e4m3(side, row, columns, scale, target, scales):
    """Store e2m1 codes, with an e4m3 scale for each block. A value is its code times the stored scale times `scale`."""
    for block in range(side.num_scales):
        values, place = row + 4 * block * side.group, scales + block * side.scale_step
        high = largest_magnitude(values, side.group)
        if high == high:
            high = high / (LARGEST_E2M1 * scale) if scale > 0 else np.float32(0)
        store_scale(E4M3, place, high)
        factor = number_at(E4M3, place, 0)
        codes, size = target + block * side.group // 2, side.group // 2
        if factor != factor:
            zero(codes, size)
        else:
            inverse = np.float32(1) / (factor * scale) if factor > 0 else np.float32(0)
            pack_e2m1(values, codes, side.group, inverse)


@compiled
def quantize_by_powers(side, row, columns, target, scales):
    """Store e2m1 or 8-bit codes, with a power of two as the scale of each block."""
    packed = side.codes == E2M1
    size = side.group // 2 if packed else side.group
    for block in range(side.num_scales):
        values, codes = row + 4 * block * side.group, target + block * size
        high = largest_magnitude(values, side.group)
        if high != high:
            set_byte(scales, block * side.scale_step, 255)
            zero(codes, size)
            continue
        # The largest magnitude is m * 2 ** e. The exponent e is incremented if m >= 1.75 (e2m1) or m > 1.75 (8 bits).
        raised = bits_of_float(high) + (0x200000 if packed else 0x1FFFFF) >> 23
        exponent = min(max(raised - 127 - (2 if packed else 8), -127), 127)
        if (raised == 255) if packed else not is_finite(high):
            exponent = 127
        set_byte(scales, block * side.scale_step, exponent + 127)
        multiply_by_power(values, side.group, -exponent)
        if packed:
            pack_e2m1(values, codes, side.group, np.float32(1))
        else:
            _formats.narrow(side.codes, values, codes, side.group, 1.0)


@compiled
def multiply_by_power(values, count, exponent):
    """Multiply floats in whole vectors by 2 ** `exponent`, from -127 to 127."""
    # 2 ** -127 is subnormal and might be flushed to 0, so it is applied as two factors.
    first = max(exponent, -126)
    factor, rest = splat(float_of(first + 127 << 23)), splat(np.float32(1) if first == exponent else np.float32(0.5))
    for index in range(0, count, LANES):
        store(values, index, load(values, index) * factor * rest)


@compiled
def quantize(side, row, columns, scale, largest, target, scales):
    """Store a row of floats, which is overwritten and has memory for whole vectors, as codes with their scales.

    `scale` multiplies the values of its KV head; `largest` is the entry of LARGEST for the codes. A subnormal `scale`
    counts as 0.
    """
    if abs(scale) < np.float32(_formats.SMALLEST_FLOAT32):
        scale *= np.float32(0)
    if side.scale_codes == E4M3:
        quantize_by_e4m3(side, row, columns, scale, target, scales)
        return
    if scale != 1:
        for index in range(0, columns, LANES):
            store(row, index, load(row, index) / splat(scale))
    fill(row, columns, up_to(columns, LANES), float_at(row, 0))  # padding that changes no maximum
    if side.scale_codes == E8M0:
        quantize_by_powers(side, row, columns, target, scales)
    elif side.zero:
        quantize_from_least(side, row, columns, target, scales)
    else:
        quantize_about_zero(side, row, columns, largest, target, scales)
