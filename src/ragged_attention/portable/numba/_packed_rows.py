"""Reads and writes a program's rows of queries, keys and gradients, in the gradient of packed attention."""

from ragged_attention.portable.numba import _masks
from ragged_attention.portable.numba._formats import narrow, size_of, widen
from ragged_attention.portable.numba._gradients import read_row
from ragged_attention.portable.numba._vectors import compiled, float_at, inlined, set_float, set_int


@compiled
def read_keys(call, tile, head, first, key, count):
    """Read `count` packed keys and values from row `first` on into the tile's rows from row `key` on.

    A `paired` tile also records their addresses.
    """
    size = size_of(call.q_format)
    for place in range(first, first + count):
        k = call.k + size * (place * call.k_token_stride + head * call.k_head_stride)
        v = call.v + size * (place * call.v_token_stride + head * call.v_head_stride)
        if tile.paired:
            set_int(tile.k_rows, key, k)
            set_int(tile.v_rows, key, v)
        widen(call.q_format, k, tile.k + 4 * key * tile.width, call.head_dim)
        widen(call.q_format, v, tile.v + 4 * key * tile.v_width, call.v_head_dim)
        key += 1


@inlined
def seen_between(call, token, stop, kv_len):
    """A range with all keys that a query token sees; query token `stop` - 1 is at position `kv_len` - 1."""
    position = kv_len - stop + token
    left = max(position - call.sliding_window + 1, 0) if call.sliding_window else 0
    right = min(position + 1, kv_len) if call.causal else kv_len
    return _masks.bounds_of(call, token, kv_len) if call.key_ranges else (left, right)


@inlined
def read_token(call, tile, row, token, head, position, left, right):
    """Read the rows of a query token for a KV head, from row `row` of the tile on; each sees the keys [left, right)."""
    group = call.num_q_heads // call.num_kv_heads
    for q_head in range(head * group, (head + 1) * group):
        source = call.q + size_of(call.q_format) * (token * call.q_token_stride + q_head * call.q_head_stride)
        sees = read_row(call, tile, row, token, q_head, source)
        set_int(tile.left, row, left)
        set_int(tile.right, row, right if sees else left)
        if call.alibi_slopes:
            set_float(tile.slopes, row, float_at(call.alibi_slopes, q_head))
        if call.relative_bias:
            offset = token * call.bias_stride + q_head * call.bias_width
            set_int(tile.tables, row, call.relative_bias + 4 * offset)
            if call.has_d_relative_bias:
                table = call.d_relative_bias + 4 * offset
                sums = tile.sums + 4 * (q_head - head * group) * tile.sums_stride
                set_int(tile.d_tables, row, table if call.bias_stride else sums)
        set_int(tile.positions, row, position)
        row += 1


@compiled
def write_key_gradients(call, tile, head, first, count):
    """Write the gradients of `count` keys and values from row `first` on."""
    size = size_of(call.q_format)
    for key in range(count):
        place = (first + key) * call.num_kv_heads + head
        k, v = tile.dk + 4 * key * tile.width, tile.dv + 4 * key * tile.v_width
        narrow(call.q_format, k, call.dk + size * place * call.head_dim, call.head_dim, 1.0)
        narrow(call.q_format, v, call.dv + size * place * call.v_head_dim, call.v_head_dim, 1.0)
