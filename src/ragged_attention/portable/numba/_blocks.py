"""The kernel of `block_scores` and `select_blocks`: scores of blocks of keys for each index head, and their top-k.

As in `_indexer`, packed keys are treated as one page and one sequence of all tokens. A *column* is a position counted
from the first key that a token sees, so a token sees the columns [0, n). A *unit* is a range of consecutive tokens of a
sequence with one split of their columns. With packed keys, tokens share a unit only if column 0 is the same key for all
of them. Splits begin and end at block boundaries. A program computes one unit: it reads each tile of keys once for all
tokens, transposes it, multiplies it with the queries, and raises the score of each block to the largest product. Scores
are written to the result or, for a top-k, to scratch memory. Of the units of a token range, the last one to finish
selects the top-k from this memory.
"""

from ragged_attention.portable.numba import _records
from ragged_attention.portable.numba._formats import size_of
from ragged_attention.portable.numba._indexer import list_run, pairs_up, read_keys, read_query, tokens_of
from ragged_attention.portable.numba._products import COLUMNS, ROWS, product, product_of_pairs
from ragged_attention.portable.numba._selection import INFINITY, ordered, scratch_size, select
from ragged_attention.portable.numba._sequences import clearer_of_gaps, kv_len_of, num_sequences, within
from ragged_attention.portable.numba._softmax import NOTHING
from ragged_attention.portable.numba._splits import lister, splits_of
from ragged_attention.portable.numba._tiles import advance
from ragged_attention.portable.numba._vectors import (
    LANES,
    add_to,
    compiled,
    fill,
    float_at,
    inlined,
    int32_at,
    int_at,
    larger_or_nan,
    largest_or_nan,
    load,
    set_float,
    set_int,
    set_int32,
    splat,
    store,
)

FIELDS = _records.Fields(
    operands=("q", "keys", "key_scale", "starts", "stops", "page_indices", "kv_lens", "cu_q_lens", "cu_kv_lens",
              "num_seqs"),
    results=("scores", "blocks"),
    numbers=(
        "num_tokens", "num_heads", "num_kv_heads", "group", "head_dim", "key_format", "in_bytes", "num_pages",
        "page_size", "packed", "columns", "num_blocks", "block_size", "max_num_seqs", "layout", "capacity", "top_k",
        "init_blocks", "local_blocks", "block_q", "block_kv",
    ),
    plan=("units", "num_units", "work", "counters", "partials", "row_floats", "longest"),
    strides={"q": "token head", "page_indices": "seq", "keys": "page slot head", "key_scale": "page slot head"},
    formats=("q",),
    floats=("work",),
)  # fmt: skip
call_of = FIELDS.at
UNIT = ("seq", "first", "last", "base", "seen", "low", "high", "split", "num_splits", "blocks", "row")
unit_at, UNIT_BYTES = _records.record_at(UNIT), 8 * len(UNIT)
SPAN = 1024  # columns per split if scores are the result, a multiple of every block size
SHARES = 32  # for a top-k, only a unit with more than 1/SHARES of the total work is split
MAX_FLOATS = 2**18  # scores per unit, for a top-k; a single token may have more
FORCED = INFINITY + 1  # the `ordered` integer of a block that is always selected


# ---- dividing the work


@compiled
def seen_by(call, seq, token, stop):
    """The first key that a token sees and the number of its columns; its sequence's last token is `stop` - 1."""
    if call.packed:
        start = within(int32_at(call.starts, token), call.page_size)
        end = within(int32_at(call.stops, token), call.page_size)
        return start, min(max(end - start, 0), call.columns)
    return 0, max(kv_len_of(call, seq) - (stop - token) + 1, 0)


@inlined
def blocks_in(call, columns):
    return (columns + call.block_size - 1) // call.block_size


@compiled
def range_of(call, seq, first, stop):
    """The end of the token range from `first` on, its tokens' first key, and the most columns that a token sees."""
    base, longest = seen_by(call, seq, first, stop)
    last = first + 1
    while last < min(stop, first + call.block_q):
        start, seen = seen_by(call, seq, last, stop)
        seen = max(seen, longest)
        too_many = call.top_k and (last + 1 - first) * call.num_heads * blocks_in(call, seen) > MAX_FLOATS
        if start != base or too_many:
            break
        last, longest = last + 1, seen
    return last, base, longest


@compiled
def divide(call, units):
    """Count the units, or list them if `units` is the address of their list; returns the total work."""
    work, count, call.longest, call.row_floats = 0.0, 0, 0, 0
    for seq in range(num_sequences(call)):
        first, stop = tokens_of(call, seq)
        while first < stop:
            last, base, longest = range_of(call, seq, first, stop)
            num_splits, step, high = (call.columns + SPAN - 1) // SPAN, SPAN, call.columns
            if call.top_k:
                num_splits = splits_of((last - first) * longest, longest, call.work, SHARES, 0)
                step = _records.up_to((longest + num_splits - 1) // num_splits, max(COLUMNS, call.block_size))
                high = longest
            for split in range(num_splits if units else 0):
                unit = unit_at(units + UNIT_BYTES * (count + split))
                unit.seq, unit.first, unit.last, unit.base, unit.seen = seq, first, last, base, longest
                unit.low, unit.high = min(split * step, high), min((split + 1) * step, high)
                unit.split, unit.num_splits, unit.row = split, num_splits, call.row_floats
                unit.blocks = blocks_in(call, longest) if call.top_k else call.num_blocks
            work += (last - first) * longest
            count += num_splits
            floats = (last - first) * call.num_heads * blocks_in(call, longest)
            if num_splits > 1 and call.top_k:
                call.row_floats += floats
            call.longest = max(call.longest, floats)
            first = last
    call.num_units = count
    return work


@compiled
def clear(call, first, stop):
    """Write the results of the tokens [first, stop), which belong to no sequence."""
    if call.top_k:
        for index in range(first * call.num_heads * call.top_k, stop * call.num_heads * call.top_k):
            set_int32(call.blocks, index, -1)
    else:
        row = call.num_heads * call.num_blocks
        fill(call.scores, first * row, stop * row, NOTHING)


clear_gaps = clearer_of_gaps(tokens_of, clear)
list_units = lister(divide, compiled(lambda call: (call.num_units, call.row_floats)), UNIT_BYTES)


def plan(address):
    """List the units, and write the results of tokens that belong to no sequence."""
    call = call_of(address)
    clear_gaps(call)
    return call.num_units if list_units(call) else _records.NO_MEMORY


# ---- a program's memory

NUMBERS = ("keys", "width", "rows", "paired")
BUFFERS = ("q", "k", "k_rows", "transposed", "s", "scales", "counts", "sources", "v_sources", "next_sources",
           "next_v_sources", "scores", "order", "scratch")  # fmt: skip
tile_at = _records.record_at((*NUMBERS, *BUFFERS))


@compiled
def new_tile(call):
    """Allocate a tile; returns its address, 0 if there is no memory.

    A place is 32 bits: a float32 or a pair of bfloat16, as in `_products`. `q` has `rows` rows for each KV head,
    `counts` the number of columns that each token sees. The buffers `scores`, `order` and `scratch` serve a top-k: the
    scores of a unit, a row of them as `ordered` integers, and the scratch memory of `select`.
    """
    paired = pairs_up(call)
    keys, rows = _records.up_to(call.block_kv, COLUMNS), _records.up_to(call.block_q * call.group, ROWS)
    width = call.head_dim // 2 if paired else call.head_dim
    scores = order = scratch = 0
    if call.top_k:
        scores, order = 4 * (call.longest + LANES), 4 * (blocks_in(call, call.columns) + LANES)
        scratch = scratch_size(call.top_k)
    addresses, floats = 8 * keys, 4 * keys
    sizes = (
        4 * call.num_kv_heads * rows * width, floats * call.head_dim, addresses, floats * width, rows * floats, floats,
        8 * call.block_q, addresses, addresses, addresses, addresses, scores, order, scratch,
    )  # fmt: skip
    address = _records.allocate_arena(len(NUMBERS), _records.on_stack(sizes))
    if address == 0:
        return address
    tile = tile_at(address)
    tile.keys, tile.width, tile.rows, tile.paired = keys, width, rows, paired
    _records.list_rows(tile.k_rows, keys, tile.k, 4 * call.head_dim)
    return address


# ---- one program


@compiled
def read_queries(call, tile, unit):
    """Read a unit's queries, and set the number of columns that each token sees."""
    _, stop = tokens_of(call, unit.seq)
    for token in range(unit.first, unit.last):
        set_int(tile.counts, token - unit.first, seen_by(call, unit.seq, token, stop)[1])
        for head in range(call.num_heads):
            source = call.q + size_of(call.q_format) * (token * call.q_token_stride + head * call.q_head_stride)
            row = head // call.group * tile.rows + (token - unit.first) * call.group + head % call.group
            target = tile.q + 4 * row * tile.width
            read_query(call, tile, source, target)


@compiled
def list_next(call, tile, unit, column, count):
    """List the addresses of the next `count` keys, and of their scales, in the first head; prefetch these keys.

    Returns how many of the next keys have no page.
    """
    holes, key = 0, 0
    while key < count:
        run, missing = list_run(call, tile, unit.seq, unit.base + column + key, key, count - key)
        key, holes = key + run, holes + missing
    return holes


@compiled
def next_head(call, tile, count):
    """Change the addresses of keys and scales to those of the next head."""
    step = size_of(call.key_format) * call.keys_head_stride
    for key in range(count):
        source = int_at(tile.sources, key)
        if source:
            set_int(tile.sources, key, source + step)
            set_int(tile.v_sources, key, int_at(tile.v_sources, key) + 4 * call.key_scale_head_stride)


@compiled
def raise_scores(s, count, column, size, target):
    """Raise each block's score in `target` to the largest of its products.

    `s` has the products of `count` columns from `column` on. A block has `size` columns.
    """
    index = 0
    while index < count:
        block = (column + index) // size
        stop = min((block + 1) * size - column, count)
        top = float_at(target, block)
        if stop - index >= LANES:
            tops = splat(top)
            while index + LANES <= stop:
                tops = larger_or_nan(load(s, index), tops)
                index += LANES
            top = largest_or_nan(tops)
        while index < stop:
            value = float_at(s, index)
            if value > top or value != value:
                top = value
            index += 1
        set_float(target, block, top)


@inlined
def multiply_head(tile, head, rows, count):
    """Set `s` to the products of a head's `rows` queries and `count` transposed keys."""
    q, k, s, width, s_width = tile.q + 4 * head * tile.rows * tile.width, tile.transposed, tile.s, tile.width, tile.keys
    rows, columns = _records.up_to(rows, ROWS), _records.up_to(count, COLUMNS)
    if tile.paired:
        product_of_pairs(q, k, s, rows, width, columns, width, 1, s_width, s_width, 1.0, 0)
    else:
        product(q, k, s, rows, width, columns, width, 1, s_width, s_width, 1.0, 0)


@compiled
def score_keys(call, tile, unit, scores):
    """Compute the scores of a unit, `unit.blocks` for each token and head, from the columns of its split."""
    tokens, group = unit.last - unit.first, call.group
    if unit.low == unit.high:  # an empty range, rounded to whole blocks, would include a block of another split
        return
    begin, end = unit.low // call.block_size, blocks_in(call, unit.high)
    for row in range(tokens * call.num_heads):
        fill(scores, row * unit.blocks + begin, row * unit.blocks + end, NOTHING)
    high = min(unit.high, unit.seen)
    next_holes = list_next(call, tile, unit, unit.low, min(tile.keys, high - unit.low))
    for start in range(unit.low, high, tile.keys):
        count, holes, after = min(tile.keys, high - start), next_holes, start + tile.keys
        advance(tile)
        next_holes = list_next(call, tile, unit, after, min(tile.keys, high - after))
        for head in range(call.num_kv_heads):
            if head:
                next_head(call, tile, count)
            read_keys(call, tile, count)
            multiply_head(tile, head, tokens * group, count)
            for row in range(tokens * group):
                token, s = row // group, tile.s + 4 * row * tile.keys
                seen = min(int_at(tile.counts, token) - start, count)
                if seen > 0:
                    if call.in_bytes or call.key_scale:
                        for key in range(0, seen, LANES):
                            store(s, key, load(s, key) * load(tile.scales, key))
                    if holes:
                        for key in range(seen):
                            if not int_at(tile.sources, key):
                                set_float(s, key, NOTHING)
                    place = (token * call.num_heads + head * group + row % group) * unit.blocks
                    raise_scores(s, seen, start, call.block_size, scores + 4 * place)


@compiled
def force(scores, order, count, init_blocks, local_blocks):
    """Replace the `ordered` integers of blocks that are always selected; `scores` is the same row as floats."""
    last = count - 1
    while last >= 0 and float_at(scores, last) == NOTHING:
        last -= 1
    for block in range(last + 1):
        if (block < init_blocks or block > last - local_blocks) and float_at(scores, block) != NOTHING:
            set_int32(order, block, FORCED)


@compiled
def select_blocks(call, tile, unit, scores):
    """Write the blocks that each token and head of a unit selects."""
    count = unit.blocks
    for row in range((unit.last - unit.first) * call.num_heads):
        source = scores + 4 * row * count
        for block in range(0, count, LANES):
            store(tile.order, block, ordered(load(source, block)))
        if call.init_blocks or call.local_blocks:
            force(source, tile.order, count, call.init_blocks, call.local_blocks)
        target = call.blocks + 4 * (unit.first * call.num_heads + row) * call.top_k
        select(tile.order, count, call.top_k, 0, 0, target, tile.scratch)


# ---- all programs


@compiled
def program(call, tile, address):
    """Compute the unit at `address`."""
    unit = unit_at(address)
    read_queries(call, tile, unit)
    if not call.top_k:
        score_keys(call, tile, unit, call.scores + 4 * unit.first * call.num_heads * call.num_blocks)
        return
    scores = call.partials + 4 * unit.row if unit.num_splits > 1 else tile.scores
    score_keys(call, tile, unit, scores)
    first_unit = (address - call.units) // UNIT_BYTES - unit.split
    if unit.num_splits == 1 or add_to(call.counters + 8 * first_unit, 1) == unit.num_splits - 1:
        select_blocks(call, tile, unit, scores)


def work(address):
    """Run programs until none is left."""
    call = call_of(address)
    memory = new_tile(call)
    for index in _records.programs(address, memory):
        program(call, tile_at(memory), call.units + UNIT_BYTES * index)
    return 0
