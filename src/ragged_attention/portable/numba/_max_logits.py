"""The largest logit of each query head in a call, before the soft cap and biases: branches of `_paged` and `_latent`.

All programs share one float32 for each head, which an atomic maximum raises. A maximum is exact, so the result
depends neither on the order of programs nor on the number of threads.
"""

from ragged_attention.portable.numba._branches import branch
from ragged_attention.portable.numba._records import up_to
from ragged_attention.portable.numba._softmax import LN2, NOTHING, capped
from ragged_attention.portable.numba._tiles import seen_of
from ragged_attention.portable.numba._vectors import (
    LANES,
    compiled,
    fill,
    float_at,
    inlined,
    int_at,
    larger_or_nan,
    largest_or_nan,
    load,
    raise_float,
    set_float,
)


@inlined
def clear_largest(call):
    """Set the largest logit of each head to NOTHING, as if there were no keys."""
    if call.head_max_logits:
        fill(call.head_max_logits, 0, call.num_q_heads, NOTHING)


@inlined
def cap_of_products(call):
    """The soft cap that `multiply_keys` applies; 0 if `keep_largest` applies it, after it has seen the logits."""
    return 0.0 if call.return_max_logits else call.soft_cap


@compiled
def largest_of_row(tile, row, first, count):
    """The largest visible logit of a row; hidden logits become NOTHING."""
    s, whole = tile.s + 4 * row * tile.s_width, up_to(count, LANES)
    left, right = seen_of(tile, row, first, count)
    fill(s, 0, min(left, right), NOTHING)
    fill(s, right, whole, NOTHING)
    largest = load(s, 0)
    for index in range(LANES, whole, LANES):
        largest = larger_or_nan(largest, load(s, index))
    return largest_or_nan(largest)


@branch("return_max_logits")
def keep_largest(call, tile, head, offset, rows, group, first, count, holes):
    """Update the call's largest logits with those of `count` keys, from position `first` on; then cap these.

    Hidden logits within a row's bounds are NOTHING already, except those of missing keys if there are `holes`. Each
    query token has `group` rows. The tile's first row is row `offset`, counted from the first row of a token.
    """
    if holes:
        for key in range(count):
            if not int_at(tile.sources, key):
                for row in range(rows):
                    set_float(tile.s, row * tile.s_width + key, NOTHING)
    for row in range(rows):
        q_head, largest = head * group + (offset + row) % group, largest_of_row(tile, row, first, count)
        if call.soft_cap == 0:
            largest = largest * LN2
        if not largest <= float_at(call.head_max_logits, q_head):
            raise_float(call.head_max_logits + 4 * q_head, largest)
        if call.soft_cap > 0:
            capped(tile.s + 4 * row * tile.s_width, up_to(count, LANES), call.soft_cap)
