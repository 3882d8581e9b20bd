"""Splits the keys of blocks that have a large share of the call's work, and merges the results of the splits.

A split's partial result is the weighted sum of values, the largest logit and the sum of weights of each row. The last
split of a block to finish merges all of them in their order, so no program waits for another. The number of splits
depends only on lengths, so results do not depend on the number of threads.
"""

import math

import numpy as np

from ragged_attention.errors import InvalidInput
from ragged_attention.portable.numba._branches import branch
from ragged_attention.portable.numba._formats import narrow, size_of
from ragged_attention.portable.numba._products import COLUMNS, ROWS
from ragged_attention.portable.numba._records import NO_MEMORY, programs, record_at, up_to
from ragged_attention.portable.numba._softmax import NOTHING, log_sum_exp, power, scale_row, weight_of_sink
from ragged_attention.portable.numba._tiles import FEW_ROWS, new_tile, reset, shift, tile_at
from ragged_attention.portable.numba._vectors import (
    add_multiple,
    add_to,
    allocate,
    compiled,
    copy,
    fill,
    float_at,
    inlined,
    set_float,
    zero,
)

SPLITS = (  # fields of the plan
    "units", "num_units", "work", "partials", "num_partials", "counters", "partial_rows", "partial_size", "heads",
)  # fmt: skip
UNIT = ("seq", "token", "first", "last", "low", "high", "split", "num_splits", "partial")  # one split of a block
unit_at = record_at(UNIT)
UNIT_BYTES = 8 * len(UNIT)
# Without `max_splits`, a block is split only if it has more than 1/SHARES of the call's work, and its work for one KV
# head, which is that of one program, is more than 1/PROGRAMS. A block with segments needs only the second condition.
SHARES = 128
PROGRAMS = 256
MIN_KEYS = 512  # a block has at most one split per MIN_KEYS keys
MAX_SPLITS = 64
MAX_SEGMENT = 2**20  # keys


def expect_splits(num_splits: int) -> None:
    """Raise InvalidInput if the `num_splits` of a tile is out of range."""
    if not isinstance(num_splits, int) or not 0 <= num_splits <= MAX_SPLITS:
        raise InvalidInput(f"expected num_splits from 0 to {MAX_SPLITS}, got {num_splits!r}")


def expect_segment(segment_kv: int) -> None:
    """Raise InvalidInput if the `segment_kv` of a tile is out of range."""
    if not isinstance(segment_kv, int) or not 0 <= segment_kv <= MAX_SEGMENT:
        raise InvalidInput(f"expected segment_kv from 0 to {MAX_SEGMENT}, got {segment_kv!r}")


@compiled
def splits_of(work, keys, total_work, shares, max_splits):
    """The number of splits of a block that has `keys` keys and `work` pairs of a query and a key.

    If `max_splits` is not 0, the number depends on `max_splits` and `keys` alone. Otherwise a block with more than 1 /
    `shares` of the call's `total_work` is split in proportion to its work, into at most keys // MIN_KEYS splits.
    `total_work` is 0 until it is known; until then, no block is split.
    """
    if max_splits:
        return max(min(max_splits, keys // MIN_KEYS), 1)
    if total_work == 0:
        return 1
    return max(min(math.ceil(work * shares / total_work), keys // MIN_KEYS), 1)


@compiled
def list_splits(call, units, seq, token, first, last, low, high, begin, step, num_splits):
    """Count the splits of the rows [first, last), and list them unless `units` is 0.

    Split i has the keys that are both in [low, high) and in [begin + i * step, begin + (i + 1) * step).
    """
    for split in range(num_splits if units else 0):
        unit = unit_at(units + UNIT_BYTES * (call.num_units + split))
        unit.seq, unit.token, unit.first, unit.last = seq, token, first, last
        unit.low, unit.high = max(low, begin + split * step), min(begin + (split + 1) * step, high)
        unit.split, unit.num_splits, unit.partial = split, num_splits, call.num_partials
    call.num_units += num_splits
    if num_splits > 1:
        call.num_partials += num_splits
        call.partial_rows = max(call.partial_rows, last - first)


@compiled
def add_splits(call, units, seq, token, first, last, low, high, keys, max_splits):
    """Split the keys [low, high) for the rows [first, last): count the splits, and list them unless `units` is 0.

    A row sees up to `keys` of these keys. Returns the work of the rows. `units` is the address of the list. Each KV
    head has a program for each split. The first keys of a program are not prefetched, so there are no more splits than
    necessary.
    """
    work = (last - first) * keys
    num_splits = splits_of(work, keys, call.work, min(max(PROGRAMS // call.num_kv_heads, 1), SHARES), max_splits)
    step = (high - low + num_splits - 1) // num_splits
    list_splits(call, units, seq, token, first, last, low, high, low, step, num_splits)
    return work


@compiled
def add_segments(call, units, seq, token, first, last, low, high, keys):
    """`add_splits` for a call with segments. A split is then a segment: keys [i * segment_kv, (i + 1) * segment_kv).

    A block with a small share of the total work has one unit, whose program attends to one segment after another. The
    results of segments are merged in the same way in both cases, so the choice does not change any bit of the results.
    """
    work, size = (last - first) * keys, call.segment_kv
    begin, step, num_splits = low, high - low, 1
    if call.work > 0 and work * PROGRAMS > call.work * call.num_kv_heads:
        begin, step = low // size * size, size
        num_splits = max((high - begin + size - 1) // size, 1)
    list_splits(call, units, seq, token, first, last, low, high, begin, step, num_splits)
    return work


def lister(divide, sizes_of, unit_bytes):
    """A function that allocates a call's workspace and lists its units there; it returns False if allocation fails.

    `divide(call, units)` counts the units, or lists them if `units` is the address of their list, and returns the total
    work. `sizes_of(call)` returns how many counters and how many floats of partial results follow the list.
    """

    @compiled
    def list_units(call):
        call.work, call.units = 0.0, 0
        # The first pass only finds the total work, on which the number of splits depends.
        call.work = divide(call, call.units)
        divide(call, call.units)
        counters, floats = sizes_of(call)
        table = unit_bytes * call.num_units
        call.workspace = allocate(table + 8 * counters + 4 * floats + 64)
        if call.workspace == 0:
            return False
        call.units, call.counters = call.workspace, call.workspace + table
        call.partials = call.counters + 8 * counters
        zero(call.counters, 8 * counters)
        divide(call, call.units)
        return True

    return list_units


def planner(divide):
    """A function that lists the units of an attention call and returns the number of programs, or NO_MEMORY."""

    @compiled
    def sizes_of(call):
        counters = call.num_partials * call.num_kv_heads
        return counters, counters * call.partial_rows * call.partial_size

    list_units = lister(divide, sizes_of, UNIT_BYTES)

    @compiled
    def plan_units(call, rows):
        """List the units; returns the number of programs, one for each unit and KV head, or NO_MEMORY.

        Each row that `divide` gives to a unit stands for `rows` rows of a tile. Partial results have no more memory
        than the largest split block needs, because new memory is slow when it is first used.
        """
        call.partial_rows, call.partial_size = 0, rows * (up_to(call.v_head_dim, COLUMNS) + 2)
        if not list_units(call):
            return NO_MEMORY
        call.partial_size *= call.partial_rows
        call.heads = 1
        return call.num_units * call.num_kv_heads

    return plan_units


# ---- results


@compiled
def clear(call, first, stop):
    """Write the results of the query tokens [first, stop), which see no key."""
    row = call.num_q_heads * call.v_head_dim * size_of(call.out_format)
    zero(call.out + first * row, (stop - first) * row)
    if call.lse:
        fill(call.lse, first * call.num_q_heads, stop * call.num_q_heads, NOTHING)


@compiled
def write_row(call, tile, row, q_head, target, scale):
    """Write the result of a row, multiplied by `scale`; the row's softmax state must be final."""
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
def keep_partial(tile, rows, target):
    """Store the partial result of a split: results, largest logits and sums of weights."""
    floats = rows * tile.columns
    copy(target, tile.out, 4 * floats)
    copy(target + 4 * floats, tile.m_i, 4 * rows)
    copy(target + 4 * (floats + rows), tile.l_i, 4 * rows)


@compiled
def merge_rows(rows, columns, out, m_i, l_i, later_out, later_m_i, later_l_i):
    """Merge the softmax states of `rows` rows with the states of the same rows for later keys."""
    for row in range(rows):
        largest, other = float_at(m_i, row), float_at(later_m_i, row)
        if other == NOTHING:
            continue
        weight = np.float32(1)
        if other > largest or other != other:
            weight = power(largest - other)
            scale_row(out + 4 * row * columns, columns, weight)
            largest = other
        later_weight = power(other - largest)
        set_float(m_i, row, largest)
        set_float(l_i, row, float_at(l_i, row) * weight + float_at(later_l_i, row) * later_weight)
        add_multiple(out + 4 * row * columns, later_out + 4 * row * columns, columns, later_weight)


@compiled
def merge(tile, rows, partials, stride, num_splits):
    """Merge the partial results of all splits, which are `stride` bytes apart, into the tile."""
    columns = tile.columns
    reset(tile, rows)
    for split in range(num_splits):
        partial = partials + split * stride
        m_i = partial + 4 * rows * columns
        merge_rows(rows, columns, tile.out, tile.m_i, tile.l_i, partial, m_i, m_i + 4 * rows)


@inlined
def exchange_kept(tile):
    """Exchange the state of the tile's rows with the state that is kept from earlier segments."""
    tile.out, tile.kept_out = tile.kept_out, tile.out
    tile.m_i, tile.kept_m_i = tile.kept_m_i, tile.m_i
    tile.l_i, tile.kept_l_i = tile.kept_l_i, tile.l_i


@branch("segment_kv")
def merge_kept(call, tile, rows):
    """Merge the state of the tile's rows with the state that is kept from earlier segments, if there is one."""
    if tile.keeps:
        exchange_kept(tile)
        merge_rows(rows, tile.columns, tile.out, tile.m_i, tile.l_i, tile.kept_out, tile.kept_m_i, tile.kept_l_i)
        tile.keeps = 0


@branch("segment_kv")
def keep(call, tile, rows):
    """Keep the state of the tile's rows, merged with that of earlier segments, and begin another segment."""
    merge_kept(call, tile, rows)
    exchange_kept(tile)
    reset(tile, rows)
    tile.keeps = 1


@compiled
def is_last(call, tile, unit, head, rows):
    """Whether this split is the last of its rows' splits to finish; if so, all of them are now merged into the tile.

    Every split stores its partial result first, unless it is its rows' only split.
    """
    if unit.num_splits == 1:
        return True
    place, stride = unit.partial * call.num_kv_heads + head * unit.num_splits, 4 * call.partial_size
    partials = call.partials + place * stride
    keep_partial(tile, rows, partials + unit.split * stride)
    if add_to(call.counters + 8 * place, 1) < unit.num_splits - 1:
        return False
    merge(tile, rows, partials, stride, unit.num_splits)
    return True


# ---- all programs


@compiled
def run_units(address, call, max_rows, latent, paired, table, named, segments, read_queries, attend, finish):
    """Run programs, each of which computes one unit for one KV head with three functions that the kernel supplies.

    If a unit has few rows, its first program computes `heads` KV heads, whose rows lie one head after another, and the
    programs of the other heads do nothing. `table` and `named` are the sizes of a tile's tables for lists (see
    `new_tile`). With `named`, one token's rows are multiplied at a time. With `segments`, keys are attended to in
    segments.
    """
    width = call.head_dim // 2 if paired else call.head_dim
    group = call.num_q_heads // call.num_kv_heads
    at_once, all_rows = group if named else max_rows, max(max_rows, call.heads * FEW_ROWS)
    memory = new_tile(all_rows, call.block_kv, width, call.v_head_dim, latent, paired, table, named, at_once, segments)
    for index in programs(address, memory):
        tile, head = tile_at(memory), index % call.num_kv_heads
        unit = unit_at(call.units + UNIT_BYTES * (index // call.num_kv_heads))
        heads, step, rows = call.heads if unit.last - unit.first <= FEW_ROWS // group else 1, 0, 0
        if head % heads:
            continue
        for other in range(head, head + heads):
            rows = read_queries(call, tile, unit, other)
            step = up_to(rows, ROWS)
            shift(tile, step)
        shift(tile, -heads * step)
        attend(call, tile, unit, head, heads, rows)
        for other in range(head, head + heads):
            if is_last(call, tile, unit, other, rows):
                finish(call, tile, unit, other, rows)
            shift(tile, step)
        shift(tile, -heads * step)
    return 0
