"""The division of a decode step's work into parts of about equal cost, in Triton.

A single program fills the parts with sequences, one after another. It cannot work in parallel: a sequence that is cut
costs its overhead in both parts, so each step depends on the previous one. The program takes one step per sequence and
one per part. A model makes a schedule once for all its layers.
"""

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import MakeDecodeSchedule
from ragged_attention.kernels_triton._sequences import VARYING
from ragged_attention.kernels_triton._tiles import expect_power_of_two, launchable

BLOCK: tl.constexpr = tl.constexpr(64)  # keys per block, the unit of work
SEQUENCES: tl.constexpr = tl.constexpr(128)  # sequences whose work is summed at a time
FEATURES = frozenset({"extra_lens", "sparse", "num_parts", "overhead"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    num_warps: int = 1

    def __post_init__(self) -> None:
        expect_power_of_two(self, num_warps=(1, 16))


def why_not(call: MakeDecodeSchedule) -> str | None:
    return launchable(call, schedule_kernel)


@triton.jit
def length_of(seq, num_seqs, lens_ptr, extra_lens_ptr, SPARSE: tl.constexpr, HAS_EXTRA: tl.constexpr):
    """The number of keys of each sequence in `seq`, with padding so that extra keys begin a new block."""
    length = tl.maximum(tl.load(lens_ptr + seq, mask=seq < num_seqs, other=0), 0).to(tl.int64)
    if SPARSE:
        length = tl.maximum(length, 1)
    if HAS_EXTRA:
        extra = tl.maximum(tl.load(extra_lens_ptr + seq, mask=seq < num_seqs, other=0), 0)
        length = (length + BLOCK - 1) // BLOCK * BLOCK + extra
    return length


@triton.jit
def blocks_of(length):
    """The number of blocks for `length` keys; a sequence without keys has one block too."""
    return tl.maximum(length - 1, 0) // BLOCK + 1


@triton.jit(do_not_specialize=VARYING)
def schedule_kernel(
    lens_ptr, extra_lens_ptr, parts_ptr, num_splits_ptr, num_seqs, num_parts, overhead,
    SPARSE: tl.constexpr, HAS_EXTRA: tl.constexpr,
):  # fmt: skip
    """Lay the blocks of all sequences end to end, and cut them into parts of about equal cost.

    A row of `parts` has (first sequence, its first block, last sequence, one past its last block, index of the first
    sequence's split).
    """
    work = tl.zeros([SEQUENCES], tl.int64)
    for start in range(0, num_seqs, SEQUENCES):
        seq = start + tl.arange(0, SEQUENCES)
        blocks = blocks_of(length_of(seq, num_seqs, lens_ptr, extra_lens_ptr, SPARSE, HAS_EXTRA))
        work += tl.where(seq < num_seqs, blocks + overhead, 0)
    budget = (tl.sum(work, 0) + num_parts - 1) // num_parts + overhead
    tl.store(num_splits_ptr, 0)
    seq = 0
    block = budget * 0  # the next block of sequence `seq`, as int64 like the budget
    split = 0
    splits = 0
    for part in range(num_parts):
        part_ptr = parts_ptr + part * 8
        tl.store(part_ptr, seq)
        tl.store(part_ptr + 1, block.to(tl.int32))
        tl.store(part_ptr + 4, split)
        left = budget
        going = seq < num_seqs
        while going:
            length = length_of(seq, num_seqs, lens_ptr, extra_lens_ptr, SPARSE, HAS_EXTRA)
            cost = blocks_of(length) - block + overhead
            whole = left >= cost
            partial = (left > overhead) & (whole == 0)
            splits += tl.where(whole, split + 1, 0)
            tl.store(num_splits_ptr + seq + 1, splits, mask=whole)
            block = tl.where(whole, 0, block + tl.where(partial, left - overhead, 0))
            split = tl.where(whole, 0, split + tl.where(partial, 1, 0))
            seq += tl.where(whole, 1, 0)
            left -= tl.where(whole, cost, left)
            going = whole & (seq < num_seqs)
        cut = block > 0
        last = tl.where(cut, seq, seq - 1)
        tl.store(part_ptr + 2, last)
        length = length_of(tl.maximum(last, 0), num_seqs, lens_ptr, extra_lens_ptr, SPARSE, HAS_EXTRA)
        end = tl.where(cut, block, tl.where((last >= 0) & (length > 0), blocks_of(length), 0))
        tl.store(part_ptr + 3, end.to(tl.int32))
        unused = tl.arange(0, 4)
        tl.store(part_ptr + 5 + unused, tl.zeros_like(unused), mask=unused < 3)


def run(call: MakeDecodeSchedule, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns parts and num_splits."""
    lens = launch.packed(call.lens)
    extra_lens = lens if call.extra_lens is None else launch.packed(call.extra_lens)
    parts, num_splits = launch(
        schedule_kernel,
        (1,),
        (lens, extra_lens),
        [((call.num_ranges, 8), "int32"), ((call.num_seqs + 1,), "int32")],
        num_warps=tile.num_warps,
        num_stages=1,
        num_seqs=call.num_seqs,
        num_parts=call.num_ranges,
        overhead=call.overhead,
        SPARSE=call.sparse,
        HAS_EXTRA=call.extra_lens is not None,
    )
    return parts, num_splits
