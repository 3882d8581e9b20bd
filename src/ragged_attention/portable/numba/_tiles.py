"""The memory of one program: a tile of queries, one of keys and values, and what the softmax holds of each row.

A tile is a record in front of the memory that it describes. Queries, keys, values and results are float32 in rows that
are whole vectors; rows are a multiple of four, the products' step. The bounds of the keys that each row sees are
positions, `left` to before `right`.
"""

import numpy as np

from ragged_attention.portable.numba._formats import widen
from ragged_attention.portable.numba._products import COLUMNS, ROWS, mix, scores
from ragged_attention.portable.numba._records import record_at
from ragged_attention.portable.numba._softmax import NOTHING, capped, weigh
from ragged_attention.portable.numba._vectors import (
    LANES,
    allocate,
    compiled,
    fill,
    inlined,
    int_at,
    set_float,
    set_int,
    zero,
)

SIZES = ("rows", "keys", "width", "v_width", "columns")
ADDRESSES = ("q", "k", "k_rows", "v", "s", "out", "m_i", "l_i", "left", "right", "sources", "v_sources",
             "next_sources", "next_v_sources")  # fmt: skip
tile_at = record_at(np.dtype([(name, np.int64) for name in (*SIZES, *ADDRESSES)]))
HEADER = -(-8 * (len(SIZES) + len(ADDRESSES)) // 64) * 64  # bytes of the record


@inlined
def up_to(count, step):
    """The smallest multiple of `step` that is at least `count`."""
    return (count + step - 1) // step * step


@compiled
def new_tile(rows, keys, width, columns, latent):
    """The address of a tile for so many rows, keys, columns of a key and of a value; `latent`: keys hold the values."""
    rows, keys = up_to(rows, ROWS), up_to(keys, LANES)
    width = up_to(width, LANES)
    v_width = width if latent else up_to(columns, COLUMNS)
    columns = up_to(columns, COLUMNS)
    floats = rows * (width + columns + keys + 2) + keys * (width + (0 if latent else v_width))
    address = allocate(HEADER + 4 * floats + 8 * (2 * rows + 5 * keys) + 64 * len(ADDRESSES))
    tile = tile_at(address)
    tile.rows, tile.keys, tile.width, tile.v_width, tile.columns = rows, keys, width, v_width, columns
    end = address + HEADER
    tile.q, end = end, up_to(end + 4 * rows * width, 64)
    tile.k, end = end, up_to(end + 4 * keys * width, 64)
    if latent:
        tile.v = tile.k
    else:
        tile.v, end = end, up_to(end + 4 * keys * v_width, 64)
        zero(tile.v, 4 * keys * v_width)  # of which what lies behind a row's columns stays so
    tile.s, end = end, up_to(end + 4 * rows * keys, 64)
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
    zero(tile.q + 4 * rows * tile.width, 4 * (tile.rows - rows) * tile.width)
    zero(tile.out, 4 * tile.rows * tile.columns)
    zero(tile.s, 4 * tile.rows * tile.keys)
    zero(tile.l_i, 4 * tile.rows)
    fill(tile.m_i, 0, tile.rows, NOTHING)


@compiled
def read_rows(code, sources, target, width, columns, count, factor):
    """Read rows by their addresses, times a factor; a row without an address is zeros."""
    for key in range(count):
        source, row = int_at(sources, key), target + 4 * key * width
        if source:
            widen(code, source, row, columns, factor)
        else:
            zero(row, 4 * columns)


@inlined
def turn_to_next(tile):
    """Let the addresses that were listed ahead be those of the keys at hand."""
    tile.sources, tile.next_sources = tile.next_sources, tile.sources
    tile.v_sources, tile.next_v_sources = tile.next_v_sources, tile.v_sources


@inlined
def within(position, count):
    return min(max(position, 0), count)


@compiled
def weigh_keys(tile, rows, first, count, holes):
    """Turn logits into weights for `count` keys from position `first` on; with `holes` some keys have no address."""
    if holes:
        for key in range(count):
            if not int_at(tile.sources, key):
                for row in range(rows):
                    set_float(tile.s, row * tile.keys + key, NOTHING)
    whole = up_to(count, LANES)
    for row in range(rows):
        s = tile.s + 4 * row * tile.keys
        left, right = within(int_at(tile.left, row) - first, count), within(int_at(tile.right, row) - first, count)
        weigh(s, left, right, whole, row, tile.m_i, tile.l_i, tile.out + 4 * row * tile.columns, tile.columns)


@compiled
def multiply_keys(tile, keys, rows, count, soft_cap):
    """The logits of all rows for `count` keys by their addresses, in powers of two; `soft_cap` is 0 for none.

    Without one the queries hold the factor that makes powers of two of powers of e.
    """
    rows = up_to(rows, ROWS)
    scores(tile.q, keys, tile.s, rows, count, tile.width, tile.width, tile.keys)
    if soft_cap > 0:
        for row in range(rows):
            capped(tile.s + 4 * row * tile.keys, up_to(count, LANES), soft_cap)


@compiled
def mix_values(tile, rows, count):
    """Add the weighted values of `count` keys."""
    mix(tile.s, tile.v, tile.out, up_to(rows, ROWS), count, tile.columns, tile.keys, 1, tile.v_width,
        tile.columns)  # fmt: skip
