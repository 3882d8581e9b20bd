"""Rows of a latent cache in all its formats, to and from float32."""

import numpy as np

from ragged_attention.calls import CACHE_FORMATS, CacheFormat
from ragged_attention.portable.numba._formats import (
    BFLOAT16,
    E4M3,
    narrow,
    number_at,
    widen,
    widen_e2m1,
    widen_e4m3,
    write_some_e4m3,
)
from ragged_attention.portable.numba._vectors import (
    LANES,
    bits_of_float,
    byte_at,
    compiled,
    float_at,
    float_of,
    inlined,
    int_at,
    load,
    set_byte,
    set_float,
    splat,
    store,
    without_signs_of_nan,
    zero,
)

PLAIN, V32, V4, V41, V41_PAGE, FP4, FP4_PAGE = range(7)
LAYOUTS = {
    ("fp8_v32", "token"): V32,
    ("fp8_v4", "page"): V4,
    ("fp8_v41", "token"): V41,
    ("fp8_v41", "page"): V41_PAGE,
    ("fp4_v41", "token"): FP4,
    ("fp4_v41", "page"): FP4_PAGE,
}

VALUES_32, GROUP_32 = CACHE_FORMATS["fp8_v32"].values, CACHE_FORMATS["fp8_v32"].group
VALUES_4, GROUP_4 = CACHE_FORMATS["fp8_v4"].values, CACHE_FORMATS["fp8_v4"].group
ROTARY = CACHE_FORMATS["fp8_v4"].rotary
ROW_4 = VALUES_4 + 2 * ROTARY  # bytes of a token of fp8_v4 in front of a page's scales
LARGEST, SMALLEST_SCALE = np.float32(448), np.float32(1e-4)  # of e4m3; of a group
SCALES_4 = CACHE_FORMATS["fp8_v4"].token_bytes - ROW_4
VALUES_41, GROUP_41 = CACHE_FORMATS["fp8_v41"].values, CACHE_FORMATS["fp8_v41"].group
SCALES_41 = CACHE_FORMATS["fp8_v41"].scale_bytes
GROUP_FP4, BYTES_FP4 = CACHE_FORMATS["fp4_v41"].group, CACHE_FORMATS["fp4_v41"].value_bytes
SCALES_FP4 = CACHE_FORMATS["fp4_v41"].scale_bytes
LARGEST_E2M1, SMALLEST_E4M3 = np.float32(6), np.float32(2**-9)


def code_of(layout: CacheFormat | None) -> int:
    """The number here of a format in its layout; None is plain."""
    return PLAIN if layout is None else LAYOUTS[layout.name, layout.layout]


@inlined
def e8m0_value(code):
    """A scale stored as an exponent alone: 2 ** (code - 127), NaN of 255."""
    return float_of(code << 23 if code else 1 << 22) if code != 255 else float_of(0x7FC00000)


@compiled
def place_of(layout, size, page, slot, page_stride, slot_stride, page_size):
    """Where in a cache a row lies, and its scales, in bytes; strides count numbers of `size` bytes."""
    start = size * page * page_stride
    if layout == V4:
        return start + ROW_4 * slot, start + ROW_4 * page_size + SCALES_4 * slot
    if layout == V41_PAGE:
        return start + VALUES_41 * slot, start + VALUES_41 * page_size + SCALES_41 * slot
    if layout == FP4_PAGE:
        return start + BYTES_FP4 * slot, start + BYTES_FP4 * page_size + SCALES_FP4 * slot
    row = start + size * slot * slot_stride
    return row, row + (BYTES_FP4 if layout == FP4 else VALUES_32)


@compiled
def read_latents(first_layout, own, second_layout, code, rows, scales, target, width, columns, count):
    """Read rows by their addresses and those of their scales; a row without an address is zeros.

    The first `own` ones are in one layout, the others in a second. `code` is the format of the numbers of plain rows,
    `width` the distance of the rows written.
    """
    for key in range(count):
        row, scale, to = int_at(rows, key), int_at(scales, key), target + 4 * key * width
        layout = first_layout if key < own else second_layout
        if not row:
            zero(to, 4 * columns)
        elif layout == PLAIN:
            widen(code, row, to, columns)
        elif layout == V32:
            for group in range(VALUES_32 // GROUP_32):
                start = group * GROUP_32
                widen_e4m3(row + start, to + 4 * start, GROUP_32, float_at(scale, group))
            widen(BFLOAT16, scale + 4 * (VALUES_32 // GROUP_32), to + 4 * VALUES_32, ROTARY)
        elif layout in (V41, V41_PAGE):
            for group in range(VALUES_41 // GROUP_41):
                start = group * GROUP_41
                widen_e4m3(row + start, to + 4 * start, GROUP_41, e8m0_value(byte_at(scale, group)))
        elif layout in (FP4, FP4_PAGE):
            for group in range(VALUES_41 // GROUP_FP4):
                start = group * GROUP_FP4
                widen_e2m1(row + start // 2, to + 4 * start, GROUP_FP4, number_at(E4M3, scale, group))
        else:
            for group in range(VALUES_4 // GROUP_4):
                start = group * GROUP_4
                widen_e4m3(row + start, to + 4 * start, GROUP_4, e8m0_value(byte_at(scale, group)))
            widen(BFLOAT16, row + VALUES_4, to + 4 * VALUES_4, ROTARY)


# ---- to bytes


@compiled
def group_scale(row, count, power_of_two):
    """A group's scale: its largest magnitude over e4m3's, at least 1e-4, maybe rounded up; NaN if one of it is."""
    high, nan = np.float32(0), False
    for index in range(count):
        size = abs(float_at(row, index))
        nan = nan or size != size
        high = max(high, size)
    scale = max(high / LARGEST, SMALLEST_SCALE)
    if nan:
        return np.float32(np.nan)
    if power_of_two and scale < np.float32(np.inf):
        return float_of(bits_of_float(scale) + 0x7FFFFF & 0xFF800000)
    return scale


@compiled
def quantize_group(row, count, scale, target):
    """A group's codes; `row`, which becomes the scaled numbers, holds whole vectors."""
    for index in range(0, count, LANES):
        store(row, index, without_signs_of_nan(load(row, index) / splat(scale)))
    narrow(E4M3, row, target, count, 1.0)


@inlined
def e2m1_code(value):
    """To nearest, ties to the even code, saturating: how many middles between two neighbours lie below."""
    size, sign = abs(value), bits_of_float(value) >> 28 & 8
    code = (size > 0.25) + (size >= 0.75) + (size > 1.25) + (size >= 1.75) + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return code | sign


@compiled
def store_fp4(row, target, scales):
    """Write a row of float32 as e2m1 and their e4m3 scales: a group's largest magnitude over 6, NaN if one of it is."""
    for group in range(VALUES_41 // GROUP_FP4):
        high, nan = np.float32(0), False
        for index in range(group * GROUP_FP4, (group + 1) * GROUP_FP4):
            size = abs(float_at(row, index))
            nan = nan or size != size
            high = max(high, size)
        start = target + group * (GROUP_FP4 // 2)
        if nan:
            set_byte(scales + group, 0x7F)
            zero(start, GROUP_FP4 // 2)
        else:
            write_some_e4m3(scales, group, splat(min(max(high / LARGEST_E2M1, SMALLEST_E4M3), LARGEST)), 1)
            scale = number_at(E4M3, scales, group)
            for pair in range(GROUP_FP4 // 2):
                index = group * GROUP_FP4 + 2 * pair
                low, above = e2m1_code(float_at(row, index) / scale), e2m1_code(float_at(row, index + 1) / scale)
                set_byte(start + pair, low | above << 4)


@compiled
def store_latent(layout, row, target, scales, power_of_two):
    """Write a row of float32 as the bytes of a token, whose places `place_of` gives; the row is used up."""
    if layout == V32:
        for group in range(VALUES_32 // GROUP_32):
            values = row + 4 * group * GROUP_32
            scale = group_scale(values, GROUP_32, power_of_two)
            set_float(scales, group, scale)
            quantize_group(values, GROUP_32, scale, target + group * GROUP_32)
        narrow(BFLOAT16, row + 4 * VALUES_32, scales + 4 * (VALUES_32 // GROUP_32), ROTARY, 1.0)
        return
    if layout in (FP4, FP4_PAGE):
        store_fp4(row, target, scales)
        return
    if layout in (V41, V41_PAGE):
        for group in range(VALUES_41 // GROUP_41):
            values = row + 4 * group * GROUP_41
            scale = group_scale(values, GROUP_41, True)
            set_byte(scales + group, bits_of_float(scale) >> 23)
            quantize_group(values, GROUP_41, scale, target + group * GROUP_41)
        return
    for group in range(VALUES_4 // GROUP_4):
        values = row + 4 * group * GROUP_4
        scale = group_scale(values, GROUP_4, True)
        set_byte(scales + group, bits_of_float(scale) >> 23)
        quantize_group(values, GROUP_4, scale, target + group * GROUP_4)
    set_byte(scales + VALUES_4 // GROUP_4, 0)
    narrow(BFLOAT16, row + 4 * VALUES_4, target + VALUES_4, ROTARY, 1.0)
