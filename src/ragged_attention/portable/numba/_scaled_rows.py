"""Rows of K and V whose scales are stored beside their codes: where the scales lie, and the rows' values.

The host describes the rows of each side, K and V, to a kernel by the record `SIDE`, which holds what their `KvFormat`
says; rows without scales are described too. A scale of a whole row is *folded*: it multiplies logits, or weights, and
the codes stay as they are. The scales of blocks of columns multiply the codes as they are read, and a zero point is
subtracted from them then. Where pairs of bfloat16 are multiplied, these hold the products exactly.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.portable.numba import _formats
from ragged_attention.portable.numba._formats import FLOAT32, bfloat16_of_e4m3, number_at
from ragged_attention.portable.numba._latent_rows import E2M1, E8M0, STORED, widen_groups_of_e4m3
from ragged_attention.portable.numba._records import up_to
from ragged_attention.portable.numba._softmax import scale_row
from ragged_attention.portable.numba._vectors import (
    FLOATS,
    I8,
    I16,
    INTS,
    LANES,
    PAIRS,
    bits_of_float,
    byte_at,
    called,
    compiled,
    constant,
    copy,
    element,
    float_at,
    float_of,
    function_of,
    in_all_lanes,
    inlined,
    int32_at,
    int_at,
    join,
    larger_magnitude,
    largest_of_magnitudes,
    load,
    load_aligned,
    set_byte,
    set_float,
    set_int,
    shuffled,
    splat,
    store,
    vector,
    with_bits,
    zero,
)

UINT4 = len(STORED)  # the code of a format that no other rows have
CODES = STORED | {"uint4": UINT4}
ZEROS = {"": 0, "mantissa": 1, "stored": 2}
MANTISSA, STORED_ZERO = ZEROS["mantissa"], ZEROS["stored"]
# `scale_step` is the stride in bytes from a scale of a row to the next one. Without scales, `num_scales` is 0.
SIDE = ("codes", "scale_codes", "num_scales", "scale_step", "group", "zero")
MOST_SCALES = 32  # of a row
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
    """Whether the codes of a row become other numbers as they are read, by scales of blocks or since bytes hold two."""
    return side.group > 0 or side.codes == UINT4


# ---- scales


@inlined
def scale_at(code, source):
    """One scale."""
    return float_at(source, 0) if code == FLOAT32 else number_at(code, source, 0)


@inlined
def is_finite(number):
    return abs(number) < np.float32(np.inf)


@compiled
def load_scales(side, source, scratch):
    """Read a row's scales at the address `source` as floats into `scratch`, which has SCRATCH bytes.

    A scale of a whole row is followed by its zero point. Returns whether the values of the row, without a folded scale,
    are finite, as far as its scales decide that, and a folded scale is finite too.
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
    """Read the scales of a row's blocks, and zeros to fill the last vector; returns the largest magnitudes in lanes."""
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
    """Whether no product of a code and a scale may be infinite or NaN; `high` has the magnitudes of the largest."""
    return largest_of_magnitudes(high) < np.float32(_formats.LARGE)


@inlined
def scale_bytes(side):
    """The bytes from the first of a row's scales to past its last."""
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
    """Store a row as float32, with its zero point and the scales of blocks, which `load_scales` has read."""
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


SHORTS_OF_PAIRS = ir.VectorType(I16, 2 * LANES)
_INTEGERS = np.arange(-15, 17, dtype=np.float32).view(np.uint32) >> 16
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32).view(np.uint32) >> 16
_E2M1_PAIRS = np.tile(np.concatenate([_E2M1, _E2M1 | 0x8000]), 2)


def _of_table(builder: Any, table: Any, places: Any) -> Any:
    """Pairs of bfloat16 from a table of 32; needs PAIRS."""
    if not PAIRS:
        return ir.Constant(FLOATS, None)
    entries = ir.Constant(SHORTS_OF_PAIRS, table.tolist())
    return builder.bitcast(called(builder, "llvm.x86.avx512.permvar.hi.512", SHORTS_OF_PAIRS, entries, places), FLOATS)


def _halves_of_bytes(builder: Any, source: Any, index: Any) -> Any:
    """The 4-bit numbers of a vector of bytes, each in 16 bits, in order; `index` counts bytes."""
    kind = ir.VectorType(I8, LANES)
    wide = builder.zext(load_aligned(builder, element(builder, source, index, I8), kind, 1), INTS)
    low = builder.and_(wide, constant(INTS, 0xF))
    high = builder.shl(builder.and_(wide, constant(INTS, 0xF0)), constant(INTS, 12))
    return builder.bitcast(builder.or_(low, high), SHORTS_OF_PAIRS)


@function_of(vector, types.int64, types.int64, types.int64)
def pairs_of_uint4(builder: Any, source: Any, index: Any, point: Any) -> Any:
    """Pairs of neighbouring columns of a row, less `point` from 0 to 15; `index` counts bytes. Needs PAIRS."""
    places = _halves_of_bytes(builder, source, index)
    added = builder.trunc(builder.sub(ir.Constant(point.type, 15), point), I16)
    first = builder.insert_element(ir.Constant(SHORTS_OF_PAIRS, ir.Undefined), added, ir.Constant(ir.IntType(32), 0))
    added = shuffled(builder, [0] * SHORTS_OF_PAIRS.count, first)
    return _of_table(builder, _INTEGERS, builder.add(places, added))


@function_of(vector, types.int64, types.int64)
def pairs_of_e2m1(builder: Any, source: Any, index: Any) -> Any:
    """Pairs of neighbouring columns of a row; `index` counts bytes. Needs PAIRS."""
    return _of_table(builder, _E2M1_PAIRS, _halves_of_bytes(builder, source, index))


@function_of(vector, vector, vector)
def scaled_pairs(builder: Any, pairs: Any, factors: Any) -> Any:
    """Pairs of bfloat16, both times the factor of their lane, which must be exact in bfloat16."""
    bits = builder.bitcast(pairs, INTS)
    low = builder.bitcast(builder.shl(bits, constant(INTS, 16)), FLOATS)
    high = builder.bitcast(builder.and_(bits, constant(INTS, 0xFFFF0000)), FLOATS)
    return join(builder, builder.fmul(low, factors), builder.fmul(high, factors))


@function_of(vector, types.float32, types.float32)
def in_each_half(builder: Any, first: Any, second: Any) -> Any:
    """A vector with one number in the first half of its lanes, and another in the second."""
    lanes = [0] * (LANES // 2) + [LANES] * (LANES // 2)
    return shuffled(builder, lanes, in_all_lanes(builder, first), in_all_lanes(builder, second))


@function_of(vector, vector, vector)
def paired_low(builder: Any, a: Any, b: Any) -> Any:
    """The pairs of numbers at the same places of two vectors of bfloat16, for the first half of these."""
    return _interleaved(builder, a, b, 0)


@function_of(vector, vector, vector)
def paired_high(builder: Any, a: Any, b: Any) -> Any:
    """`paired_low` for the second half."""
    return _interleaved(builder, a, b, LANES)


def _interleaved(builder: Any, a: Any, b: Any, first: int) -> Any:
    a, b = (builder.bitcast(each, SHORTS_OF_PAIRS) for each in (a, b))
    places = [place for lane in range(first, first + LANES) for place in (lane, 2 * LANES + lane)]
    return builder.bitcast(shuffled(builder, places, a, b), FLOATS)


@inlined
def point_of(side, source, scratch):
    """The zero point in the mantissa of a scale; and no magnitudes of scales of blocks."""
    return int32_at(source, 0) & 15, splat(0.0)


@inlined
def uint4_at(side, source, column, point):
    return pairs_of_uint4(source, column // 2, point)


@inlined
def factors_at(side, source, scratch):
    """The address of the scales of a row's blocks, and the largest magnitudes of vectors of them."""
    return scratch, load_block_scales(side, source, scratch)


@inlined
def factors_of(side, factors, column):
    """The factors of a vector of pairs from a column on, whose number is a multiple of 2 * LANES."""
    block = column // side.group
    if side.group < 2 * LANES:
        return in_each_half(float_at(factors, block), float_at(factors, block + 1))
    return splat(float_at(factors, block))


@inlined
def e2m1_at(side, source, column, factors):
    return scaled_pairs(pairs_of_e2m1(source, column // 2), factors_of(side, factors, column))


@inlined
def e4m3_at(side, source, column, factors):
    return scaled_pairs(bfloat16_of_e4m3(source, column), factors_of(side, factors, column))


def _pairs_of_rows(prepare: Any, pairs_at: Any) -> tuple[Any, Any]:
    """Functions that read the keys and the values of a paired tile, whose codes must be expanded.

    `prepare(side, scales, scratch)` reads what belongs to a row: it returns what `pairs_at` needs, and the largest
    magnitudes of the scales of blocks. `pairs_at(side, source, column, prepared)` returns 2 * LANES columns of a row,
    from a multiple of that on.
    """

    @compiled
    def expand_keys(tile, side, columns, count):
        for key in range(count):
            source, row = int_at(tile.sources, key), tile.k + 4 * key * tile.width
            if source:
                prepared, _ = prepare(side, int_at(tile.k_scales, key), tile.scratch)
                for column in range(0, columns, 2 * LANES):
                    store(row, column // 2, pairs_at(side, source, column, prepared))

    @compiled
    def expand_pair(tile, side, columns, key, first, second):
        """Write the pairs of two values, of which one or both may be zeros; returns the largest of their scales."""
        # The zeros of a missing value may become other numbers, which a weight of 0 multiplies.
        prepared_first = prepared_second = tile.zeros
        high, whole, scratch = splat(0.0), columns // (2 * LANES) * (2 * LANES), tile.scratch + SCRATCH
        if first != tile.zeros:
            prepared_first, high = prepare(side, int_at(tile.v_scales, key), tile.scratch)
        if second != tile.zeros:
            prepared_second, other = prepare(side, int_at(tile.v_scales, key + 1), scratch)
            high = larger_magnitude(high, other)
        row = tile.v + 2 * key * tile.v_width
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

    @compiled
    def right_or_zeros(tile, side, key):
        """The address of a value, or of zeros if it has wrong scales."""
        source = int_at(tile.v_sources, key)
        _, high = prepare(side, int_at(tile.v_scales, key), tile.scratch)
        return source if blocks_are_finite(high) else tile.zeros

    @compiled
    def expand_values(tile, side, columns, count):
        high = splat(0.0)
        if count % 2:
            set_int(tile.v_sources, count, 0)  # the list has room for an even number
        for key in range(0, count, 2):
            first, second = int_at(tile.v_sources, key), int_at(tile.v_sources, key + 1)
            first, second = first if first else tile.zeros, second if second else tile.zeros
            high = larger_magnitude(high, expand_pair(tile, side, columns, key, first, second))
        if blocks_are_finite(high):
            return 0
        for key in range(0, count, 2):
            first = right_or_zeros(tile, side, key) if int_at(tile.v_sources, key) else tile.zeros
            second = right_or_zeros(tile, side, key + 1) if int_at(tile.v_sources, key + 1) else tile.zeros
            expand_pair(tile, side, columns, key, first, second)
        return 1

    return expand_keys, expand_values


keys_of_uint4, values_of_uint4 = _pairs_of_rows(point_of, uint4_at)
keys_of_e2m1, values_of_e2m1 = _pairs_of_rows(factors_at, e2m1_at)
keys_of_e4m3, values_of_e4m3 = _pairs_of_rows(factors_at, e4m3_at)


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
    elif side.codes == E2M1:
        keys_of_e2m1(tile, side, columns, count)
    else:
        keys_of_e4m3(tile, side, columns, count)


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

    A value that is missing, or has scales of blocks that might make it infinite or NaN, becomes zeros, except that a
    missing one may become any numbers; the others are wrong.
    """
    if not tile.paired:
        return widen_values(tile, side, columns, count)
    if side.codes == UINT4:
        return values_of_uint4(tile, side, columns, count)
    if side.codes == E2M1:
        return values_of_e2m1(tile, side, columns, count)
    return values_of_e4m3(tile, side, columns, count)


@compiled
def read_factors(tile, side, sources, scales, factors, count, instead):
    """List the scales of `count` whole rows as factors; returns how many were not finite, which become `instead`."""
    zero(factors, 4 * up_to(count, LANES))
    if side.scale_codes == FLOAT32:
        high, mask = splat(0.0), splat(float_of(0xFFFFFFF0 if side.zero == MANTISSA else 0xFFFFFFFF))
        for key in range(count):
            if int_at(sources, key):
                set_float(factors, key, float_at(int_at(scales, key), 0))
        for index in range(0, count, LANES):
            each = with_bits(load(factors, index), mask)
            store(factors, index, each)
            high = larger_magnitude(high, each)
        if side.zero != STORED_ZERO and is_finite(largest_of_magnitudes(high)):
            return 0
    wrong = 0
    for key in range(count):
        if int_at(sources, key):
            finite = load_scales(side, int_at(scales, key), tile.scratch)
            set_float(factors, key, float_at(tile.scratch, 0) if finite else np.float32(instead))
            wrong += 0 if finite else 1
    return wrong
