"""The gradient of packed attention to the keys that lists of blocks name: a part of `varlen_attention_backward`.

The keys that any query of a sequence names are read once, a range of keys at a time. Each query then visits its own
keys in the range: it adds to the gradients of these keys, and to its own gradient.
"""

from ragged_attention.portable.numba import _masks, _selected
from ragged_attention.portable.numba._formats import size_of
from ragged_attention.portable.numba._gradients import differentiate_own
from ragged_attention.portable.numba._packed_rows import read_keys, read_token, seen_between, write_key_gradients
from ragged_attention.portable.numba._products import ROWS, product_listed, scores, spread
from ragged_attention.portable.numba._records import up_to
from ragged_attention.portable.numba._sequences import first_key_of, kv_len_of, queries_of
from ragged_attention.portable.numba._vectors import LANES, add_row, compiled, int_at, prefetch_early, set_int, zero


@compiled
def read_named(call, tile, head, named, base, first, stop, packed):
    """Read the keys of [first, stop) that any query names: the key at position p becomes the tile's row p - `first`.

    `base` is the first block of the table `named`, and `packed` is the row of the sequence's first key.
    """
    begin = _selected.next_key(call, named, base, first, stop)
    while begin < stop:
        end = _selected.end_of_run(call, named, base, begin, stop)
        read_keys(call, tile, head, packed + begin, begin - first, end - begin)
        begin = _selected.next_key(call, named, base, end, stop)


@compiled
def prefetch_named(call, head, named, base, first, stop, packed):
    """Prefetch the keys of [first, stop) that any query names; see `read_named`."""
    size = size_of(call.q_format)
    position = _selected.next_key(call, named, base, first, stop)
    while position < stop:
        place = packed + position
        prefetch_early(call.k + size * (place * call.k_token_stride + head * call.k_head_stride), size * call.head_dim)
        prefetch_early(
            call.v + size * (place * call.v_token_stride + head * call.v_head_stride), size * call.v_head_dim
        )
        position = _selected.next_key(call, named, base, position + 1, stop)


@compiled
def list_own(call, tile, token, bounds, row, base, first, stop, kv_len):
    """List the keys of [first, stop) that a token names and sees within its bounds; returns their number.

    `row` is the token's row of a table whose first block is `base`.
    """
    count = 0
    named = _selected.list_marked(call, row, base, max(bounds[0], first), min(bounds[1], stop), tile.own_positions)
    for index in range(named):
        position = int_at(tile.own_positions, index)
        if call.num_ranges < 2 or _masks.sees(call, token, token + 1, kv_len, position, position + 1):
            key = position - first
            set_int(tile.own_positions, count, position)
            set_int(tile.own_k, count, tile.k + 4 * key * tile.width)
            set_int(tile.own_v, count, tile.v + 4 * key * tile.v_width)
            set_int(tile.own_dk, count, tile.dk + 4 * key * tile.width)
            set_int(tile.own_dv, count, tile.dv + 4 * key * tile.v_width)
            count += 1
    for key in range(count, up_to(count, ROWS)):
        set_int(tile.own_dk, key, tile.dk + 4 * tile.keys * tile.width)
        set_int(tile.own_dv, key, tile.dv + 4 * tile.keys * tile.v_width)
    return count


@compiled
def add_own_gradients(call, tile, rows, count, dq):
    """Add the contributions of a token's rows and its `count` listed keys to all gradients."""
    whole, values = up_to(rows, ROWS), up_to(call.v_head_dim, LANES)
    keys, width, v_width = tile.keys, tile.width, tile.v_width
    scores(tile.q, tile.own_k, tile.s, whole, count, width, width, keys, 1.0, 0, 0)
    scores(tile.d_out, tile.own_v, tile.d_s, whole, count, values, v_width, keys, 1.0, 0, 0)
    for row in range(whole):
        s, d_s = tile.s + 4 * row * keys, tile.d_s + 4 * row * keys
        if row < rows and int_at(tile.left, row) < int_at(tile.right, row):
            differentiate_own(tile, row, count, call.scale, call.soft_cap)
        else:
            zero(s, 4 * up_to(count, LANES))
            zero(d_s, 4 * up_to(count, LANES))
    product_listed(tile.d_s, tile.own_k, tile.dq, whole, count, width, keys, width)
    add_row(dq, tile.dq, rows * width)
    spread(tile.d_s, tile.q, tile.own_dk, rows, count, width, keys, width)
    spread(tile.s, tile.d_out, tile.own_dv, rows, count, v_width, keys, v_width)


@compiled
def attend_to_blocks_backward(call, tile, unit, head, dq, named):
    """`attend_backward` for a call with lists of blocks; `named` is memory for a table (see `_selected`).

    Each token visits only those keys of a tile that it names and sees, so short lists save time.
    """
    seq, size, at_once = unit.seq, call.block_size, _selected.blocks_at_once(call)
    start, stop = queries_of(call, seq)
    kv_len, packed, group = kv_len_of(call, seq), first_key_of(call, seq), call.num_q_heads // call.num_kv_heads
    first_block, stop_block = _selected.blocks_of(call, unit.low, unit.high)
    for base in range(first_block, stop_block, at_once):
        blocks = min(at_once, stop_block - base)
        row = _selected.row_of(blocks)
        _selected.mark(call, named, start, stop, head, base, blocks)
        high = min((base + blocks) * size, unit.high)
        for first in range(max(base * size, unit.low), high, tile.keys):
            end = min(first + tile.keys, high)
            zero(tile.dk, 4 * (end - first) * tile.width)
            zero(tile.dv, 4 * (end - first) * tile.v_width)
            if _selected.next_key(call, named, base, first, end) < end:
                read_named(call, tile, head, named, base, first, end, packed)
                after, step = end, (tile.keys + stop - start - 1) // (stop - start)
                for token in range(start, stop):
                    prefetch_named(call, head, named, base, after, min(after + step, high), packed)
                    after += step
                    own = named + (token - start + 1) * row
                    if _selected.next_key(call, own, base, first, end) == end:
                        continue
                    seen = seen_between(call, token, stop, kv_len)
                    count = list_own(call, tile, token, seen, own, base, first, end, kv_len)
                    if count:
                        read_token(call, tile, 0, token, head, kv_len - stop + token, 0, 1)
                        add_own_gradients(call, tile, group, count, dq + 4 * (token - start) * group * tile.width)
            write_key_gradients(call, tile, head, packed + first, end - first)
