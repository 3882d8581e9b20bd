"""The top-k of a row: the positions of its largest numbers, in ascending order.

Floats are compared as integers that have their order: -0 equals 0, and NaN and minus infinity become `LEAST`, which is
never selected. The numbers of a row are counted in bins. The bin of the smallest number to select is divided into
narrower bins, until all its numbers are selected or are equal. Then one pass lists the positions.
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

INFINITY = 0x7F800000  # infinity as an `ordered` integer
LEAST = -INFINITY
BINS = 2048
INT32 = np.dtype(np.int32).itemsize


@function_of(vector, vector)
def ordered(builder: Any, a: Any) -> Any:
    """Integers in the order of the floats, as the bits of a vector."""
    bits = builder.bitcast(a, INTS)
    magnitude = builder.and_(bits, constant(INTS, 0x7FFFFFFF))
    negative = builder.sub(ir.Constant(INTS, None), magnitude)
    signed = builder.select(builder.icmp_signed("<", bits, ir.Constant(INTS, None)), negative, magnitude)
    nan = builder.icmp_signed(">", magnitude, constant(INTS, INFINITY))
    return builder.bitcast(builder.select(nan, constant(INTS, LEAST), signed), FLOATS)


@inlined
def scratch_size(top_k):
    """The bytes of scratch memory that `select` needs."""
    return INT32 * (BINS + top_k + 1 + LANES)


@compiled
def bounds_of(values, count):
    """The smallest and the largest number above LEAST, and the count of numbers above LEAST."""
    low, high, num_found = INFINITY, LEAST, 0
    for index in range(count):
        value = int32_at(values, index)
        low = min(low, value if value > LEAST else INFINITY)
        high = max(high, value)
        num_found += value > LEAST
    return low, high, num_found


@compiled
def fill_bins(values, count, bins, low, high, shift):
    """Count the numbers from `low` to `high` in bins of width 2 ** shift."""
    zero(bins, INT32 * BINS)
    for index in range(count):
        value = int32_at(values, index)
        if low <= value <= high:
            bin = (value - low) >> shift
            set_int32(bins, bin, int32_at(bins, bin) + 1)


@compiled
def threshold_of(values, count, top_k, bins):
    """The threshold of the top-k, and how many numbers equal to it, at the beginning of the row, are not selected."""
    low, high, num_found = bounds_of(values, count)
    if num_found <= top_k:
        return LEAST, count
    left = top_k  # how many numbers from `low` to `high` to select
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
    """Write the positions of the `top_k` largest numbers of an `ordered` row, in ascending order, then -1.

    The number at index i has the position `first` + i, or entry i of the list `positions` if that is not 0. Of equal
    numbers, those with the largest indices are selected.
    """
    bins, candidates = scratch, scratch + INT32 * BINS
    threshold, skipped = threshold_of(values, count, top_k, bins)
    num_found = equal = 0
    for index in range(count):
        value = int32_at(values, index)
        set_int32(candidates, num_found, index)  # the next index overwrites this one unless it is selected
        same = value == threshold
        num_found += (value > threshold) | (same & (equal >= skipped))
        equal += same
    for index in range(num_found):
        place = int32_at(candidates, index)
        set_int32(target, index, int32_at(positions, place) if positions else first + place)
    for index in range(num_found, top_k):
        set_int32(target, index, -1)
