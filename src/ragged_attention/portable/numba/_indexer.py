"""The kernel of `indexer_logits` and `indexer_topk`: logits of queries over keys, and the top-k of these logits.

Packed keys are treated as one page and one sequence of all tokens, in which each token has its own range of keys. With
pages, a token's range begins at key 0 of its sequence. A *block* is a range of consecutive tokens of a sequence. A
program computes one block over one split of its keys, one tile of keys after another, and reads each tile once for all
tokens of the block. It transposes the tile first, so that a vector holds one column of LANES keys: products, relu,
weights and the sum over heads then stay in registers. No sum runs over keys, so there is nothing to merge: logits are
written to the result or, for a top-k, to scratch memory; the last split of a block to finish selects from it.

With candidates, a block is one token, and a key is identified by its index in the token's list of candidates. With
lists of packed keys (`key_lists`), a block is one token too, and a key is identified by its entry in the list.
"""

import numpy as np

from ragged_attention.portable.numba import _records
from ragged_attention.portable.numba._formats import BFLOAT16, FLOAT32, narrow, pairs_of_four_e4m3, size_of, widen
from ragged_attention.portable.numba._products import times_number
from ragged_attention.portable.numba._selection import ordered, scratch_size, select
from ragged_attention.portable.numba._sequences import clearer_of_gaps, kv_len_of, num_sequences, queries_of, within
from ragged_attention.portable.numba._softmax import NOTHING
from ragged_attention.portable.numba._splits import lister, splits_of
from ragged_attention.portable.numba._tiles import advance, read_rows, transpose_keys
from ragged_attention.portable.numba._vectors import (
    LANES,
    PAIRS,
    add_to,
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
    set_byte,
    set_float,
    set_int,
    set_int32,
    splat,
    store,
    zero,
)

FIELDS = _records.Fields(
    operands=("q", "keys", "weights", "key_scale", "starts", "stops", "page_indices", "kv_lens", "cu_q_lens",
              "cu_kv_lens", "num_seqs", "candidate_blocks", "key_lists"),
    results=("logits", "indices"),
    numbers=(
        "num_tokens", "num_heads", "head_dim", "key_format", "in_bytes", "num_pages", "page_size", "packed", "listed",
        "relative",
        "columns", "max_num_seqs", "layout", "capacity", "ratio", "top_k", "num_candidates", "candidate_block_size",
        "block_q", "block_kv",
    ),
    plan=("units", "num_units", "work", "counters", "partials", "row_floats", "longest"),
    strides={"q": "token head", "weights": "token", "page_indices": "seq", "candidate_blocks": "token",
             "key_lists": "token"}
    | dict.fromkeys(("keys", "key_scale"), "page slot"),
    formats=("q",),
    floats=("work",),
)  # fmt: skip
call_of = FIELDS.at
UNIT = ("seq", "first", "last", "low", "high", "split", "num_splits", "length", "row")
unit_at, UNIT_BYTES = _records.record_at(UNIT), 8 * len(UNIT)
SPAN = 1024  # keys per split if logits are the result
SHARES = 32  # for a top-k, only a block with more than 1/SHARES of the total work is split
MAX_FLOATS = 2**18  # logits per block, for a top-k; a single token may have more
HEADS, COLUMNS = 4, 2 * LANES  # heads and keys whose products are computed together


# ---- dividing the work


@inlined
def tokens_of(call, seq):
    return (0, call.num_tokens) if call.packed else queries_of(call, seq)


@compiled
def seen_by(call, seq, token, stop):
    """The range (first, one past the last) of keys that a token sees; its sequence's last token is `stop` - 1."""
    if call.listed:
        return 0, call.columns
    if call.packed:
        start = within(int32_at(call.starts, token), call.page_size)
        end = within(int32_at(call.stops, token), call.page_size)
        return start, max(min(end, start + call.columns) if call.relative else end, start)
    return 0, max(kv_len_of(call, seq) - (stop - token) + 1, 0) // call.ratio


@inlined
def max_candidates(call, keys):
    """The maximum number of a token's candidates among `keys` keys: all keys if the call lists no candidates."""
    return min(keys, call.num_candidates * call.candidate_block_size) if call.candidate_block_size else keys


@inlined
def num_blocks(call):
    """The number of blocks of `candidate_block_size` columns."""
    return (call.columns + call.candidate_block_size - 1) // call.candidate_block_size


@compiled
def block_of(call, seq, first, stop):
    """The end of the block that begins at `first`, its range of keys, and the most keys that one token sees."""
    low, high = seen_by(call, seq, first, stop)
    longest, last = high - low, first + 1
    if call.candidate_block_size:
        longest = max_candidates(call, longest)
        return last, 0, longest, longest
    while last < min(stop, first + call.block_q) and not call.listed:
        left, right = seen_by(call, seq, last, stop)
        length = max(longest, right - left)
        if call.top_k and (last + 1 - first) * length > MAX_FLOATS:
            break
        last, longest, low, high = last + 1, length, min(low, left), max(high, right)
    return last, low, high, longest


@compiled
def divide(call, units):
    """Count the units, or list them if `units` is the address of their list; returns the total work."""
    work, count, call.longest, call.row_floats = 0.0, 0, 0, 0
    for seq in range(num_sequences(call)):
        first, stop = tokens_of(call, seq)
        while first < stop:
            last, low, high, longest = block_of(call, seq, first, stop)
            if call.top_k:
                num_splits = splits_of((last - first) * (high - low), high - low, call.work, SHARES, 0)
            else:  # all columns, because those that no token sees are written too; ranges may span more
                ranges = call.packed and not call.listed
                low, high = 0, max(call.columns, call.page_size) if ranges else call.columns
                num_splits = (high + SPAN - 1) // SPAN
            step = _records.up_to((high - low + num_splits - 1) // max(num_splits, 1), COLUMNS)
            for split in range(num_splits if units else 0):
                unit = unit_at(units + UNIT_BYTES * (count + split))
                unit.seq, unit.first, unit.last, unit.length = seq, first, last, longest
                unit.low, unit.high = low + split * step, min(low + (split + 1) * step, high)
                unit.split, unit.num_splits, unit.row = split, num_splits, call.row_floats
            work += (last - first) * (high - low)
            count += num_splits
            if num_splits > 1 and call.top_k:
                call.row_floats += (last - first) * longest
            call.longest = max(call.longest, (last - first) * longest)
            first = last
    call.num_units = count
    return work


@compiled
def clear(call, first, stop):
    """Write the results of the tokens [first, stop), which see no key."""
    if call.top_k:
        for index in range(first * call.top_k, stop * call.top_k):
            set_int32(call.indices, index, -1)
    else:
        fill(call.logits, first * call.columns, stop * call.columns, NOTHING)


clear_gaps = clearer_of_gaps(tokens_of, clear)
list_units = lister(divide, compiled(lambda call: (call.num_units, call.row_floats)), UNIT_BYTES)


def plan(address):
    """List the units, and write the results of tokens that belong to no sequence."""
    call = call_of(address)
    clear_gaps(call)
    return call.num_units if list_units(call) else _records.NO_MEMORY


# ---- a program's memory

NUMBERS = ("keys", "width", "heads", "paired")
BUFFERS = ("q", "k", "k_rows", "transposed", "s", "scales", "left", "right", "sources", "v_sources", "next_sources",
         "next_v_sources")  # fmt: skip
FOR_TOP_K = ("rows", "scratch", "places", "blocks")
tile_at = _records.record_at((*NUMBERS, *BUFFERS, *FOR_TOP_K))


@inlined
def pairs_up(call):
    """Whether to multiply pairs of bfloat16: it represents queries and keys exactly, and a key fills whole vectors."""
    return (
        PAIRS
        and (call.q_format == BFLOAT16 or size_of(call.q_format) == 1)
        and (call.key_format == BFLOAT16 or size_of(call.key_format) == 1)
        and call.head_dim * size_of(call.key_format) % (4 * LANES) == 0
    )


@compiled
def new_tile(call):
    """Allocate a tile; returns its address, 0 if there is no memory.

    A place is 32 bits: a float32 or a pair of bfloat16, as in `_products`. `v_sources` lists the addresses of the keys'
    scales. The buffers FOR_TOP_K hold ordered logits, the scratch memory of `select`, the columns of a token's
    candidates, and a flag for each block of columns.
    """
    paired = pairs_up(call)
    tokens, keys, heads = call.block_q, _records.up_to(call.block_kv, COLUMNS), _records.up_to(call.num_heads, HEADS)
    width = call.head_dim // 2 if paired else call.head_dim
    rows = scratch = places = blocks = 0
    if call.top_k:
        rows, scratch = 4 * (call.longest + LANES), scratch_size(call.top_k)
        if call.candidate_block_size:
            places, blocks = 4 * max_candidates(call, call.columns), num_blocks(call)
    addresses, bounds = 8 * keys, 8 * tokens
    sizes = (
        4 * tokens * heads * width, 4 * keys * call.head_dim, addresses, 4 * keys * width, 4 * keys, 4 * keys, bounds,
        bounds, addresses, addresses, addresses, addresses, rows, scratch, places, blocks,
    )  # fmt: skip
    address = _records.allocate_arena(len(NUMBERS), _records.on_stack(sizes))
    if address == 0:
        return address
    tile = tile_at(address)
    tile.keys, tile.width, tile.heads, tile.paired = keys, width, heads, paired
    zero(tile.q, 4 * tokens * heads * width)  # the rows that pad the heads to a multiple of HEADS stay 0
    _records.list_rows(tile.k_rows, keys, tile.k, 4 * call.head_dim)
    return address


# ---- one program


@compiled
def list_candidates(call, tile, token, low, high):
    """List a token's candidates among the columns [low, high), in ascending order; returns their number."""
    zero(tile.blocks, num_blocks(call))
    for index in range(call.num_candidates):
        block = int32_at(call.candidate_blocks, token * call.candidate_blocks_token_stride + index)
        if 0 <= block < num_blocks(call):
            set_byte(tile.blocks, block, 1)
    count, size = 0, call.candidate_block_size
    for block in range(low // size, (high + size - 1) // size):
        if byte_at(tile.blocks, block):
            for position in range(max(block * size, low), min((block + 1) * size, high)):
                set_int32(tile.places, count, position)
                count += 1
    return count


@inlined
def base_of(call, seq, token, stop):
    """The key in column 0 of a token's logits."""
    return seen_by(call, seq, token, stop)[0] if call.relative else 0


@compiled
def read_query(call, tile, source, target):
    """Read one head's query into a row of the tile."""
    if not tile.paired:
        widen(call.q_format, source, target, call.head_dim)
    elif call.q_format == BFLOAT16:
        copy(target, source, 2 * call.head_dim)
    else:
        widen(call.q_format, source, tile.k, call.head_dim)
        narrow(BFLOAT16, tile.k, target, call.head_dim, 1.0)


@compiled
def read_queries(call, tile, unit):
    """Read a block's queries and set the range of keys that each token sees."""
    seq, first = unit.seq, unit.first
    _, stop = tokens_of(call, seq)
    for token in range(first, unit.last):
        left, right = seen_by(call, seq, token, stop)
        if call.candidate_block_size:
            base = base_of(call, seq, token, stop)
            left, right = 0, list_candidates(call, tile, token, left - base, right - base)
        set_int(tile.left, token - first, left)
        set_int(tile.right, token - first, right)
        for head in range(call.num_heads):
            place = token * call.q_token_stride + head * call.q_head_stride
            source = call.q + size_of(call.q_format) * place
            target = tile.q + 4 * ((token - first) * tile.heads + head) * tile.width
            read_query(call, tile, source, target)


@inlined
def list_run(call, tile, seq, position, key, most):
    """List keys from `position` on, as next keys from index `key` on: their addresses, and those of their scales.

    At most `most` keys are listed, and none after the page of `position`. Returns their number, and how many of them
    have no valid page.
    """
    page, slot, size = 0, position, size_of(call.key_format)
    if not call.packed:
        slot = position % call.page_size
        page = int32_at(call.page_indices, seq * call.page_indices_seq_stride + position // call.page_size)
    run, source, scale = min(most, call.page_size - slot), 0, 0
    known = 0 <= page < call.num_pages
    if known:
        source = call.keys + size * (page * call.keys_page_stride + slot * call.keys_slot_stride)
        scale = call.key_scale + 4 * (page * call.key_scale_page_stride + slot * call.key_scale_slot_stride)
        if call.in_bytes:
            scale = call.keys + page * call.keys_page_stride + call.page_size * call.head_dim + 4 * slot
    for index in range(key, key + run):
        set_int(tile.next_sources, index, source)
        set_int(tile.next_v_sources, index, scale)
        if source:
            prefetch(source, size * call.head_dim)
            source, scale = source + size * call.keys_slot_stride, scale + 4 * call.key_scale_slot_stride
    return run, 0 if known else run


@compiled
def list_next(call, tile, seq, token, base, first, count):
    """List the addresses of the next `count` keys, from key `first` on, and of their scales, and prefetch the keys.

    The prefetches overlap with the work on the current keys. Returns how many of the next keys have no page.
    """
    holes, key = 0, 0
    while key < count:
        position, run = first + key, count - key
        if call.candidate_block_size:
            position, run = int32_at(tile.places, position) + base, 1
        if call.listed:
            position, run = int32_at(call.key_lists, token * call.key_lists_token_stride + position), 1
            if position < 0 or position >= call.page_size:
                set_int(tile.next_sources, key, 0)
                key, holes = key + 1, holes + 1
                continue
        run, missing = list_run(call, tile, seq, position, key, run)
        key, holes = key + run, holes + missing
    return holes


@compiled
def read_keys(call, tile, count):
    """Transpose a tile's keys, and read their scales."""
    if call.key_format == FLOAT32 or (tile.paired and call.key_format == BFLOAT16):
        transpose_keys(tile.sources, count, tile.q, tile.width, tile.transposed, tile.keys)
    elif tile.paired:  # transpose words of four e4m3 codes, then convert each to two pairs
        transpose_keys(tile.sources, count, tile.q, tile.width // 2, tile.k, tile.keys)
        for row in range(tile.width // 2):
            source, target = tile.k + 4 * row * tile.keys, tile.transposed + 8 * row * tile.keys
            for key in range(0, count, LANES):
                pairs_of_four_e4m3(source, key, target, tile.keys)
    else:
        read_rows(call.key_format, tile.sources, tile.k, call.head_dim, call.head_dim, count)
        transpose_keys(tile.k_rows, count, tile.q, tile.width, tile.transposed, tile.keys)
    if call.in_bytes or call.key_scale:
        for key in range(count):
            scale = int_at(tile.v_sources, key) if int_at(tile.sources, key) else 0
            set_float(tile.scales, key, float_at(scale, 0) if scale else np.float32(1))


def _score_of(fma_of_products):
    """A function for s[keys] = the sum over heads of weights * relu(q[heads, width] @ transposed[width, keys])."""
    add = times_number(fma_of_products)

    @inlined
    def add_head(weights, head, heads, a, b, first, second):
        if head >= heads:
            return first, second
        weight, none = splat(float_at(weights, head)), splat(0.0)
        # `maximum` keeps the NaN of its second argument.
        return fma(weight, maximum(none, a), first), fma(weight, maximum(none, b), second)

    @compiled
    def score(q, transposed, weights, s, heads, keys, width, stride):
        none = splat(0.0)
        for key in range(0, keys, COLUMNS):
            columns, first, second = transposed + 4 * key, none, none
            for head in range(0, heads, HEADS):
                q0 = q + 4 * head * width
                q1, q2, q3 = q0 + 4 * width, q0 + 8 * width, q0 + 12 * width
                a0 = b0 = a1 = b1 = a2 = b2 = a3 = b3 = none
                for place in range(width):
                    a, b = load(columns, place * stride), load(columns, place * stride + LANES)
                    a0, b0 = add(q0, place, a, b, a0, b0)
                    a1, b1 = add(q1, place, a, b, a1, b1)
                    a2, b2 = add(q2, place, a, b, a2, b2)
                    a3, b3 = add(q3, place, a, b, a3, b3)
                first, second = add_head(weights, head, heads, a0, b0, first, second)
                first, second = add_head(weights, head + 1, heads, a1, b1, first, second)
                first, second = add_head(weights, head + 2, heads, a2, b2, first, second)
                first, second = add_head(weights, head + 3, heads, a3, b3, first, second)
            store(s, key, first)
            store(s, key + LANES, second)

    return score


score = _score_of(fma)
score_of_pairs = _score_of(fma_pairs) if PAIRS else score


@compiled
def finish(call, tile, first, last, holes):
    """Scale the logits of a tile's keys [first, last), hide missing keys if `holes`; for a top-k, apply `ordered`."""
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
    """Compute a unit's logits and write them to the result or, for a top-k, to `rows`."""
    seq, first, length = unit.seq, unit.first, unit.length
    _, stop = tokens_of(call, seq)
    tokens, low, high = unit.last - first, unit.high, unit.low
    for token in range(tokens):
        low, high = min(low, int_at(tile.left, token)), max(high, int_at(tile.right, token))
    low, high = max(low, unit.low), min(high, unit.high)
    base = base_of(call, seq, first, stop)
    next_holes = list_next(call, tile, seq, first, base, low, min(tile.keys, high - low))
    for start in range(low, high, tile.keys):
        count, holes, after = min(tile.keys, high - start), next_holes, start + tile.keys
        advance(tile)
        read_keys(call, tile, count)
        next_holes = list_next(call, tile, seq, first, base, after, min(tile.keys, high - after))
        for token in range(tokens):
            left, right = int_at(tile.left, token) - start, min(int_at(tile.right, token) - start, count)
            begin = max(left, 0)
            if begin >= right:
                continue
            whole = begin // COLUMNS * COLUMNS
            q, columns = tile.q + 4 * token * tile.heads * tile.width, tile.transposed + 4 * whole
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
    """Write minus infinity to the unit's columns that a token does not see."""
    seq, first = unit.seq, unit.first
    low, high = unit.low, min(unit.high, call.columns)
    _, stop = tokens_of(call, seq)
    for token in range(first, unit.last):
        base, row = base_of(call, seq, token, stop), token * call.columns
        left, right = int_at(tile.left, token - first) - base, int_at(tile.right, token - first) - base
        fill(call.logits, row + low, row + min(left, high), NOTHING)
        fill(call.logits, row + max(right, low), row + high, NOTHING)


@compiled
def select_keys(call, tile, unit, rows):
    """Write the top-k of each token of a unit."""
    seq, first, length = unit.seq, unit.first, unit.length
    _, stop = tokens_of(call, seq)
    for token in range(first, unit.last):
        left, right = int_at(tile.left, token - first), int_at(tile.right, token - first)
        row, target = rows + 4 * (token - first) * length, call.indices + 4 * token * call.top_k
        places = tile.places if call.candidate_block_size else 0
        base = base_of(call, seq, token, stop)
        select(row, right - left, call.top_k, left - base, places, target, tile.scratch)


# ---- all programs


@compiled
def program(call, tile, address):
    """Compute the unit at `address`: one block over one split of its keys."""
    unit = unit_at(address)
    read_queries(call, tile, unit)
    rows = call.partials + 4 * unit.row if unit.num_splits > 1 else tile.rows
    score_keys(call, tile, unit, rows)
    if not call.top_k:
        clear_unseen(call, tile, unit)
        return
    first_unit = (address - call.units) // UNIT_BYTES - unit.split
    if unit.num_splits == 1 or add_to(call.counters + 8 * first_unit, 1) == unit.num_splits - 1:
        select_keys(call, tile, unit, rows)


def work(address):
    """Run programs until none is left."""
    call = call_of(address)
    memory = new_tile(call)
    for index in _records.programs(address, memory):
        program(call, tile_at(memory), call.units + UNIT_BYTES * index)
    return 0
