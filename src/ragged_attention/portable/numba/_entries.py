"""The packed keys that a token sees, its *entries*: the keys of its list (`indices`), or those of its range.

A call's record needs the operands `indices`, `starts` and `stops`, and the numbers `listed`, `relative`, `columns` and
`num_keys`. A program's tile has `rows` heads of one token, and copies of `keys` of its keys, all float32 in rows of
`width`.
"""

from ragged_attention.portable.numba._formats import size_of, widen
from ragged_attention.portable.numba._records import list_rows
from ragged_attention.portable.numba._sequences import within
from ragged_attention.portable.numba._vectors import inlined, int32_at, zero


@inlined
def entries_of(call, token):
    """The first key of a token's range, 0 if it has a list, and the number of its entries."""
    if call.listed:
        return 0, call.columns
    start, stop = (
        within(int32_at(call.starts, token), call.num_keys),
        within(int32_at(call.stops, token), call.num_keys),
    )
    return start, max(min(stop, start + call.columns) - start if call.relative else stop - start, 0)


@inlined
def key_of(call, token, start, entry):
    """The key of an entry of a token; -1 if the entry names no key. `start` is the first key of the token's range."""
    if not call.listed:
        return start + entry
    key = int32_at(call.indices, token * call.indices_token_stride + entry)
    return key if 0 <= key < call.num_keys else -1


@inlined
def begin_tile(tile, rows, keys, width):
    """Set the sizes of a new tile, whose queries and keys become 0 and stay 0 in columns beyond the last."""
    tile.rows, tile.keys, tile.width = rows, keys, width
    zero(tile.q, 4 * rows * width)
    zero(tile.k, 4 * keys * width)
    list_rows(tile.k_rows, keys, tile.k, 4 * width)


@inlined
def read_heads(call, tile, token, first, last, whole):
    """Read a token's queries of the heads [first, last), padded with zeros to `whole` rows."""
    rows, size = last - first, size_of(call.q_format)
    for row in range(rows):
        place = token * call.q_token_stride + (first + row) * call.q_head_stride
        widen(call.q_format, call.q + size * place, tile.q + 4 * row * tile.width, call.head_dim)
    zero(tile.q + 4 * rows * tile.width, 4 * (whole - rows) * tile.width)
