"""Attention to a range of keys over K and V in pages or packed, tile by tile: a part of `_paged`'s kernel."""

from ragged_attention.portable.numba import _formats, _masks, _tiles
from ragged_attention.portable.numba._branches import branch
from ragged_attention.portable.numba._max_logits import cap_of_products, keep_largest
from ragged_attention.portable.numba._paged_heads import expect_parts
from ragged_attention.portable.numba._paged_keys import (
    factor_of,
    keys_of,
    list_next,
    reads_in_place,
    set_row_bytes,
    values_in_place,
    values_of,
)
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
from ragged_attention.portable.numba._records import up_to
from ragged_attention.portable.numba._scaled_rows import expanded, folded, leaves_rests
from ragged_attention.portable.numba._sequences import kv_len_of
from ragged_attention.portable.numba._vectors import compiled, inlined, set_int


@compiled
def list_seen(call, tile, unit, head, first, stop, whole):
    """`list_next` for the next keys of a unit, as many as a tile holds.

    If not `whole`, keys that no row of the unit sees are treated as missing.
    """
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
    """Read `count` values; returns whether some were left out because of their scales (see `expand_values`)."""
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


@inlined
def attend_to_tile(call, tile, unit, head, rows, first, count, holes):
    """Attend from a unit's rows to the tile's `count` keys, the first of which is at position `first`.

    `holes` of these keys are missing.
    """
    group, kv_len, values = call.num_q_heads // call.num_kv_heads, kv_len_of(call, unit.seq), values_of(call)
    keys, factors, wrong = tile.sources if reads_in_place(call, tile) else tile.k_rows, read_keys(call, tile, count), 0
    rests, cap = tile.k_rests if leaves_rests(keys_of(call), tile) else 0, cap_of_products(call)
    _tiles.multiply_keys(call, tile, keys, rows, first, count, factor_of(call, head), factors, rests, cap)
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
    in_place = rows <= _tiles.FEW_ROWS and not tile.paired and values_in_place(call)
    if not in_place:
        wrong += read_values(call, tile, count)
    _tiles.mix_values(call, tile, rows, count, in_place)
    if wrong:
        add_wrong_values(call, tile, unit, rows, first, count)


@branch("unlisted")
def attend_to_range(call, tile, unit, first_head, heads, rows, low, high):
    """Attend from a unit's rows to the keys [low, high), tile by tile; each tile is computed for all `heads`."""
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
