"""The keys that a query sees if lists name blocks of keys for each KV head: an interface between masks and kernels.

A program marks the blocks that its query tokens' lists name in a *table* of bits. The table has one row for all tokens,
then a row for each token, with a bit for each of `blocks_at_once` blocks. So a block that is named twice counts once,
the order of a list does not matter, and a table is not larger than the lists. A program goes from one range of named
keys to the next. It reads the keys in the range that any token names, and each token then visits its own keys among
them. Within the blocks, the other masks apply too.
"""

from numba.core import types

from ragged_attention.portable.numba import _splits
from ragged_attention.portable.numba._branches import branch
from ragged_attention.portable.numba._records import up_to
from ragged_attention.portable.numba._vectors import compiled, inlined, int32_at, int_at, set_int, trailing_zeros, zero

BITS = 64  # bits in a word of a table
MIN_BLOCKS = 64 * BITS  # minimum blocks in a table: marking few blocks at a time costs more
SPARE = 8  # words after a row's blocks, see `mark`


@inlined
def entries_of(call, token, head):
    """The address of the list that a query token has for a KV head."""
    index = head if call.num_lists > 1 else 0
    return call.selected + 4 * (token * call.num_lists + index) * call.num_selected


@inlined
def blocks_of(call, low, high):
    """The range of blocks that have any of the keys [low, high)."""
    first = low // call.block_size
    return first, (high - 1) // call.block_size + 1 if low < high else first


@inlined
def blocks_at_once(call):
    """The largest number of blocks in a table: the number of bits in a list, or MIN_BLOCKS if that is more."""
    return max(up_to(32 * call.num_selected, BITS), MIN_BLOCKS)


@inlined
def row_of(blocks):
    """The size in bytes of a row of a table for `blocks` blocks."""
    return up_to(blocks, BITS) // 8 + 8 * SPARE


@inlined
def table_size(call, tokens, low, high):
    """The size in bytes of a table for `tokens` tokens and the blocks of the keys [low, high)."""
    first, stop = blocks_of(call, low, high)
    return (tokens + 1) * row_of(min(stop - first, blocks_at_once(call)))


@branch("num_lists", result=types.int64)
def divide_lists(call, units, seq, first, last, low, high):
    """`add_splits`, or `add_segments`, for query tokens [first, last), whose lists name blocks of the keys [low, high).

    The number of splits depends on the largest number of keys that a list can name. Each split has a range of
    positions.
    """
    call.named_size = max(call.named_size, table_size(call, last - first, low, high))
    keys = min(high - low, call.num_selected * call.block_size)
    if call.segment_kv:
        return _splits.add_segments(call, units, seq, 0, first, last, low, high, keys)
    return _splits.add_splits(call, units, seq, 0, first, last, low, high, keys, 0)


@compiled
def mark(call, table, first, last, head, base, blocks):
    """Write a table of the blocks of [base, base + `blocks`) that the lists of tokens [first, last) name for a KV head.

    Entries that name other blocks set bits in SPARE spare words. This is faster than a branch, and several words are
    faster than a single one.
    """
    row = row_of(blocks)
    spare = row // 8 - SPARE
    zero(table, (last - first + 1) * row)
    for token in range(first, last):
        entries, own = entries_of(call, token, head), table + (token - first + 1) * row
        for index in range(call.num_selected):
            block = int32_at(entries, index) - base
            word = block // BITS if 0 <= block < blocks else spare + index % SPARE
            set_int(own, word, int_at(own, word) | 1 << block % BITS)
        for word in range(spare):
            set_int(table, word, int_at(table, word) | int_at(own, word))


@inlined
def next_block(row, block, stop):
    """The first block of [block, stop) that a table's row marks, else `stop`. Bit 0 of the row stands for block 0."""
    while block < stop:
        rest = int_at(row, block // BITS) >> block % BITS  # copies of the sign bit come after it
        if rest:
            return min(block + trailing_zeros(rest), stop)
        block = (block // BITS + 1) * BITS
    return stop


@inlined
def next_key(call, row, base, position, stop):
    """The first key of [position, stop) in a block that `row` marks, else `stop`. Bit 0 of `row` stands for `base`."""
    shift = trailing_zeros(call.block_size)
    if position >= stop:
        return stop
    block = next_block(row, (position >> shift) - base, ((stop - 1) >> shift) + 1 - base)
    return min(max((base + block) << shift, position), stop)


@inlined
def end_of_run(call, row, base, position, stop):
    """The end of the run of marked keys that begins at `position`, which must be a marked key; at most `stop`."""
    shift = trailing_zeros(call.block_size)
    block = (position >> shift) + 1 - base
    while (base + block) << shift < stop and next_block(row, block, block + 1) == block:
        block += 1
    return min((base + block) << shift, stop)


@compiled
def list_marked(call, row, base, first, stop, positions):
    """List the marked keys of [first, stop) in ascending order, and return their number."""
    shift, count = trailing_zeros(call.block_size), 0
    if first >= stop:
        return count
    block, blocks = (first >> shift) - base, ((stop - 1) >> shift) + 1 - base
    rest = int_at(row, block // BITS) & (-1 << block % BITS)
    for word in range(block // BITS, (blocks - 1) // BITS + 1):
        if word > block // BITS:
            rest = int_at(row, word)
        while rest:
            begin = (base + word * BITS + trailing_zeros(rest)) << shift
            for position in range(max(begin, first), min(begin + call.block_size, stop)):
                set_int(positions, count, position)
                count += 1
            rest &= rest - 1
    return count
