"""Attention over K and V, in pages of any layout or packed: the kernel of four operations.

Packed keys are treated as pages of one key each; the index of a page is the row of its key.

A *block* is a range of consecutive queries of a sequence. The query heads that share a KV head are rows of one tile, so
each K and V is read once for all of them. A *unit* is a block with one split of the keys that it sees: keys that the
causal mask, the window, the ranges of keys or the lists of blocks of keys hide from the whole block are skipped. A
program computes one unit for one KV head, or a unit of few rows for several (`_paged_heads`). A block with a large
share of the work has several splits, and the last of them to finish merges them. How the work is divided depends on the
shapes, lengths and ranges alone.
"""

from ragged_attention.portable.numba import _formats, _masks, _selected, _splits, _tiles
from ragged_attention.portable.numba._formats import scale_of, size_of
from ragged_attention.portable.numba._max_logits import cap_of_products, clear_largest, keep_largest
from ragged_attention.portable.numba._paged_heads import expect_parts, heads_together
from ragged_attention.portable.numba._paged_keys import (
    factor_of,
    keeps_order,
    keys_of,
    list_next,
    list_scales,
    pairs_up,
    reads_in_place,
    set_row_bytes,
    values_in_place,
    values_of,
)
from ragged_attention.portable.numba._paged_lists import attend_to_blocks
from ragged_attention.portable.numba._paged_logits import (
    add_relative_bias,
    add_slopes,
    hide_undrafted,
    hide_unseen,
)
from ragged_attention.portable.numba._paged_scales import (
    add_wrong_values,
    expand_keys,
    expand_values,
    read_key_factors,
    read_value_factors,
)
from ragged_attention.portable.numba._products import ROWS
from ragged_attention.portable.numba._records import Fields, up_to
from ragged_attention.portable.numba._scaled_rows import (
    expanded,
    folded,
    leaves_rests,
    side_fields,
)
from ragged_attention.portable.numba._sequences import (
    clearer_of_gaps,
    kv_len_of,
    num_sequences,
    queries_of,
)
from ragged_attention.portable.numba._vectors import (
    compiled,
    inlined,
    set_int,
)

FIELDS = Fields(
    operands=(
        "q", "k_pages", "v_pages", "kv_lens", "page_indices", "cu_q_lens", "cu_kv_lens", "num_seqs", "sinks",
        "alibi_slopes", "relative_bias", "k_scale", "v_scale", "k_scales", "v_scales", "draft_mask", "key_ranges",
        "selected",
    ),
    results=("out", "lse", "head_max_logits"),
    numbers=(
        "num_tokens", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "max_num_seqs", "layout", "out_format",
        "num_pages", "page_size", "capacity", "v_offset", "causal", "sliding_window", "drafted", "draft_width",
        "num_ranges", "num_lists", "num_selected", "block_size", "scale", "soft_cap", "bias_width", "bias_stride",
        "bias_at_own", "return_max_logits", "block_q", "block_kv", "decode_kv", "segment_kv",
        *side_fields("k_"), *side_fields("v_"),
    ),
    plan=(*_splits.SPLITS, "named_size"),
    strides={"q": "token head", "page_indices": "seq", "draft_mask": "token"}
    | dict.fromkeys(("k_pages", "v_pages", "k_scales", "v_scales"), "page slot head"),
    formats=("q",),
    scales=("k_scale", "v_scale"),
    floats=("scale", "soft_cap", "work"),
    branches=(
        _selected.divide_lists, attend_to_blocks, _masks.divide_spans, _masks.drop_unseen, _masks.hide_gaps,
        hide_undrafted, add_slopes, add_relative_bias, list_scales, expand_keys, expand_values, read_key_factors,
        read_value_factors, add_wrong_values, hide_unseen, keep_largest, _splits.merge_kept, _splits.keep,
    ),
)  # fmt: skip
call_of = FIELDS.at
clear_gaps = clearer_of_gaps(queries_of, _splits.clear)


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
            begin, end = start + first, start + last
            low, high = range_of(call, first_new, kv_len, first, last)
            if call.num_lists:
                low, high = (0, kv_len) if call.key_ranges else (low, high)
                work += _selected.divide_lists(call, units, seq, begin, end, low, high)
            elif call.key_ranges:
                work += _masks.divide_spans(call, units, seq, 0, begin, end, begin, end, kv_len, 0)
            elif call.segment_kv:
                work += _splits.add_segments(call, units, seq, 0, begin, end, low, high, high - low)
            else:
                work += _splits.add_splits(call, units, seq, 0, begin, end, low, high, high - low, 0)
    return work


plan_units = _splits.planner(divide)


def plan(address):
    """List the units, and write the results of queries that belong to no sequence."""
    call = call_of(address)
    clear_gaps(call)
    clear_largest(call)
    num_programs = plan_units(call, call.num_q_heads // call.num_kv_heads)
    call.heads = heads_together(call, num_programs)
    return num_programs


# ---- one program


@inlined
def read_queries(call, tile, unit, head):
    """Read a block's queries for a KV head and set the bounds of what each row sees; returns the number of rows."""
    group, (_, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    kv_len = kv_len_of(call, unit.seq)
    rows, row = (unit.last - unit.first) * group, 0
    in_order, summed = keeps_order(call, tile), leaves_rests(keys_of(call), tile)
    _tiles.begin(tile, rows)
    for token in range(unit.first, unit.last):
        left, right = _masks.seen_between(call, token, stop, kv_len)
        for q_head in range(head * group, (head + 1) * group):
            source = call.q + size_of(call.q_format) * (token * call.q_token_stride + q_head * call.q_head_stride)
            _tiles.read_query(tile, row, call.q_format, source, call.head_dim, in_order)
            if summed:
                _tiles.sum_query(tile, row)
            _tiles.set_bounds(tile, row, left, right)
            row += 1
    return rows


@compiled
def list_seen(call, tile, unit, head, first, stop, whole):
    """`list_next` for the next keys of a unit that a tile holds; if not `whole`, some of them may be unseen."""
    count = min(tile.keys, stop - first)
    before = min(max(unit.low - first, 0), count)  # keys that no row of the unit sees
    for key in range(before):
        set_int(tile.next_sources, key, 0)
        set_int(tile.next_v_sources, key, 0)
    holes = before + list_next(call, tile, unit.seq, head, first + before, before, count)
    if call.key_ranges and not whole:
        holes += _masks.drop_unseen(call, tile, unit.first, unit.last, kv_len_of(call, unit.seq), first, count)
    return holes


@inlined
def read_keys(call, tile, count):
    """Read `count` keys, unless they are multiplied in the cache; returns the address of their factors, 0 for none."""
    keys, in_place = keys_of(call), reads_in_place(call, tile)
    if expanded(keys):
        expand_keys(call, tile, count)
    elif tile.paired and not in_place:
        _formats.pair_keys(keys.codes, tile.sources, tile.k, tile.width, count)
    elif not in_place:
        _tiles.read_rows(keys.codes, tile.sources, tile.k, tile.width, call.head_dim, count)
    if not folded(keys):
        return 0
    read_key_factors(call, tile, count)
    return tile.k_factors


@inlined
def read_values(call, tile, count):
    """Read `count` values; returns how many have scales that might make them infinite or NaN, and so are 0 here."""
    values, step = values_of(call), _tiles.PIECE
    if expanded(values):
        _tiles.prefetch_values(tile, 0, tile.ahead)
        return expand_values(call, tile, count)
    for key in range(0, count, step):
        _tiles.prefetch_values(tile, key, key + step)
        sources, num_keys = tile.v_sources + 8 * key, min(step, count - key)
        if tile.paired:
            row = tile.v + 2 * key * tile.v_width
            _formats.pair_values(values.codes, sources, row, tile.v_width, call.v_head_dim, num_keys)
        else:
            row = tile.v + 4 * key * tile.v_width
            _tiles.read_rows(values.codes, sources, row, tile.v_width, call.v_head_dim, num_keys)
    _tiles.prefetch_values(tile, up_to(count, step), tile.ahead)
    return 0


@compiled
def attend(call, tile, unit, head, heads, rows):
    """Attend from a unit's rows to its keys, one segment after another if the call has segments."""
    low, high, size = unit.low, unit.high, call.segment_kv
    while size and low // size < (high - 1) // size:
        end = (low // size + 1) * size
        attend_between(call, tile, unit, head, heads, rows, low, end)
        _splits.keep(call, tile, rows)
        low = end
    attend_between(call, tile, unit, head, heads, rows, low, high)
    if size:
        _splits.merge_kept(call, tile, rows)


@compiled
def attend_between(call, tile, unit, first_head, heads, rows, low, high):
    """Attend from a unit's rows to the keys [low, high), one tile of keys after another, of each for all `heads`."""
    if call.num_lists:
        attend_to_blocks(call, tile, unit, first_head, low, high)
        return
    set_row_bytes(call, tile)
    tokens, kv_len, next_head = (unit.first, unit.last), kv_len_of(call, unit.seq), first_head + heads
    size = min(call.decode_kv, tile.keys) if call.decode_kv and rows <= _tiles.FEW_ROWS else tile.keys
    first, stop, whole = _masks.seen_from(call, tokens, kv_len, low, high)
    next_holes = list_seen(call, tile, unit, first_head, first, min(first + size, stop), whole)
    while first < stop:
        count, seen_whole = min(size, stop - first), whole
        after = end = first + count
        if after == stop:
            after, stop, whole = _masks.seen_from(call, tokens, kv_len, after, high)
        after_next = min(after + size, stop)
        for head in range(first_head, next_head):
            holes = next_holes
            _tiles.advance_scaled(tile)
            if head + 1 < next_head:
                if head == first_head:
                    list_seen(call, tile, unit, head, after, after_next, whole)
                    _tiles.keep_next(tile)
                next_holes = list_seen(call, tile, unit, head + 1, first, end, seen_whole)
            else:
                next_holes = list_seen(call, tile, unit, first_head, after, after_next, whole)
            _tiles.expect_next(tile, after_next - after)
            if heads > 1:
                expect_parts(call, tile, head - first_head, heads)
            attend_to_tile(call, tile, unit, head, rows, first, count, holes)
            _tiles.shift(tile, up_to(rows, ROWS))
        _tiles.shift(tile, -heads * up_to(rows, ROWS))
        first = after


@inlined
def attend_to_tile(call, tile, unit, head, rows, first, count, holes):
    """Attend from a unit's rows to the `count` keys that a tile has, from position `first` on; `holes` are missing."""
    group, kv_len, values = call.num_q_heads // call.num_kv_heads, kv_len_of(call, unit.seq), values_of(call)
    keys, factors, wrong = tile.sources if reads_in_place(call, tile) else tile.k_rows, read_keys(call, tile, count), 0
    rests, cap = tile.k_rests if leaves_rests(keys_of(call), tile) else 0, cap_of_products(call)
    _tiles.multiply_keys(tile, keys, rows, first, count, factor_of(call, head), factors, rests, cap)
    if call.return_max_logits:
        hide_unseen(call, tile, unit, rows, first, count)
        keep_largest(call, tile, head, 0, rows, group, first, count, holes)
    if call.alibi_slopes:
        add_slopes(call, tile, unit, head, rows, first, count)
    if call.relative_bias:
        add_relative_bias(call, tile, unit, head, rows, first, count)
    if call.drafted:
        hide_undrafted(call, tile, unit, first, count)
    if call.num_ranges > 1:
        _masks.hide_gaps(call, tile, unit.first, 0, rows, group, kv_len, first, count)
    factors = 0
    if folded(values):
        factors, wrong = tile.v_factors, read_value_factors(call, tile, count)
    _tiles.weigh_keys(tile, rows, first, count, holes, factors, tile.v_rests if leaves_rests(values, tile) else 0)
    if rows <= _tiles.FEW_ROWS and not tile.paired and values_in_place(call):
        _tiles.mix_values_in_place(tile, rows, count)
    else:
        wrong += read_values(call, tile, count)
        _tiles.mix_values(tile, rows, count)
    if wrong:
        add_wrong_values(call, tile, unit, rows, first, count)


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
    segments = call.segment_kv > 0
    return _splits.run_units(
        address, call, rows, False, pairs_up(call), 0, named, segments, read_queries, attend, finish
    )
