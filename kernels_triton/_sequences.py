"""Functions that find the sequence of a program, and the blocks of keys or rows that its loops visit.

Related values travel between functions as a named tuple. A kernel takes its arguments one by one, as launchers pass
them, and bundles them itself. Constants in a tuple stay compile-time constants only if the tuple is built inside a call
expression; if it is assigned to a name first, Triton turns them into run-time values. Triton 3.6 also loses constants
in nested tuples. So a tuple with constant fields is built inside a call, is not nested, and is read as `bundle.FIELD`,
not by unpacking.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._mask import MASK_NUMBERS

# Kernel arguments that change from step to step while a model is served. By default Triton compiles a kernel again if
# such an argument becomes 1, or begins or ceases to be a multiple of 16. Strides are not in this list: they do not
# change, and wide loads depend on strides that are multiples of 16.
VARYING = (
    *MASK_NUMBERS, "blocks", "capacity", "count", "extra_longest",
    "extra_num_slots", "first_token", "fixed_splits", "longest", "max_num_seqs", "num_entries", "num_kv_tokens",
    "num_pages", "num_parts", "num_q_tokens", "num_rows", "num_seqs", "num_slots", "num_splits", "num_tokens",
    "overhead", "rows", "search_steps", "table_stride",
)  # fmt: skip


class PageTable(NamedTuple):
    """The page table of a batch, one row for each sequence."""

    ptr: tl.tensor
    stride: tl.tensor
    num_pages: tl.tensor  # pages in the cache; an index outside [0, num_pages) names no page


class Blocks(NamedTuple):
    """Blocks of keys or rows that one loop visits: `left_blocks` blocks from `left` on, then the rest from `right` on.
    A loop without masks visits all blocks from `left` on.

    `later` has pairs (iteration, start): in this iteration, the loop jumps to the block that begins at `start`, and
    continues from there.
    """

    left: tl.tensor
    left_blocks: tl.tensor
    right: tl.tensor
    num_blocks: tl.tensor
    later: tl.tuple


class Edges(NamedTuple):
    """The range of key blocks that a program's queries see, and the range that every query sees in full.

        first                                            last       keys that some query sees
      |  some see   |  every query sees these   |  some see   |
    start      whole_start                 whole_stop        end    edges of blocks

    The unmasked loop visits the blocks in the middle, the masked loop those at both ends. For dk and dv, the edges are
    those of the blocks of rows that see a program's keys. If queries have several ranges of keys, there can be several
    parts like the one in the picture, one after the other. `later` has the four edges of each part after the first.
    """

    start: tl.tensor
    whole_start: tl.tensor
    whole_stop: tl.tensor
    end: tl.tensor
    later: Any = ()


@triton.jit
def whole_blocks(edges, BLOCK: tl.constexpr):
    """The blocks in the middle, which need no masks."""
    num_blocks = (edges.whole_stop - edges.whole_start) // BLOCK
    later = ()
    for part in tl.static_range(len(edges.later)):
        _, whole_start, whole_stop, _ = edges.later[part]
        later += ((num_blocks, whole_start),)
        num_blocks += (whole_stop - whole_start) // BLOCK
    return Blocks(edges.whole_start, 0, 0, num_blocks, later)


@triton.jit
def end_blocks(edges, BLOCK: tl.constexpr):
    """The blocks at both ends, which need masks. One loop for both ends takes fewer registers than two loops."""
    left_blocks = (edges.whole_start - edges.start) // BLOCK
    num_blocks = left_blocks + (edges.end - edges.whole_stop) // BLOCK
    later = ()
    for part in tl.static_range(len(edges.later)):
        start, whole_start, whole_stop, end = edges.later[part]
        later += ((num_blocks, start),)
        num_blocks += (whole_start - start) // BLOCK
        later += ((num_blocks, whole_stop),)
        num_blocks += (end - whole_stop) // BLOCK
    return Blocks(edges.start, left_blocks, edges.whole_stop, num_blocks, later)


@triton.jit
def none_unless(condition, blocks):
    """`blocks` if the condition holds, else no blocks."""
    num_blocks = tl.where(condition, blocks.num_blocks, 0)
    return Blocks(blocks.left, blocks.left_blocks, blocks.right, num_blocks, blocks.later)


@triton.jit
def block_start(blocks, index, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The first key or row of the block that a loop visits in iteration `index`."""
    start = blocks.left + index * BLOCK
    if MASKED:
        start = tl.where(index < blocks.left_blocks, start, blocks.right + (index - blocks.left_blocks) * BLOCK)
    for part in tl.static_range(len(blocks.later)):
        first, later_start = blocks.later[part]
        start = tl.where(index < first, start, later_start + (index - first) * BLOCK)
    return start


@triton.jit
def count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS: tl.constexpr):
    """The number of live sequences, clamped to [0, max_num_seqs]."""
    count = max_num_seqs
    if HAS_NUM_SEQS:
        count = tl.minimum(tl.maximum(tl.load(num_seqs_ptr), 0), max_num_seqs)
    return count


@triton.jit
def query_edge(cu_q_lens_ptr, index, num_tokens):
    return tl.minimum(tl.maximum(tl.load(cu_q_lens_ptr + index), 0), num_tokens)


@triton.jit
def segment_edge(cu_q_lens_ptr, segment, num_seqs, num_tokens):
    """The first token of a segment.

    Segment 0 has the tokens before the first sequence (none in a valid call). Segment i + 1 is sequence i. Segment
    `num_seqs + 1` is the padding after the last sequence.
    """
    edge = query_edge(cu_q_lens_ptr, tl.minimum(tl.maximum(segment - 1, 0), num_seqs), num_tokens)
    return tl.where(segment == 0, 0, tl.where(segment > num_seqs + 1, num_tokens, edge))


def max_blocks(rows: int, block: int, num_seqs: int) -> int:
    """The maximum number of blocks, and so of programs, for `rows` rows in `num_seqs` sequences; see `find_segment`."""
    return rows // block + num_seqs + 2 if rows else 0


@triton.jit
def find_segment(block, cu_q_lens_ptr, num_seqs, num_tokens, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The segment (see `segment_edge`) that a block of rows belongs to, found by binary search.

    If segment i begins at token t, its first block has the index `t * GROUP // BLOCK + i`. So each segment has enough
    block indices, and a program need not count the blocks of earlier segments. The grid follows from shapes alone.
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
