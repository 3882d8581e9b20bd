"""Pairs of bfloat16 from codes of 4 and 8 bits, with zero points and scales; they need PAIRS.

A scale that is a power of two needs no multiplication: it only adds to a number's exponent. A table has all numbers
times the least *usual* power. Each block of 32 columns has a *step*, which is added to the exponents of the numbers
from this table, and so replaces the least power by the power of the block. There is a step for each 16-bit half of a
lane. A power is usual if its products with all finite numbers except 0 are finite and normal.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from ragged_attention.portable.numba._formats import E4M3_BITS, magnitudes_of
from ragged_attention.portable.numba._vectors import (
    FLOATS,
    I8,
    I16,
    I32,
    INTS,
    LANES,
    PAIRS,
    called,
    constant,
    element,
    float_of,
    function_of,
    halves,
    inlined,
    join,
    load_aligned,
    paired_high,
    paired_low,
    shuffled,
    splat,
    vector,
)

SHORTS_OF_PAIRS = ir.VectorType(I16, 2 * LANES)
_INTEGERS = np.arange(-15, 17, dtype=np.float32).view(np.uint32) >> 16
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32).view(np.uint32) >> 16
_E2M1_PAIRS = np.tile(np.concatenate([_E2M1, _E2M1 | 0x8000]), 2)


def _of_table(builder: Any, table: Any, places: Any) -> Any:
    """Pairs of bfloat16 looked up in a table of 32 numbers, which is an array or a vector; needs PAIRS."""
    if not PAIRS:
        return ir.Constant(FLOATS, None)
    entries = ir.Constant(SHORTS_OF_PAIRS, table.tolist()) if isinstance(table, np.ndarray) else table
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
    """Pairs of neighbouring columns of a row, minus `point` from 0 to 15; `index` counts bytes. Needs PAIRS."""
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
    """Pairs of bfloat16, multiplied by the factor of their lane; bfloat16 must represent the products exactly."""
    return join(builder, *(builder.fmul(half, factors) for half in halves(builder, pairs)))


# ---- e2m1, with scales of 16 columns
#
# A table has the products of the 16 numbers with every scale, which are exact in bfloat16.

_E2M1_NUMBERS = (_E2M1_PAIRS[:16].astype(np.uint32) << 16).view(np.float32)
_E4M3_NUMBERS = (np.concatenate([E4M3_BITS, E4M3_BITS | 0x8000]).astype(np.uint32) << 16).view(np.float32)
_PRODUCTS = np.outer(_E4M3_NUMBERS, _E2M1_NUMBERS).astype(np.float32).view(np.uint32) >> 16
HALF_TABLE = ir.VectorType(I16, 16)


def _products(builder: Any, first: Any, second: Any) -> Any:
    """A table of 32 products: of the 16 numbers and each of two scales, which are given by their e4m3 codes."""
    name, kind = "products_of_e2m1", ir.ArrayType(HALF_TABLE, len(_PRODUCTS))
    table: Any = builder.module.globals.get(name)
    if table is None:
        table = ir.GlobalVariable(builder.module, kind, name)
        table.linkage, table.global_constant, table.align = "internal", True, 32
        table.initializer = ir.Constant(kind, [ir.Constant(HALF_TABLE, row) for row in _PRODUCTS.tolist()])
    rows = [builder.load(builder.gep(table, [ir.Constant(I32, 0), code])) for code in (first, second)]
    return shuffled(builder, list(range(2 * LANES)), *rows)


@function_of(vector, types.int64, types.int64, types.int64, types.int64)
def scaled_e2m1(builder: Any, source: Any, index: Any, first: Any, second: Any) -> Any:
    """Pairs of 32 columns of a row, of which each half has a scale; `index` counts bytes. Needs PAIRS."""
    if not PAIRS:
        return ir.Constant(FLOATS, None)
    halves = ir.Constant(SHORTS_OF_PAIRS, [0] * 16 + [16] * 16)
    places = builder.or_(_halves_of_bytes(builder, source, index), halves)
    return _of_table(builder, _products(builder, first, second), places)


@function_of(vector, types.int64, types.int64, types.int64, types.int64, types.int64)
def scaled_pair_of_e2m1(builder: Any, first: Any, second: Any, index: Any, scale: Any, other: Any) -> Any:
    """Pairs of the same 16 columns of two rows, times their scales; `index` counts bytes. Needs PAIRS."""
    if not PAIRS:
        return ir.Constant(FLOATS, None)
    kind = ir.VectorType(I8, 8)
    rows = [load_aligned(builder, element(builder, row, index, I8), kind, 1) for row in (first, second)]
    both = shuffled(builder, list(range(16)), *rows)
    lanes = [place for lane in range(16) for place in (lane // 2, 16, 8 + lane // 2, 16)]
    bits = builder.bitcast(shuffled(builder, lanes, both, ir.Constant(both.type, None)), INTS)
    bits = builder.lshr(bits, ir.Constant(INTS, [0, 4] * 8))  # an odd column is the high half of its byte
    places = builder.or_(builder.and_(bits, constant(INTS, 0x000F000F)), constant(INTS, 0x00100000))
    return _of_table(builder, _products(builder, scale, other), builder.bitcast(places, SHORTS_OF_PAIRS))


# ---- powers of two

ONE = 127  # the code of 2 ** 0 in e8m0
LEAST_POWER, MOST_POWER = ONE - 117, ONE + 119  # the codes of the least and greatest usual power, for e4m3 and e2m1
BYTES = ir.VectorType(I8, LANES)
# The bfloat16 bits of all numbers times the least power. Steps are added to e4m3 numbers with saturation: 0 is the
# least 16-bit integer here, so that no step makes it positive, and NaN is the greatest, so that it stays NaN.
_LEAST_E4M3 = np.where(E4M3_BITS == 0, 0x8000, np.where(E4M3_BITS >= 0x7F80, 0x7FFF, E4M3_BITS - (117 << 7)))
_LEAST_E2M1 = np.where(_E2M1_PAIRS & 0x7FFF, _E2M1_PAIRS - (117 << 7), _E2M1_PAIRS)


@inlined
def steps_of(first, second):
    """The steps by which the lower and upper halves of lanes are raised, from the codes of two powers."""
    return splat(float_of(((first - LEAST_POWER) << 7) + ((second - LEAST_POWER) << 23)))


@inlined
def unusual(power):
    """A number that is negative if the power with this code is not usual."""
    return (power - LEAST_POWER) | (MOST_POWER - power)


def _raised_e4m3(builder: Any, codes: Any, steps: Any) -> Any:
    """Emit `raised_e4m3` for `codes`, which holds each code twice."""
    magnitudes, signs = (builder.bitcast(each, SHORTS_OF_PAIRS) for each in magnitudes_of(builder, _LEAST_E4M3, codes))
    name = f"llvm.sadd.sat.v{2 * LANES}i16"
    raised = called(builder, name, SHORTS_OF_PAIRS, magnitudes, builder.bitcast(steps, SHORTS_OF_PAIRS))
    none = ir.Constant(SHORTS_OF_PAIRS, None)
    raised = builder.select(builder.icmp_signed(">", raised, none), raised, none)
    return builder.bitcast(builder.or_(raised, signs), FLOATS)


@function_of(vector, types.int64, types.int64, vector)
def raised_e4m3(builder: Any, source: Any, index: Any, steps: Any) -> Any:
    """Pairs of 2 * LANES neighbouring columns of a row, raised by `steps`."""
    if not PAIRS:
        return ir.Constant(FLOATS, None)
    kind = ir.VectorType(I8, 2 * LANES)
    codes = load_aligned(builder, element(builder, source, index, I8), kind, 1)
    return _raised_e4m3(builder, shuffled(builder, [place // 2 for place in range(4 * LANES)], codes), steps)


@function_of(vector, types.int64, types.int64, types.int64, vector)
def raised_pair_of_e4m3(builder: Any, first: Any, second: Any, index: Any, steps: Any) -> Any:
    """Pairs of the same LANES columns of two rows, raised by `steps`."""
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
    """Pairs of finite numbers, raised by `steps`."""
    pairs, steps = (builder.bitcast(each, SHORTS_OF_PAIRS) for each in (pairs, steps))
    magnitudes = builder.and_(pairs, constant(SHORTS_OF_PAIRS, 0x7FFF))
    differ = builder.icmp_unsigned("!=", magnitudes, ir.Constant(SHORTS_OF_PAIRS, None))
    return builder.bitcast(builder.select(differ, builder.add(pairs, steps), pairs), FLOATS)


@inlined
def raised_e2m1(source, column, steps):
    return raised(least_e2m1(source, column // 2), steps)


@inlined
def both_raised_e4m3(first, second, column, steps):
    """Two vectors of pairs of the same columns of two rows, raised by `steps`."""
    return raised_pair_of_e4m3(first, second, column, steps), raised_pair_of_e4m3(first, second, column + LANES, steps)


@inlined
def both_raised_e2m1(first, second, column, steps):
    a, b = least_e2m1(first, column // 2), least_e2m1(second, column // 2)
    return raised(paired_low(a, b), steps), raised(paired_high(a, b), steps)
