"""The draft mask and the biases by position, applied to logits: branches of `_paged`'s kernel."""

from ragged_attention.portable.numba._branches import branch
from ragged_attention.portable.numba._masks import hide_gaps
from ragged_attention.portable.numba._records import up_to
from ragged_attention.portable.numba._sequences import kv_len_of, queries_of
from ragged_attention.portable.numba._softmax import LOG2E, NOTHING, add_slope
from ragged_attention.portable.numba._vectors import LANES, byte_at, float_at, int_at, set_float, set_int


@branch("drafted")
def hide_undrafted(call, tile, unit, first, count):
    """Hide the keys of new tokens from those of the unit's rows for which the draft mask excludes them.

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


@branch("return_max_logits")
def hide_unseen(call, tile, unit, rows, first, count):
    """Hide the logits of keys that a unit's rows do not see within their bounds."""
    if call.drafted:
        hide_undrafted(call, tile, unit, first, count)
    if call.num_ranges > 1:
        group = call.num_q_heads // call.num_kv_heads
        hide_gaps(call, tile, unit.first, 0, rows, group, kv_len_of(call, unit.seq), first, count)


@branch("alibi_slopes")
def add_slopes(call, tile, unit, head, rows, first, count):
    """Add ALiBi's biases to the logits of `count` keys, from position `first` on."""
    group, (_, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    position = kv_len_of(call, unit.seq) - stop + unit.first
    for row in range(rows):
        slope = float_at(call.alibi_slopes, head * group + row % group) * LOG2E
        add_slope(tile.s + 4 * row * tile.s_width, up_to(count, LANES), slope, first - position - row // group)


@branch("relative_bias")
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
