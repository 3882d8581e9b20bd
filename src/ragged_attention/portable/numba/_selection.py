"""The largest numbers of a row: which they are, in ascending order of position.

Numbers are compared as integers of the same order, in which -0 is 0 and NaN is what minus infinity is: `LEAST`, which
is never chosen. A row of them is counted into bins, from the bin in which the choice ends into narrower ones, until
that one is taken as a whole or holds equal numbers alone; then one pass lists the positions.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from ragged_attention.portable.numba._vectors import (
    FLOATS,
    INTS,
    LANES,
    compiled,
    constant,
    function_of,
    inlined,
    int32_at,
    set_int32,
    vector,
    zero,
)

INFINITY = 0x7F800000  # as an integer
LEAST, MOST = -INFINITY, INFINITY
BINS = 2048
INT32 = np.dtype(np.int32).itemsize


@function_of(vector, vector)
def ordered(builder: Any, a: Any) -> Any:
    """The bits of integers that are in the order of the floats."""
    bits = builder.bitcast(a, INTS)
    magnitude = builder.and_(bits, constant(INTS, 0x7FFFFFFF))
    negative = builder.sub(ir.Constant(INTS, None), magnitude)
    signed = builder.select(builder.icmp_signed("<", bits, ir.Constant(INTS, None)), negative, magnitude)
    nan = builder.icmp_signed(">", magnitude, constant(INTS, INFINITY))
    return builder.bitcast(builder.select(nan, constant(INTS, LEAST), signed), FLOATS)


@inlined
def scratch_size(top_k):
    """Bytes that `select` needs."""
    return INT32 * (BINS + top_k + 1 + LANES)


@compiled
def bounds_of(values, count):
    """The smallest and the largest number above LEAST, and how many there are."""
    low, high, found = MOST, LEAST, 0
    for index in range(count):
        value = int32_at(values, index)
        low = min(low, value if value > LEAST else MOST)
        high = max(high, value)
        found += value > LEAST
    return low, high, found


@compiled
def fill_bins(values, count, bins, low, high, shift):
    """Count the numbers from `low` to `high` in bins of 2 ** shift."""
    zero(bins, INT32 * BINS)
    for index in range(count):
        value = int32_at(values, index)
        if low <= value <= high:
            bin = (value - low) >> shift
            set_int32(bins, bin, int32_at(bins, bin) + 1)


@compiled
def edge_of(values, count, top_k, bins):
    """Where the choice ends: what is larger is chosen, and of what equals it all but the first ones, whose number is
    the second result."""
    low, high, found = bounds_of(values, count)
    if found <= top_k:
        return LEAST, count
    left = top_k  # to be chosen from `low` to `high`
    while True:
        shift = 0
        while (high - low) >> shift >= BINS:
            shift += 1
        fill_bins(values, count, bins, low, high, shift)
        bin = BINS - 1
        while int32_at(bins, bin) < left:
            left -= int32_at(bins, bin)
            bin -= 1
        low, high = low + (bin << shift), min(high, low + ((bin + 1) << shift) - 1)
        if int32_at(bins, bin) == left:
            return low - 1, count
        if shift == 0:
            return low, int32_at(bins, bin) - left


@compiled
def select(values, count, top_k, first, positions, target, scratch):
    """Write the positions of the largest of a row of ordered numbers in ascending order, then -1.

    A number's position is its place and `first`, or what `positions` lists there. Of equal ones the last are taken.
    """
    bins, chosen = scratch, scratch + INT32 * BINS
    edge, skipped = edge_of(values, count, top_k, bins)
    found = equal = 0
    for index in range(count):
        value = int32_at(values, index)
        set_int32(chosen, found, index)  # which stays if it is counted
        same = value == edge
        found += (value > edge) | (same & (equal >= skipped))
        equal += same
    for index in range(found):
        place = int32_at(chosen, index)
        set_int32(target, index, int32_at(positions, place) if positions else first + place)
    for index in range(found, top_k):
        set_int32(target, index, -1)
