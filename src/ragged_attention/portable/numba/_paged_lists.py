"""Attention to the keys that lists of blocks name, over K and V in pages or packed: a part of `_paged`'s kernel.

The keys that any token of a unit names are read once, a range of keys at a time, and each token visits its own keys in
the range. Values that several tokens share are float32, and so are their weights. If a unit has a single token, and
rows have no scales, its values and weights are stored as in a call without lists.
"""

from ragged_attention.portable.numba import _masks, _selected, _tiles
from ragged_attention.portable.numba._branches import branch
from ragged_attention.portable.numba._formats import pair, pair_values, size_of, widen
from ragged_attention.portable.numba._max_logits import cap_of_products, keep_largest
from ragged_attention.portable.numba._paged_keys import (
    factor_of,
    keys_of,
    list_next,
    reads_in_place,
    sees,
    set_row_bytes,
    values_of,
)
from ragged_attention.portable.numba._products import ROWS, mix_listed
from ragged_attention.portable.numba._records import up_to
from ragged_attention.portable.numba._scaled_rows import read_row
from ragged_attention.portable.numba._sequences import kv_len_of, queries_of, within
from ragged_attention.portable.numba._softmax import LOG2E
from ragged_attention.portable.numba._vectors import (
    compiled,
    copy,
    float_at,
    inlined,
    int_at,
    set_float,
    set_int,
)


@compiled
def list_named(call, tile, unit, head, base, position, stop):
    """List the next keys of [position, stop) that the unit's lists name; they span at most as many keys as a tile.

    `base` is the first block of the tile's table. Returns the first key, the number of keys and the number of those
    that have no page.
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


@inlined
def shares_values(call, unit):
    """Whether values are read once for all tokens of a unit, as values with scales always are."""
    return unit.last - unit.first > 1 or call.listed_scales != 0


@branch("listed_scales")
def read_scaled_key(call, tile, index, source, target):
    """Read a listed key of a call in which rows of keys or of values have scales."""
    read_row(keys_of(call), source, int_at(tile.k_scales, index), target, call.head_dim, tile.scratch)


@branch("listed_scales")
def read_scaled_value(call, tile, index, source, target):
    """`read_scaled_key` for a value."""
    read_row(values_of(call), source, int_at(tile.v_scales, index), target, call.v_head_dim, tile.scratch)


@compiled
def read_named(call, tile, first, count, shared):
    """Read `count` listed keys and values, and list their addresses by position, counted from `first`.

    If tokens share keys and values (`shared`), even keys that could be multiplied in the cache are copied, so that they
    are close together in memory. Otherwise, values are read later (see `add_values`).
    """
    in_place, code = reads_in_place(call, tile), call.k_codes
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
        elif not in_place and call.listed_scales:
            read_scaled_key(call, tile, index, source, k)
        elif not in_place:
            widen(code, source, k, call.head_dim)
        elif shared:
            copy(k, source, 4 * tile.width)
        if shared and call.listed_scales:
            read_scaled_value(call, tile, index, value, v)
        elif shared:
            widen(call.v_codes, value, v, call.v_head_dim)


@compiled
def list_own(call, tile, unit, token, base, first, stop, holes):
    """List the keys of [first, stop) that a token names and sees; returns their number.

    `read_named` has listed the addresses of these keys. If `holes`, some of them have no page.
    """
    (start, end), kv_len, count = queries_of(call, unit.seq), kv_len_of(call, unit.seq), 0
    left, right = _masks.seen_between(call, token, end, kv_len)
    row = tile.named + (token - unit.first + 1) * tile.named_row
    named = _selected.list_marked(call, row, base, max(left, first), min(right, stop), tile.own_positions)
    is_masked = holes or call.drafted or call.num_ranges > 1
    for index in range(named):
        position = int_at(tile.own_positions, index)
        key = position - first
        if not is_masked or (int_at(tile.seen, key) and sees(call, token, kv_len - (end - start), kv_len, position)):
            set_int(tile.own_positions, count, position)
            set_int(tile.own_keys, count, int_at(tile.k_rows, key))
            set_int(tile.own_values, count, int_at(tile.v_rows, key))
            count += 1
    return count


@branch("listed_biases")
def add_biases(call, tile, unit, head, token, count):
    """Add the biases by distance to the logits of `count` listed keys and a token's rows."""
    group, (_, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    query_position = kv_len_of(call, unit.seq) - stop + token
    for row in range(group):
        q_head = head * group + row
        table = call.relative_bias + 4 * (token * call.bias_stride + q_head * call.bias_width)
        for key in range(count):
            distance, place = int_at(tile.own_positions, key) - query_position, row * tile.s_width + key
            logit = float_at(tile.s, place)
            if call.alibi_slopes:
                logit += float_at(call.alibi_slopes, q_head) * LOG2E * distance
            if call.relative_bias:
                logit += float_at(table, within(call.bias_at_own - distance, call.bias_width - 1)) * LOG2E
            set_float(tile.s, place, logit)


@compiled
def add_values(call, tile, rows, count, shared):
    """Replace the logits of `count` listed keys by weights, and add the weighted values to the results of `rows` rows.

    Values that tokens share are float32, and so are their weights: a pair of bfloat16 would hold two neighbouring keys,
    and a token might see only one of them.
    """
    columns, s_width, values = tile.columns, tile.s_width, tile.own_values
    if shared:
        for row in range(0, rows, ROWS):
            _tiles.weigh_rows(tile, rows, row, 0, count)
        mix_listed(tile.s, values, tile.out, up_to(rows, ROWS), count, columns, s_width, columns, values, 0)
        return
    _tiles.weigh_keys(tile, rows, 0, count, 0, 0, 0)
    if tile.paired:
        pair_values(call.v_codes, values, tile.v, tile.v_width, call.v_head_dim, count)
    else:
        _tiles.read_rows(call.v_codes, values, tile.v, tile.v_width, call.v_head_dim, count)
    _tiles.mix_values(call, tile, rows, count, False)


@compiled
def attend_listed(call, tile, unit, head, token, count, factor, ahead):
    """Attend from a token's rows to the `count` keys that `list_own` has listed.

    Meanwhile, prefetch those of the next values whose indices are in the range `ahead`.
    """
    group = call.num_q_heads // call.num_kv_heads
    first, aligned = (token - unit.first) * group, group % ROWS == 0
    if aligned:
        _tiles.shift(tile, first)
    else:
        _tiles.pack_rows(tile, first, group)
    for row in range(group):
        _tiles.set_bounds(tile, row, 0, count)
    _tiles.multiply_keys(call, tile, tile.own_keys, group, 0, count, factor, 0, 0, cap_of_products(call))
    if call.return_max_logits:
        keep_largest(call, tile, head, 0, group, group, 0, count, 0)
    _tiles.prefetch_rows_early(tile.next_v_sources, ahead[0], ahead[1], tile.v_bytes)
    if call.listed_biases:
        add_biases(call, tile, unit, head, token, count)
    add_values(call, tile, group, count, shares_values(call, unit))
    if aligned:
        _tiles.shift(tile, -first)
    else:
        _tiles.unpack_rows(tile, first, group)


@branch("num_lists")
def attend_to_blocks(call, tile, unit, head, low, high):
    """`attend_between` for a call with lists of blocks.

    Keys that any token names are read once for all tokens. Then each token visits the keys that it names itself.
    """
    factor, size, at_once = factor_of(call, head), call.block_size, _selected.blocks_at_once(call)
    first_block, stop_block = _selected.blocks_of(call, low, high)
    set_row_bytes(call, tile)
    tile.ahead = 0  # the next keys are prefetched here, not during the products of each token
    for base in range(first_block, stop_block, at_once):
        blocks = min(at_once, stop_block - base)
        stop = min((base + blocks) * size, high)
        tile.named_row = _selected.row_of(blocks)
        _selected.mark(call, tile.named, unit.first, unit.last, head, base, blocks)
        first, next_count, next_holes = list_named(call, tile, unit, head, base, max(base * size, low), stop)
        _tiles.prefetch_rows_early(tile.next_sources, 0, next_count, tile.k_bytes)
        _tiles.prefetch_rows_early(tile.next_v_sources, 0, next_count, tile.v_bytes)
        while next_count:
            count, holes, end = next_count, next_holes, min(first + tile.keys, stop)
            _tiles.advance_scaled(tile)
            tile.positions, tile.next_positions = tile.next_positions, tile.positions
            after, next_count, next_holes = list_named(call, tile, unit, head, base, end, stop)
            _tiles.prefetch_rows_early(tile.next_sources, 0, next_count, tile.k_bytes)
            read_named(call, tile, first, count, shares_values(call, unit))
            step = (next_count + unit.last - unit.first - 1) // (unit.last - unit.first)
            for token in range(unit.first, unit.last):
                begin = min((token - unit.first) * step, next_count)
                ahead = begin, min(begin + step, next_count)
                own = list_own(call, tile, unit, token, base, first, end, holes)
                if own:
                    attend_listed(call, tile, unit, head, token, own, factor, ahead)
                else:
                    _tiles.prefetch_rows_early(tile.next_v_sources, ahead[0], ahead[1], tile.v_bytes)
            first = after
