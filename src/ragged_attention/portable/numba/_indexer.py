"""The lightning indexer: logits of queries over keys, kept or only chosen from; the kernel behind two operations.

Packed keys are one page, in which each token has its range; in a sequence's pages ranges begin at 0. A *block* is some
consecutive tokens of a sequence, or of all where keys are packed; a program computes one block over one part of the
keys, a tile of keys after another, each of which is read once for all tokens of the block. A tile is turned first, so
that a vector holds the same column of LANES keys: products, the relu, weights and the sum over heads then stay in
registers. No sum goes over keys, so the parts have nothing to merge: logits are written where they belong, or, where
the largest are wanted, to rows of their own, from which the last part of a block to end chooses.

Where candidates are listed a block is one token, and what is called a key in all the rest is a place in the list of
the positions to look at.
"""

import numpy as np

from ragged_attention.portable.numba._formats import BFLOAT16, FLOAT32, narrow, pairs_of_four_e4m3, size_of, widen
from ragged_attention.portable.numba._records import NO_MEMORY, Fields, programs, record_at
from ragged_attention.portable.numba._selection import ordered, scratch_size, select
from ragged_attention.portable.numba._sequences import kv_len_of, num_sequences, queries_of, within
from ragged_attention.portable.numba._softmax import NOTHING
from ragged_attention.portable.numba._splits import splits_of
from ragged_attention.portable.numba._tiles import read_rows, turn_to_next, up_to
from ragged_attention.portable.numba._vectors import (
    LANES,
    PAIRS,
    add_to,
    allocate,
    byte_at,
    compiled,
    copy,
    fill,
    float_at,
    fma,
    fma_pairs,
    inlined,
    int32_at,
    int_at,
    load,
    maximum,
    prefetch,
    release,
    set_byte,
    set_float,
    set_int,
    set_int32,
    splat,
    store,
    transpose,
    zero,
)

FIELDS = Fields(
    operands=("q", "keys", "weights", "key_scale", "starts", "stops", "page_indices", "kv_lens", "cu_q_lens",
              "cu_kv_lens", "num_seqs", "candidates"),
    results=("logits", "indices"),
    numbers=(
        "num_tokens", "num_heads", "head_dim", "q_format", "q_token_stride", "q_head_stride", "weights_token_stride",
        "key_format", "in_bytes", "num_pages", "page_size", "page_stride", "slot_stride", "scales_page_stride",
        "scales_slot_stride", "packed", "relative", "columns", "max_num_seqs", "layout", "capacity", "table_stride",
        "ratio", "top_k", "num_candidates", "candidates_stride", "candidate_size", "block_q", "block_kv",
        "num_threads",
    ),
    plan=("units", "num_units", "work", "counters", "rows", "row_floats", "longest"),
    floats=("work",),
)  # fmt: skip
call_of = FIELDS.at
UNIT = ("seq", "first", "last", "low", "high", "part", "num_parts", "length", "row")
SEQ, FIRST, LAST, LOW, HIGH, PART, NUM_PARTS, LENGTH, ROW = range(len(UNIT))
SPAN = 1024  # keys of a part, where logits are kept
SHARES = 32  # of all work: a block with more than one is divided
ROOM = 2**18  # floats of the rows of a block, but for a single one

HEADS, COLUMNS = 4, 2 * LANES  # whose products are computed together


# ---- dividing the work


@inlined
def tokens_of(call, seq):
    if call.packed:
        return 0, call.num_tokens
    return queries_of(call, seq)


@compiled
def seen_by(call, seq, token, stop):
    """The keys that a token sees, from the first to before the last; `stop` ends its sequence's tokens."""
    if call.packed:
        start = within(int32_at(call.starts, token), 0, call.page_size)
        end = within(int32_at(call.stops, token), 0, call.page_size)
        return start, max(min(end, start + call.columns) if call.relative else end, start)
    return 0, max(kv_len_of(call, seq) - (stop - token) + 1, 0) // call.ratio


@inlined
def places_of(call, keys):
    """How many of so many keys a row of the chosen can be made from."""
    return min(keys, call.num_candidates * call.candidate_size) if call.candidate_size else keys


@compiled
def block_of(call, seq, first, stop):
    """The end of a block of tokens, the keys that it sees, and the most that one of its tokens sees."""
    low, high = seen_by(call, seq, first, stop)
    longest, last = high - low, first + 1
    if call.candidate_size:
        return last, 0, places_of(call, longest), places_of(call, longest)
    while last < min(stop, first + call.block_q):
        left, right = seen_by(call, seq, last, stop)
        length = max(longest, right - left)
        if call.top_k and (last + 1 - first) * length > ROOM:
            break
        last, longest, low, high = last + 1, length, min(low, left), max(high, right)
    return last, low, high, longest


@compiled
def divide(call, units):
    """Count the units, or list them where `units` is their memory; `call.work` is the work of all, 0 before known."""
    work, count, call.longest, call.row_floats = 0.0, 0, 0, 0
    for seq in range(num_sequences(call)):
        first, stop = tokens_of(call, seq)
        while first < stop:
            last, low, high, longest = block_of(call, seq, first, stop)
            if call.top_k:
                num_parts = splits_of((last - first) * (high - low), high - low, call.work, SHARES, 0)
            else:  # all columns, also those of which nothing is seen; counted from a row's start there may be more
                low, high = 0, max(call.columns, call.page_size) if call.packed else call.columns
                num_parts = (high + SPAN - 1) // SPAN
            step = up_to((high - low + num_parts - 1) // max(num_parts, 1), COLUMNS)
            for part in range(num_parts if units else 0):
                unit = units + 8 * len(UNIT) * (count + part)
                set_int(unit, SEQ, seq)
                set_int(unit, FIRST, first)
                set_int(unit, LAST, last)
                set_int(unit, LOW, low + part * step)
                set_int(unit, HIGH, min(low + (part + 1) * step, high))
                set_int(unit, PART, part)
                set_int(unit, NUM_PARTS, num_parts)
                set_int(unit, LENGTH, longest)
                set_int(unit, ROW, call.row_floats)
            work += (last - first) * (high - low)
            count += num_parts
            if num_parts > 1 and call.top_k:
                call.row_floats += (last - first) * longest
            call.longest = max(call.longest, (last - first) * longest)
            first = last
    call.num_units = count
    return work


@compiled
def clear(call, first, stop):
    """Set the results of the tokens [first, stop) to those of no key."""
    if call.top_k:
        for index in range(first * call.top_k, stop * call.top_k):
            set_int32(call.indices, index, -1)
    else:
        fill(call.logits, first * call.columns, stop * call.columns, NOTHING)


@compiled
def clear_what_no_sequence_has(call):
    """Clear the rows that belong to no sequence; all of them where edges do not ascend."""
    done = 0
    for seq in range(num_sequences(call)):
        first, stop = tokens_of(call, seq)
        if first < done:
            clear(call, 0, call.num_tokens)
            return
        clear(call, done, first)
        done = stop
    clear(call, done, call.num_tokens)


def plan(address):
    """List the units, and find memory for the rows of blocks of several parts."""
    call = call_of(address)
    clear_what_no_sequence_has(call)
    call.work = 0.0
    call.work = divide(call, 0)
    divide(call, 0)
    table = 8 * len(UNIT) * call.num_units
    call.workspace = allocate(table + 8 * call.num_units + 4 * call.row_floats + 64)
    if call.workspace == 0:
        return NO_MEMORY
    call.units, call.counters = call.workspace, call.workspace + table
    call.rows = call.counters + 8 * call.num_units
    zero(call.counters, 8 * call.num_units)
    divide(call, call.units)
    return call.num_units


# ---- a program's memory

SIZES = ("keys", "width", "heads", "paired")
ADDRESSES = ("q", "k", "k_rows", "turned", "s", "scales", "left", "right", "sources", "v_sources", "next_sources",
             "next_v_sources", "rows", "scratch", "places", "blocks")  # fmt: skip
tile_at = record_at(np.dtype([(name, np.int64) for name in (*SIZES, *ADDRESSES)]))
HEADER = -(-8 * (len(SIZES) + len(ADDRESSES)) // 64) * 64  # bytes of the record


@inlined
def pairs_up(call):
    """Whether products are those of bfloat16: numbers that it holds exactly, in rows of whole vectors of bytes."""
    return (
        PAIRS
        and (call.q_format == BFLOAT16 or size_of(call.q_format) == 1)
        and (call.key_format == BFLOAT16 or size_of(call.key_format) == 1)
        and call.head_dim * size_of(call.key_format) % (4 * LANES) == 0
    )


@compiled
def new_tile(call):
    """The address of a tile, 0 if there is no memory: a record, then queries, keys and what is made of them.

    Places of 32 bits hold a number or a pair of them, as in `_products`; `v_sources` are those of the keys' scales.
    """
    paired = pairs_up(call)
    tokens, keys, heads = call.block_q, up_to(call.block_kv, COLUMNS), up_to(call.num_heads, HEADS)
    width = call.head_dim // 2 if paired else call.head_dim
    floats = width * (tokens * heads + keys) + keys * (call.head_dim + 2)
    address = allocate(HEADER + 4 * floats + 8 * (2 * tokens + 5 * keys) + 64 * len(ADDRESSES))
    if address == 0:
        return address
    tile = tile_at(address)
    tile.keys, tile.width, tile.heads, tile.paired = keys, width, heads, paired
    end = address + HEADER
    tile.q, end = end, up_to(end + 4 * tokens * heads * width, 64)
    zero(tile.q, 4 * tokens * heads * width)  # of which the heads that make a multiple of four stay so
    tile.k, end = end, up_to(end + 4 * keys * call.head_dim, 64)
    tile.turned, end = end, up_to(end + 4 * keys * width, 64)
    tile.s, end = end, up_to(end + 4 * keys, 64)
    tile.scales, end = end, up_to(end + 4 * keys, 64)
    tile.left, end = end, up_to(end + 8 * tokens, 64)
    tile.right, end = end, up_to(end + 8 * tokens, 64)
    tile.k_rows, end = end, up_to(end + 8 * keys, 64)
    for key in range(keys):
        set_int(tile.k_rows, key, tile.k + 4 * key * call.head_dim)
    tile.sources, end = end, up_to(end + 8 * keys, 64)
    tile.v_sources, end = end, up_to(end + 8 * keys, 64)
    tile.next_sources, end = end, up_to(end + 8 * keys, 64)
    tile.next_v_sources = end
    return address


@compiled
def room_to_choose(call, tile):
    """The address of what a tile needs to choose, 0 if there is no memory: rows of numbers, a list of candidates."""
    rows, places = 4 * (call.longest + LANES), 0
    if call.candidate_size:
        places = up_to(4 * places_of(call, call.columns), 64) + num_blocks(call)
    address = allocate(up_to(rows, 64) + up_to(scratch_size(call.top_k), 64) + places)
    tile.rows = address
    tile.scratch = tile.rows + up_to(rows, 64)
    tile.places = tile.scratch + up_to(scratch_size(call.top_k), 64)
    tile.blocks = tile.places + up_to(4 * places_of(call, call.columns), 64)
    return address


# ---- one program


@inlined
def num_blocks(call):
    """How many blocks of candidates there are."""
    return (call.columns + call.candidate_size - 1) // call.candidate_size


@compiled
def list_candidates(call, tile, token, low, high):
    """List the positions of a token's candidates that it sees, and return how many there are."""
    zero(tile.blocks, num_blocks(call))
    for index in range(call.num_candidates):
        block = int32_at(call.candidates, token * call.candidates_stride + index)
        if 0 <= block < num_blocks(call):
            set_byte(tile.blocks + block, 1)
    count, size = 0, call.candidate_size
    for block in range(low // size, (high + size - 1) // size):
        if byte_at(tile.blocks, block):
            for position in range(max(block * size, low), min((block + 1) * size, high)):
                set_int32(tile.places, count, position)
                count += 1
    return count


@inlined
def base_of(call, seq, token, stop):
    """The key of a token's position 0."""
    return seen_by(call, seq, token, stop)[0] if call.relative else 0


@compiled
def read_queries(call, tile, unit):
    """The queries of a block, and for each the keys that it sees."""
    seq, first = int_at(unit, SEQ), int_at(unit, FIRST)
    _, stop = tokens_of(call, seq)
    for token in range(first, int_at(unit, LAST)):
        left, right = seen_by(call, seq, token, stop)
        if call.candidate_size:
            base = base_of(call, seq, token, stop)
            left, right = 0, list_candidates(call, tile, token, left - base, right - base)
        set_int(tile.left, token - first, left)
        set_int(tile.right, token - first, right)
        for head in range(call.num_heads):
            place = token * call.q_token_stride + head * call.q_head_stride
            source = call.q + size_of(call.q_format) * place
            target = tile.q + 4 * ((token - first) * tile.heads + head) * tile.width
            if not tile.paired:
                widen(call.q_format, source, target, call.head_dim)
            elif call.q_format == BFLOAT16:
                copy(target, source, 2 * call.head_dim)
            else:
                widen(call.q_format, source, tile.k, call.head_dim)
                narrow(BFLOAT16, tile.k, target, call.head_dim, 1.0)


@compiled
def list_next(call, tile, seq, base, first, count):
    """The addresses of the next `count` keys and of their scales, which are asked for now.

    While they come, the keys before them are multiplied. Returns how many of them are on no page.
    """
    holes, key, size = 0, 0, size_of(call.key_format)
    while key < count:
        position, run = first + key, count - key
        if call.candidate_size:
            position, run = int32_at(tile.places, position) + base, 1
        page, slot = 0, position
        if not call.packed:
            slot = position % call.page_size
            page = int32_at(call.page_indices, seq * call.table_stride + position // call.page_size)
        run = min(run, call.page_size - slot)
        source = scale = 0
        if 0 <= page < call.num_pages:
            source = call.keys + size * (page * call.page_stride + slot * call.slot_stride)
            scale = call.key_scale + 4 * (page * call.scales_page_stride + slot * call.scales_slot_stride)
            if call.in_bytes:
                scale = call.keys + page * call.page_stride + call.page_size * call.head_dim + 4 * slot
        else:
            holes += run
        for each in range(key, key + run):
            set_int(tile.next_sources, each, source)
            set_int(tile.next_v_sources, each, scale)
            if source:
                prefetch(source, size * call.head_dim)
                source, scale = source + size * call.slot_stride, scale + 4 * call.scales_slot_stride
        key += run
    return holes


@compiled
def turn(keys, count, otherwise, places, target, width):
    """Write so many places of `count` rows, by their addresses, as columns; what is behind them is anything."""
    for key in range(0, count, LANES):
        for place in range(0, places, LANES):
            transpose(keys + 8 * key, count - key, otherwise, place, target + 4 * (place * width + key), width)


@compiled
def read_keys(call, tile, count):
    """Turn a tile's keys into columns, and read their scales."""
    if call.key_format == FLOAT32 or (tile.paired and call.key_format == BFLOAT16):
        turn(tile.sources, count, tile.q, tile.width, tile.turned, tile.keys)
    elif tile.paired:  # four bytes at a time, of which pairs are made afterwards
        turn(tile.sources, count, tile.q, tile.width // 2, tile.k, tile.keys)
        for row in range(tile.width // 2):
            source, target = tile.k + 4 * row * tile.keys, tile.turned + 8 * row * tile.keys
            for key in range(0, count, LANES):
                pairs_of_four_e4m3(source, key, target, tile.keys)
    else:
        read_rows(call.key_format, tile.sources, tile.k, call.head_dim, call.head_dim, count)
        turn(tile.k_rows, count, tile.q, tile.width, tile.turned, tile.keys)
    if call.in_bytes or call.key_scale:
        for key in range(count):
            scale = int_at(tile.v_sources, key) if int_at(tile.sources, key) else 0
            set_float(tile.scales, key, float_at(scale, 0) if scale else np.float32(1))


def _score_of(fma_of_products):
    """s[keys] = the sum over heads of weights * relu(q[heads, width] . turned[width, keys]), by what multiplies."""

    @compiled
    def score(q, turned, weights, s, heads, keys, width, stride):
        none = splat(0.0)
        for key in range(0, keys, COLUMNS):
            columns, first, second = turned + 4 * key, none, none
            for head in range(0, heads, HEADS):
                q0 = q + 4 * head * width
                q1, q2, q3 = q0 + 4 * width, q0 + 8 * width, q0 + 12 * width
                a0 = b0 = a1 = b1 = a2 = b2 = a3 = b3 = none
                for place in range(width):
                    a, b = load(columns, place * stride), load(columns, place * stride + LANES)
                    each = splat(float_at(q0, place))
                    a0, b0 = fma_of_products(each, a, a0), fma_of_products(each, b, b0)
                    each = splat(float_at(q1, place))
                    a1, b1 = fma_of_products(each, a, a1), fma_of_products(each, b, b1)
                    each = splat(float_at(q2, place))
                    a2, b2 = fma_of_products(each, a, a2), fma_of_products(each, b, b2)
                    each = splat(float_at(q3, place))
                    a3, b3 = fma_of_products(each, a, a3), fma_of_products(each, b, b3)
                each = splat(float_at(weights, head))  # and `maximum` keeps the NaN of its second argument
                first, second = fma(each, maximum(none, a0), first), fma(each, maximum(none, b0), second)
                if head + 1 < heads:
                    each = splat(float_at(weights, head + 1))
                    first, second = fma(each, maximum(none, a1), first), fma(each, maximum(none, b1), second)
                if head + 2 < heads:
                    each = splat(float_at(weights, head + 2))
                    first, second = fma(each, maximum(none, a2), first), fma(each, maximum(none, b2), second)
                if head + 3 < heads:
                    each = splat(float_at(weights, head + 3))
                    first, second = fma(each, maximum(none, a3), first), fma(each, maximum(none, b3), second)
            store(s, key, first)
            store(s, key + LANES, second)

    return score


score = _score_of(fma)
score_of_pairs = _score_of(fma_pairs) if PAIRS else score


@compiled
def finish(call, tile, first, last, holes):
    """Make logits of the products of a tile's keys [first, last), or numbers of the same order to choose from."""
    if call.in_bytes or call.key_scale:
        for key in range(first, last, LANES):
            store(tile.s, key, load(tile.s, key) * load(tile.scales, key))
    if holes:
        for key in range(first, last):
            if not int_at(tile.sources, key):
                set_float(tile.s, key, NOTHING)
    if call.top_k:
        for key in range(first, last, LANES):
            store(tile.s, key, ordered(load(tile.s, key)))


@compiled
def score_keys(call, tile, unit, rows):
    """The logits of a block of tokens for a part of the keys; `rows` is where they go if they are chosen from."""
    seq, first, length = int_at(unit, SEQ), int_at(unit, FIRST), int_at(unit, LENGTH)
    _, stop = tokens_of(call, seq)
    tokens, low, high = int_at(unit, LAST) - first, int_at(unit, HIGH), int_at(unit, LOW)
    for token in range(tokens):
        low, high = min(low, int_at(tile.left, token)), max(high, int_at(tile.right, token))
    low, high = max(low, int_at(unit, LOW)), min(high, int_at(unit, HIGH))
    base = base_of(call, seq, first, stop)
    next_holes = list_next(call, tile, seq, base, low, min(tile.keys, high - low))
    for start in range(low, high, tile.keys):
        count, holes, behind = min(tile.keys, high - start), next_holes, start + tile.keys
        turn_to_next(tile)
        read_keys(call, tile, count)
        next_holes = list_next(call, tile, seq, base, behind, min(tile.keys, high - behind))
        for token in range(tokens):
            left, right = int_at(tile.left, token) - start, min(int_at(tile.right, token) - start, count)
            begin = max(left, 0)
            if begin >= right:
                continue
            whole = begin // COLUMNS * COLUMNS
            q, columns = tile.q + 4 * token * tile.heads * tile.width, tile.turned + 4 * whole
            weights = call.weights + 4 * (first + token) * call.weights_token_stride
            s, heads, width = tile.s + 4 * whole, call.num_heads, tile.width
            if tile.paired:
                score_of_pairs(q, columns, weights, s, heads, right - whole, width, tile.keys)
            else:
                score(q, columns, weights, s, heads, right - whole, width, tile.keys)
            finish(call, tile, whole, right, holes)
            if call.top_k:
                target = rows + 4 * (token * length - left + begin)
            else:
                place = start + begin - base_of(call, seq, first + token, stop)
                target = call.logits + 4 * ((first + token) * call.columns + place)
            copy(target, tile.s + 4 * begin, 4 * (right - begin))


@compiled
def clear_unseen(call, tile, unit):
    """The columns of a part that tokens do not see."""
    seq, first = int_at(unit, SEQ), int_at(unit, FIRST)
    low, high = int_at(unit, LOW), min(int_at(unit, HIGH), call.columns)
    _, stop = tokens_of(call, seq)
    for token in range(first, int_at(unit, LAST)):
        base, row = base_of(call, seq, token, stop), token * call.columns
        left, right = int_at(tile.left, token - first) - base, int_at(tile.right, token - first) - base
        fill(call.logits, row + low, row + min(left, high), NOTHING)
        fill(call.logits, row + max(right, low), row + high, NOTHING)


@compiled
def choose(call, tile, unit, rows):
    """The largest of the rows of a block."""
    seq, first, length = int_at(unit, SEQ), int_at(unit, FIRST), int_at(unit, LENGTH)
    _, stop = tokens_of(call, seq)
    for token in range(first, int_at(unit, LAST)):
        left, right = int_at(tile.left, token - first), int_at(tile.right, token - first)
        row, target = rows + 4 * (token - first) * length, call.indices + 4 * token * call.top_k
        places = tile.places if call.candidate_size else 0
        base = base_of(call, seq, token, stop)
        select(row, right - left, call.top_k, left - base, places, target, tile.scratch)


# ---- all programs


@compiled
def program(call, tile, unit):
    """One part of the keys for one block."""
    read_queries(call, tile, unit)
    num_parts = int_at(unit, NUM_PARTS)
    rows = tile.rows
    if num_parts > 1:
        rows = call.rows + 4 * int_at(unit, ROW)
    score_keys(call, tile, unit, rows)
    if not call.top_k:
        clear_unseen(call, tile, unit)
        return
    first_unit = (unit - call.units) // (8 * len(UNIT)) - int_at(unit, PART)
    if num_parts == 1 or add_to(call.counters + 8 * first_unit, 1) == num_parts - 1:
        choose(call, tile, unit, rows)


def work(address):
    """Programs, one after another, until none is left."""
    call = call_of(address)
    memory, choice = new_tile(call), 0
    if memory == 0:
        return NO_MEMORY
    tile = tile_at(memory)
    if call.top_k:
        choice = room_to_choose(call, tile)
        if choice == 0:
            release(memory)
            return NO_MEMORY
    for index in programs(address, call.num_programs):
        program(call, tile, call.units + 8 * len(UNIT) * index)
    release(choice)
    release(memory)
    return 0
