"""Rows of K and V that are stored as codes with scales: the addresses of the scales, and the values of the rows.

The host describes the rows of each side, K and V, to a kernel by the record `SIDE`, which has the properties of their
`KvFormat`; rows without scales are described too. A scale of a whole row is *folded*: it multiplies logits, or weights,
and the codes stay as they are. The scales of blocks of columns multiply the codes as they are read, and a zero point is
then subtracted from them. Pairs of bfloat16 hold these products exactly, and also the differences from integer zero
points. The *rest* of a zero point, its difference from the nearest integer from 0 to 15, is subtracted
from logits and results (`_tiles`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.core import types

from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.portable.numba import _formats
from ragged_attention.portable.numba._formats import E4M3, FLOAT32, bfloat16_of_e4m3, number_at
from ragged_attention.portable.numba._latent_rows import E2M1, E8M0, STORED, widen_groups_of_e4m3
from ragged_attention.portable.numba._records import up_to
from ragged_attention.portable.numba._scaled_pairs import (
    both_raised_e2m1,
    both_raised_e4m3,
    pairs_of_e2m1,
    pairs_of_uint4,
    raised_e2m1,
    raised_e4m3,
    scaled_e2m1,
    scaled_pair_of_e2m1,
    scaled_pairs,
    steps_of,
    unusual,
)
from ragged_attention.portable.numba._softmax import scale_row
from ragged_attention.portable.numba._vectors import (
    FLOATS,
    LANES,
    between,
    bits_of_float,
    byte_at,
    compiled,
    copy,
    float_at,
    float_of,
    function_of,
    inlined,
    int32_at,
    int_at,
    larger_magnitude,
    largest_of_magnitudes,
    load,
    paired_high,
    paired_low,
    set_byte,
    set_float,
    set_int,
    splat,
    store,
    truncated,
    vector,
    with_bits,
    zero,
)

UINT4 = len(STORED)  # the code of a format that only rows with scales have
CODES = STORED | {"uint4": UINT4}
ZEROS = {"": 0, "mantissa": 1, "stored": 2}
MANTISSA, STORED_ZERO = ZEROS["mantissa"], ZEROS["stored"]
# `scale_step` is the stride in bytes from a scale of a row to the next one. Without scales, `num_scales` is 0.
SIDE = ("codes", "scale_codes", "num_scales", "scale_step", "group", "zero")
MOST_SCALES = 32  # the maximum number of scales per row
SCRATCH = 4 * MOST_SCALES + 64  # bytes for a row's scales as floats, and for up to 64 bytes of codes or scales
CODES_AT = 4 * MOST_SCALES


def side_fields(prefix: str) -> tuple[str, ...]:
    """The names that a side's `SIDE` has in a call's record."""
    return tuple(prefix + name for name in SIDE)


def side_numbers(prefix: str, form: KvFormat, scales: Any = None, strides: Sequence[int] = ()) -> dict[str, int]:
    """The `SIDE` of rows in a format; `scales` are their scale pages, whose last axis is that of a row's scales."""
    numbers = [CODES[form.codes], 0, 0, 0, 0, 0]
    if scales is not None:
        code = CODES[form.scales]
        size = _formats.size_of.py_func(code)
        numbers[1:] = code, scales.shape[-1], size * strides[-1], form.group, ZEROS[form.zero]
    return dict(zip(side_fields(prefix), numbers, strict=True))


@inlined
def row_bytes(side, columns):
    """The bytes of a row's codes."""
    packed = side.codes == UINT4 or side.codes == E2M1
    return columns // 2 if packed else columns * _formats.size_of(side.codes)


@inlined
def folded(side):
    """Whether the scale of a row multiplies its logit or weight."""
    return side.num_scales > 0 and side.group == 0


@inlined
def expanded(side):
    """Whether codes become other numbers as they are read: they have scales of blocks, or two codes share a byte."""
    return side.group > 0 or side.codes == UINT4


# ---- scales


@inlined
def scale_at(code, source):
    """The scale at the address `source`."""
    return float_at(source, 0) if code == FLOAT32 else number_at(code, source, 0)


@inlined
def is_finite(number):
    return abs(number) < np.float32(np.inf)


@compiled
def load_scales(side, source, scratch):
    """Read a row's scales at the address `source` as floats into `scratch`, which has SCRATCH bytes.

    A scale of a whole row is followed by its zero point. Returns whether this scale and its zero point are finite or,
    for scales of blocks, whether they leave all values finite.
    """
    if side.group == 0:
        scale, point = scale_at(side.scale_codes, source), np.float32(0)
        if side.zero == MANTISSA:
            bits = bits_of_float(scale)
            scale, point = float_of(bits & 0xFFFFFFF0), np.float32(bits & 15)
        elif side.zero == STORED_ZERO:
            point = scale_at(side.scale_codes, source + side.scale_step)
        set_float(scratch, 0, scale)
        set_float(scratch, 1, point)
        return is_finite(scale) and is_finite(point)
    return blocks_are_finite(load_block_scales(side, source, scratch))


@inlined
def load_block_scales(side, source, scratch):
    """Read the scales of a row's blocks, padded to whole vectors; returns the largest magnitudes by lane."""
    if side.scale_step != 1:
        for index in range(side.num_scales):
            set_byte(scratch + CODES_AT, index, byte_at(source, index * side.scale_step))
        source = scratch + CODES_AT
    high = splat(0.0)
    for index in range(0, side.num_scales, LANES):
        if side.scale_codes == E8M0:
            scales = _formats.read_some_e8m0(source, index, side.num_scales - index)
        else:
            scales = _formats.read_some_e4m3(source, index, side.num_scales - index)
        store(scratch, index, scales)
        high = larger_magnitude(high, scales)
    return high


@inlined
def blocks_are_finite(high):
    """Whether all products of codes and scales must be finite; `high` has the largest magnitudes of scales by lane."""
    return largest_of_magnitudes(high) < np.float32(_formats.LARGE)


@inlined
def scale_bytes(side):
    """The number of bytes from the beginning of a row's first scale to the end of its last scale."""
    return (side.num_scales - 1) * side.scale_step + _formats.size_of(side.scale_codes)


# ---- rows as float32


@function_of(vector, types.int64, types.int64)
def read_uint4(builder: Any, source: Any, index: Any) -> Any:
    """A vector of the numbers 0 to 15, two in a byte, the low half first."""
    return builder.uitofp(_formats.nibbles(builder, source, index), FLOATS)


@compiled
def widen_uint4(source, target, columns, point, scratch):
    """Store `columns` numbers from 0 to 15 less `point`, in whole vectors; `columns` is a multiple of 8."""
    whole, points = columns // LANES * LANES, splat(point)
    for index in range(0, whole, LANES):
        store(target, index, read_uint4(source, index) - points)
    if whole < columns:
        copy(scratch, source + whole // 2, (columns - whole) // 2)
        store(target, whole, read_uint4(scratch, 0) - points)


@compiled
def widen_codes(side, source, target, columns, scratch):
    """Store a row as float32, and apply the zero point and the scales of blocks that `load_scales` has read."""
    if side.codes == UINT4:
        widen_uint4(source, target, columns, float_at(scratch, 1), scratch + CODES_AT)
    elif side.group == 0:
        _formats.widen(side.codes, source, target, columns)
    elif side.codes == E2M1:
        for index in range(side.num_scales):
            start, factor = index * side.group, float_at(scratch, index)
            _formats.widen_e2m1(source + start // 2, target + 4 * start, side.group, factor)
    else:
        widen_groups_of_e4m3(source, target, columns, side.group, scratch)


@compiled
def read_row(side, source, scales, target, columns, scratch):
    """Store the values of a row as float32, in whole vectors."""
    if side.num_scales:
        load_scales(side, scales, scratch)
    widen_codes(side, source, target, columns, scratch)
    if folded(side):
        scale_row(target, columns, float_at(scratch, 0))


# ---- rows as bfloat16


@inlined
def nearest(point):
    """The integer from 0 to 15 that is nearest to a zero point; 0 for NaN."""
    return np.int64(point + np.float32(0.5)) if 0 <= point <= 15 else 15 if point > 15 else 0


@inlined
def point_of(side, source, scratch):
    """The integer from 0 to 15 nearest to a zero point, and zeros in place of the magnitudes of scales of blocks."""
    if side.zero == MANTISSA:
        return int32_at(source, 0) & 15, splat(0.0)
    return nearest(scale_at(side.scale_codes, source + side.scale_step)), splat(0.0)


@inlined
def uint4_at(side, source, column, point):
    return pairs_of_uint4(source, column // 2, point)


@inlined
def factors_at(side, source, scratch):
    """The address of the float32 scales of a row's blocks, and the scales' largest magnitudes by lane."""
    return scratch, load_block_scales(side, source, scratch)


@inlined
def codes_of(side, source, scratch):
    """The address of a row's scales as they are stored, and the scales' largest magnitudes by lane."""
    return source, load_block_scales(side, source, scratch)


@inlined
def nvfp4_at(side, source, column, scales):
    block, last = column >> 4, side.num_scales - 1
    first = byte_at(scales, block * side.scale_step)
    second = byte_at(scales, min(block + 1, last) * side.scale_step)
    return scaled_e2m1(source, column // 2, first, second)


@inlined
def key_of_nvfp4(side, source, scales, row):
    step = side.scale_step
    for block in range(0, side.num_scales, 2):  # the number of blocks is even (`numbers_of_products`)
        first, second = byte_at(scales, block * step), byte_at(scales, (block + 1) * step)
        store(row, block * (LANES // 2), scaled_e2m1(source, block * 8, first, second))
    return True


@inlined
def pair_of_nvfp4(side, sources, scales, row):
    """Write the pairs of two values; returns whether none of their scales is NaN."""
    step, wrong = side.scale_step, 0
    for block in range(side.num_scales):
        first, second = byte_at(scales[0], block * step), byte_at(scales[1], block * step)
        wrong |= (first & 127) + 1 | (second & 127) + 1
        store(row, block * LANES, scaled_pair_of_e2m1(sources[0], sources[1], block * 8, first, second))
    return wrong < 128


@inlined
def mxfp4_at(side, source, column, factors):
    return scaled_pairs(pairs_of_e2m1(source, column // 2), splat(float_at(factors, column >> 5)))


@inlined
def mxfp8_at(side, source, column, factors):
    return scaled_pairs(bfloat16_of_e4m3(source, column), splat(float_at(factors, column >> 5)))


def _pairs_of_rows(prepare: Any, pairs_at: Any, expand_key: Any = None, expand_pair: Any = None) -> tuple[Any, Any]:
    """Functions that read the keys and the values of a paired tile, whose codes must be expanded.

    `prepare(side, scales, scratch)` reads a row's scales. It returns the `prepared` scales for `pairs_at`, and the
    largest magnitudes of the scales of blocks by lane. `pairs_at(side, source, column, prepared)` returns the pairs of
    2 * LANES columns of a row, from `column` on, which is a multiple of 2 * LANES. `expand_key` and `expand_pair` are
    optional. They write the pairs of a key, or of two values, faster, and return False if the scales do not allow it.
    """
    expand_key = expand_key or _cannot
    pair_values = _pairs_of_two_values(prepare, pairs_at, expand_pair or _cannot)

    @compiled
    def expand_keys(tile, side, columns, count):
        for key in range(count):
            source, scales, row = int_at(tile.sources, key), int_at(tile.k_scales, key), tile.k + 4 * key * tile.width
            if not source or expand_key(side, source, scales, row):
                continue
            prepared, _ = prepare(side, scales, tile.scratch)
            for column in range(0, columns, 2 * LANES):
                store(row, column // 2, pairs_at(side, source, column, prepared))

    @compiled
    def right_or_zeros(tile, side, key):
        """The address of a value, or of zeros if its scales might make it infinite or NaN."""
        source = int_at(tile.v_sources, key)
        _, high = prepare(side, int_at(tile.v_scales, key), tile.scratch)
        return source if blocks_are_finite(high) else tile.zeros

    @compiled
    def expand_values(tile, side, columns, count):
        high = splat(0.0)
        if count % 2:
            set_int(tile.v_sources, count, 0)  # the list has memory for an even number of addresses
        for key in range(0, count, 2):
            first, second = int_at(tile.v_sources, key), int_at(tile.v_sources, key + 1)
            first, second = first if first else tile.zeros, second if second else tile.zeros
            high = larger_magnitude(high, pair_values(tile, side, columns, key, first, second))
        if blocks_are_finite(high):
            return 0
        for key in range(0, count, 2):
            first = right_or_zeros(tile, side, key) if int_at(tile.v_sources, key) else tile.zeros
            second = right_or_zeros(tile, side, key + 1) if int_at(tile.v_sources, key + 1) else tile.zeros
            pair_values(tile, side, columns, key, first, second)
        return 1

    return expand_keys, expand_values


def _pairs_of_two_values(prepare: Any, pairs_at: Any, expand_pair: Any) -> Any:
    """The function that writes the pairs of two values; its arguments are those of `_pairs_of_rows`."""

    @compiled
    def pair_values(tile, side, columns, key, first, second):
        """Write two rows of V as pairs, and return their largest scales by lane.

        `first` and `second` are the addresses of the rows, or `tile.zeros` for a missing row.
        """
        # The zeros of a missing value may become other numbers, but its weight is 0.
        scales, others = int_at(tile.v_scales, key), int_at(tile.v_scales, key + 1)
        both, row = first != tile.zeros and second != tile.zeros, tile.v + 2 * key * tile.v_width
        if both and expand_pair(side, (first, second), (scales, others), row):
            return splat(0.0)
        prepared_first = prepared_second = tile.zeros
        high, whole, scratch = splat(0.0), columns // (2 * LANES) * (2 * LANES), tile.scratch + SCRATCH
        if first != tile.zeros:
            prepared_first, high = prepare(side, scales, tile.scratch)
        if second != tile.zeros:
            prepared_second, other = prepare(side, others, scratch)
            high = larger_magnitude(high, other)
        for column in range(0, whole, 2 * LANES):
            a = pairs_at(side, first, column, prepared_first)
            b = pairs_at(side, second, column, prepared_second)
            store(row, column, paired_low(a, b))
            store(row, column + LANES, paired_high(a, b))
        if whole < columns:
            at = row_bytes(side, whole)
            copy(tile.scratch + CODES_AT, first + at, row_bytes(side, LANES))
            copy(scratch + CODES_AT, second + at, row_bytes(side, LANES))
            a = pairs_at(side, tile.scratch + CODES_AT - at, whole, prepared_first)
            b = pairs_at(side, scratch + CODES_AT - at, whole, prepared_second)
            store(row, whole, paired_low(a, b))
        return high

    return pair_values


@inlined
def _cannot(side, source, scales, row):
    return False


def _raised_rows(raised_at: Any, both_raised_at: Any) -> tuple[Any, Any]:
    """`expand_key` and `expand_pair` of `_pairs_of_rows` for scales that are usual powers of two (`_scaled_pairs`).

    They return whether all scales are usual. `raised_at(source, column, steps)` returns the pairs of a block of a row,
    and `both_raised_at(first, second, column, steps)` those of the same block of two rows.
    """

    @inlined
    def expand_key(side, source, scales, row):
        step, sign = side.scale_step, 0
        for block in range(side.num_scales):
            power = byte_at(scales, block * step)
            sign |= unusual(power)
            store(row, block * LANES, raised_at(source, block * 2 * LANES, steps_of(power, power)))
        return sign >= 0

    @inlined
    def expand_pair(side, sources, scales, row):
        step, sign = side.scale_step, 0
        for block in range(side.num_scales):
            column, power, other = block * 2 * LANES, byte_at(scales[0], block * step), byte_at(scales[1], block * step)
            sign |= unusual(power) | unusual(other)
            low, high = both_raised_at(sources[0], sources[1], column, steps_of(power, other))
            store(row, column, low)
            store(row, column + LANES, high)
        return sign >= 0

    return expand_key, expand_pair


keys_of_uint4, values_of_uint4 = _pairs_of_rows(point_of, uint4_at)
keys_of_nvfp4, values_of_nvfp4 = _pairs_of_rows(codes_of, nvfp4_at, key_of_nvfp4, pair_of_nvfp4)
keys_of_mxfp4, values_of_mxfp4 = _pairs_of_rows(factors_at, mxfp4_at, *_raised_rows(raised_e2m1, both_raised_e2m1))
keys_of_mxfp8, values_of_mxfp8 = _pairs_of_rows(factors_at, mxfp8_at, *_raised_rows(raised_e4m3, both_raised_e4m3))


# ---- the keys and values of a tile


@compiled
def expand_keys(tile, side, columns, count):
    """Read `count` keys whose codes must be expanded; skip a key whose address is 0."""
    if not tile.paired:
        for key in range(count):
            source = int_at(tile.sources, key)
            if source:
                load_scales(side, int_at(tile.k_scales, key), tile.scratch)
                widen_codes(side, source, tile.k + 4 * key * tile.width, columns, tile.scratch)
    elif side.codes == UINT4:
        keys_of_uint4(tile, side, columns, count)
    elif side.codes == E4M3:
        keys_of_mxfp8(tile, side, columns, count)
    elif side.scale_codes == E8M0:
        keys_of_mxfp4(tile, side, columns, count)
    else:
        keys_of_nvfp4(tile, side, columns, count)


@compiled
def widen_values(tile, side, columns, count):
    """`expand_values` for a tile of float32."""
    wrong = 0
    for key in range(count):
        source, row = int_at(tile.v_sources, key), tile.v + 4 * key * tile.v_width
        if source and load_scales(side, int_at(tile.v_scales, key), tile.scratch):
            widen_codes(side, source, row, columns, tile.scratch)
        else:
            zero(row, 4 * columns)
            wrong += 1 if source else 0
    return wrong


@compiled
def expand_values(tile, side, columns, count):
    """Read `count` values whose codes must be expanded; returns whether some are wrong.

    A value is *wrong* if its scales of blocks might make it infinite or NaN. A wrong value becomes zeros. A missing
    value becomes arbitrary numbers.
    """
    if not tile.paired:
        return widen_values(tile, side, columns, count)
    if side.codes == UINT4:
        return values_of_uint4(tile, side, columns, count)
    if side.codes == E4M3:
        return values_of_mxfp8(tile, side, columns, count)
    if side.scale_codes == E8M0:
        return values_of_mxfp4(tile, side, columns, count)
    return values_of_nvfp4(tile, side, columns, count)


@inlined
def leaves_rests(side, tile):
    """Whether zero points are rounded to integers, so that all columns of a row are too large by its rest."""
    return side.zero == STORED_ZERO and tile.paired


@compiled
def read_factors(tile, side, sources, scales, factors, rests, count, instead):
    """List the scales of `count` whole rows as factors, and the `rests` of their zero points (see `leaves_rests`).

    Returns how many scales or zero points were not finite. A row with one of these has the factor `instead` and the
    rest 0.
    """
    zero(factors, 4 * up_to(count, LANES))
    zero(rests, 4 * up_to(count, LANES))
    code, stored = side.scale_codes, side.zero == STORED_ZERO
    high, mask = splat(0.0), splat(float_of(0xFFFFFFF0 if side.zero == MANTISSA else 0xFFFFFFFF))
    for key in range(count):
        if int_at(sources, key):
            set_float(factors, key, scale_at(code, int_at(scales, key)))
            if stored:
                set_float(rests, key, scale_at(code, int_at(scales, key) + side.scale_step))
    for index in range(0, count, LANES):
        scale, point = with_bits(load(factors, index), mask), load(rests, index)
        store(factors, index, scale)
        store(rests, index, point - truncated(between(point, np.float32(0), np.float32(15)) + splat(0.5)))
        high = larger_magnitude(larger_magnitude(high, scale), point)
    if is_finite(largest_of_magnitudes(high)):
        return 0
    wrong = 0
    for key in range(count):
        if int_at(sources, key):
            finite = load_scales(side, int_at(scales, key), tile.scratch)
            point = float_at(tile.scratch, 1) if finite else np.float32(0)
            set_float(factors, key, float_at(tile.scratch, 0) if finite else np.float32(instead))
            set_float(rests, key, point - np.float32(nearest(point)))
            wrong += 0 if finite else 1
    return wrong
