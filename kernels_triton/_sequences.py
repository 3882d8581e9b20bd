"""Which sequence a program works on, and which keys its queries see.

What belongs together goes from function to function as a named tuple. A kernel itself takes its arguments one by one,
as launchers pass them, and bundles them. Triton keeps a constant in a tuple that is built where a function is called;
in one that is assigned to a name it becomes a number that is computed with, and Triton 3.6 loses it in a tuple within
a tuple. So tuples with fields annotated as constants are built in calls, are not nested, and are read as
`bundle.FIELD`, not by unpacking.
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from typing import NamedTuple

import triton
import triton.language as tl

# Arguments that change from step to step while a model is served, wherever a kernel has them. Triton would compile a
# kernel anew where one of them becomes 1, or a multiple of 16, or stops being it. Strides, which stay, are not among
# them: that they are multiples of 16 is what wide loads rest on.
VARYING = (
    "blocks", "capacity", "count", "draft_stride", "draft_width", "extra_longest", "extra_num_slots", "first_token",
    "fixed_splits", "longest", "max_num_seqs", "num_entries", "num_kv_tokens", "num_pages", "num_parts", "num_q_tokens",
    "num_rows", "num_seqs", "num_slots", "num_splits", "num_tokens", "overhead", "range_end", "rows", "search_steps",
    "table_stride", "window",
)  # fmt: skip


class PageTable(NamedTuple):
    """The page table of a batch, one row for each sequence."""

    ptr: tl.tensor
    stride: tl.tensor
    num_pages: tl.tensor  # of the cache: an index out of [0, num_pages) names no page


class Blocks(NamedTuple):
    """Blocks of keys or rows that one loop visits: the first `left_blocks` of them from `left` on, the rest from
    `right` on. Without masks there are none on the right."""

    left: tl.tensor
    left_blocks: tl.tensor
    right: tl.tensor
    num_blocks: tl.tensor


class Edges(NamedTuple):
    """Which blocks of a sequence's keys the queries of a program see, and which of these in full.

        first                                            last       keys that some query sees
      |  some see   |  every query sees these   |  some see   |
    start      whole_start                 whole_stop        end    multiples of a block
      | with masks  |       without masks       | with masks  |     one loop and another
    """

    start: tl.tensor
    whole_start: tl.tensor
    whole_stop: tl.tensor
    end: tl.tensor


@triton.jit
def whole_blocks(edges, BLOCK: tl.constexpr):
    """The blocks in the middle, which need no masks."""
    return Blocks(edges.whole_start, 0, 0, (edges.whole_stop - edges.whole_start) // BLOCK)


@triton.jit
def end_blocks(edges, BLOCK: tl.constexpr):
    """The blocks on either side of those in the middle; one loop for both ends takes fewer registers than two."""
    left_blocks = (edges.whole_start - edges.start) // BLOCK
    return Blocks(edges.start, left_blocks, edges.whole_stop, left_blocks + (edges.end - edges.whole_stop) // BLOCK)


@triton.jit
def block_start(blocks, index, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The first key or row of the block that a loop visits as number `index`."""
    start = blocks.left + index * BLOCK
    if MASKED:
        start = tl.where(index < blocks.left_blocks, start, blocks.right + (index - blocks.left_blocks) * BLOCK)
    return start


@triton.jit
def count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS: tl.constexpr):
    """The number of live sequences, clamped to the tables."""
    count = max_num_seqs
    if HAS_NUM_SEQS:
        count = tl.minimum(tl.maximum(tl.load(num_seqs_ptr), 0), max_num_seqs)
    return count


@triton.jit
def query_edge(cu_q_lens_ptr, index, num_tokens):
    return tl.minimum(tl.maximum(tl.load(cu_q_lens_ptr + index), 0), num_tokens)


@triton.jit
def segment_edge(cu_q_lens_ptr, segment, num_seqs, num_tokens):
    """Where a segment of the query rows starts: 0 is what lies before the first sequence (nothing, in a valid call),
    then come the sequences, and `num_seqs + 1` is the padding behind them."""
    edge = query_edge(cu_q_lens_ptr, tl.minimum(tl.maximum(segment - 1, 0), num_seqs), num_tokens)
    return tl.where(segment == 0, 0, tl.where(segment > num_seqs + 1, num_tokens, edge))


@triton.jit
def find_segment(block, cu_q_lens_ptr, num_seqs, num_tokens, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The segment that a block of rows belongs to.

    Segment i is given blocks from `start_i * GROUP // BLOCK + i` on: that leaves each enough of them, and needs no
    count of the blocks of those before it, so the grid follows from shapes alone.
    """
    low = 0
    high = num_seqs + 2
    while high - low > 1:
        middle = (low + high) // 2
        first = segment_edge(cu_q_lens_ptr, middle, num_seqs, num_tokens) * GROUP // BLOCK + middle
        found = first <= block
        low = tl.where(found, middle, low)
        high = tl.where(found, high, middle)
    return low
