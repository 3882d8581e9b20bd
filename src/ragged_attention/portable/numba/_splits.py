"""Splitting the keys of what has much more work than the average, and merging what the splits have found.

A split's results are its sums of weights and weighted values, with the largest logit; the last split to end merges
those of all, so that no program waits for another. How many splits there are follows from lengths alone, not from
threads: results do not depend on those.
"""

import math

from ragged_attention.errors import InvalidInput
from ragged_attention.portable.numba._softmax import NOTHING, power
from ragged_attention.portable.numba._tiles import begin
from ragged_attention.portable.numba._vectors import add_to, allocate, compiled, float_at, set_float, zero

SPLITS = ("units", "num_units", "work", "partials", "num_partials", "counters", "partial_size")  # of a call's plan
SHARES = 128  # of the work of attention
FEWEST_KEYS = 512  # of a split
MOST_SPLITS = 64


def expect_splits(num_splits: int) -> None:
    """Check the `num_splits` of a tile."""
    if not isinstance(num_splits, int) or not 0 <= num_splits <= MOST_SPLITS:
        raise InvalidInput(f"expected num_splits from 0 to {MOST_SPLITS}, got {num_splits!r}")


@compiled
def splits_of(work, keys, all_work, shares, most):
    """How many splits to make of keys that take so much work: more than one if it is more than one of the shares of
    all; one as long as the work of all is not known. If `most` is given, as many as the keys allow up to that."""
    if most:
        return max(min(most, keys // FEWEST_KEYS), 1)
    if all_work == 0:
        return 1
    return max(min(math.ceil(work * shares / all_work), keys // FEWEST_KEYS), 1)


@compiled
def provide(call, unit_size, partial_size, num_kv_heads):
    """Allocate a call's units and partial results, whose numbers are known; False if there is no memory."""
    call.partial_size = partial_size
    table, parts = unit_size * call.num_units, call.num_partials * num_kv_heads
    call.workspace = allocate(table + 8 * parts + 4 * parts * partial_size + 64)
    if call.workspace == 0:
        return False
    call.units = call.workspace
    call.counters = call.units + table
    call.partials = call.counters + 8 * parts
    zero(call.counters, 8 * parts)
    return True


@compiled
def keep_partial(tile, rows, columns, target):
    """Store what a split has of its rows."""
    for row in range(rows):
        for column in range(columns):
            set_float(target, row * columns + column, float_at(tile.out, row * tile.columns + column))
        set_float(target, rows * columns + row, float_at(tile.m_i, row))
        set_float(target, rows * columns + rows + row, float_at(tile.l_i, row))


@compiled
def merge(tile, rows, columns, partials, stride, num_splits):
    """Turn the partial results of all splits into the tile's own."""
    begin(tile, rows)
    for row in range(rows):
        m_i = NOTHING
        for split in range(num_splits):
            m_i = max(m_i, float_at(partials + split * stride, rows * columns + row))
        set_float(tile.m_i, row, m_i)
        for split in range(num_splits):
            partial = partials + split * stride
            its = float_at(partial, rows * columns + row)
            if its > NOTHING or its != its:
                weight = power(its - m_i)
                part = float_at(partial, rows * columns + rows + row)
                set_float(tile.l_i, row, float_at(tile.l_i, row) + weight * part)
                for column in range(columns):
                    at = row * tile.columns + column
                    value = float_at(partial, row * columns + column)
                    set_float(tile.out, at, float_at(tile.out, at) + weight * value)


@compiled
def is_last(call, tile, rows, columns, place, split, num_splits):
    """Whether the results in a tile are whole, all splits merged; else they are kept for the split that ends last.

    `place` is where the partial results of the first of these splits lie.
    """
    if num_splits == 1:
        return True
    stride = 4 * call.partial_size
    partials = call.partials + place * stride
    keep_partial(tile, rows, columns, partials + split * stride)
    if add_to(call.counters + 8 * place, 1) < num_splits - 1:
        return False
    merge(tile, rows, columns, partials, stride, num_splits)
    return True
