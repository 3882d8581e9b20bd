"""Splitting the keys of a block that has much more work than the average, and merging the results of the splits.

The partial result of a split is its sums of weights, its weighted values and its largest logits. The split that ends
last merges the partial results of all, so no program waits for another. The number of splits follows from lengths
alone and not from threads, so results do not depend on the number of threads.
"""

import math

from ragged_attention.errors import InvalidInput
from ragged_attention.portable.numba._formats import narrow, size_of
from ragged_attention.portable.numba._records import NO_MEMORY, record_at
from ragged_attention.portable.numba._softmax import NOTHING, log_sum_exp, power, scale_row, weight_of_sink
from ragged_attention.portable.numba._tiles import begin
from ragged_attention.portable.numba._vectors import add_to, allocate, compiled, fill, float_at, set_float, zero

SPLITS = ("units", "num_units", "work", "partials", "num_partials", "counters", "partial_size")  # fields of the plan
UNIT = ("seq", "token", "first", "last", "low", "high", "split", "num_splits", "partial")  # one split of a block
unit_at = record_at(UNIT)
UNIT_BYTES = 8 * len(UNIT)
SHARES = 128  # the shares of all work of an attention: a block with more than one share is split
FEWEST_KEYS = 512  # of a split
MOST_SPLITS = 64


def expect_splits(num_splits: int) -> None:
    """Check the `num_splits` of a tile."""
    if not isinstance(num_splits, int) or not 0 <= num_splits <= MOST_SPLITS:
        raise InvalidInput(f"expected num_splits from 0 to {MOST_SPLITS}, got {num_splits!r}")


@compiled
def splits_of(work, keys, all_work, shares, most):
    """The number of splits of a block of `work` over `keys`, where the whole call has `all_work`.

    A block is split if its work exceeds one of `shares` equal shares of all work; it has one split while `all_work` is
    0, not known yet. A `most` above 0 decides instead: as many splits as the keys allow, up to that number.
    """
    if most:
        return max(min(most, keys // FEWEST_KEYS), 1)
    if all_work == 0:
        return 1
    return max(min(math.ceil(work * shares / all_work), keys // FEWEST_KEYS), 1)


@compiled
def add_splits(call, units, seq, token, first, last, low, high, most):
    """Count the splits of the rows [first, last) over the keys [low, high); returns their work.

    If `units` is the memory of the units, the splits are also written there.
    """
    work, keys = (last - first) * (high - low), high - low
    num_splits = splits_of(work, keys, call.work, SHARES, most)
    step = (keys + num_splits - 1) // num_splits
    for split in range(num_splits if units else 0):
        unit = unit_at(units + UNIT_BYTES * (call.num_units + split))
        unit.seq, unit.token, unit.first, unit.last = seq, token, first, last
        unit.low, unit.high = low + split * step, min(low + (split + 1) * step, high)
        unit.split, unit.num_splits, unit.partial = split, num_splits, call.num_partials
    call.num_units += num_splits
    call.num_partials += num_splits if num_splits > 1 else 0
    return work


def planner(divide):
    """A function that lists the units of a call and returns the number of programs, NO_MEMORY if there is no memory.

    `divide(call, units)` adds the splits of all blocks and returns the work of all.
    """

    @compiled
    def plan_units(call, rows):
        """`rows` is the most rows of a unit. A program is one unit for one KV head."""
        call.work = 0.0
        for _ in range(2):  # the number of splits depends on the work of all, so the first pass only finds that
            call.num_units = call.num_partials = 0
            call.work = divide(call, 0)
        call.partial_size = rows * (call.v_head_dim + 2)
        table, parts = UNIT_BYTES * call.num_units, call.num_partials * call.num_kv_heads
        call.workspace = allocate(table + 8 * parts + 4 * parts * call.partial_size + 64)
        if call.workspace == 0:
            return NO_MEMORY
        call.units = call.workspace
        call.counters = call.units + table
        call.partials = call.counters + 8 * parts
        zero(call.counters, 8 * parts)
        call.num_units = call.num_partials = 0
        divide(call, call.units)
        return call.num_units * call.num_kv_heads

    return plan_units


# ---- results


@compiled
def clear(call, first, stop):
    """Write the results of query tokens [first, stop) that see no key."""
    row = call.num_q_heads * call.v_head_dim * size_of(call.out_format)
    zero(call.out + first * row, (stop - first) * row)
    if call.lse:
        fill(call.lse, first * call.num_q_heads, stop * call.num_q_heads, NOTHING)


@compiled
def write_row(call, tile, row, q_head, target, scale):
    """Write the result of a row that has seen all its keys; `scale` multiplies its values."""
    m_i, out = float_at(tile.m_i, row), tile.out + 4 * row * tile.columns
    if m_i == NOTHING:
        zero(target, call.v_head_dim * size_of(call.out_format))
    else:
        sink = weight_of_sink(call.sinks, q_head, m_i)
        scale_row(out, tile.columns, scale)
        narrow(call.out_format, out, target, call.v_head_dim, float_at(tile.l_i, row) + sink)


@compiled
def write_lse(call, tile, row, place):
    if call.lse:
        set_float(call.lse, place, log_sum_exp(float_at(tile.m_i, row), float_at(tile.l_i, row)))


@compiled
def keep_partial(tile, rows, columns, target):
    """Store the partial result of a split."""
    for row in range(rows):
        for column in range(columns):
            set_float(target, row * columns + column, float_at(tile.out, row * tile.columns + column))
        set_float(target, rows * columns + row, float_at(tile.m_i, row))
        set_float(target, rows * columns + rows + row, float_at(tile.l_i, row))


@compiled
def merge(tile, rows, columns, partials, stride, num_splits):
    """Merge the partial results of all splits into the tile."""
    begin(tile, rows)
    for row in range(rows):
        m_i = NOTHING
        for split in range(num_splits):
            m_i = max(m_i, float_at(partials + split * stride, rows * columns + row))
        set_float(tile.m_i, row, m_i)
        for split in range(num_splits):
            partial = partials + split * stride
            split_m_i = float_at(partial, rows * columns + row)
            if split_m_i > NOTHING or split_m_i != split_m_i:
                weight = power(split_m_i - m_i)
                split_l_i = float_at(partial, rows * columns + rows + row)
                set_float(tile.l_i, row, float_at(tile.l_i, row) + weight * split_l_i)
                for column in range(columns):
                    place = row * tile.columns + column
                    value = float_at(partial, row * columns + column)
                    set_float(tile.out, place, float_at(tile.out, place) + weight * value)


@compiled
def is_last(call, tile, unit, head, rows):
    """Whether the tile now holds the whole result of its rows, with all splits merged.

    If another split of these rows still runs, the partial result is stored for the split that ends last.
    """
    if unit.num_splits == 1:
        return True
    place, stride = unit.partial * call.num_kv_heads + head * unit.num_splits, 4 * call.partial_size
    partials = call.partials + place * stride
    keep_partial(tile, rows, call.v_head_dim, partials + unit.split * stride)
    if add_to(call.counters + 8 * place, 1) < unit.num_splits - 1:
        return False
    merge(tile, rows, call.v_head_dim, partials, stride, unit.num_splits)
    return True
