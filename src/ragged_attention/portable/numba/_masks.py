"""The keys that a query sees under ranges of keys: the interface between masks and the CPU kernels.

For a block of queries, a kernel needs the number of keys that the block sees (`divide_spans`), the next span of such
keys (`seen_from`), the keys of this span that no query of the block sees (`drop_unseen`), and the keys that a single
query does not see (`bounds_of`, `hide_gaps`). A gradient loops over keys, and needs the queries that see them
(`tokens_seeing`).

All results are computed from the call's ranges, i32 [T, R, 2], clamped to the keys of the query's sequence. The ranges
of a query may be in any order. Without ranges, all keys of a unit are one span.
"""

from numba.core import types

from ragged_attention.portable.numba import _splits
from ragged_attention.portable.numba._branches import branch
from ragged_attention.portable.numba._softmax import NOTHING
from ragged_attention.portable.numba._vectors import compiled, fill, inlined, int32_at, int_at, set_int

BOUND = 32  # query tokens whose bounds are listed together


@inlined
def range_at(call, index, kv_len):
    """Range `index` of all queries' ranges, as the keys [begin, end); it is empty if end <= begin."""
    return max(int32_at(call.key_ranges, 2 * index), 0), min(int32_at(call.key_ranges, 2 * index + 1), kv_len)


@compiled
def bounds_of(call, token, kv_len):
    """The smallest range that holds all keys that a query token sees."""
    left, right = kv_len, 0
    for index in range(token * call.num_ranges, (token + 1) * call.num_ranges):
        begin, end = range_at(call, index, kv_len)
        if begin < end:
            left, right = min(left, begin), max(right, end)
    return min(left, right), right


@compiled
def next_span(call, first, last, kv_len, position, gap):
    """The next span of keys, from `position` on, that query tokens of [first, last) see: (begin, end, `whole`).

    The span ends where none of these tokens sees the next `gap` keys. If `whole`, each key of the span is seen by some
    token; otherwise the span may have gaps. Begin and end are `kv_len` if there are no more keys that a token sees.
    """
    start, stop, span = first * call.num_ranges, last * call.num_ranges, kv_len
    for index in range(start, stop):
        begin, end = range_at(call, index, kv_len)
        begin = max(begin, position)
        if begin < end:
            span = min(span, begin)
    reached, grows, whole = span, True, True
    while grows:
        grows = False
        for index in range(start, stop):
            begin, end = range_at(call, index, kv_len)
            if end > reached and begin < min(reached + gap, end):
                whole = whole and begin <= reached
                reached, grows = end, True
    return span, reached, whole


# ---- dividing the work


@compiled
def count_keys(call, first, last, kv_len):
    """The number of keys in the spans that query tokens [first, last) see."""
    count = position = 0
    while position < kv_len:
        begin, position, _ = next_span(call, first, last, kv_len, position, call.block_kv)
        count += position - begin
    return count


@compiled
def position_of(call, first, last, kv_len, number):
    """The position of the key with index `number` among the keys that `count_keys` counts."""
    position = 0
    while position < kv_len:
        begin, position, _ = next_span(call, first, last, kv_len, position, call.block_kv)
        if number < position - begin:
            return begin + number
        number -= position - begin
    return kv_len


@branch("key_ranges", result=types.int64)
def divide_spans(call, units, seq, token, first, last, first_token, last_token, kv_len, max_splits):
    """`add_splits`, or `add_segments`, for rows whose query tokens [first_token, last_token) see keys by ranges.

    Keys that none of these tokens sees do not count.
    """
    listed, keys = call.num_units, count_keys(call, first_token, last_token, kv_len)
    if call.segment_kv:
        low = position_of(call, first_token, last_token, kv_len, 0)
        high = position_of(call, first_token, last_token, kv_len, keys - 1) + 1 if keys else low
        return _splits.add_segments(call, units, seq, token, first, last, low, high, keys)
    work = _splits.add_splits(call, units, seq, token, first, last, 0, keys, keys, max_splits)
    for index in range(listed, call.num_units if units else listed):
        unit = _splits.unit_at(units + _splits.UNIT_BYTES * index)
        if unit.low < unit.high:
            unit.high = position_of(call, first_token, last_token, kv_len, unit.high - 1) + 1
            unit.low = position_of(call, first_token, last_token, kv_len, unit.low)
    return work


# ---- one program


@inlined
def seen_between(call, token, stop, kv_len):
    """A range with all keys that a query token sees; query token `stop` - 1 is at position `kv_len` - 1."""
    position = kv_len - stop + token
    left = position - call.sliding_window + 1 if call.sliding_window else 0
    right = min(position + 1, kv_len) if call.causal and not call.drafted else kv_len
    return bounds_of(call, token, kv_len) if call.key_ranges else (left, right)


@inlined
def seen_from(call, tokens, kv_len, position, high):
    """The next span, from `position` on and before `high`, of keys that a unit's `tokens` see (see `next_span`).

    If the call has segments, a span is one tile of keys. Its first key is a multiple of `block_kv` keys after the
    segment's first key. So the keys in a tile do not depend on what the tokens see, and a tile can have keys that no
    token sees.
    """
    begin, end, whole = position, high, True
    if call.key_ranges:
        begin, end, whole = next_span(call, tokens[0], tokens[1], kv_len, position, call.block_kv)
    if call.segment_kv and begin < high:
        begin -= begin % call.segment_kv % call.block_kv
        end, whole = begin + call.block_kv, False
    return min(begin, high), min(end, high), whole


@branch("key_ranges", result=types.int64)
def drop_unseen(call, tile, first_token, last_token, kv_len, first, count):
    """Treat keys that no query token of [first_token, last_token) sees as missing; returns the number of such keys.

    The keys are the next `count` keys, from position `first` on. Missing keys are not read, so a NaN in them does not
    reach the results.
    """
    holes, position, stop = 0, first, first + count
    while position < stop:
        begin, end, _ = next_span(call, first_token, last_token, kv_len, position, 1)
        for key in range(position - first, min(begin, stop) - first):
            set_int(tile.next_sources, key, 0)
            set_int(tile.next_v_sources, key, 0)
            holes += 1
        position = end
    return holes


@branch("num_ranges")
def hide_gaps(call, tile, token, offset, rows, group, kv_len, first, count):
    """Hide keys in the gaps between the ranges of each row's query token.

    The logits are those of `count` keys, from position `first` on. Each token has `group` rows. The tile's first row is
    row `offset`, counted from the first row of `token`.
    """
    row = 0
    while row < rows:
        query, next_row = token + (offset + row) // group, min(row + group - (offset + row) % group, rows)
        position, stop = max(int_at(tile.left, row), first), min(int_at(tile.right, row), first + count)
        while position < stop:
            begin, end, _ = next_span(call, query, query + 1, kv_len, position, 1)
            for hidden in range(row, next_row if begin > position else row):
                fill(tile.s + 4 * hidden * tile.s_width, position - first, min(begin, stop) - first, NOTHING)
            position = end
        row = next_row


# ---- gradients


@compiled
def list_gaps(call, tile, row, token, left, right, kv_len):
    """List the gaps between the keys that a query token sees, all within [left, right), as the gaps of a tile's row."""
    count, position = 0, left
    while position < right:
        begin, end, _ = next_span(call, token, token + 1, kv_len, position, 1)
        if begin > position:
            place = 2 * (row * tile.max_gaps + count)
            set_int(tile.gaps, place, position)
            set_int(tile.gaps, place + 1, begin)
            count += 1
        position = end
    set_int(tile.num_gaps, row, count)


@inlined
def bytes_of_bounds(count):
    """The size of the list that `list_bounds` makes for `count` query tokens."""
    return 16 * ((count + BOUND - 1) // BOUND)


@compiled
def list_bounds(call, start, stop, kv_len, bounds):
    """List, at the address `bounds`, the bounds of the keys that each group of BOUND tokens of [start, stop) sees."""
    for token in range(start, stop, BOUND):
        left, right = kv_len, 0
        for query in range(token, min(token + BOUND, stop)):
            low, high = bounds_of(call, query, kv_len)
            if low < high:
                left, right = min(left, low), max(right, high)
        place = 2 * ((token - start) // BOUND)
        set_int(bounds, place, left)
        set_int(bounds, place + 1, right)


@compiled
def sees(call, first, last, kv_len, begin, end):
    """Whether a query token of [first, last) sees any of the keys [begin, end)."""
    for index in range(first * call.num_ranges, last * call.num_ranges):
        low, high = range_at(call, index, kv_len)
        if max(low, begin) < min(high, end):
            return True
    return False


@compiled
def tokens_seeing(call, start, stop, kv_len, bounds, begin, end):
    """The first and one past the last query token of [start, stop) that sees any of the keys [begin, end).

    `bounds` are those of `list_bounds`. With them, most tokens that see none of these keys are skipped.
    """
    first, last = stop, start
    for token in range(start, stop, BOUND):
        place = 2 * ((token - start) // BOUND)
        if int_at(bounds, place) < end and begin < int_at(bounds, place + 1):
            for query in range(token, min(token + BOUND, stop)):
                if sees(call, query, query + 1, kv_len, begin, end):
                    first, last = min(first, query), query + 1
    return min(first, last), last
