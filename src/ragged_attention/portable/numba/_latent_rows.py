"""Rows of a latent cache in all its formats, to and from float32.

The host passes a cache's format to a kernel as the record `ROWS`: the fields of its `CacheFormat` and strides in bytes.
The strides cover both layouts: scales in each row, or after all rows of a page. So kernels need no code per format.
"""

from collections.abc import Sequence

import numpy as np

from ragged_attention.calls import CacheFormat
from ragged_attention.portable.numba import _formats
from ragged_attention.portable.numba._formats import bfloat16_of_e4m3
from ragged_attention.portable.numba._scaled_pairs import raised_e4m3, scaled_e2m1, scaled_pairs, steps_of, unusual
from ragged_attention.portable.numba._vectors import (
    LANES,
    bits_of_float,
    byte_at,
    compiled,
    copy,
    float_at,
    float_of,
    inlined,
    int_at,
    larger_magnitude,
    largest_of_magnitudes,
    load,
    set_byte,
    set_float,
    splat,
    store,
    without_signs_of_nan,
    zero,
)

# The codes of formats that only latent caches use.
E2M1, E8M0 = range(len(_formats.CODES), len(_formats.CODES) + 2)
STORED = _formats.CODES | {"float4_e2m1fn": E2M1, "float8_e8m0fnu": E8M0}
LARGEST, SMALLEST_SCALE = np.float32(448), np.float32(1e-4)  # the largest e4m3; the minimum scale of e4m3 values
LARGEST_E2M1, SMALLEST_E4M3 = np.float32(6), np.float32(2**-9)

# `*_step` are strides in bytes: of pages, rows, KV heads, and from one row's scales to the next row's. `scales_at` is
# the offset of a page's first scale. `row_bytes` counts a row's contiguous bytes. The fields
# from `codes` on describe the format.
ROWS = ("num_pages", "page_size", "page_step", "row_step", "head_step", "scales_step", "scales_at", "row_bytes",
        "codes", "values", "group", "scales", "padding", "rotary", "rotary_at")  # fmt: skip


def rows_fields(prefix: str) -> tuple[str, ...]:
    """The names that a cache's `ROWS` have in a call's record."""
    return tuple(prefix + name for name in ROWS)


def rows_numbers(prefix: str, form: CacheFormat, shape: Sequence[int], strides: Sequence[int]) -> dict[str, int]:
    """The `ROWS` of a cache [P, G, K, C], or of packed rows [s_kv, K, C], treated as pages of one row."""
    planar, quantized = form.planar, form.quantized
    size = 1 if quantized else _formats.size_of.py_func(_formats.CODES[form.codes])  # bytes per element
    page_size, row_step = (shape[1], size * strides[1]) if len(shape) == 4 else (1, 0)
    numbers = (
        shape[0],
        page_size,
        size * strides[0],
        form.row_bytes if planar else row_step,
        size * strides[-2],
        form.padded_scale_bytes if planar else row_step,
        form.row_bytes * page_size if planar else form.value_bytes,
        form.row_bytes if planar else form.token_bytes if quantized else size * shape[-1],
        STORED[form.codes],
        form.values,
        form.group,
        STORED[form.scales] if quantized else 0,
        form.padded_scale_bytes - form.scale_bytes,
        form.rotary,
        form.rotary_at,
    )
    return dict(zip(rows_fields(prefix), numbers, strict=True))


@inlined
def place_of(cache, page, slot):
    """The offsets of a row and of its scales in the cache, in bytes."""
    start = page * cache.page_step
    return start + slot * cache.row_step, start + cache.scales_at + slot * cache.scales_step


@compiled
def widen_scales(code, source, target, count):
    """Store `count` scales as float32, and padding to fill the last vector."""
    if code == E8M0:
        for index in range(0, count, LANES):
            store(target, index, _formats.read_some_e8m0(source, index, count - index))
    else:
        _formats.widen(code, source, target, count)


@compiled
def widen_groups_of_e4m3(source, target, values, group, factors):
    """Store the e4m3 values of a row as float32, each group multiplied by its factor."""
    column, in_pairs = 0, group % (2 * LANES) == 0
    for index in range(values // group):
        factor, stop = float_at(factors, index), column + group
        if in_pairs and abs(factor) < _formats.LARGE:
            scale = splat(factor)
            while column < stop:
                _formats.widen_two_e4m3(source, target, column, scale)
                column += 2 * LANES
        else:
            _formats.widen_e4m3(source + column, target + 4 * column, group, factor)
            column = stop


@compiled
def read_latents(cache, rows, scales, target, width, columns, count, factors):
    """Read the `count` rows at the addresses `rows`, with scales at the addresses `scales`, as float32.

    A row whose address is 0 becomes zeros. The rows in `target` are `width` floats apart. `factors` is scratch memory
    for the scales of a row.
    """
    codes, values, group = cache.codes, cache.values, cache.group
    num_groups = values // max(group, 1)
    for key in range(count):
        row, to = int_at(rows, key), target + 4 * key * width
        if not row:
            zero(to, 4 * columns)
        elif group == 0:
            _formats.widen(codes, row, to, columns)
        else:
            widen_scales(cache.scales, int_at(scales, key), factors, num_groups)
            if codes == _formats.E4M3:
                widen_groups_of_e4m3(row, to, values, group, factors)
            else:
                for index in range(num_groups):
                    start = index * group
                    _formats.widen_e2m1(row + start // 2, to + 4 * start, group, float_at(factors, index))
            _formats.widen(_formats.BFLOAT16, row + cache.rotary_at, to + 4 * values, cache.rotary)


@inlined
def pair_raised_groups(row, scales, target, values, group):
    """Store e4m3 values times powers of two as pairs of bfloat16; returns whether all powers are usual.

    If a power is not usual (see `_scaled_pairs`), the stored values are wrong. A group has one or two vectors of pairs.
    """
    sign, step = 0, 2 * LANES
    for index in range(values // group):
        power, column = byte_at(scales, index), index * group
        sign |= unusual(power)
        steps = steps_of(power, power)
        store(target, column // 2, raised_e4m3(row, column, steps))
        if group > step:
            store(target, (column + step) // 2, raised_e4m3(row, column + step, steps))
    return sign >= 0


@compiled
def pair_groups(cache, row, scales, target, factors):
    """Store the values of a row with scales of at most 8 bits as bfloat16, in order."""
    values, group, step = cache.values, cache.group, 2 * LANES
    if cache.codes == E2M1:
        for column in range(0, values, step):
            index = column // group
            store(
                target, column // 2, scaled_e2m1(row, column // 2, byte_at(scales, index), byte_at(scales, index + 1))
            )
    elif not pair_raised_groups(row, scales, target, values, group):
        widen_scales(cache.scales, scales, factors, values // group)
        for column in range(0, values, step):
            factor = splat(float_at(factors, column // group))
            store(target, column // 2, scaled_pairs(bfloat16_of_e4m3(row, column), factor))


@compiled
def pair_latents(cache, rows, scales, target, width, count, factors):
    """`read_latents` for rows whose scales have at most 8 bits, as bfloat16 in order; a row at address 0 is skipped."""
    for key in range(count):
        row, to = int_at(rows, key), target + 4 * key * width
        if row:
            pair_groups(cache, row, int_at(scales, key), to, factors)
            copy(to + 2 * cache.values, row + cache.rotary_at, 2 * cache.rotary)


# ---- to bytes


@compiled
def largest_magnitude(row, count):
    """The largest magnitude of `count` floats; NaN if any of them is NaN. Zeros pad the floats to whole vectors."""
    vectors = splat(0.0)
    for index in range(0, count, LANES):
        vectors = larger_magnitude(vectors, load(row, index))
    high = largest_of_magnitudes(vectors)
    return np.float32(np.nan) if high != high else high


@compiled
def group_scale(row, count, power_of_two):
    """The e4m3 scale of a group: its largest magnitude / LARGEST, at least SMALLEST_SCALE; NaN if the group has a NaN.

    With `power_of_two` the scale is rounded up to a power of two.
    """
    high = largest_magnitude(row, count)
    if high != high:
        return high
    scale = max(high / LARGEST, SMALLEST_SCALE)
    if power_of_two and scale < np.float32(np.inf):
        return float_of(bits_of_float(scale) + 0x7FFFFF & 0xFF800000)
    return scale


@compiled
def quantize_group(row, count, scale, target):
    """Divide a group by `scale` and store it as e4m3; `row` is overwritten in whole vectors."""
    for index in range(0, count, LANES):
        store(row, index, without_signs_of_nan(load(row, index) / splat(scale)))
    _formats.narrow(_formats.E4M3, row, target, count, 1.0)


@inlined
def e2m1_code(value):
    """The nearest e2m1 code, ties to even, saturating: the number of midpoints below the magnitude, plus the sign."""
    size, sign = abs(value), bits_of_float(value) >> 28 & 8
    code = (size > 0.25) + (size >= 0.75) + (size > 1.25) + (size >= 1.75) + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return code | sign


@compiled
def quantize_group_to_e2m1(row, count, scale, target):
    """Divide a group by `scale` and store it as e2m1, two codes per byte; if `scale` is NaN, store zeros."""
    if scale != scale:
        zero(target, count // 2)
        return
    for pair in range(count // 2):
        even, odd = e2m1_code(float_at(row, 2 * pair) / scale), e2m1_code(float_at(row, 2 * pair + 1) / scale)
        set_byte(target, pair, even | odd << 4)


@compiled
def store_scale(code, scales, index, scale):
    """Store a group's scale; returns the stored value, which may be rounded."""
    if code == _formats.FLOAT32:
        set_float(scales, index, scale)
    elif code == E8M0:  # the scale is a power of two
        set_byte(scales, index, bits_of_float(scale) >> 23)
    else:
        set_byte(scales, index, _formats.code_of_e4m3(scale))
        return _formats.number_at(_formats.E4M3, scales, index)
    return scale


@compiled
def store_latent(cache, row, target, scales, power_of_two):
    """Quantise a float32 row, which is overwritten, to the addresses `target` and `scales` (see `place_of`)."""
    group, num_groups = cache.group, cache.values // cache.group
    for index in range(num_groups):
        values, start = row + 4 * index * group, index * group
        if cache.codes == _formats.E4M3:
            scale = group_scale(values, group, power_of_two or cache.scales == E8M0)
            scale = store_scale(cache.scales, scales, index, scale)
            quantize_group(values, group, scale, target + start)
        else:
            high = largest_magnitude(values, group)
            scale = high if high != high else min(max(high / LARGEST_E2M1, SMALLEST_E4M3), LARGEST)
            scale = store_scale(cache.scales, scales, index, scale)
            quantize_group_to_e2m1(values, group, scale, target + start // 2)
    size = 4 if cache.scales == _formats.FLOAT32 else 1
    zero(scales + size * num_groups, cache.padding)
    _formats.narrow(_formats.BFLOAT16, row + 4 * cache.values, target + cache.rotary_at, cache.rotary, 1.0)
