"""Calls with key ranges: the key blocks that a block of rows visits, and the queries that see a block of keys.

Each row has several ranges of keys. Range i of a *row block* is the smallest range that contains range i of each of its
rows. The ranges of a row block are sorted by their first keys and visited one after the other. Within a range, every
row sees the key blocks in the middle, which need no mask. The key blocks at both ends need one. If ranges of a row
block overlap, the earlier range gets the shared key blocks, so no key block is visited twice.

There are two masked loops. For solid ranges (see `RowRanges`), which nearly all masks of models have, the loop compares
each row's ranges with keys only to hide logits. For other ranges, an exact loop also finds the keys that no row sees.
It visits blocks of half the size, because with whole blocks its registers would limit the tile of all three loops (the
third is the unmasked loop). With Triton 3.6, smaller blocks take more registers, so the exact loop keeps whole blocks.
"""

import triton
import triton.language as tl

from ragged_attention.kernels_triton._mask import meet_ranges
from ragged_attention.kernels_triton._sequences import Edges, end_blocks, none_unless
from ragged_attention.kernels_triton._tiles import OLDER_COMPILER

SCANNED: tl.constexpr = tl.constexpr(512)  # queries that `queries_of_keys` checks per step
SMALLEST_BLOCK = 16  # minimum keys of a matrix product


def smaller_block(block_kv: int) -> int:
    """The keys per block of a loop that takes too many registers with `block_kv` keys: half as many, if possible."""
    return block_kv if OLDER_COMPILER else max(block_kv // 2, SMALLEST_BLOCK)


@triton.jit
def ranks_of(first, KIND: tl.constexpr):
    """The rank of each range of a block, by the order of their first keys."""
    ranks = ()
    for index in tl.static_range(KIND.RANGES):
        rank = first[index] * 0
        for other in tl.static_range(KIND.RANGES):
            if other < index:
                rank += (first[other] <= first[index]).to(tl.int32)
            elif other > index:
                rank += (first[other] < first[index]).to(tl.int32)
        ranks += (rank,)
    return ranks


@triton.jit
def with_rank(rank, ranks, numbers, KIND: tl.constexpr):
    """The element of `numbers` that belongs to the range with this rank; `numbers` has one element for each range."""
    number = numbers[0]
    for index in tl.static_range(1, KIND.RANGES):
        number = tl.where(ranks[index] == rank, numbers[index], number)
    return number


@triton.jit
def range_edges(start, stop, ranges, KIND: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """The `Edges` of the keys [start, stop) that a block of rows sees, where `start` is the first key of a block.

    Blocks have BLOCK keys in the unmasked loop, and EDGE keys in the masked loop.
    """
    ranks = ranks_of(ranges.first, KIND)
    parts = ()
    cursor = start
    for rank in tl.static_range(KIND.RANGES):
        first = with_rank(rank, ranks, ranges.first, KIND)
        last = tl.minimum(with_rank(rank, ranks, ranges.last, KIND), stop)
        left = tl.maximum(first // EDGE * EDGE, cursor)
        right = tl.maximum((last + EDGE - 1) // EDGE * EDGE, left)
        whole_start = tl.maximum(with_rank(rank, ranks, ranges.whole_first, KIND), left)
        whole_start = tl.minimum((whole_start + BLOCK - 1) // BLOCK * BLOCK, right)
        whole_stop = tl.minimum(with_rank(rank, ranks, ranges.whole_last, KIND), right)
        whole_stop = tl.minimum(whole_stop, stop) // BLOCK * BLOCK
        parts += ((left, whole_start, tl.maximum(whole_stop, whole_start), right),)
        cursor = right
    start, whole_start, whole_stop, end = parts[0]
    return Edges(start, whole_start, whole_stop, end, parts[1:])


@triton.jit
def exact_and_other_ends(edges, solid, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    """(end blocks for the exact loop, end blocks for the other masked loop); one of these loops gets no blocks."""
    return none_unless(solid == 0, end_blocks(edges, EXACT)), none_unless(solid, end_blocks(edges, BLOCK))


@triton.jit
def hull_edges(visible, BLOCK: tl.constexpr):
    """The `Edges` of a single part that contains all keys that a block of rows sees; all of its blocks are masked."""
    start = visible.first // BLOCK * BLOCK
    end = tl.maximum((visible.last + BLOCK - 1) // BLOCK * BLOCK, start)
    return Edges(start, start, start, end, ())


@triton.jit
def queries_of_keys(ptr, first_key, last_key, q_len, kv_len, KIND: tl.constexpr):
    """(first, last, whole_first, whole_last) of a sequence's queries, whose ranges begin at address `ptr`.

    The queries that see one of the keys [first_key, last_key) are among [first, last), and each of [whole_first,
    whole_last) sees all of these keys in one range.
    """
    first = q_len
    last = q_len * 0
    whole_first = q_len
    whole_last = q_len
    for start in range(0, q_len, SCANNED):
        query = start + tl.arange(0, SCANNED)
        meets, covers = meet_ranges(
            ptr + query.to(tl.int64) * (2 * KIND.RANGES), first_key, last_key, kv_len, query < q_len, KIND
        )
        first = tl.minimum(first, tl.min(tl.where(meets, query, q_len), 0))
        last = tl.maximum(last, tl.max(tl.where(meets, query + 1, 0), 0))
        whole_first = tl.minimum(whole_first, tl.min(tl.where(covers, query, q_len), 0))
        whole_last = tl.minimum(whole_last, tl.min(tl.where(covers | (query < whole_first), q_len, query), 0))
    return tl.minimum(first, last), last, tl.minimum(whole_first, last), tl.minimum(whole_last, last)


@triton.jit
def range_blocks(begin, end, kv_len, ranges, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """(begin, end, later) of a `KeyList` with the blocks in [begin, end) that a block of rows sees.

    The returned `begin` is the index of the block that the first iteration visits.
    """
    edges = range_edges(begin * BLOCK, tl.minimum(end * BLOCK, kv_len), ranges, KIND, BLOCK, BLOCK)
    begin = edges.start // BLOCK
    end = edges.end // BLOCK
    later = ()
    for part in tl.static_range(len(edges.later)):
        left, _, _, right = edges.later[part]
        later += ((end, left // BLOCK),)
        end += (right - left) // BLOCK
    block = begin  # the first iteration's block, which is in a later part if the first part is empty
    for part in tl.static_range(len(later)):
        first, start = later[part]
        block = tl.where(begin < first, block, start + begin - first)
    shifted = ()
    for part in tl.static_range(len(later)):
        first, start = later[part]
        shifted += ((first + block - begin, start),)
    return block, end + block - begin, shifted
