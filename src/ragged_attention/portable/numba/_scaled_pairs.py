"""Pairs of bfloat16 from codes of 4 and 8 bits, with zero points and scales; they need PAIRS.

A power of two for each block of 32 columns needs no multiplication: the product has the number's digits and the sum of
both exponents. So the exponents of numbers from a table are raised by a *step* for each half of a lane. The table has
the numbers times the least *usual* power, from which a step leads to another one. Powers are usual if they leave the
products of finite numbers finite and normal.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from ragged_attention.portable.numba._formats import E4M3_BITS, first_lanes, magnitudes_of, masked
from ragged_attention.portable.numba._vectors import (
    FLOATS,
    I8,
    I16,
    I32,
    INTS,
    LANES,
    PAIRS,
    byte_at,
    called,
    constant,
    element,
    function_of,
    in_all_lanes,
    inlined,
    join,
    load_aligned,
    set_byte,
    shuffled,
    store,
    vector,
)

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


# ---- powers of two

ONE = 127  # the code of 2 ** 0 in e8m0
LEAST_POWER, MOST_POWER = ONE - 117, ONE + 119  # the usual ones, for e4m3 and e2m1
BYTES = ir.VectorType(I8, LANES)
# Multiplied by the least power; 0 stays 0, and the bits of NaN are those that no step can raise.
_LEAST_E4M3 = np.where(E4M3_BITS == 0, 0, np.where(E4M3_BITS >= 0x7F80, 0x7FFF, E4M3_BITS - (117 << 7)))
_LEAST_E2M1 = np.where(_E2M1_PAIRS & 0x7FFF, _E2M1_PAIRS - (117 << 7), _E2M1_PAIRS)


@function_of(vector, types.int64, types.int64, types.int64)
def read_powers(builder: Any, source: Any, index: Any, count: Any) -> Any:
    """A vector of integers from the codes of up to `count` powers, then ONE."""
    place = builder.bitcast(element(builder, source, index, I8), BYTES.as_pointer())
    given = (place, ir.Constant(I32, 1), first_lanes(builder, count), constant(BYTES, ONE))
    return builder.bitcast(builder.zext(masked(builder, "load", BYTES, BYTES, *given), INTS), FLOATS)


@function_of(vector, vector)
def steps_from_least(builder: Any, powers: Any) -> Any:
    """Integers less LEAST_POWER."""
    return builder.bitcast(builder.sub(builder.bitcast(powers, INTS), constant(INTS, LEAST_POWER)), FLOATS)


@function_of(vector, vector, vector)
def joined_steps(builder: Any, low: Any, high: Any) -> Any:
    """What both halves of lanes are raised by."""
    low, high = (builder.bitcast(each, INTS) for each in (low, high))
    both = builder.or_(builder.shl(low, constant(INTS, 7)), builder.shl(high, constant(INTS, 23)))
    return builder.bitcast(both, FLOATS)


@function_of(types.boolean, vector)
def are_steps(builder: Any, steps: Any) -> Any:
    """Whether no integer is negative or leads beyond MOST_POWER."""
    most = constant(INTS, MOST_POWER - LEAST_POWER)
    beyond = builder.icmp_unsigned(">", builder.bitcast(steps, INTS), most)
    kind = ir.IntType(LANES)
    return builder.icmp_unsigned("==", builder.bitcast(beyond, kind), ir.Constant(kind, 0))


@inlined
def gathered(source, count, step, target):
    """The address of `count` bytes side by side, which are `step` bytes apart."""
    if step == 1:
        return source
    for index in range(count):
        set_byte(target, index, byte_at(source, index * step))
    return target


@inlined
def read_steps(first, second, count, target):
    """Store the steps of two rows of `count` powers; returns whether all powers are usual."""
    for index in range(0, count, LANES):
        low = steps_from_least(read_powers(first, index, count - index))
        high = low if first == second else steps_from_least(read_powers(second, index, count - index))
        if not (are_steps(low) and are_steps(high)):
            return False
        store(target, index, joined_steps(low, high))
    return True


def _raised_e4m3(builder: Any, codes: Any, steps: Any) -> Any:
    """`codes` holds each code twice."""
    magnitudes, signs = (builder.bitcast(each, SHORTS_OF_PAIRS) for each in magnitudes_of(builder, _LEAST_E4M3, codes))
    name = f"llvm.sadd.sat.v{2 * LANES}i16"
    raised = called(builder, name, SHORTS_OF_PAIRS, magnitudes, builder.bitcast(steps, SHORTS_OF_PAIRS))
    none = ir.Constant(SHORTS_OF_PAIRS, None)
    raised = builder.select(builder.icmp_unsigned("!=", magnitudes, none), raised, none)
    return builder.bitcast(builder.or_(raised, signs), FLOATS)


@function_of(vector, types.int64, types.int64, vector)
def raised_e4m3(builder: Any, source: Any, index: Any, steps: Any) -> Any:
    """Pairs of 2 * LANES neighbouring columns of a row."""
    if not PAIRS:
        return ir.Constant(FLOATS, None)
    kind = ir.VectorType(I8, 2 * LANES)
    codes = load_aligned(builder, element(builder, source, index, I8), kind, 1)
    return _raised_e4m3(builder, shuffled(builder, [place // 2 for place in range(4 * LANES)], codes), steps)


@function_of(vector, types.int64, types.int64, types.int64, vector)
def raised_pair_of_e4m3(builder: Any, first: Any, second: Any, index: Any, steps: Any) -> Any:
    """Pairs of the same LANES columns of two rows."""
    if not PAIRS:
        return ir.Constant(FLOATS, None)
    rows = [load_aligned(builder, element(builder, row, index, I8), BYTES, 1) for row in (first, second)]
    places = [place for lane in range(LANES) for place in (lane, lane, LANES + lane, LANES + lane)]
    return _raised_e4m3(builder, shuffled(builder, places, *rows), steps)


@function_of(vector, types.int64, types.int64)
def least_e2m1(builder: Any, source: Any, index: Any) -> Any:
    """Pairs of neighbouring columns of a row, times the least power; `index` counts bytes."""
    return _of_table(builder, _LEAST_E2M1, _halves_of_bytes(builder, source, index))


@function_of(vector, vector, vector)
def raised(builder: Any, pairs: Any, steps: Any) -> Any:
    """Pairs of finite numbers, raised by steps."""
    pairs, steps = (builder.bitcast(each, SHORTS_OF_PAIRS) for each in (pairs, steps))
    magnitudes = builder.and_(pairs, constant(SHORTS_OF_PAIRS, 0x7FFF))
    differ = builder.icmp_unsigned("!=", magnitudes, ir.Constant(SHORTS_OF_PAIRS, None))
    return builder.bitcast(builder.select(differ, builder.add(pairs, steps), pairs), FLOATS)


@inlined
def raised_e2m1(source, column, steps):
    return raised(least_e2m1(source, column // 2), steps)


@inlined
def both_raised_e4m3(first, second, column, steps):
    """Two vectors of pairs of the same columns of two rows."""
    return raised_pair_of_e4m3(first, second, column, steps), raised_pair_of_e4m3(first, second, column + LANES, steps)


@inlined
def both_raised_e2m1(first, second, column, steps):
    a, b = least_e2m1(first, column // 2), least_e2m1(second, column // 2)
    return raised(paired_low(a, b), steps), raised(paired_high(a, b), steps)
