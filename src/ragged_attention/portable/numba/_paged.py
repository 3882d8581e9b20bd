"""Attention over K and V, in pages of any layout or packed: the kernel of four operations.

Packed keys are treated as pages of one key each; the index of a page is the row of its key.

A *block* is a range of consecutive queries of a sequence. The query heads that share a KV head are rows of one tile, so
each K and V is read once for all of them. A *unit* is a block with one split of the keys that it sees: keys that the
causal mask, the window, the ranges of keys or the lists of blocks of keys hide from the whole block are skipped. A
program computes one unit for one KV head. A block with a large share of the work has several splits, and the last of
them to finish merges them. How the work is divided depends on the shapes, lengths and ranges alone.
"""

import numpy as np

from ragged_attention.portable.numba import _masks, _selected, _splits, _tiles
from ragged_attention.portable.numba._formats import BFLOAT16, FLOAT32, pair, scale_of, size_of, widen
from ragged_attention.portable.numba._products import ROWS, mix_listed
from ragged_attention.portable.numba._records import Fields, up_to
from ragged_attention.portable.numba._sequences import (
    first_key_of,
    gaps_by,
    kv_len_of,
    num_sequences,
    queries_of,
    within,
)
from ragged_attention.portable.numba._softmax import LOG2E, NOTHING, add_slope, scale_row, weigh
from ragged_attention.portable.numba._vectors import (
    LANES,
    byte_at,
    compiled,
    copy,
    float_at,
    inlined,
    int32_at,
    int_at,
    prefetch,
    set_float,
    set_int,
)

FIELDS = Fields(
    operands=(
        "q", "k_pages", "v_pages", "kv_lens", "page_indices", "cu_q_lens", "cu_kv_lens", "num_seqs", "sinks",
        "alibi_slopes", "relative_bias", "k_scale", "v_scale", "k_scales", "v_scales", "draft_mask", "key_ranges",
        "selected",
    ),
    results=("out", "lse"),
    numbers=(
        "num_tokens", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "max_num_seqs", "layout", "out_format",
        "num_pages", "page_size", "capacity", "v_offset", "causal", "sliding_window", "drafted", "draft_width",
        "num_ranges", "num_lists", "num_selected", "block_size", "scale", "soft_cap", "bias_width", "bias_stride",
        "bias_at_own", "block_q", "block_kv", "num_splits",
    ),
    plan=(*_splits.SPLITS, "named_size"),
    strides={"q": "token head", "page_indices": "seq", "draft_mask": "token"}
    | dict.fromkeys(("k_pages", "v_pages", "k_scales", "v_scales"), "page slot head"),
    formats=("q", "k_pages"),
    scales=("k_scale", "v_scale"),
    floats=("scale", "soft_cap", "work"),
)  # fmt: skip
call_of = FIELDS.at
gaps = gaps_by(queries_of)


# ---- dividing the work


@compiled
def range_of(call, first_new, kv_len, first, last):
    """The range of keys that the queries [first, last) of a sequence see; query 0 is at position `first_new`."""
    low, high = 0, kv_len
    if call.causal and not call.drafted:
        high = min(first_new + last, kv_len)
    if call.sliding_window:
        low = max(first_new + first - call.sliding_window + 1, 0)
    return low, max(high, low)


@compiled
def divide(call, units):
    """Split all blocks into units, which are listed unless `units` is 0 (see `add_splits`); returns the total work."""
    work, call.num_units, call.num_partials, call.named_size = 0.0, 0, 0, 0
    for seq in range(num_sequences(call)):
        start, stop = queries_of(call, seq)
        kv_len = kv_len_of(call, seq)
        first_new = kv_len - (stop - start)
        for first in range(0, stop - start, call.block_q):
            last = min(first + call.block_q, stop - start)
            # Every split stores a partial result for each query, so blocks of more queries have fewer splits.
            max_splits = max(call.num_splits // (last - first), 1) if call.num_splits else 0
            rows = start + first, start + last
            low, high = range_of(call, first_new, kv_len, first, last)
            if call.num_lists:
                low, high = (0, kv_len) if call.key_ranges else (low, high)
                work += _selected.divide_lists(call, units, seq, rows[0], rows[1], low, high, max_splits)
            elif call.key_ranges:
                work += _masks.divide_spans(call, units, seq, 0, rows[0], rows[1], rows, kv_len, max_splits)
            else:
                work += _splits.add_splits(call, units, seq, 0, rows[0], rows[1], low, high, high - low, max_splits)
    return work


plan_units = _splits.planner(divide)


def plan(address):
    """List the units, and write the results of queries that belong to no sequence."""
    call = call_of(address)
    for first, stop in gaps(call):
        _splits.clear(call, first, stop)
    # The maximum number of queries in a block with several splits; see `divide`.
    queries = min(call.block_q, call.num_splits // 2) if call.num_splits else call.block_q
    return plan_units(call, queries * (call.num_q_heads // call.num_kv_heads))


# ---- one program


@inlined
def pairs_up(call):
    """Whether to multiply pairs of bfloat16: q, K and V are exact in bfloat16 and have no scales per position."""
    scaled = call.k_scales or call.v_scales
    return not scaled and _tiles.pairs_with(call.q_format, call.k_pages_format, call.head_dim, call.v_head_dim)


@inlined
def reads_in_place(call, tile):
    """Whether keys are multiplied in the cache itself, without being copied to the tile."""
    if tile.paired:
        return call.k_pages_format == BFLOAT16
    return call.k_pages_format == FLOAT32 and call.head_dim % LANES == 0 and not call.k_scales


@inlined
def factor_of(call, head):
    """The factor of q . k. It includes log2(e); with a soft cap, `capped` multiplies by log2(e) after capping."""
    k_scale = scale_of(call.k_scale, call.k_scale_format, call.k_scale_stride, call.k_scale_number, head)
    return call.scale * k_scale * (LOG2E if call.soft_cap == 0 else np.float32(1))


@inlined
def read_queries(call, tile, unit, head):
    """Read a block's queries for a KV head and set the bounds of what each row sees; returns the number of rows."""
    group, (_, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    kv_len = kv_len_of(call, unit.seq)
    rows, row = (unit.last - unit.first) * group, 0
    in_place = reads_in_place(call, tile)
    _tiles.begin(tile, rows)
    for token in range(unit.first, unit.last):
        left, right = _masks.seen_between(call, token, stop, kv_len)
        for q_head in range(head * group, (head + 1) * group):
            source = call.q + size_of(call.q_format) * (token * call.q_token_stride + q_head * call.q_head_stride)
            _tiles.read_query(tile, row, call.q_format, source, call.head_dim, in_place)
            _tiles.set_bounds(tile, row, left, right)
            row += 1
    return rows


@inlined
def place_of(call, seq, position):
    """The index of a position's page in its sequence's block table, and the position's slot in that page."""
    if call.cu_kv_lens:
        return first_key_of(call, seq) + position, 0
    return position // call.page_size, position % call.page_size


@inlined
def page_at(call, seq, number):
    """The page at an index of a sequence's block table; the table may hold any int32."""
    return number if call.cu_kv_lens else int32_at(call.page_indices + 4 * seq * call.page_indices_seq_stride, number)


@compiled
def list_next(call, tile, seq, head, first, key, count):
    """List the addresses of the next keys [key, count) of a tile, from position `first` on, and prefetch the keys.

    The prefetches overlap with the work on the current keys. Returns how many of the positions have no page.
    """
    holes, size = 0, size_of(call.k_pages_format)
    number, slot = place_of(call, seq, first)
    while key < count:
        page, run = page_at(call, seq, number), min(call.page_size - slot, count - key)
        k = v = k_step = v_step = 0
        if 0 <= page < call.num_pages:
            k = page * call.k_pages_page_stride + slot * call.k_pages_slot_stride + head * call.k_pages_head_stride
            v = page * call.v_pages_page_stride + slot * call.v_pages_slot_stride + head * call.v_pages_head_stride
            k, v = call.k_pages + size * k, call.v_pages + size * (v + call.v_offset)
            k_step, v_step = size * call.k_pages_slot_stride, size * call.v_pages_slot_stride
        else:
            holes += run
        for index in range(key, key + run):
            set_int(tile.next_sources, index, k)
            set_int(tile.next_v_sources, index, v)
            if k:
                prefetch(k, size * call.head_dim)
            k, v = k + k_step, v + v_step
        key, number, slot = key + run, number + 1, 0
    return holes


@compiled
def list_seen(call, tile, unit, head, first, stop, whole):
    """`list_next` for the next keys of a unit that a tile holds; if not `whole`, some of them may be unseen."""
    count = min(tile.keys, stop - first)
    holes = list_next(call, tile, unit.seq, head, first, 0, count)
    if not whole:
        holes += _masks.drop_unseen(call, tile, (unit.first, unit.last), kv_len_of(call, unit.seq), first, count)
    return holes


@compiled
def prefetch_values(call, tile, first, stop):
    """Prefetch the values of the next keys [first, stop)."""
    for key in range(first, stop):
        source = int_at(tile.next_v_sources, key)
        if source:
            prefetch(source, size_of(call.k_pages_format) * call.v_head_dim)


@compiled
def scale_rows(scales, page_stride, slot_stride, call, seq, head_offset, first, count, rows, width):
    """Multiply `count` rows of the tile, for the positions from `first` on, by the scales of their positions."""
    for key in range(count):
        number, slot = place_of(call, seq, first + key)
        page = page_at(call, seq, number)
        if 0 <= page < call.num_pages:
            scale = float_at(scales, page * page_stride + slot * slot_stride + head_offset)
            scale_row(rows + 4 * key * width, width, scale)


@compiled
def hide_undrafted(call, tile, unit, first, count):
    """Hide from the unit's rows the new tokens that the draft mask excludes.

    The value of a token that no row sees is treated as missing, so that a NaN in it does not reach the results.
    """
    group, (start, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    first_new = kv_len_of(call, unit.seq) - (stop - start)
    for key in range(max(first_new - first, 0), count):
        draft, seen = first + key - first_new, False
        for token in range(unit.first, unit.last):
            row = (token - unit.first) * group
            if draft < call.draft_width and byte_at(call.draft_mask, token * call.draft_mask_token_stride + draft):
                seen = seen or int_at(tile.left, row) <= first + key
            else:
                for hidden in range(row, row + group):
                    set_float(tile.s, hidden * tile.s_width + key, NOTHING)
        if not seen:
            set_int(tile.v_sources, key, 0)


@compiled
def add_slopes(call, tile, unit, head, rows, first, count):
    """Add what ALiBi does to the logits of `count` keys, from position `first` on."""
    group, (_, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    position = kv_len_of(call, unit.seq) - stop + unit.first
    for row in range(rows):
        slope = float_at(call.alibi_slopes, head * group + row % group) * LOG2E
        add_slope(tile.s + 4 * row * tile.s_width, up_to(count, LANES), slope, first - position - row // group)


@compiled
def add_relative_bias(call, tile, unit, head, rows, first, count):
    """Add the relative bias to the logits of `count` keys, from position `first` on."""
    group, (_, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    for row in range(rows):
        token, q_head = unit.first + row // group, head * group + row % group
        table = call.relative_bias + 4 * (token * call.bias_stride + q_head * call.bias_width)
        column, s = kv_len_of(call, unit.seq) - stop + token - first + call.bias_at_own, row * tile.s_width
        for key in range(count):
            bias = float_at(table, min(max(column - key, 0), call.bias_width - 1))
            set_float(tile.s, s + key, float_at(tile.s, s + key) + bias * LOG2E)


@compiled
def list_named(call, tile, unit, head, base, position, stop):
    """List the next keys of [position, stop) that the unit's lists name, from a range of as many keys as a tile holds.

    `base` is the first block of the tile's table. Returns the first of the keys, how many they are and how many of them
    have no page.
    """
    first, count, holes = _selected.next_key(call, tile.named, base, position, stop), 0, 0
    begin, stop = first, min(first + tile.keys, stop)
    while begin < stop:
        end = _selected.end_of_run(call, tile.named, base, begin, stop)
        holes += list_next(call, tile, unit.seq, head, begin, count, count + end - begin)
        for index in range(end - begin):
            set_int(tile.next_positions, count + index, begin + index)
        count += end - begin
        begin = _selected.next_key(call, tile.named, base, end, stop)
    return first, count, holes


@compiled
def read_named(call, tile, first, count, shared):
    """Read `count` listed keys and values and note where each lies, at its distance from position `first`.

    If tokens share them, even keys that could be multiplied in the cache are copied, so that they lie close together.
    Values for one token are read later, see `add_values`.
    """
    in_place, code = reads_in_place(call, tile), call.k_pages_format
    for index in range(count):
        source, value = int_at(tile.sources, index), int_at(tile.v_sources, index)
        key = int_at(tile.positions, index) - first
        k, v = tile.k + 4 * key * tile.width, tile.v + 4 * key * tile.v_width
        set_int(tile.seen, key, source)
        set_int(tile.k_rows, key, k if shared or not in_place else source)
        set_int(tile.v_rows, key, v if shared else value)
        if not source:
            continue
        if not in_place and tile.paired:
            pair(code, source, source + size_of(code) * tile.width, k, tile.width)
        elif not in_place:
            widen(code, source, k, call.head_dim)
        elif shared:
            copy(k, source, 4 * tile.width)
        if shared:
            widen(code, value, v, call.v_head_dim)


@compiled
def sees(call, token, first_new, kv_len, position):
    """Whether a query token sees a key within the bounds of its masks and of its lists."""
    if call.drafted and position >= first_new:
        draft = position - first_new
        place = token * call.draft_mask_token_stride + draft
        return draft < call.draft_width and byte_at(call.draft_mask, place) != 0
    return call.num_ranges < 2 or _masks.sees(call, token, token + 1, kv_len, position, position + 1)


@compiled
def list_own(call, tile, unit, token, base, first, stop, holes):
    """List the keys of [first, stop) that a token sees, from `read_named`; if `holes`, some of them have no page."""
    (start, end), kv_len, count = queries_of(call, unit.seq), kv_len_of(call, unit.seq), 0
    left, right = _masks.seen_between(call, token, end, kv_len)
    row = tile.named + (token - unit.first + 1) * tile.named_row
    named = _selected.list_marked(call, row, base, max(left, first), min(right, stop), tile.own_positions)
    each = holes or call.drafted or call.num_ranges > 1
    for index in range(named):
        position = int_at(tile.own_positions, index)
        key = position - first
        if not each or (int_at(tile.seen, key) and sees(call, token, kv_len - (end - start), kv_len, position)):
            set_int(tile.own_positions, count, position)
            set_int(tile.own_keys, count, int_at(tile.k_rows, key))
            set_int(tile.own_values, count, int_at(tile.v_rows, key))
            count += 1
    return count


@compiled
def add_biases(call, tile, unit, head, token, count):
    """Add the biases by distance to the logits of `count` listed keys and a token's rows."""
    group, (_, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    own = kv_len_of(call, unit.seq) - stop + token
    for row in range(group):
        q_head = head * group + row
        table = call.relative_bias + 4 * (token * call.bias_stride + q_head * call.bias_width)
        for key in range(count):
            distance, place = int_at(tile.own_positions, key) - own, row * tile.s_width + key
            logit = float_at(tile.s, place)
            if call.alibi_slopes:
                logit += float_at(call.alibi_slopes, q_head) * LOG2E * distance
            if call.relative_bias:
                logit += float_at(table, within(call.bias_at_own - distance, call.bias_width - 1)) * LOG2E
            set_float(tile.s, place, logit)


@compiled
def add_values(call, tile, rows, count, shared):
    """Weigh the `count` listed keys of some rows by their logits, and add the weighted values to the results.

    Values that tokens share are float32, and so are their weights: a pair of bfloat16 would hold two neighbouring keys,
    of which a token may see one.
    """
    columns, s_width, code = tile.columns, tile.s_width, call.k_pages_format
    if shared:
        for row in range(rows):
            s, out = tile.s + 4 * row * s_width, tile.out + 4 * row * columns
            weigh(s, 0, count, up_to(count, LANES), row, tile.m_i, tile.l_i, out, columns, False)
        mix_listed(tile.s, tile.own_values, tile.out, up_to(rows, ROWS), count, columns, s_width, columns, False)
        return
    _tiles.weigh_keys(tile, rows, 0, count, 0)
    if tile.paired:
        _tiles.pair_values(code, tile.own_values, tile.v, tile.v_width, call.v_head_dim, count)
    else:
        _tiles.read_rows(code, tile.own_values, tile.v, tile.v_width, call.v_head_dim, count)
    _tiles.mix_values(tile, rows, 0, count)


@compiled
def attend_listed(call, tile, unit, head, token, count, factor, ahead):
    """Attend from a token's rows to the `count` keys that `list_own` has listed; prefetch the next values `ahead`."""
    group = call.num_q_heads // call.num_kv_heads
    first, aligned = (token - unit.first) * group, group % ROWS == 0
    if aligned:
        _tiles.shift(tile, first)
    else:
        _tiles.pack_rows(tile, first, group)
    for row in range(group):
        _tiles.set_bounds(tile, row, 0, count)
    _tiles.multiply_keys(tile, tile.own_keys, group, 0, count, factor, call.soft_cap)
    prefetch_values(call, tile, ahead[0], ahead[1])
    if call.alibi_slopes or call.relative_bias:
        add_biases(call, tile, unit, head, token, count)
    add_values(call, tile, group, count, unit.last - unit.first > 1)
    if aligned:
        _tiles.shift(tile, -first)
    else:
        _tiles.unpack_rows(tile, first, group)


@compiled
def attend_to_blocks(call, tile, unit, head):
    """`attend` for a call with lists of blocks.

    Keys that any token names are read once for all tokens, each of which then visits its own.
    """
    factor, size, at_once = factor_of(call, head), call.block_size, _selected.blocks_at_once(call)
    first_block, stop_block = _selected.blocks_of(call, unit.low, unit.high)
    for base in range(first_block, stop_block, at_once):
        blocks = min(at_once, stop_block - base)
        stop = min((base + blocks) * size, unit.high)
        tile.named_row = _selected.row_of(blocks)
        _selected.mark(call, tile.named, unit.first, unit.last, head, base, blocks)
        first, next_count, next_holes = list_named(call, tile, unit, head, base, max(base * size, unit.low), stop)
        prefetch_values(call, tile, 0, next_count)
        while next_count:
            count, holes, end = next_count, next_holes, min(first + tile.keys, stop)
            _tiles.advance(tile)
            tile.positions, tile.next_positions = tile.next_positions, tile.positions
            after, next_count, next_holes = list_named(call, tile, unit, head, base, end, stop)
            read_named(call, tile, first, count, unit.last - unit.first > 1)
            step = (next_count + unit.last - unit.first - 1) // (unit.last - unit.first)
            for token in range(unit.first, unit.last):
                begin = min((token - unit.first) * step, next_count)
                ahead = begin, min(begin + step, next_count)
                own = list_own(call, tile, unit, token, base, first, end, holes)
                if own:
                    attend_listed(call, tile, unit, head, token, own, factor, ahead)
                else:
                    prefetch_values(call, tile, ahead[0], ahead[1])
            first = after


@compiled
def attend(call, tile, unit, head, rows):
    """Attend from a unit's rows to its keys, one tile of keys after another."""
    if call.num_lists:
        attend_to_blocks(call, tile, unit, head)
        return
    seq, low, high, code = unit.seq, unit.low, unit.high, call.k_pages_format
    in_place, factor = reads_in_place(call, tile), factor_of(call, head)
    tokens, kv_len = (unit.first, unit.last), kv_len_of(call, seq)
    first, stop, whole = _masks.seen_from(call, tokens, kv_len, low, high)
    next_holes = list_seen(call, tile, unit, head, first, stop, whole)
    prefetch_values(call, tile, 0, min(tile.keys, stop - first))
    while first < stop:
        count, holes = min(tile.keys, stop - first), next_holes
        after = first + count
        if after == stop:
            after, stop, whole = _masks.seen_from(call, tokens, kv_len, after, high)
        _tiles.advance(tile)
        keys = tile.sources if in_place else tile.k_rows
        if tile.paired and not in_place:
            _tiles.pair_keys(code, tile.sources, tile.k, tile.width, count)
        elif not in_place:
            _tiles.read_rows(code, tile.sources, tile.k, tile.width, call.head_dim, count)
        if call.k_scales:
            scale_rows(call.k_scales, call.k_scales_page_stride, call.k_scales_slot_stride, call, seq,
                       head * call.k_scales_head_stride, first, count, tile.k, tile.width)  # fmt: skip
        next_holes = list_seen(call, tile, unit, head, after, stop, whole)
        _tiles.multiply_keys(tile, keys, rows, first, count, factor, call.soft_cap)
        if call.alibi_slopes:
            add_slopes(call, tile, unit, head, rows, first, count)
        if call.relative_bias:
            add_relative_bias(call, tile, unit, head, rows, first, count)
        if call.drafted:
            hide_undrafted(call, tile, unit, first, count)
        if call.num_ranges > 1:
            group = call.num_q_heads // call.num_kv_heads
            _masks.hide_gaps(call, tile, unit.first, 0, rows, group, kv_len, first, count)
        _tiles.weigh_keys(tile, rows, first, count, holes)
        prefetch_values(call, tile, 0, min(tile.keys, stop - after))
        if tile.paired:
            _tiles.pair_values(code, tile.v_sources, tile.v, tile.v_width, call.v_head_dim, count)
        else:
            _tiles.read_rows(code, tile.v_sources, tile.v, tile.v_width, call.v_head_dim, count)
        if call.v_scales:
            scale_rows(call.v_scales, call.v_scales_page_stride, call.v_scales_slot_stride, call, seq,
                       head * call.v_scales_head_stride, first, count, tile.v, tile.v_width)  # fmt: skip
        _tiles.mix_values(tile, rows, first, count)
        first = after


@compiled
def finish(call, tile, unit, head, rows):
    """Write the results of a block, whose splits are all merged."""
    group, size = call.num_q_heads // call.num_kv_heads, call.v_head_dim * size_of(call.out_format)
    v_scale = scale_of(call.v_scale, call.v_scale_format, call.v_scale_stride, call.v_scale_number, head)
    for row in range(rows):
        q_head = head * group + row % group
        place = (unit.first + row // group) * call.num_q_heads + q_head
        _splits.write_row(call, tile, row, q_head, call.out + size * place, v_scale)
        _splits.write_lse(call, tile, row, place)


def work(address):
    call = call_of(address)
    rows = call.block_q * (call.num_q_heads // call.num_kv_heads)
    named = call.named_size
    return _splits.run_units(address, call, rows, False, pairs_up(call), named, read_queries, attend, finish)
