"""Which keys a query sees if lists name blocks of keys for each KV head: a seam between masks and `_paged`'s kernel.

A unit visits the blocks that the lists of its query tokens name, in ascending order, so that a tile holds keys at
ascending positions that need not be neighbours. Its `named` is a table of bytes: a row for each token and before them
one for all, with a byte for each block of the unit's range of keys. Other masks hold within the blocks.
"""

from ragged_attention.portable.numba import _masks, _splits
from ragged_attention.portable.numba._sequences import kv_len_of, queries_of, within
from ragged_attention.portable.numba._softmax import LOG2E, NOTHING
from ragged_attention.portable.numba._tiles import set_bounds
from ragged_attention.portable.numba._vectors import (
    byte_at,
    compiled,
    fill,
    float_at,
    inlined,
    int32_at,
    int_at,
    set_byte,
    set_float,
    set_int,
    zero,
)


@inlined
def entries_of(call, token, head):
    """The address of the list that a query token has for a KV head."""
    own = head if call.num_lists > 1 else 0
    return call.selected + 4 * (token * call.num_lists + own) * call.num_selected


@inlined
def blocks_between(call, low, high):
    """The number of blocks that have any of the keys [low, high)."""
    return (high - 1) // call.block_size - low // call.block_size + 1 if low < high else 0


@compiled
def divide_lists(call, units, seq, first, last, low, high, max_splits):
    """`add_splits` for query tokens [first, last), whose lists name blocks of the keys [low, high).

    How many keys the lists name at most says how many splits there are; each of these has a range of positions.
    """
    tokens, blocks = last - first, blocks_between(call, low, high)
    call.named_size = max(call.named_size, (tokens + 1) * blocks)
    keys = min(high - low, tokens * call.num_selected * call.block_size)
    return _splits.add_splits(call, units, seq, 0, first, last, low, high, keys, max_splits)


@compiled
def mark(call, tile, unit, head):
    """Write the table `named` of a unit for a KV head."""
    base, blocks = unit.low // call.block_size, blocks_between(call, unit.low, unit.high)
    zero(tile.named, (unit.last - unit.first + 1) * blocks)
    for token in range(unit.first, unit.last):
        entries, own = entries_of(call, token, head), tile.named + (token - unit.first + 1) * blocks
        for index in range(call.num_selected):
            block = int32_at(entries, index) - base
            if 0 <= block < blocks:
                set_byte(tile.named, block, 1)
                set_byte(own, block, 1)


@compiled
def next_run(call, tile, unit, position):
    """The next keys of one block, from `position` on and before the unit's end, that any of its lists names."""
    base = unit.low // call.block_size
    while position < unit.high and not byte_at(tile.named, position // call.block_size - base):
        position = (position // call.block_size + 1) * call.block_size
    return min(position, unit.high), min((position // call.block_size + 1) * call.block_size, unit.high)


@compiled
def list_tokens(call, tile, unit, count):
    """List the tokens whose lists name any of the tile's `count` keys, by their place in the unit; returns how many."""
    size, base, blocks = call.block_size, unit.low // call.block_size, blocks_between(call, unit.low, unit.high)
    tokens = 0
    for token in range(unit.last - unit.first):
        named, key = tile.named + (token + 1) * blocks, 0
        while key < count:
            position = int_at(tile.positions, key)
            if byte_at(named, position // size - base):
                set_int(tile.tokens, tokens, token)
                tokens, key = tokens + 1, count
            key += (position // size + 1) * size - position  # the keys of one block are neighbours
    return tokens


@compiled
def add_biases(call, tile, unit, head, rows, count):
    """Add the biases by distance to the logits of `count` keys of the tile's listed tokens."""
    group, (_, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    for row in range(rows):
        token, q_head = unit.first + int_at(tile.tokens, row // group), head * group + row % group
        s = row * tile.s_width
        position = kv_len_of(call, unit.seq) - stop + token
        table = call.relative_bias + 4 * (token * call.bias_stride + q_head * call.bias_width)
        for key in range(count):
            distance, logit = int_at(tile.positions, key) - position, float_at(tile.s, s + key)
            if call.alibi_slopes:
                logit += float_at(call.alibi_slopes, q_head) * LOG2E * distance
            if call.relative_bias:
                column = within(call.bias_at_own - distance, call.bias_width - 1)
                logit += float_at(table, column) * LOG2E
            set_float(tile.s, s + key, logit)


@compiled
def sees(call, token, first_new, kv_len, position):
    """Whether a query token sees a key within the bounds of its masks and of its lists."""
    if call.drafted and position >= first_new:
        draft = position - first_new
        place = token * call.draft_mask_token_stride + draft
        return draft < call.draft_width and byte_at(call.draft_mask, place) != 0
    return call.num_ranges < 2 or _masks.sees(call, token, token + 1, kv_len, position, position + 1)


@compiled
def hide_unseen(call, tile, unit, tokens, count):
    """Hide from each row those of the tile's `count` keys that it does not see, and set its bounds, which count keys.

    Its rows are those of the first `tokens` of its listed tokens. The value of a key that no row sees is treated as
    missing, so that a NaN in it does not reach the results.
    """
    size, base, blocks = call.block_size, unit.low // call.block_size, blocks_between(call, unit.low, unit.high)
    group, (start, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    kv_len = kv_len_of(call, unit.seq)
    zero(tile.seen, 8 * count)
    for index in range(tokens):
        token = unit.first + int_at(tile.tokens, index)
        left, right = _masks.seen_between(call, token, stop, kv_len)
        row, named = index * group, tile.named + (token - unit.first + 1) * blocks
        first, last, key = count, 0, 0
        while key < count:
            position = int_at(tile.positions, key)
            after = min(key + (position // size + 1) * size - position, count)  # the keys of one block are neighbours
            low = high = key
            if byte_at(named, position // size - base):
                low = key + within(left - position, after - key)
                high = max(key + within(right - position, after - key), low)
            for hidden in range(row, row + group):
                fill(tile.s + 4 * hidden * tile.s_width, key, low, NOTHING)
                fill(tile.s + 4 * hidden * tile.s_width, high, after, NOTHING)
            for own in range(low, high):
                if sees(call, token, kv_len - (stop - start), kv_len, position + own - key):
                    first, last = min(first, own), own + 1
                    set_int(tile.seen, own, 1)
                else:
                    for hidden in range(row, row + group):
                        set_float(tile.s, hidden * tile.s_width + own, NOTHING)
            key = after
        for own in range(row, row + group):
            set_bounds(tile, own, min(first, last), last)
    for key in range(count):
        if not int_at(tile.seen, key):
            set_int(tile.v_sources, key, 0)
