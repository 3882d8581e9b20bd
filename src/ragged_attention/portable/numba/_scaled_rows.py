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
from ragged_attention.portable.numba._latent_rows import E2M1, STORED, widen_groups_of_e4m3, widen_scales
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
    join,
    load_aligned,
    set_byte,
    set_float,
    shuffled,
    splat,
    store,
    vector,
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
    if side.scale_step != 1:
        for index in range(side.num_scales):
            set_byte(scratch + CODES_AT, index, byte_at(source, index * side.scale_step))
        source = scratch + CODES_AT
    widen_scales(side.scale_codes, source, scratch, side.num_scales)
    fine = True
    for index in range(side.num_scales):
        fine = fine and abs(float_at(scratch, index)) < np.float32(_formats.LARGE)
    return fine


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


@inlined
def factors_of(side, scratch, column):
    """The factors of a vector of pairs from a column on, whose number is a multiple of 2 * LANES."""
    block = column // side.group
    if side.group < 2 * LANES:
        return in_each_half(float_at(scratch, block), float_at(scratch, block + 1))
    return splat(float_at(scratch, block))


@compiled
def pair_codes(side, source, target, columns, scratch):
    """`widen_codes` to bfloat16, with pairs of neighbouring columns; `columns` is a multiple of LANES. Needs PAIRS."""
    whole = columns // (2 * LANES) * (2 * LANES)
    if side.codes != UINT4 and side.codes != E2M1:
        for column in range(0, whole, 2 * LANES):
            pairs = scaled_pairs(bfloat16_of_e4m3(source, column), factors_of(side, scratch, column))
            store(target, column // 2, pairs)
        return
    rest = scratch + CODES_AT
    if whole < columns:
        copy(rest, source + whole // 2, (columns - whole) // 2)
    point = np.int64(float_at(scratch, 1)) if side.codes == UINT4 else 0
    for column in range(0, columns, 2 * LANES):
        place, index = (source, column // 2) if column < whole else (rest, 0)
        if side.codes == UINT4:
            store(target, column // 2, pairs_of_uint4(place, index, point))
        else:
            store(target, column // 2, scaled_pairs(pairs_of_e2m1(place, index), factors_of(side, scratch, column)))
