"""The division of work among programs: blocks of rows for long sequences, KV splits for short ones.

*Rows* are (query token, head) pairs; all rows of a sequence share its keys. A sequence is *short* if it has few rows,
as in decode and speculative decode. Its keys may be divided into several splits, each with its own program. The combine
kernel then merges the splits' results. A long sequence has one program per block of rows, which visits all keys that
the rows see. Each program finds its own sequence and keys, so grids follow from shapes alone.

There are four ways to split the keys of short sequences:
- Balanced: the whole batch gets about `num_splits` splits, all with the same number of key blocks.
- Batch-invariant: each sequence gets up to `num_splits` splits, which depend on its own length only.
- Segmented: each segment of keys is a split; see `_segments`. A sequence can have up to `num_splits` of them.
- Scheduled: the caller's schedule decides (`make_decode_schedule`).
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._mask import key_range
from ragged_attention.kernels_triton._segments import number_of_segments
from ragged_attention.kernels_triton._sequences import find_segment, query_edge, segment_edge
from ragged_attention.kernels_triton._tiles import cdiv

LARGEST_INT: tl.constexpr = tl.constexpr(2**31 - 1)
FEW_TOKENS = 4  # in a mixed batch, a sequence with at most this many query tokens counts as decoding
MANY_TOKENS = 8  # a batch with more query tokens per sequence on average is assumed to have prompts
MAX_SPLITS = 4096
SEQUENCES = (64, 256, 1024, 4096)  # the values of `Division.MAX_SEQS` above 1; a kernel is compiled for each


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Division(Constants):
    """The constants by which a launch divides its work."""

    GROUP: int  # rows per query token
    SHORT_ROWS: int  # maximum rows of a short sequence
    BLOCK_KV: int  # keys per block; a split consists of whole blocks
    SPLIT_KV: bool  # whether sequences can have several splits
    BATCH_INVARIANT: bool = False  # whether a sequence's splits depend on its own length only
    SEGMENT: int = 0  # keys per segment, if each segment is a split; else 0
    PACKED: bool = False  # whether keys are packed: then `Batch.kv_lens_ptr` is cu_kv_lens
    COMPACT: bool = False  # whether sequences with one split take no memory for split results
    ALL_SEQUENCES: bool = False  # whether the launch also computes long sequences and rows that belong to no sequence
    MIN_BLOCKS: int = 1  # minimum blocks per split, unless the sequence has fewer
    MAX_SEQS: int = 1  # sequence lengths that a program loads at once, to balance splits or to find later rows; else 1


class Batch(NamedTuple):
    """The sequences of a call."""

    cu_q_lens_ptr: tl.tensor
    kv_lens_ptr: tl.tensor
    num_seqs: tl.tensor  # the first `num_seqs` sequences are live
    max_num_seqs: tl.tensor  # rows of the page table
    num_tokens: tl.tensor
    capacity: tl.tensor  # keys that a row of the page table can address, or the total number of packed keys


class Split(NamedTuple):
    """The rows of one sequence that a program computes, and the split of the sequence's keys that they attend to."""

    seq: tl.tensor
    start: tl.tensor  # the sequence's first token
    q_len: tl.tensor  # 0 if the program has no work
    kv_len: tl.tensor
    seen_first: tl.tensor  # the sequence's rows see the keys [seen_first, seen_end)
    seen_end: tl.tensor
    number: tl.tensor  # the index of this split in its sequence
    splits: tl.tensor  # the sequence's number of splits
    blocks_each: tl.tensor  # key blocks in each split except the last
    place: tl.tensor  # the index at which this split's result is stored, if the sequence has several splits
    first_row: tl.tensor  # the program's first row in the sequence; above 0 only for long sequences


def most_tokens(call: Any) -> int:
    """The maximum query tokens per sequence that the host expects, at least 1. The call's `max_q_len` can be wrong."""
    return max(1, call.num_tokens if call.max_q_len is None else min(call.max_q_len, call.num_tokens))


def short_tokens(call: Any) -> int:
    """The query tokens per short sequence for which the host selects tiles.

    This is `max_q_len` if the call has it, else the average. If that exceeds MANY_TOKENS, it is FEW_TOKENS.
    """
    tokens = cdiv(call.num_tokens, max(call.max_num_seqs, 1)) if call.max_q_len is None else call.max_q_len
    return tokens if tokens <= MANY_TOKENS else FEW_TOKENS


def sequences_together(max_num_seqs: int) -> int:
    """`Division.MAX_SEQS` for a page table with `max_num_seqs` rows."""
    return next((count for count in SEQUENCES if count >= max_num_seqs), SEQUENCES[-1])


def possible_tile(call: Any, tile: Any) -> Any:
    """The tile, but without splits if balancing them would need sums over more than SEQUENCES[-1] lengths."""
    balanced = tile.num_splits > 1 and not tile.invariant
    return dataclasses.replace(tile, num_splits=1) if balanced and call.max_num_seqs > SEQUENCES[-1] else tile


def splits_at_most(max_num_seqs: int, num_splits: int, *, invariant: bool) -> tuple[int, int]:
    """(maximum number of splits, maximum number of stored splits if COMPACT)."""
    if num_splits == 1:
        return max_num_seqs, 0
    if invariant:
        return max_num_seqs * num_splits, max_num_seqs * num_splits
    # There are at most num_splits full splits in total. A stored sequence has at least one full split, and at most one
    # partial split.
    return max_num_seqs + num_splits, min(max_num_seqs + num_splits, 2 * num_splits)


@triton.jit
def find_rows(block, batch, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr):
    """(sequence, its first token, its q_len, the block's first row in it, whether it is live) for a block of rows.

    Rows that belong to no live sequence form segments that are not live; see `segment_edge`.
    """
    segment = find_segment(block, batch.cu_q_lens_ptr, batch.num_seqs, batch.num_tokens, GROUP, BLOCK_Q)
    start = segment_edge(batch.cu_q_lens_ptr, segment, batch.num_seqs, batch.num_tokens)
    stop = segment_edge(batch.cu_q_lens_ptr, segment + 1, batch.num_seqs, batch.num_tokens)
    seq = segment - 1
    live = (seq >= 0) & (seq < batch.num_seqs)
    first_row = (block - (start * GROUP // BLOCK_Q + segment)) * BLOCK_Q
    return seq, start, tl.maximum(stop, start) - start, first_row, live


@triton.jit
def length_of(seq, kv_lens_ptr, capacity, PACKED: tl.constexpr):
    """The number of a sequence's keys. If PACKED, `kv_lens_ptr` is cu_kv_lens, and `capacity` counts all keys."""
    if PACKED:
        start = query_edge(kv_lens_ptr, seq, capacity)
        kv_len = tl.maximum(query_edge(kv_lens_ptr, seq + 1, capacity) - start, 0)
    else:
        kv_len = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + seq), 0), capacity)
    return kv_len


@triton.jit
def short_sequence(seq, batch, mask, KIND: tl.constexpr, DIVISION: tl.constexpr):
    """(start, q_len, kv_len, first, last) of one or more sequences; see `Split`.

    q_len is 0 for a sequence that is not live. Unless ALL_SEQUENCES, it is also 0 for a long sequence.
    """
    row = tl.minimum(seq, batch.max_num_seqs - 1)
    start = query_edge(batch.cu_q_lens_ptr, row, batch.num_tokens)
    stop = tl.maximum(query_edge(batch.cu_q_lens_ptr, row + 1, batch.num_tokens), start)
    ours = seq < batch.num_seqs
    if not DIVISION.ALL_SEQUENCES:
        ours = ours & ((stop - start) * DIVISION.GROUP <= DIVISION.SHORT_ROWS)
    q_len = tl.where(ours, stop - start, 0)
    kv_len = length_of(row, batch.kv_lens_ptr, batch.capacity, DIVISION.PACKED)
    first, last = key_range(kv_len - q_len, kv_len - 1, kv_len, mask, KIND)
    return start, q_len, kv_len, first, last


@triton.jit
def balanced_splits(batch, mask, num_splits, KIND: tl.constexpr, DIVISION: tl.constexpr):
    """(splits of each sequence, blocks per split), with about `num_splits` in total. A long sequence has one."""
    BLOCK_KV: tl.constexpr = DIVISION.BLOCK_KV
    seqs = tl.arange(0, DIVISION.MAX_SEQS)
    _, q_len, _, first, last = short_sequence(seqs, batch, mask, KIND, DIVISION)
    short = (q_len > 0) & (q_len * DIVISION.GROUP <= DIVISION.SHORT_ROWS)
    blocks = tl.where(short, (last + BLOCK_KV - 1) // BLOCK_KV - first // BLOCK_KV, 0)
    each = (tl.sum(blocks.to(tl.int64), 0) + num_splits - 1) // num_splits
    each = tl.minimum(tl.maximum(each, DIVISION.MIN_BLOCKS), LARGEST_INT // BLOCK_KV).to(tl.int32)
    return tl.where(q_len > 0, tl.maximum((blocks + each - 1) // each, 1), 0), each


@triton.jit
def blocks_of_sequence(q_len, first, last, DIVISION: tl.constexpr):
    """The number of key blocks in [first, last) that can be split; 0 for a long sequence."""
    blocks = (last + DIVISION.BLOCK_KV - 1) // DIVISION.BLOCK_KV - first // DIVISION.BLOCK_KV
    return tl.where(q_len * DIVISION.GROUP <= DIVISION.SHORT_ROWS, blocks, 0)


@triton.jit
def splits_of_sequence(blocks, num_splits, MIN_BLOCKS: tl.constexpr):
    """(splits, blocks per split) of a sequence with `blocks` key blocks: at least one and up to `num_splits` splits."""
    each = tl.maximum((blocks + num_splits - 1) // num_splits, MIN_BLOCKS)
    return tl.maximum((blocks + each - 1) // each, 1), each


@triton.jit
def segments_of_sequence(q_len, first, last, DIVISION: tl.constexpr):
    """The number of programs for the keys [first, last): one per segment, but only one for a long sequence."""
    segments = number_of_segments(first, last, DIVISION.SEGMENT)
    return tl.where(q_len * DIVISION.GROUP <= DIVISION.SHORT_ROWS, segments, 1)


@triton.jit
def find_later_rows(index, batch, DIVISION: tl.constexpr):
    """(sequence, first row) of a block of rows. `index` counts all blocks except each sequence's first."""
    seqs = tl.arange(0, DIVISION.MAX_SEQS)
    row = tl.minimum(seqs, batch.max_num_seqs - 1)
    q_len = query_edge(batch.cu_q_lens_ptr, row + 1, batch.num_tokens)
    q_len -= query_edge(batch.cu_q_lens_ptr, row, batch.num_tokens)
    later = tl.maximum((q_len * DIVISION.GROUP - 1) // DIVISION.SHORT_ROWS, 0)
    later = tl.where(seqs < batch.num_seqs, later, 0)
    seq = tl.sum((tl.cumsum(later, 0) <= index).to(tl.int32), 0)
    before = tl.sum(tl.where(seqs < seq, later, 0), 0)
    return seq, (index - before + 1) * DIVISION.SHORT_ROWS


@triton.jit
def most_splits(max_num_seqs, num_splits, DIVISION: tl.constexpr):
    """The maximum number of splits of the batch. If ALL_SEQUENCES, programs after these call `find_later_rows`."""
    most = max_num_seqs
    if DIVISION.BATCH_INVARIANT or DIVISION.SEGMENT > 0:
        most = max_num_seqs * num_splits
    elif DIVISION.SPLIT_KV:
        most = max_num_seqs + num_splits
    return most


@triton.jit
def stored_splits(seq, batch, mask, num_splits, KIND: tl.constexpr, DIVISION: tl.constexpr):
    """(index at which a short sequence's first split is stored, number of its splits), for the combine kernel."""
    if DIVISION.BATCH_INVARIANT:
        _, q_len, _, first, last = short_sequence(seq, batch, mask, KIND, DIVISION)
        splits, _ = splits_of_sequence(blocks_of_sequence(q_len, first, last, DIVISION), num_splits,
                                       DIVISION.MIN_BLOCKS)  # fmt: skip
        place = seq * num_splits
    elif DIVISION.SEGMENT:
        _, q_len, _, first, last = short_sequence(seq, batch, mask, KIND, DIVISION)
        splits = segments_of_sequence(q_len, first, last, DIVISION)
        place = seq * num_splits
    else:
        counts, _ = balanced_splits(batch, mask, num_splits, KIND, DIVISION)
        seqs = tl.arange(0, DIVISION.MAX_SEQS)
        splits = tl.sum(tl.where(seqs == seq, counts, 0), 0)
        earlier = seqs < seq
        if DIVISION.COMPACT:
            earlier = earlier & (counts > 1)
        place = tl.sum(tl.where(earlier, counts, 0), 0)
    return place, splits


@triton.jit
def find_split(entry, batch, mask, num_splits, KIND: tl.constexpr, DIVISION: tl.constexpr):
    """The `Split` of the program with index `entry` along the grid's axis of splits."""
    seq = entry
    first_row = 0
    number = 0
    splits = 1
    each = 0
    place = entry
    most = most_splits(batch.max_num_seqs, num_splits, DIVISION)
    if DIVISION.ALL_SEQUENCES and entry >= most:
        seq, first_row = find_later_rows(entry - most, batch, DIVISION)
    elif DIVISION.BATCH_INVARIANT or DIVISION.SEGMENT > 0:
        seq = entry // num_splits
        number = entry % num_splits
    elif DIVISION.SPLIT_KV:
        counts, each = balanced_splits(batch, mask, num_splits, KIND, DIVISION)
        ends = tl.cumsum(counts, 0)
        seq = tl.sum((ends <= entry).to(tl.int32), 0)
        own = tl.arange(0, DIVISION.MAX_SEQS) == seq
        splits = tl.sum(tl.where(own, counts, 0), 0)
        number = entry - tl.sum(tl.where(own, ends, 0), 0) + splits
        if DIVISION.COMPACT:
            earlier = (tl.arange(0, DIVISION.MAX_SEQS) < seq) & (counts > 1)
            place = tl.sum(tl.where(earlier, counts, 0), 0) + number
    start, q_len, kv_len, first, last = short_sequence(seq, batch, mask, KIND, DIVISION)
    if DIVISION.BATCH_INVARIANT:
        blocks = blocks_of_sequence(q_len, first, last, DIVISION)
        splits, each = splits_of_sequence(blocks, num_splits, DIVISION.MIN_BLOCKS)
        q_len = tl.where(number < splits, q_len, 0)
    if DIVISION.SEGMENT:
        splits = segments_of_sequence(q_len, first, last, DIVISION)
        q_len = tl.where(number < splits, q_len, 0)
    return Split(seq, start, q_len, kv_len, first, last, number, splits, each, place, first_row)


@triton.jit
def schedule_edge(num_splits_ptr, seq, num_entries):
    """A schedule's number of splits for all sequences before `seq`."""
    return tl.minimum(tl.maximum(tl.load(num_splits_ptr + seq), 0), num_entries)


@triton.jit
def find_entry(entry, num_splits_ptr, num_seqs, num_entries, fixed_splits, SCHEDULED: tl.constexpr):
    """(sequence, split, number of splits) of a program. Without a schedule, each sequence has `fixed_splits` splits.

    If the split's index is not below the number of splits, the program has no work.
    """
    if SCHEDULED:
        seq = 0
        high = num_seqs
        while high - seq > 1:
            middle = (seq + high) // 2
            found = schedule_edge(num_splits_ptr, middle, num_entries) <= entry
            seq = tl.where(found, middle, seq)
            high = tl.where(found, high, middle)
        first = schedule_edge(num_splits_ptr, seq, num_entries)
        split = tl.where(entry < first, num_entries, entry - first)  # no work before the first sequence's splits
        count = schedule_edge(num_splits_ptr, seq + 1, num_entries) - first
    else:
        seq = entry // fixed_splits
        split = entry % fixed_splits
        count = fixed_splits
    return seq, split, count


@triton.jit
def divide_blocks(blocks, count, SCHEDULED: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """(splits, blocks per split) of a list with `blocks` key blocks; if SCHEDULED, there are `count` splits."""
    if SCHEDULED:
        splits = count
        each = (blocks + tl.maximum(count, 1) - 1) // tl.maximum(count, 1)
    else:
        splits, each = splits_of_sequence(blocks, count, MIN_BLOCKS)
    return splits, each
