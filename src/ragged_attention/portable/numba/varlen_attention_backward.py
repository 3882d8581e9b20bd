"""The gradient of attention over packed sequences on a CPU.

A program takes a range of keys of one sequence and KV head, and all queries that see them. It computes the complete
gradients of these keys and values, and it sums the gradients of the queries over its tiles of keys. If a sequence has a
large share of the work, its keys are split; the last split to finish sums the query gradients of all splits, in the
order of the splits. With ranges of keys, a tile of keys skips the blocks of queries that see none of them, and keys
that no query sees count as zeros; with lists of blocks, each query visits its own keys (`_packed_lists`). If all
queries share the relative bias, each program sums the gradient of the bias over the program's keys and queries, and the
last program of a KV head to finish adds up the sums. If each query has its own table of biases, one program must write
the table's whole gradient, so keys are not split.
"""

from typing import Any

from ragged_attention.calls import VarlenAttentionBackward
from ragged_attention.portable.numba import _masks, _selected
from ragged_attention.portable.numba._call import Blocks as Tile
from ragged_attention.portable.numba._call import numbers_of_bias, numbers_of_lists
from ragged_attention.portable.numba._call import why_not as why_not
from ragged_attention.portable.numba._formats import BFLOAT16, narrow, size_of
from ragged_attention.portable.numba._gradients import (
    differentiate_rows,
    new_tile,
    sink_gradient,
    tile_at,
)
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._packed_lists import attend_to_blocks_backward
from ragged_attention.portable.numba._packed_rows import read_keys, read_token, seen_between, write_key_gradients
from ragged_attention.portable.numba._products import COLUMNS, ROWS, mix
from ragged_attention.portable.numba._records import NO_MEMORY, Fields, mark_failed, programs, record_at, up_to
from ragged_attention.portable.numba._sequences import PACKED, first_key_of, kv_len_of, queries_of, within
from ragged_attention.portable.numba._splits import lister, splits_of
from ragged_attention.portable.numba._vectors import (
    LANES,
    PAIRS,
    add_row,
    add_to,
    allocate,
    compiled,
    float_at,
    inlined,
    release,
    set_float,
    zero,
)

FIELDS = Fields(
    operands=("d_out", "q", "k", "v", "out", "lse", "cu_q_lens", "cu_kv_lens", "d_lse", "sinks",
              "alibi_slopes", "relative_bias", "key_ranges", "selected"),
    results=("dq", "dk", "dv", "d_sinks", "d_relative_bias"),
    numbers=(
        "num_tokens", "num_kv_tokens", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "max_num_seqs",
        "layout", "causal", "sliding_window", "scale", "soft_cap", "bias_width", "bias_stride", "bias_at_own",
        "has_d_relative_bias", "num_ranges", "num_lists", "num_selected", "block_size", "block_q", "block_kv",
    ),
    plan=("capacity", "kv_lens", "units", "num_units", "work", "num_splits", "partials", "partial_size", "counters"),
    strides=dict.fromkeys(("q", "k", "v"), "token head"),
    formats=("q",),
    floats=("scale", "soft_cap", "work"),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({
    "d_lse", "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes",
    "relative_bias", "return_d_relative_bias", "key_ranges", "selected", "block_size", "deterministic",
})  # fmt: skip
# The keys of a sequence are split only if one of its KV heads has more than 1/SHARES of the call's work. There are few
# splits, since each of them stores the gradients of all queries of its sequence.
SHARES = 16
TILE_FLOATS = 2**16  # maximum floats in a tile's keys and values
UNIT = ("seq", "low", "high", "split", "num_splits", "partial", "counter", "sums")
unit_at, UNIT_BYTES = record_at(UNIT), 8 * len(UNIT)


def heuristic(call: VarlenAttentionBackward) -> Tile:
    if call.selected is not None:  # one query at a time
        return Tile(block_q=1, block_kv=256)
    keys = min(TILE_FLOATS // (call.head_dim + call.v_head_dim), 256)
    return Tile(block_q=max(64 // call.group, 1), block_kv=max(keys // 8 * 8, 8))


# ---- dividing the work


@compiled
def sums_bias(call):
    """Whether programs sum the gradient of a relative bias that all queries share."""
    return call.has_d_relative_bias and not call.bias_stride


@compiled
def columns_of(call, seq, low, high):
    """The range of columns of `relative_bias` that a sequence's queries and its keys [low, high) use."""
    start, stop = queries_of(call, seq)
    kv_len, last = kv_len_of(call, seq), call.bias_width - 1
    nearest = kv_len - (stop - start) - (high - 1) + call.bias_at_own
    farthest = kv_len - 1 - low + call.bias_at_own
    return min(max(nearest, 0), last), min(max(farthest, 0), last) + 1


@compiled
def sums_stride_of(call, seq, low, high):
    """The number of floats that a unit's sums take for one query head."""
    first, end = columns_of(call, seq, low, high)
    return up_to(max(end - first, 0), LANES)


@compiled
def divide(call, units):
    """Count the units, or list them if `units` is the address of their list; returns the total work."""
    work, count, splits, size = 0.0, 0, 0, 0
    group, width = call.num_q_heads // call.num_kv_heads, up_to(call.head_dim, COLUMNS)
    for seq in range(call.max_num_seqs):
        start, stop = queries_of(call, seq)
        keys = kv_len_of(call, seq)
        num_splits = splits_of((stop - start) * keys / call.num_kv_heads, keys, call.work, SHARES, 0)
        if call.has_d_relative_bias and call.bias_stride:
            num_splits = 1
        step, partial = up_to((keys + num_splits - 1) // num_splits, LANES), size
        if num_splits > 1:
            size += num_splits * ((stop - start) * group + ROWS) * width
        for split in range(num_splits):
            low, high = min(split * step, keys), min((split + 1) * step, keys)
            if units:
                unit = unit_at(units + UNIT_BYTES * (count + split))
                unit.seq, unit.low, unit.high, unit.split, unit.num_splits = seq, low, high, split, num_splits
                unit.partial, unit.counter, unit.sums = partial, splits, size
            if sums_bias(call):
                size += group * sums_stride_of(call, seq, low, high)
        work += (stop - start) * keys
        count += num_splits
        if num_splits > 1:
            splits += 1
    call.num_units, call.num_splits, call.partial_size = count, splits, size
    return work


@compiled
def clear(array, first, stop, size):
    zero(array + first * size, max(stop - first, 0) * size)


@compiled
def clear_unowned(call):
    """Zero the gradients of tokens that belong to no sequence, or of all tokens if the `cu_*_lens` do not ascend."""
    size, q_done, kv_done, ascending = size_of(call.q_format), 0, 0, True
    q_size = call.num_q_heads * call.head_dim * size
    k_size, v_size = call.num_kv_heads * call.head_dim * size, call.num_kv_heads * call.v_head_dim * size
    for seq in range(call.max_num_seqs):
        start, stop = queries_of(call, seq)
        first = first_key_of(call, seq)
        ascending = ascending and start >= q_done and first >= kv_done
        clear(call.dq, q_done, start, q_size)
        clear(call.dk, kv_done, first, k_size)
        clear(call.dv, kv_done, first, v_size)
        q_done, kv_done = stop, first + kv_len_of(call, seq)
    clear(call.dq, q_done if ascending else 0, call.num_tokens, q_size)
    clear(call.dk, kv_done if ascending else 0, call.num_kv_tokens, k_size)
    clear(call.dv, kv_done if ascending else 0, call.num_kv_tokens, v_size)


@compiled
def sizes_of(call):
    counters = call.num_splits + (1 if sums_bias(call) else 0)
    return counters * call.num_kv_heads, call.partial_size * call.num_kv_heads


list_units = lister(divide, sizes_of, UNIT_BYTES)


def plan(address):
    """List the units. A program computes one unit for one KV head, or one sink's gradient."""
    call = call_of(address)
    call.capacity = call.num_kv_tokens
    clear_unowned(call)
    if call.has_d_relative_bias:
        tables = call.num_tokens if call.bias_stride else 1
        zero(call.d_relative_bias, 4 * tables * call.num_q_heads * call.bias_width)
    if not list_units(call):
        return NO_MEMORY
    return call.num_units * call.num_kv_heads + (call.num_q_heads if call.sinks else 0)


# ---- one program


@compiled
def tokens_seeing(call, seq, bounds, first, stop):
    """The range of a sequence's queries that see any of the keys [first, stop); `bounds` are those of `list_bounds`."""
    start, end = queries_of(call, seq)
    q_len, kv_len = end - start, kv_len_of(call, seq)
    if call.key_ranges:
        low, high = _masks.tokens_seeing(call, start, end, kv_len, bounds, first, stop)
        return low - start, high - start
    first_new = kv_len - q_len
    low = max(first - first_new, 0) if call.causal else 0
    high = min(stop - 1 + call.sliding_window - first_new, q_len) if call.sliding_window else q_len
    return low, high


@compiled
def clear_unseen(call, tile, first_token, last_token, kv_len, first, count):
    """Set the tile's keys and values that no query sees to zeros; the first key is at position `first`."""
    position, stop = first, first + count
    while position < stop:
        begin, end, _ = _masks.next_span(call, first_token, last_token, kv_len, position, 1)
        missing, key = min(begin, stop) - position, position - first
        zero(tile.k + 4 * key * tile.width, 4 * missing * tile.width)
        zero(tile.v + 4 * key * tile.v_width, 4 * missing * tile.v_width)
        position = end


@inlined
def pad_rows(tile, rows):
    """Set the rows after the first `rows` rows to zeros."""
    zero(tile.q + 4 * rows * tile.width, 4 * (tile.rows - rows) * tile.width)
    zero(tile.d_out + 4 * rows * tile.v_width, 4 * (tile.rows - rows) * tile.v_width)
    if tile.paired:
        zero(tile.q_pairs + 2 * rows * tile.width, 2 * (tile.rows - rows) * tile.width)
        zero(tile.d_out_pairs + 2 * rows * tile.v_width, 2 * (tile.rows - rows) * tile.v_width)


@compiled
def read_queries(call, tile, seq, head, first, last):
    """Read the queries [first, last) of a sequence for a KV head; returns the range of keys that they see."""
    group, row = call.num_q_heads // call.num_kv_heads, 0
    start, stop = queries_of(call, seq)
    kv_len = kv_len_of(call, seq)
    low, high = kv_len, 0
    for token in range(start + first, start + last):
        left, right = seen_between(call, token, stop, kv_len)
        if left < right:
            low, high = min(low, left), max(high, right)
        read_token(call, tile, row, token, head, kv_len - stop + token, left, right)
        if call.num_ranges > 1:
            for token_row in range(row, row + group):
                _masks.list_gaps(call, tile, token_row, token, left, right, kv_len)
        row += group
    pad_rows(tile, row)
    return low, high


@compiled
def add_gradients(call, tile, rows, first, offset, count, dq):
    """Add the contributions of the tile's rows and `count` of its keys, from key `offset` on, to all gradients.

    The tile's first key is at position `first`. `dq` is the address of the rows' gradients.
    """
    differentiate_rows(call, tile, rows, first + offset, offset, count, call.soft_cap)
    keys, width, v_width, written = tile.keys, tile.width, tile.v_width, up_to(count, ROWS)
    mix(tile.d_s, tile.k + 4 * offset * width, dq, up_to(rows, ROWS), count, width, keys, 1, width, width, 0)
    mix(tile.d_s, tile.q, tile.dk + 4 * offset * width, written, rows, width, 1, keys, width, width, 0)
    mix(tile.s, tile.d_out, tile.dv + 4 * offset * v_width, written, rows, v_width, 1, keys, v_width, v_width, 0)


@compiled
def attend_backward(call, tile, unit, head, dq, bounds):
    """Write the gradients of a unit's keys and values, and add those of the sequence's queries to `dq`.

    `bounds` is memory for the bounds of the sequence's queries (see `list_bounds`).
    """
    seq, low, high = unit.seq, unit.low, unit.high
    start, stop = queries_of(call, seq)
    kv_len, base, group = kv_len_of(call, seq), first_key_of(call, seq), call.num_q_heads // call.num_kv_heads
    if call.key_ranges:
        _masks.list_bounds(call, start, stop, kv_len, bounds)
    for first in range(low, high, tile.keys):
        count = min(tile.keys, high - first)
        earliest, last = tokens_seeing(call, seq, bounds, first, first + count)
        cleared = min(up_to(count, ROWS) + ROWS, tile.keys)  # products are added to whole groups of ROWS keys
        zero(tile.dk, 4 * cleared * tile.width)
        zero(tile.dv, 4 * cleared * tile.v_width)
        if earliest < last:
            read_keys(call, tile, head, base + first, 0, count)
        if call.key_ranges and earliest < last:
            clear_unseen(call, tile, start + earliest, start + last, kv_len, first, count)
        for token in range(earliest, last, call.block_q):
            end = min(token + call.block_q, last)
            if call.key_ranges and not _masks.sees(call, start + token, start + end, kv_len, first, first + count):
                continue
            left, right = read_queries(call, tile, seq, head, token, end)
            left, right = within(left - first, count), within(right - first, count)
            if left < right:
                target = dq + 4 * token * group * tile.width
                add_gradients(call, tile, (end - token) * group, first, left, right - left, target)
        write_key_gradients(call, tile, head, base + first, count)


@compiled
def sums_of(call, unit, head):
    """The address of the sums of a unit and KV head: floats [group, `sums_stride_of`], from the unit's first column."""
    group, stride = call.num_q_heads // call.num_kv_heads, sums_stride_of(call, unit.seq, unit.low, unit.high)
    return call.partials + 4 * (unit.sums * call.num_kv_heads + head * group * stride)


@compiled
def begin_sums(call, tile, unit, head):
    """Zero the sums of a unit, and set `tile.sums` to the address where column 0 of the first table would be."""
    first, _ = columns_of(call, unit.seq, unit.low, unit.high)
    group, sums = call.num_q_heads // call.num_kv_heads, sums_of(call, unit, head)
    tile.sums_stride = sums_stride_of(call, unit.seq, unit.low, unit.high)
    tile.sums = sums - 4 * first
    zero(sums, 4 * group * tile.sums_stride)


@compiled
def finish_sums(call, head):
    """Write the gradients of a KV head's tables if this is the last of its programs to finish."""
    counter = call.counters + 8 * (call.num_splits * call.num_kv_heads + head)
    if add_to(counter, 1) < call.num_units - 1:
        return
    group = call.num_q_heads // call.num_kv_heads
    for index in range(call.num_units):
        unit = unit_at(call.units + UNIT_BYTES * index)
        first, end = columns_of(call, unit.seq, unit.low, unit.high)
        stride, sums = sums_stride_of(call, unit.seq, unit.low, unit.high), sums_of(call, unit, head)
        for row in range(group):
            target = call.d_relative_bias + 4 * (head * group + row) * call.bias_width
            for column in range(first, end):
                gradient = float_at(sums, row * stride + column - first)
                set_float(target, column, float_at(target, column) + gradient)


@compiled
def write_query_gradients(call, tile, seq, head, dq):
    group, size = call.num_q_heads // call.num_kv_heads, size_of(call.q_format)
    start, stop = queries_of(call, seq)
    for row in range((stop - start) * group):
        place = (start + row // group) * call.num_q_heads + head * group + row % group
        narrow(call.q_format, dq + 4 * row * tile.width, call.dq + size * place * call.head_dim, call.head_dim, 1.0)


@compiled
def program(call, tile, index):
    """Compute one unit for one KV head, or one sink's gradient; returns False if there is no memory for it."""
    if index >= call.num_units * call.num_kv_heads:
        sink_gradient(call, tile, index - call.num_units * call.num_kv_heads)
        return True
    unit, head = unit_at(call.units + UNIT_BYTES * (index // call.num_kv_heads)), index % call.num_kv_heads
    seq, num_splits = unit.seq, unit.num_splits
    start, stop = queries_of(call, seq)
    count = ((stop - start) * (call.num_q_heads // call.num_kv_heads) + ROWS) * tile.width
    partials = call.partials + 4 * (unit.partial * call.num_kv_heads + head * num_splits * count)
    bounds = allocate(_masks.bytes_of_bounds(stop - start)) if call.key_ranges else 0
    named = allocate(_selected.table_size(call, stop - start, unit.low, unit.high)) if call.num_lists else 0
    dq = allocate(4 * count) if num_splits == 1 else partials + 4 * unit.split * count
    if dq == 0 or (call.key_ranges and bounds == 0) or (call.num_lists and named == 0):
        release(bounds)
        release(named)
        release(dq if num_splits == 1 else 0)
        return False
    zero(dq, 4 * count)
    if sums_bias(call):
        begin_sums(call, tile, unit, head)
    tile.bias_width, tile.bias_at_own = call.bias_width, call.bias_at_own
    if call.num_lists:
        attend_to_blocks_backward(call, tile, unit, head, dq, named)
    else:
        attend_backward(call, tile, unit, head, dq, bounds)
    release(bounds)
    release(named)
    if sums_bias(call):
        finish_sums(call, head)
    if num_splits == 1:
        write_query_gradients(call, tile, seq, head, dq)
        release(dq)
    elif add_to(call.counters + 8 * (unit.counter * call.num_kv_heads + head), 1) == num_splits - 1:
        for other in range(1, num_splits):
            add_row(partials, partials + 4 * other * count, count)
        write_query_gradients(call, tile, seq, head, partials)
    return True


@inlined
def pairs_up(call):
    """Whether to multiply pairs of bfloat16: inputs must be bfloat16, and their rows must fill whole vectors."""
    return PAIRS and call.q_format == BFLOAT16 and call.head_dim % COLUMNS == 0 and call.v_head_dim % COLUMNS == 0


def work(address):
    """Run programs until none is left."""
    call = call_of(address)
    group, listed = call.num_q_heads // call.num_kv_heads, call.num_lists > 0
    rows = group if listed else call.block_q * group
    paired = not listed and pairs_up(call)
    memory = new_tile(rows, call.block_kv, call.head_dim, call.v_head_dim, False, call.num_ranges, listed, paired)
    for index in programs(address, memory):
        if not program(call, tile_at(memory), index):
            mark_failed(address)
    return 0


KERNEL = Kernel("varlen_attention_backward", FIELDS, plan, work)


def run(call: VarlenAttentionBackward, tile: Tile, launch: Any) -> tuple[Any, ...]:
    numbers = {"num_tokens": call.num_q_tokens, "max_num_seqs": call.num_seqs, "layout": PACKED}
    numbers |= numbers_of_bias(call) | numbers_of_lists(call) | {"num_ranges": call.num_ranges}
    numbers |= {"has_d_relative_bias": call.has_d_relative_bias}
    return tuple(KERNEL.launch(launch, call, tile, {}, numbers).values())
