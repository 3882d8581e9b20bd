"""The memory of one program: a tile of queries, one of keys and values, and what the softmax holds of each row.

A tile is a record in front of the memory that it describes. Queries, keys, values and results are float32 in rows that
are whole vectors; rows are a multiple of four, the products' step. In a `paired` tile queries, keys, values and weights
are bfloat16, two to a place: columns d and d + half of a query and of a key, or as they lie in memory if keys are read
from there; of values those of two keys. Where few keys have much of a row's weight, what rounding took from the weights
is kept in `lost` and multiplied too, else an error of 2 ** -8 of a weight would show; `uneven` counts those rows. The
bounds of the keys that each row sees are positions, `left` to before `right`.
"""

import numpy as np

from ragged_attention.portable.numba._formats import pair, read_bfloat16, size_of, widen, write_weights
from ragged_attention.portable.numba._products import COLUMNS, ROWS, mix, mix_of_pairs, scores, scores_of_pairs
from ragged_attention.portable.numba._records import record_at
from ragged_attention.portable.numba._softmax import NOTHING, capped, scale_row, weigh
from ragged_attention.portable.numba._vectors import (
    LANES,
    allocate,
    compiled,
    copy,
    fill,
    inlined,
    int_at,
    load,
    pasted,
    set_float,
    set_int,
    transpose,
    zero,
)

SIZES = ("rows", "keys", "width", "v_width", "columns", "s_width", "paired", "uneven")
ADDRESSES = ("q", "k", "k_rows", "turned", "v", "s", "lost", "out", "m_i", "l_i", "left", "right",
             "sources", "v_sources", "next_sources", "next_v_sources")  # fmt: skip
tile_at = record_at(np.dtype([(name, np.int64) for name in (*SIZES, *ADDRESSES)]))
HEADER = -(-8 * (len(SIZES) + len(ADDRESSES)) // 64) * 64  # bytes of the record


FEW = 4 * ROWS  # rows for which keys are multiplied as they lie; for more they are turned into columns first


@inlined
def up_to(count, step):
    """The smallest multiple of `step` that is at least `count`."""
    return (count + step - 1) // step * step


@compiled
def new_tile(rows, keys, width, columns, latent, paired):
    """The address of a new tile, 0 if there is no memory.

    `width` is the places of a key, `columns` those of a value; in a `latent` tile the keys hold the values.
    """
    rows, keys = up_to(rows, ROWS), up_to(keys, LANES)
    width = up_to(width, LANES)
    v_width = width if latent else up_to(columns, COLUMNS)
    columns, s_width = up_to(columns, COLUMNS), up_to(keys, COLUMNS)
    floats = rows * (width + columns + 2 * s_width + 2) + keys * (width + (0 if latent else v_width)) + s_width * width
    address = allocate(HEADER + 4 * floats + 8 * (2 * rows + 5 * keys) + 64 * len(ADDRESSES))
    if address == 0:
        return address
    tile = tile_at(address)
    tile.rows, tile.keys, tile.width, tile.v_width, tile.columns = rows, keys, width, v_width, columns
    tile.s_width, tile.paired = s_width, paired
    end = address + HEADER
    tile.q, end = end, up_to(end + 4 * rows * width, 64)
    tile.k, end = end, up_to(end + 4 * keys * width, 64)
    tile.turned, end = end, up_to(end + 4 * s_width * width, 64)
    if latent:
        tile.v = tile.k
    else:
        tile.v, end = end, up_to(end + 4 * keys * v_width, 64)
        zero(tile.v, 4 * keys * v_width)  # of which what lies behind a row's columns stays so
    tile.s, end = end, up_to(end + 4 * rows * s_width, 64)
    tile.lost, end = end, up_to(end + 4 * rows * s_width, 64)
    tile.out, end = end, up_to(end + 4 * rows * columns, 64)
    tile.m_i, end = end, up_to(end + 4 * rows, 64)
    tile.l_i, end = end, up_to(end + 4 * rows, 64)
    tile.left, end = end, up_to(end + 8 * rows, 64)
    tile.right, end = end, up_to(end + 8 * rows, 64)
    tile.k_rows, end = end, up_to(end + 8 * keys, 64)
    for key in range(keys):
        set_int(tile.k_rows, key, tile.k + 4 * key * width)
    tile.sources, end = end, up_to(end + 8 * keys, 64)
    tile.v_sources, end = end, up_to(end + 8 * keys, 64)
    tile.next_sources, end = end, up_to(end + 8 * keys, 64)
    tile.next_v_sources = end
    return address


@compiled
def begin(tile, rows):
    """Before the first keys of `rows` rows; what makes them a multiple of four holds zeros."""
    whole = up_to(rows, ROWS)
    zero(tile.q + 4 * rows * tile.width, 4 * (whole - rows) * tile.width)
    zero(tile.out, 4 * whole * tile.columns)
    zero(tile.s, 4 * whole * tile.s_width)
    if tile.paired:
        zero(tile.lost, 4 * whole * tile.s_width)
    zero(tile.l_i, 4 * whole)
    fill(tile.m_i, 0, whole, NOTHING)


@pasted
def read_query(tile, row, code, source, columns, in_place):
    """Read one query, its columns as those of the keys will be, which are multiplied `in_place` or as they are read."""
    target = tile.q + 4 * row * tile.width
    if not tile.paired:
        widen(code, source, target, columns)
    elif in_place:
        copy(target, source, 2 * columns)
    else:
        pair(code, source, source + columns, target, tile.width)


@compiled
def read_rows(code, sources, target, width, columns, count):
    """Read rows by their addresses; a row without an address is zeros."""
    for key in range(count):
        source, row = int_at(sources, key), target + 4 * key * width
        if source:
            widen(code, source, row, columns)
        else:
            zero(row, 4 * columns)


@compiled
def pair_keys(code, sources, target, width, count):
    """Read keys by their addresses, each as pairs of its two halves."""
    for key in range(count):
        source = int_at(sources, key)
        if source:
            pair(code, source, source + size_of(code) * width, target + 4 * key * width, width)


@compiled
def pair_values(code, sources, target, width, columns, count):
    """Read values by their addresses, those of two keys together; where one has none, the other's stand for it."""
    for key in range(0, count, 2):
        first, second = int_at(sources, key), int_at(sources, key + 1) if key + 1 < count else 0
        if first or second:
            pair(code, first if first else second, second if second else first, target + 2 * key * width, columns)
        else:
            zero(target + 2 * key * width, 4 * columns)


@inlined
def turn_to_next(tile):
    """Let the addresses that were listed ahead be those of the keys at hand."""
    tile.sources, tile.next_sources = tile.next_sources, tile.sources
    tile.v_sources, tile.next_v_sources = tile.next_v_sources, tile.v_sources


@inlined
def within(position, count):
    return min(max(position, 0), count)


@inlined
def round_weights(s, lost, count, keep):
    """Turn a row's weights into bfloat16 where they lie; write what that took from them, or zeros, to `lost`."""
    for index in range(0, count, LANES):
        weights = load(s, index)
        write_weights(s, index, weights)
        if keep:
            write_weights(lost, index, weights - read_bfloat16(s, index))
    if not keep:
        zero(lost, 2 * count)


@compiled
def weigh_keys(tile, rows, first, count, holes):
    """Turn logits into weights for `count` keys from position `first` on; with `holes` some keys have no address."""
    if holes:
        for key in range(count):
            if not int_at(tile.sources, key):
                for row in range(rows):
                    set_float(tile.s, row * tile.s_width + key, NOTHING)
    whole, tile.uneven = up_to(count, LANES), 0
    for row in range(rows):
        s = tile.s + 4 * row * tile.s_width
        left, right = within(int_at(tile.left, row) - first, count), within(int_at(tile.right, row) - first, count)
        out = tile.out + 4 * row * tile.columns
        uneven = weigh(s, left, right, whole, row, tile.m_i, tile.l_i, out, tile.columns, tile.paired)
        if tile.paired:
            round_weights(s, tile.lost + 4 * row * tile.s_width, whole, uneven)
            tile.uneven += uneven


@compiled
def first_to_see(tile, rows, position):
    """The first step of rows of which one sees a position or one before it; later rows see no fewer."""
    row = 0
    while row < rows and int_at(tile.right, min(row + ROWS, rows) - 1) <= position:
        row += ROWS
    return row


@compiled
def parts_of(tile, first, count):
    """How many keys to multiply at a time: all, or few where some rows do not see the last ones."""
    return count if int_at(tile.right, 0) >= first + count else COLUMNS


@compiled
def turn(tile, keys, count):
    """Write `count` keys, by their addresses, as columns of `turned`; what is behind them there is anything."""
    for key in range(0, count, LANES):
        for place in range(0, tile.width, LANES):
            transpose(keys + 8 * key, count - key, tile.q, place, tile.turned + 4 * (place * tile.s_width + key),
                      tile.s_width)  # fmt: skip


@pasted
def multiply(tile, p, p_row, v, v_width, out, out_width, rows, keys, columns, fresh):
    """`mix` of what the tile holds."""
    if tile.paired:
        mix_of_pairs(p, v, out, up_to(rows, ROWS), keys, columns, p_row, 1, v_width, out_width, fresh)
    else:
        mix(p, v, out, up_to(rows, ROWS), keys, columns, p_row, 1, v_width, out_width, fresh)


@compiled
def multiply_keys(tile, keys, rows, first, count, factor, soft_cap):
    """The logits of `count` keys from position `first` on, by their addresses, times a factor, for rows that see them.

    `soft_cap` is 0 for none. Without one the factor holds what makes powers of two of powers of e.
    """
    width, s_width = tile.width, tile.s_width
    if rows > FEW:
        turn(tile, keys, count)
        part = parts_of(tile, first, count)
        for key in range(0, count, part):
            row, some = first_to_see(tile, rows, first + key), up_to(min(part, count - key), COLUMNS)
            q, s = tile.q + 4 * row * width, tile.s + 4 * (row * s_width + key)
            multiply(tile, q, width, tile.turned + 4 * key, s_width, s, s_width, rows - row, width, some, True)
        if factor != 1:
            scale_row(tile.s, rows * s_width, factor)
    elif tile.paired:
        scores_of_pairs(tile.q, keys, tile.s, up_to(rows, ROWS), count, width, width, s_width, factor)
    else:
        scores(tile.q, keys, tile.s, up_to(rows, ROWS), count, width, width, s_width, factor)
    if soft_cap > 0:
        for row in range(rows):
            capped(tile.s + 4 * row * s_width, up_to(count, LANES), soft_cap)


@compiled
def mix_values(tile, rows, first, count):
    """Add the weighted values of `count` keys from position `first` on."""
    part, s_width, v_width, columns = parts_of(tile, first, count), tile.s_width, tile.v_width, tile.columns
    for key in range(0, count, part):
        row, some, place = first_to_see(tile, rows, first + key), min(part, count - key), key
        if tile.paired:
            some, place = (some + 1) // 2, key // 2
        offset, v, out = 4 * (row * s_width + place), tile.v + 4 * place * v_width, tile.out + 4 * row * columns
        multiply(tile, tile.s + offset, s_width, v, v_width, out, columns, rows - row, some, columns, False)
        if tile.uneven:
            multiply(tile, tile.lost + offset, s_width, v, v_width, out, columns, rows - row, some, columns, False)
