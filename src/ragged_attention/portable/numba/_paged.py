"""Attention over K and V heads, paged whichever way or packed: the kernel behind four operations.

A packed key is a page of one, and a sequence's pages are those from its edge on.

A *block* is some consecutive queries of a sequence; the query heads of one KV head are rows of one tile, so K and V
are read once for all of them. A program computes one block for one KV head over one split of the keys that the block
sees: what is outside the causal range or the window is skipped, not masked. Keys are split where a block has much more
work than the average; the last of its splits to end merges them. How work is divided follows from the lengths alone.
"""

import numpy as np

from ragged_attention.portable.numba._formats import BFLOAT16, FLOAT16, FLOAT32, narrow, size_of
from ragged_attention.portable.numba._records import NO_MEMORY, Fields, programs
from ragged_attention.portable.numba._scales import fields_of, scale_of
from ragged_attention.portable.numba._sequences import first_key_of, gaps_by, kv_len_of, num_sequences, queries_of
from ragged_attention.portable.numba._softmax import LOG2E, NOTHING, log_sum_exp, scale_row, weight_of_sink
from ragged_attention.portable.numba._splits import SHARES, SPLITS, is_last, provide, splits_of
from ragged_attention.portable.numba._tiles import (
    begin,
    mix_values,
    multiply_keys,
    new_tile,
    pair_keys,
    pair_values,
    read_query,
    read_rows,
    tile_at,
    turn_to_next,
    weigh_keys,
)
from ragged_attention.portable.numba._vectors import (
    LANES,
    PAIRS,
    byte_at,
    compiled,
    fill,
    float_at,
    inlined,
    int32_at,
    int_at,
    prefetch,
    release,
    set_float,
    set_int,
    zero,
)

FIELDS = Fields(
    operands=(
        "q", "k_pages", "v_pages", "kv_lens", "page_indices", "cu_q_lens", "cu_kv_lens", "num_seqs", "sinks",
        "k_scale", "v_scale", "k_scales", "v_scales", "draft_mask",
    ),
    results=("out", "lse"),
    numbers=(
        "num_tokens", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "max_num_seqs", "layout",
        "q_format", "out_format", "q_token_stride", "q_head_stride",
        "num_pages", "page_size", "capacity", "table_stride", "cache_format",
        "k_page_stride", "k_slot_stride", "k_head_stride",
        "v_page_stride", "v_slot_stride", "v_head_stride", "v_offset",
        "k_scales_page_stride", "k_scales_slot_stride", "k_scales_head_stride",
        "v_scales_page_stride", "v_scales_slot_stride", "v_scales_head_stride",
        "causal", "window", "drafted", "draft_width", "draft_stride", "scale", "soft_cap",
        *fields_of("k_scale"), *fields_of("v_scale"), "block_q", "block_kv", "num_splits", "num_threads",
    ),
    plan=SPLITS,
    floats=("scale", "soft_cap", "k_scale_number", "v_scale_number", "work"),
)  # fmt: skip
call_of = FIELDS.at
UNIT = ("seq", "first", "last", "low", "high", "split", "num_splits", "partial")
SEQ, FIRST, LAST, LOW, HIGH, SPLIT, NUM_SPLITS, PARTIAL = range(len(UNIT))
gaps = gaps_by(queries_of)


# ---- dividing the work


@compiled
def range_of(call, first_new, kv_len, first, last):
    """The keys that at least one of the queries [first, last) of a sequence sees; `first_new` is query 0's position."""
    low, high = 0, kv_len
    if call.causal and not call.drafted:
        high = min(first_new + last, kv_len)
    if call.window:
        low = max(first_new + first - call.window + 1, 0)
    return low, max(high, low)


@compiled
def most_splits(call, num_queries):
    """How many splits a block of so many queries may have, 0 if that is left to its work: fewer for more queries, each
    of which has a partial result in each."""
    return max(call.num_splits // num_queries, 1) if call.num_splits else 0


@compiled
def divide(call, units):
    """Count the units, or list them where `units` is their memory; `call.work` is the work of all, 0 before known."""
    work, count, partials = 0.0, 0, 0
    for seq in range(num_sequences(call)):
        start, stop = queries_of(call, seq)
        kv_len = kv_len_of(call, seq)
        first_new = kv_len - (stop - start)
        for first in range(0, stop - start, call.block_q):
            last = min(first + call.block_q, stop - start)
            low, high = range_of(call, first_new, kv_len, first, last)
            keys = high - low
            num_splits = splits_of((last - first) * keys, keys, call.work, SHARES, most_splits(call, last - first))
            step = (keys + num_splits - 1) // num_splits
            if units:
                for split in range(num_splits):
                    unit = units + 8 * len(UNIT) * (count + split)
                    set_int(unit, SEQ, seq)
                    set_int(unit, FIRST, start + first)
                    set_int(unit, LAST, start + last)
                    set_int(unit, LOW, low + split * step)
                    set_int(unit, HIGH, min(low + (split + 1) * step, high))
                    set_int(unit, SPLIT, split)
                    set_int(unit, NUM_SPLITS, num_splits)
                    set_int(unit, PARTIAL, partials)
            work += (last - first) * keys
            count += num_splits
            if num_splits > 1:
                partials += num_splits
    if not units:
        call.num_units, call.num_partials = count, partials
    return work


@compiled
def clear(call, first, stop):
    """Set the results of the queries [first, stop) to those of no key."""
    row = call.num_q_heads * call.v_head_dim * size_of(call.out_format)
    zero(call.out + first * row, (stop - first) * row)
    if call.lse:
        fill(call.lse, first * call.num_q_heads, stop * call.num_q_heads, NOTHING)


def plan(address):
    """List the units: blocks of queries with the splits of their keys; a program is one of them for one KV head."""
    call = call_of(address)
    for first, stop in gaps(call):
        clear(call, first, stop)
    call.work = 0.0
    call.work = divide(call, 0)
    divide(call, 0)
    queries = min(call.block_q, call.num_splits) if call.num_splits else call.block_q
    rows = queries * (call.num_q_heads // call.num_kv_heads)
    if not provide(call, 8 * len(UNIT), rows * (call.v_head_dim + 2), call.num_kv_heads):
        return NO_MEMORY
    divide(call, call.units)
    return call.num_units * call.num_kv_heads


# ---- one program


@inlined
def pairs_up(call):
    """Whether products are those of bfloat16: numbers that it holds exactly, in whole vectors, without scales."""
    return (
        PAIRS
        and call.q_format == BFLOAT16
        and call.cache_format != FLOAT32
        and call.cache_format != FLOAT16
        and call.head_dim % (2 * LANES) == 0
        and call.v_head_dim % LANES == 0
        and call.k_scales == 0
        and call.v_scales == 0
    )


@inlined
def reads_in_place(call, tile):
    """Whether keys are multiplied where they lie."""
    if tile.paired:
        return call.cache_format == BFLOAT16
    return call.cache_format == FLOAT32 and call.head_dim % LANES == 0 and not call.k_scales


@inlined
def factor_of(call, head):
    """What logits are multiplied by: in powers of two, but for a soft cap, which comes first."""
    k_scale = scale_of(call.k_scale, call.k_scale_format, call.k_scale_stride, call.k_scale_number, head)
    return call.scale * k_scale * (LOG2E if call.soft_cap == 0 else np.float32(1))


@inlined
def read_queries(call, tile, unit, head):
    """The block's queries of a KV head, each row with the keys that it sees."""
    group, seq = call.num_q_heads // call.num_kv_heads, int_at(unit, SEQ)
    first, last = int_at(unit, FIRST), int_at(unit, LAST)
    _, stop = queries_of(call, seq)
    kv_len = kv_len_of(call, seq)
    rows, row = (last - first) * group, 0
    in_place = reads_in_place(call, tile)
    begin(tile, rows)
    for token in range(first, last):
        position = kv_len - stop + token
        left = position - call.window + 1 if call.window else 0
        right = min(position + 1, kv_len) if call.causal and not call.drafted else kv_len
        for q_head in range(head * group, (head + 1) * group):
            source = call.q + size_of(call.q_format) * (token * call.q_token_stride + q_head * call.q_head_stride)
            read_query(tile, row, call.q_format, source, call.head_dim, in_place)
            set_int(tile.left, row, left)
            set_int(tile.right, row, right)
            row += 1
    return rows


@inlined
def place_of(call, seq, position):
    """Where a sequence's position is: the number of its page in the sequence's table, and the slot there."""
    if call.cu_kv_lens:
        return first_key_of(call, seq) + position, 0
    return position // call.page_size, position % call.page_size


@inlined
def page_at(call, seq, number):
    """A page of a sequence's table, which may be any number."""
    return number if call.cu_kv_lens else int32_at(call.page_indices + 4 * seq * call.table_stride, number)


@compiled
def list_next(call, tile, seq, head, first, count):
    """The addresses of the next `count` keys and values, from a position on; the keys are asked for now.

    While they come, the keys before them are computed. Returns how many of them are on no page.
    """
    holes, key, size = 0, 0, size_of(call.cache_format)
    number, slot = place_of(call, seq, first)
    while key < count:
        page, run = page_at(call, seq, number), min(call.page_size - slot, count - key)
        k = v = k_step = v_step = 0
        if 0 <= page < call.num_pages:
            k = page * call.k_page_stride + slot * call.k_slot_stride + head * call.k_head_stride
            v = page * call.v_page_stride + slot * call.v_slot_stride + head * call.v_head_stride
            k, v = call.k_pages + size * k, call.v_pages + size * (v + call.v_offset)
            k_step, v_step = size * call.k_slot_stride, size * call.v_slot_stride
        else:
            holes += run
        for each in range(key, key + run):
            set_int(tile.next_sources, each, k)
            set_int(tile.next_v_sources, each, v)
            if k:
                prefetch(k, size * call.head_dim)
            k, v = k + k_step, v + v_step
        key, number, slot = key + run, number + 1, 0
    return holes


@compiled
def ask_for_values(call, tile, count):
    """Ask for the values of the next keys."""
    for key in range(count):
        source = int_at(tile.next_v_sources, key)
        if source:
            prefetch(source, size_of(call.cache_format) * call.v_head_dim)


@compiled
def scale_rows(scales, page_stride, slot_stride, call, seq, head_offset, first, count, rows, width):
    """Multiply what was read by the scales of its positions."""
    for key in range(count):
        number, slot = place_of(call, seq, first + key)
        page = page_at(call, seq, number)
        if 0 <= page < call.num_pages:
            scale = float_at(scales, page * page_stride + slot * slot_stride + head_offset)
            scale_row(rows + 4 * key * width, width, scale)


@compiled
def hide_undrafted(call, tile, unit, first, count):
    """Hide the new tokens that a draft mask hides; one that no row sees gets no value, so that no NaN of it shows."""
    group, seq = call.num_q_heads // call.num_kv_heads, int_at(unit, SEQ)
    start, stop = queries_of(call, seq)
    first_new = kv_len_of(call, seq) - (stop - start)
    for key in range(max(first_new - first, 0), count):
        draft, seen = first + key - first_new, False
        for token in range(int_at(unit, FIRST), int_at(unit, LAST)):
            row = (token - int_at(unit, FIRST)) * group
            if draft < call.draft_width and byte_at(call.draft_mask, token * call.draft_stride + draft):
                seen = seen or int_at(tile.left, row) <= first + key
            else:
                for each in range(row, row + group):
                    set_float(tile.s, each * tile.s_width + key, NOTHING)
        if not seen:
            set_int(tile.v_sources, key, 0)


@inlined
def read_keys(call, tile, count):
    if tile.paired:
        pair_keys(call.cache_format, tile.sources, tile.k, tile.width, count)
    else:
        read_rows(call.cache_format, tile.sources, tile.k, tile.width, call.head_dim, count)


@inlined
def read_values(call, tile, count):
    if tile.paired:
        pair_values(call.cache_format, tile.v_sources, tile.v, tile.v_width, call.v_head_dim, count)
    else:
        read_rows(call.cache_format, tile.v_sources, tile.v, tile.v_width, call.v_head_dim, count)


@compiled
def attend(call, tile, unit, head, rows):
    """The block's rows over the unit's keys, one tile of keys after another."""
    seq, low, high = int_at(unit, SEQ), int_at(unit, LOW), int_at(unit, HIGH)
    in_place, factor = reads_in_place(call, tile), factor_of(call, head)
    next_holes = list_next(call, tile, seq, head, low, min(tile.keys, high - low))
    ask_for_values(call, tile, min(tile.keys, high - low))
    for first in range(low, high, tile.keys):
        count, holes, behind = min(tile.keys, high - first), next_holes, first + tile.keys
        turn_to_next(tile)
        keys = tile.sources if in_place else tile.k_rows
        if not in_place:
            read_keys(call, tile, count)
        if call.k_scales:
            scale_rows(call.k_scales, call.k_scales_page_stride, call.k_scales_slot_stride, call, seq,
                       head * call.k_scales_head_stride, first, count, tile.k, tile.width)  # fmt: skip
        next_holes = list_next(call, tile, seq, head, behind, min(tile.keys, high - behind))
        multiply_keys(tile, keys, rows, first, count, factor, call.soft_cap)
        if call.drafted:
            hide_undrafted(call, tile, unit, first, count)
        weigh_keys(tile, rows, first, count, holes)
        ask_for_values(call, tile, min(tile.keys, high - behind))
        read_values(call, tile, count)
        if call.v_scales:
            scale_rows(call.v_scales, call.v_scales_page_stride, call.v_scales_slot_stride, call, seq,
                       head * call.v_scales_head_stride, first, count, tile.v, tile.v_width)  # fmt: skip
        mix_values(tile, rows, first, count)


@compiled
def finish(call, tile, unit, head, rows):
    """Write the results of a block whose keys were all seen."""
    group = call.num_q_heads // call.num_kv_heads
    v_scale = scale_of(call.v_scale, call.v_scale_format, call.v_scale_stride, call.v_scale_number, head)
    for row in range(rows):
        token, q_head = int_at(unit, FIRST) + row // group, head * group + row % group
        place, m_i, l_i = token * call.num_q_heads + q_head, float_at(tile.m_i, row), float_at(tile.l_i, row)
        out, target = tile.out + 4 * row * tile.columns, call.out + size_of(call.out_format) * place * call.v_head_dim
        if m_i == NOTHING:
            zero(target, call.v_head_dim * size_of(call.out_format))
        else:
            sink = weight_of_sink(call.sinks, q_head, m_i)
            scale_row(out, tile.columns, v_scale)
            narrow(call.out_format, out, target, call.v_head_dim, l_i + sink)
        if call.lse:
            set_float(call.lse, place, log_sum_exp(m_i, l_i))


# ---- all programs


@compiled
def program(call, tile, index):
    """One unit for one KV head."""
    unit, head = call.units + 8 * len(UNIT) * (index // call.num_kv_heads), index % call.num_kv_heads
    rows = read_queries(call, tile, unit, head)
    attend(call, tile, unit, head, rows)
    num_splits = int_at(unit, NUM_SPLITS)
    place = int_at(unit, PARTIAL) * call.num_kv_heads + head * num_splits
    if is_last(call, tile, rows, call.v_head_dim, place, int_at(unit, SPLIT), num_splits):
        finish(call, tile, unit, head, rows)


def work(address):
    """Programs, one after another, until none is left."""
    call = call_of(address)
    rows = call.block_q * (call.num_q_heads // call.num_kv_heads)
    paired = pairs_up(call)
    width = call.head_dim // 2 if paired else call.head_dim
    memory = new_tile(rows, call.block_kv, width, call.v_head_dim, False, paired)
    if memory == 0:
        return NO_MEMORY
    tile = tile_at(memory)
    for index in programs(address, call.num_programs):
        program(call, tile, index)
    release(memory)
    return 0
