"""Latent attention: the grid entry, rows and keys of a program."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import triton
import triton.language as tl

from ragged_attention.kernels_triton._pages import are_readable, pages_of


@triton.jit
def split_edge(num_splits_ptr, seq, num_entries):
    """The first entry of a schedule's sequence, clamped to the grid."""
    return tl.minimum(tl.maximum(tl.load(num_splits_ptr + seq), 0), num_entries)


@triton.jit
def find_entry(entry, num_splits_ptr, num_seqs, num_entries, fixed_splits, SCHEDULED: tl.constexpr):
    """(sequence, split, number of splits) of an entry of the grid; a split out of range has no work."""
    if SCHEDULED:
        seq = 0
        high = num_seqs
        while high - seq > 1:
            middle = (seq + high) // 2
            is_after = split_edge(num_splits_ptr, middle, num_entries) <= entry
            seq = tl.where(is_after, middle, seq)
            high = tl.where(is_after, high, middle)
        first = split_edge(num_splits_ptr, seq, num_entries)
        split = tl.where(entry < first, num_entries, entry - first)  # out of range before the first entry, too
        count = split_edge(num_splits_ptr, seq + 1, num_entries) - first
    else:
        seq = entry // fixed_splits
        split = entry % fixed_splits
        count = fixed_splits
    return seq, split, count


@triton.jit
def token_and_head(row, job, kv_head, GROUP: tl.constexpr, SPARSE: tl.constexpr):
    """The query token and the head of rows of a job."""
    if SPARSE:
        token = job + tl.zeros_like(row)
        head = kv_head * GROUP + row
    else:
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
    return token, head


@triton.jit
def list_length(lens_ptr, seq, token, longest, seq_stride, token_stride, HAS_LENS: tl.constexpr):
    """The number of keys of a list: `longest`, or what `lens` says, clamped to that."""
    count = longest
    if HAS_LENS:
        offset = seq.to(tl.int64) * seq_stride + tl.cast(token, tl.int64) * token_stride
        count = tl.minimum(tl.maximum(tl.load(lens_ptr + offset), 0), longest)
    return count


@triton.jit
def first_seen(position, window, HAS_WINDOW: tl.constexpr):
    """The first key that a query at a position sees."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    return first


@triton.jit
def divide(blocks, count, SCHEDULED: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """(blocks per split, number of splits). Without a schedule, a split has at least MIN_BLOCKS, except the last."""
    blocks_each = (blocks + tl.maximum(count, 1) - 1) // tl.maximum(count, 1)
    used = count
    if not SCHEDULED:
        blocks_each = tl.maximum(blocks_each, MIN_BLOCKS)
        used = tl.maximum((blocks + blocks_each - 1) // blocks_each, 1)
    return blocks_each, used


@triton.jit
def entries_of(list_ptr, block, exists, first, last, SPARSE: tl.constexpr, PAGE_SIZE: tl.constexpr,
               BLOCK_KV: tl.constexpr):  # fmt: skip
    """A list's entries for a block of keys: slots, or pages in a dense call. They are -1 after the last key, and if the
    block does not exist."""
    if SPARSE:
        position = block * BLOCK_KV + tl.arange(0, BLOCK_KV)
        entries = tl.load(list_ptr + position, mask=position < tl.where(exists, last, 0), other=-1)
    else:
        entries = pages_of(list_ptr, block * BLOCK_KV, first, last, exists, True, PAGE_SIZE, BLOCK_KV)
    return entries


@triton.jit
def keys_of(entries, block, first, last, num_slots, SPARSE: tl.constexpr, PAGE_SIZE: tl.constexpr,
            BLOCK_KV: tl.constexpr):  # fmt: skip
    """(position, page, offset in the page, whether it may be read) of each key of a block, from its entries."""
    position = block * BLOCK_KV + tl.arange(0, BLOCK_KV)
    if SPARSE:
        readable = (entries >= 0) & (entries < num_slots)
        slot = tl.where(readable, entries, 0)
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
    else:
        page = entries
        readable = are_readable(position, page, first, last, num_slots // PAGE_SIZE, PAGE_SIZE, BLOCK_KV)
        offset = position % PAGE_SIZE
    return position, page, offset, readable
