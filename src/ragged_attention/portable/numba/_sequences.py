"""The rows of each sequence's queries and keys, clamped so that no length leads outside the arrays."""

from typing import Any

from ragged_attention.portable.numba._vectors import compiled, inlined, int32_at

ONE_EACH, CHUNK_END, CHUNK_START, PACKED = 0, 1, 2, 3  # values of `layout`, see `queries_of`


def max_sequences(call: Any, num_rows: int) -> int:
    """The maximum number of sequences: `num_seqs` if it is an int, else the number of rows of the tables."""
    return call.num_seqs if isinstance(call.num_seqs, int) else num_rows


@inlined
def within(value, high):
    """A value, clamped to the range from 0 to `high`."""
    return min(max(value, 0), high)


@inlined
def num_sequences(call):
    return within(int32_at(call.num_seqs, 0), call.max_num_seqs) if call.num_seqs else call.max_num_seqs


@inlined
def first_key_of(call, seq):
    """A sequence's first row among `capacity` packed keys."""
    return within(int32_at(call.cu_kv_lens, seq), call.capacity)


@inlined
def kv_len_of(call, seq):
    if call.cu_kv_lens:
        first = first_key_of(call, seq)
        return max(within(int32_at(call.cu_kv_lens, seq + 1), call.capacity) - first, 0)
    return within(int32_at(call.kv_lens, seq), call.capacity)


@compiled
def packed_queries_of(call, seq):
    """The range (first, one past the last) of a sequence's rows in packed queries."""
    first = within(int32_at(call.cu_q_lens, seq), call.num_tokens)
    return first, max(within(int32_at(call.cu_q_lens, seq + 1), call.num_tokens), first)


@compiled
def queries_of(call, seq):
    """The range (first, one past the last) of a sequence's rows in the queries of any layout."""
    if call.layout == ONE_EACH:
        return seq, seq + 1
    if call.layout == PACKED:
        return packed_queries_of(call, seq)
    length, tokens = kv_len_of(call, 0), call.num_tokens
    if call.layout == CHUNK_END or tokens == 0:
        return 0, tokens
    return 0, (length - 1) % tokens + 1 if length else 0


def clearer_of_gaps(queries_of, clear):
    """A function that calls `clear(call, first, stop)` for each range of rows that belong to no sequence.

    `queries_of` returns the rows of a sequence. The function calls `clear` and does not yield the ranges, because a
    generator would hold a copy of the whole record.
    """

    @compiled
    def clear_gaps(call):
        """Clear the rows that belong to no sequence, or all rows if the sequences' rows do not ascend."""
        done = 0
        for seq in range(num_sequences(call)):
            first, stop = queries_of(call, seq)
            if first < done:
                done = 0
                break
            clear(call, done, first)
            done = stop
        clear(call, done, call.num_tokens)

    return clear_gaps
