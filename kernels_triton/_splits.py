"""How work is divided: blocks of rows of long sequences, and splits of the keys of short ones.

*Rows* are (query token, head) pairs; all rows of a sequence share its keys. A sequence is *short* where its rows fit
one block (decode, speculative decode): its keys may come in several splits, each a program's, whose results the combine
kernel merges. Every other sequence has a program for each block of its rows, over all keys that these see. A program
finds out by itself which sequence and which keys it works on, so grids follow from shapes alone.

There are three ways to divide the keys of short sequences.
- Balanced: about `num_splits` splits for the whole batch, all of the same number of blocks of keys.
- Batch-invariant: up to `num_splits` splits for each sequence, by that sequence's own length.
- Scheduled: as the caller's schedule says (`make_decode_schedule`).
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._mask import key_range
from ragged_attention.kernels_triton._sequences import find_segment, query_edge, segment_edge
from ragged_attention.kernels_triton._tiles import next_power_of_2

LARGEST_INT: tl.constexpr = tl.constexpr(2**31 - 1)
FEW_TOKENS = 4  # query tokens up to which a sequence of a mixed batch counts as decoding
MAX_SPLITS = 4096
SEQUENCES = (64, 256, 1024, 4096)  # lengths that a program may sum over; each size is compiled by itself


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Division(Constants):
    """How the work of a launch is divided."""

    GROUP: int  # rows of a query token
    SHORT_ROWS: int  # rows up to which a sequence is short
    BLOCK_KV: int  # keys of a block; a split consists of whole blocks
    SPLIT_KV: bool  # whether a sequence's keys can come in several splits
    BATCH_INVARIANT: bool = False  # a sequence is split by its own length, whatever else is in the batch
    COMPACT: bool = False  # only splits of sequences that have several take room where splits are stored
    ALL_SEQUENCES: bool = False  # this launch has programs for the rows of long sequences and of none, too
    MIN_BLOCKS: int = 1  # fewest blocks of a split, unless the sequence has no more
    MAX_SEQS: int = 1  # sequences that a program looks at together: all of the batch, unless BATCH_INVARIANT


class Batch(NamedTuple):
    """The sequences of a call."""

    cu_q_lens_ptr: tl.tensor
    kv_lens_ptr: tl.tensor
    num_seqs: tl.tensor  # live ones
    max_num_seqs: tl.tensor  # rows of the tables
    num_tokens: tl.tensor
    capacity: tl.tensor  # most keys that a sequence's row of the page table can hold


class Split(NamedTuple):
    """A short sequence's rows and one split of its keys."""

    seq: tl.tensor
    start: tl.tensor  # the sequence's first token
    q_len: tl.tensor  # 0 where the program has nothing to do
    kv_len: tl.tensor
    first: tl.tensor  # the sequence's rows see the keys [first, last)
    last: tl.tensor
    number: tl.tensor  # of this split in its sequence, from 0
    splits: tl.tensor  # of the sequence
    blocks: tl.tensor  # of keys in each split except the last
    place: tl.tensor  # where this split is stored, if the sequence has several
    first_row: tl.tensor  # above 0 only for long sequences


def most_tokens(call: Any) -> int:
    """The most query tokens of a sequence in this batch, as far as the host knows; at least 1."""
    return max(1, call.num_tokens if call.max_q_len is None else min(call.max_q_len, call.num_tokens))


def sequences_together(max_num_seqs: int) -> int:
    """`Division.MAX_SEQS` for tables of that many rows."""
    return next((count for count in SEQUENCES if count >= max_num_seqs), SEQUENCES[-1])


def splits_at_most(max_num_seqs: int, num_splits: int, *, invariant: bool) -> tuple[int, int]:
    """(all splits there can be, those that can be stored if COMPACT)."""
    if num_splits == 1:
        return max_num_seqs, 0
    if invariant:
        return max_num_seqs * num_splits, max_num_seqs * num_splits
    # All splits of a sequence but the last are full, so fewer than twice as many as asked for are stored.
    return max_num_seqs + num_splits, min(max_num_seqs + num_splits, 2 * num_splits)


def merged_at_once(num_splits: int, width: int, *, invariant: bool) -> int:
    """`Combination.MERGED` for rows of that width: few splits need no more registers than they have numbers."""
    return min(next_power_of_2(num_splits), max(1, (512 if invariant else 2048) // next_power_of_2(width)))


@triton.jit
def find_rows(block, batch, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr):
    """(sequence, its first token, q_len, the block's first row in it, whether the sequence is live) of a block of rows.

    Rows that belong to no live sequence come as segments of their own, which are not live; see `find_segment`.
    """
    segment = find_segment(block, batch.cu_q_lens_ptr, batch.num_seqs, batch.num_tokens, GROUP, BLOCK_Q)
    start = segment_edge(batch.cu_q_lens_ptr, segment, batch.num_seqs, batch.num_tokens)
    stop = segment_edge(batch.cu_q_lens_ptr, segment + 1, batch.num_seqs, batch.num_tokens)
    seq = segment - 1
    live = (seq >= 0) & (seq < batch.num_seqs)
    first_row = (block - (start * GROUP // BLOCK_Q + segment)) * BLOCK_Q
    return seq, start, tl.maximum(stop, start) - start, first_row, live


@triton.jit
def short_sequence(seq, batch, mask, KIND: tl.constexpr, DIVISION: tl.constexpr):
    """(start, q_len, kv_len, first, last) of one sequence or of several; see `Split`.

    q_len is 0 for a sequence that is not live and, unless the launch is for ALL_SEQUENCES, for a long one.
    """
    row = tl.minimum(seq, batch.max_num_seqs - 1)
    start = query_edge(batch.cu_q_lens_ptr, row, batch.num_tokens)
    stop = tl.maximum(query_edge(batch.cu_q_lens_ptr, row + 1, batch.num_tokens), start)
    ours = seq < batch.num_seqs
    if not DIVISION.ALL_SEQUENCES:
        ours = ours & ((stop - start) * DIVISION.GROUP <= DIVISION.SHORT_ROWS)
    q_len = tl.where(ours, stop - start, 0)
    kv_len = tl.minimum(tl.maximum(tl.load(batch.kv_lens_ptr + row), 0), batch.capacity)
    first, last = key_range(kv_len - q_len, kv_len - 1, kv_len, mask, KIND)
    return start, q_len, kv_len, first, last


@triton.jit
def balanced_splits(batch, mask, num_splits, KIND: tl.constexpr, DIVISION: tl.constexpr):
    """(splits of each sequence, blocks of a split): about `num_splits` in all, at least one for each sequence.

    A long sequence is one split.
    """
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
    """The blocks of the keys [first, last) that can come in splits: none of a long sequence."""
    blocks = (last + DIVISION.BLOCK_KV - 1) // DIVISION.BLOCK_KV - first // DIVISION.BLOCK_KV
    return tl.where(q_len * DIVISION.GROUP <= DIVISION.SHORT_ROWS, blocks, 0)


@triton.jit
def splits_of_sequence(blocks, num_splits, MIN_BLOCKS: tl.constexpr):
    """(splits, blocks of a split) of a sequence with that many blocks of keys: up to `num_splits`, at least one."""
    each = tl.maximum((blocks + num_splits - 1) // num_splits, MIN_BLOCKS)
    return tl.maximum((blocks + each - 1) // each, 1), each


@triton.jit
def find_later_rows(index, batch, DIVISION: tl.constexpr):
    """(sequence, first row) of a block of rows: number `index` of those that are not the first of their sequence."""
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
    """The most splits of all sequences together; with ALL_SEQUENCES, later rows are numbered from here on."""
    most = max_num_seqs
    if DIVISION.BATCH_INVARIANT:
        most = max_num_seqs * num_splits
    elif DIVISION.SPLIT_KV:
        most = max_num_seqs + num_splits
    return most


@triton.jit
def store_ranges(ranges_ptr, items, first, end, num_items, mask):
    """Write the numbers [first, end) of the splits of items to ranges [2, num_items], for the combine kernel."""
    tl.store(ranges_ptr + items, first, mask=mask)
    tl.store(ranges_ptr + num_items + items, end, mask=mask)


@triton.jit
def store_all_ranges(ranges_ptr, batch, mask, num_splits, is_last, KIND: tl.constexpr, DIVISION: tl.constexpr):
    """Tell the combine kernel, if this is the last program of the grid, where each sequence's splits are stored.

    That program has nothing else to do. If the programs of first splits wrote these ranges before their attention, some
    shapes would spill up to 72 bytes a thread on sm_90; after it, others would need 40 registers more.
    """
    for start in range(0, tl.where(is_last, batch.max_num_seqs, 0), DIVISION.MAX_SEQS):
        seqs = start + tl.arange(0, DIVISION.MAX_SEQS)
        if DIVISION.BATCH_INVARIANT:
            _, q_len, _, first, last = short_sequence(seqs, batch, mask, KIND, DIVISION)
            blocks = blocks_of_sequence(q_len, first, last, DIVISION)
            counts, _ = splits_of_sequence(blocks, num_splits, DIVISION.MIN_BLOCKS)
            places = seqs * num_splits
        else:  # then there is one turn
            counts, _ = balanced_splits(batch, mask, num_splits, KIND, DIVISION)
            places = tl.cumsum(counts, 0) - counts
        store_ranges(ranges_ptr, seqs, places, places + counts, batch.max_num_seqs, seqs < batch.max_num_seqs)


@triton.jit
def find_split(entry, batch, mask, num_splits, KIND: tl.constexpr, DIVISION: tl.constexpr):
    """The `Split` of a program whose number among all splits is `entry`."""
    seq = entry
    first_row = 0
    number = 0
    splits = 1
    each = 0
    place = entry
    most = most_splits(batch.max_num_seqs, num_splits, DIVISION)
    if DIVISION.ALL_SEQUENCES and entry >= most:
        seq, first_row = find_later_rows(entry - most, batch, DIVISION)
    elif DIVISION.BATCH_INVARIANT:
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
    return Split(seq, start, q_len, kv_len, first, last, number, splits, each, place, first_row)


@triton.jit
def schedule_edge(num_splits_ptr, seq, num_entries):
    """The number of a schedule's splits before those of a sequence."""
    return tl.minimum(tl.maximum(tl.load(num_splits_ptr + seq), 0), num_entries)


@triton.jit
def find_entry(entry, num_splits_ptr, num_seqs, num_entries, fixed_splits, SCHEDULED: tl.constexpr):
    """(sequence, split, splits) of a program: by a schedule or, without one, `fixed_splits` for each sequence.

    A split that the sequence does not have has no work.
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
        split = tl.where(entry < first, num_entries, entry - first)  # before the first sequence there is no work
        count = schedule_edge(num_splits_ptr, seq + 1, num_entries) - first
    else:
        seq = entry // fixed_splits
        split = entry % fixed_splits
        count = fixed_splits
    return seq, split, count


@triton.jit
def divide_blocks(blocks, count, SCHEDULED: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """(splits, blocks of a split) of a list with that many blocks; a schedule's number of splits stays as it is."""
    if SCHEDULED:
        splits = count
        each = (blocks + tl.maximum(count, 1) - 1) // tl.maximum(count, 1)
    else:
        splits, each = splits_of_sequence(blocks, count, MIN_BLOCKS)
    return splits, each
