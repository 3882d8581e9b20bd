"""The columns of each row's k largest logits, in Triton. Kernels find them by counting instead of sorting.

Logits are mapped to integers, here called numbers, with the same order. The first pass over a row finds the smallest
number, the largest number, and the count of selectable numbers. The k-th largest number is the *threshold*. Each
further pass divides the range that contains the threshold into bins and counts the numbers per bin, until the
threshold's bin has at most k numbers. The program copies these to the row of results, where it finds the threshold bit
by bit. The last pass writes, in ascending order, the columns of all numbers above the threshold and, to complete k
columns, the last columns of numbers equal to it.

One program selects from one row. If there are too few rows to fill the GPU, rows are split: a first launch selects the
largest logits of each split, and a second launch selects among these.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.calls import TopKIndices
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._indexer import Sight, Tables, seen_by
from ragged_attention.kernels_triton._sequences import VARYING, count_sequences
from ragged_attention.kernels_triton._splits import Batch
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    WGMMA,
    cdiv,
    expect_between,
    expect_power_of_two,
    launchable,
    next_power_of_2,
)

FEATURES = frozenset({"starts", "stops"})
BATCH_INVARIANT = True  # results do not depend on the tile
LEAST_NUMBER: tl.constexpr = tl.constexpr(0x007FFFFF)  # the ordered integer of -inf and of NaN
LARGEST_UINT: tl.constexpr = tl.constexpr(0xFFFFFFFF)
BIN_BITS: tl.constexpr = tl.constexpr(7)
BINS: tl.constexpr = tl.constexpr(1 << 7)  # bins per pass
MAX_SPLITS = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    block: int = 2048  # columns per step
    num_warps: int = 4
    num_splits: int = 1  # splits per row

    def __post_init__(self) -> None:
        expect_power_of_two(self, block=(64, 16384), num_warps=(1, 32))
        expect_between(self, num_splits=(1, MAX_SPLITS))


def why_not(call: TopKIndices) -> str | None:
    return launchable(call, select_kernel)


def heuristic(call: TopKIndices) -> Tile:
    return tile_for(call, call.num_tokens, call.columns)


def tile_for(call: Any, num_rows: int, columns: int) -> Tile:
    """A tile with enough splits to fill the GPU, unless the second selection would take longer than the first."""
    count, arch = call.device.num_multiprocessors, call.device.arch
    most_splits = math.isqrt(columns // call.top_k)
    splits = max(1, min(cdiv(2 * count, max(num_rows, 1)), most_splits, MAX_SPLITS))
    # Four warps count faster, because each warp reads more numbers. Eight or more fill a GPU that has few programs, and
    # do not spill on GPUs on which four would.
    if num_rows * splits >= 4 * count and (arch == "sm_90" or arch not in WGMMA):
        num_warps = 4
    else:
        num_warps = 16 if OLDER_COMPILER and arch.startswith("sm_") and arch != "sm_90" else 8
    return Tile(
        block=min(2048, max(64, next_power_of_2(cdiv(columns, splits)))),
        num_warps=num_warps,
        num_splits=splits,
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Selection(Constants):
    """The compile-time constants of a launch."""

    TOP_K: int
    TOP_K_PAD: int  # TOP_K, rounded up to a power of two
    BLOCK: int  # columns per step
    COUNTED: str  # selectable columns: "all", "ranges" [start, stop), "starts" (from it), "stops" (below it), "seen"
    SIGHT: Sight  # which columns a token sees, if COUNTED is "seen"
    HAS_MAP: bool  # whether columns are translated to positions
    HAS_VALUES: bool  # whether logits are also written


class Results(NamedTuple):
    """The addresses of a row's results."""

    map_ptr: tl.tensor  # the position that each column stands for, if HAS_MAP
    out_ptr: tl.tensor
    values_ptr: tl.tensor


class Row(NamedTuple):
    """A row of logits, in which the columns [first, stop) are selectable."""

    ptr: tl.tensor
    first: tl.tensor
    stop: tl.tensor


@triton.jit
def load_block(row, start, BLOCK: tl.constexpr):
    """(columns, logits, numbers) of a block. Numbers are the logits as unsigned integers with the same order.

    Logits of columns that are not selectable are -inf.
    """
    column = start + tl.arange(0, BLOCK)
    logits = tl.load(row.ptr + column, mask=(column >= row.first) & (column < row.stop), other=float("-inf"))
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # adding 0.0 turns -0 into +0
    number = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    number = tl.where(logits == logits, number, LEAST_NUMBER)
    return column, logits, number


@triton.jit
def first_block(row, BLOCK: tl.constexpr):
    """The column at which a pass over a row begins, a multiple of BLOCK so that loads are aligned."""
    return row.first // BLOCK * BLOCK


@triton.jit
def range_of(row, BLOCK: tl.constexpr):
    """(count, smallest, largest) of a row's numbers, except those of -inf and NaN, which are never selected."""
    count = tl.zeros([BLOCK], tl.int32)
    least = tl.full([BLOCK], LARGEST_UINT, tl.uint32)
    largest = tl.full([BLOCK], 0, tl.uint32)
    for start in range(first_block(row, BLOCK), row.stop, BLOCK):
        _, _, number = load_block(row, start, BLOCK)
        count += (number > LEAST_NUMBER).to(tl.int32)
        least = tl.minimum(least, number - (LEAST_NUMBER + 1))  # the unsigned difference makes -inf the largest
        largest = tl.maximum(largest, number)
    return tl.sum(count, 0), tl.min(least, 0) + (LEAST_NUMBER + 1), tl.max(largest, 0)


@triton.jit
def narrowed(row, low, span, wanted, BLOCK: tl.constexpr):
    """Narrow the range [low, low + span] to the bin of its number with rank `wanted`; its largest number has rank 1.

    Returns (low, span, wanted, inside): the bin's range, the number's rank in the bin, and the bin's count of numbers.
    """
    shift = tl.full([], 0, tl.uint32)
    for bit in tl.static_range(BIN_BITS, 32):
        shift += ((span >> bit) > 0).to(tl.uint32)
    counts = tl.zeros([2 * BINS], tl.int32)
    for start in range(first_block(row, BLOCK), row.stop, BLOCK):
        _, _, number = load_block(row, start, BLOCK)
        offset = number - low
        # Numbers outside the range are counted in extra bins, because a mask would make the threads of a warp diverge.
        piece = tl.where(offset <= span, offset >> shift, BINS + (offset & (BINS - 1)))
        counts += tl.histogram(piece.to(tl.int32), 2 * BINS)
    index = tl.arange(0, 2 * BINS)
    counts = tl.where(index < BINS, counts, 0)
    upward = tl.cumsum(counts, 0, reverse=True)  # numbers in each bin and the bins above it
    is_piece = index == tl.sum((upward >= wanted).to(tl.int32), 0) - 1
    inside = tl.sum(tl.where(is_piece, counts, 0), 0)
    above = tl.sum(tl.where(is_piece, upward, 0), 0) - inside
    below = tl.sum(tl.where(is_piece, index, 0), 0).to(tl.uint32) << shift
    last = (tl.full([], 1, tl.uint32) << shift) - 1  # the last offset in a bin
    return low + below, tl.minimum(span - below, last), wanted - above, inside


@triton.jit
def collect(row, low, span, collected_ptr, BLOCK: tl.constexpr):
    """Write the row's numbers in [low, low + span], each minus `low`, contiguously to `collected_ptr`."""
    count = 0
    for start in range(first_block(row, BLOCK), row.stop, BLOCK):
        _, _, number = load_block(row, start, BLOCK)
        offset = number - low
        inside = offset <= span
        ones = inside.to(tl.int32)
        place = count + tl.cumsum(ones, 0) - 1
        tl.store(collected_ptr + place, offset.to(tl.int32, bitcast=True), mask=inside)
        count += tl.sum(ones, 0)


@triton.jit
def ranked(collected_ptr, count, span, wanted, TOP_K_PAD: tl.constexpr):
    """(number, skipped) for `count` collected numbers: `number` has the rank `wanted`, where the largest has rank 1.

    `skipped` is how many of the numbers equal to `number` are not among the `wanted` largest.
    """
    index = tl.arange(0, TOP_K_PAD)
    exists = index < count
    offset = tl.load(collected_ptr + index, mask=exists, other=0).to(tl.uint32, bitcast=True)
    number = tl.full([], 0, tl.uint32)
    for place in range(32):
        bit = tl.full([], 0x80000000, tl.uint32) >> place
        if bit <= span:
            higher = number | bit
            enough = tl.sum((exists & (offset >= higher)).to(tl.int32), 0) >= wanted
            number = tl.where(enough, higher, number)
    larger = tl.sum((exists & (offset > number)).to(tl.int32), 0)
    equal = tl.sum((exists & (offset == number)).to(tl.int32), 0)
    return number, equal - (wanted - larger)


@triton.jit
def threshold_of(row, collected_ptr, SELECTION: tl.constexpr):
    """(threshold, skipped): a row selects numbers above the threshold, and equal numbers except the first `skipped`."""
    TOP_K: tl.constexpr = SELECTION.TOP_K
    BLOCK: tl.constexpr = SELECTION.BLOCK
    count, low, largest = range_of(row, BLOCK)
    threshold = tl.full([], LEAST_NUMBER + 1, tl.uint32)
    skipped = tl.full([], 0, tl.int32)
    if count > TOP_K:
        span = largest - low
        wanted = tl.full([], TOP_K, tl.int32)
        inside = count
        while (inside > TOP_K) & (span > 0):
            low, span, wanted, inside = narrowed(row, low, span, wanted, BLOCK)
        if inside == wanted:  # the whole bin is selected
            threshold = low
        elif span == 0:
            threshold = low
            skipped = inside - wanted
        else:
            collect(row, low, span, collected_ptr, BLOCK)
            tl.debug_barrier()  # each thread reads numbers that other threads wrote
            offset, skipped = ranked(collected_ptr, inside, span, wanted, SELECTION.TOP_K_PAD)
            tl.debug_barrier()  # the results will overwrite this memory
            threshold = low + offset
    return threshold, skipped


@triton.jit
def write_selected(row, threshold, skipped, results, HAS_TIES: tl.constexpr, SELECTION: tl.constexpr):
    """Write the selected columns in ascending order, followed by -1, and their logits; see `Results`.

    Without HAS_TIES, no number equal to the threshold is selected.
    """
    BLOCK: tl.constexpr = SELECTION.BLOCK
    count = 0
    equal = 0
    for start in range(first_block(row, BLOCK), row.stop, BLOCK):
        column, logits, number = load_block(row, start, BLOCK)
        taken = number > threshold
        ones = taken.to(tl.int32)
        if HAS_TIES:
            ties = number == threshold
            # Two counts share one integer, because a block has fewer than 2^15 columns.
            ones += ties.to(tl.int32) << 16
            counts = tl.cumsum(ones, 0)
            total = tl.sum(ones, 0)
            rank = equal + (counts >> 16)
            earlier_ties = tl.maximum(equal - skipped, 0)
            taken = taken | (ties & (rank > skipped))
            place = count + (counts & 0xFFFF) + tl.maximum(rank - skipped, 0) - earlier_ties - 1
            equal += total >> 16
            count += (total & 0xFFFF) + tl.maximum(equal - skipped, 0) - earlier_ties
        else:
            place = count + tl.cumsum(ones, 0) - 1
            count += tl.sum(ones, 0)
        position = column
        if SELECTION.HAS_MAP:
            position = tl.load(results.map_ptr + column, mask=taken, other=-1)
        tl.store(results.out_ptr + place, position, mask=taken)
        if SELECTION.HAS_VALUES:
            tl.store(results.values_ptr + place, logits, mask=taken)
    for start in range(count // BLOCK * BLOCK, SELECTION.TOP_K, BLOCK):
        index = start + tl.arange(0, BLOCK)
        rest = (index >= count) & (index < SELECTION.TOP_K)
        tl.store(results.out_ptr + index, tl.full([BLOCK], -1, tl.int32), mask=rest)
        if SELECTION.HAS_VALUES:
            tl.store(results.values_ptr + index, tl.full([BLOCK], float("-inf"), tl.float32), mask=rest)


@triton.jit(do_not_specialize=VARYING)
def select_kernel(
    logits_ptr, map_ptr, starts_ptr, stops_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs_ptr, given_out_ptr, values_ptr,
    out_ptr,
    first_token, num_tokens, max_num_seqs, capacity, num_kv_tokens, longest, num_splits, row_stride,
    SELECTION: tl.constexpr,
):  # fmt: skip
    """Select from one row of logits or from one split of it; each split has its own row of results."""
    TOP_K: tl.constexpr = SELECTION.TOP_K
    BLOCK: tl.constexpr = SELECTION.BLOCK
    index = tl.program_id(0)
    token = first_token + index
    first = 0
    stop = num_kv_tokens
    if SELECTION.COUNTED == "seen":
        num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, SELECTION.SIGHT.HAS_NUM_SEQS)
        batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
        tables = Tables(batch, starts_ptr, stops_ptr, num_kv_tokens, longest)
        _, first, stop = seen_by(token, tables, SELECTION.SIGHT)
        if SELECTION.SIGHT.RELATIVE:
            stop = stop - first
            first = 0
    elif SELECTION.COUNTED != "all":
        if SELECTION.COUNTED != "stops":
            first = tl.minimum(tl.maximum(tl.load(starts_ptr + token), 0), num_kv_tokens)
        if SELECTION.COUNTED != "starts":
            stop = tl.minimum(tl.maximum(tl.load(stops_ptr + token), first), num_kv_tokens)
    begin = first // BLOCK
    blocks = ((stop + BLOCK - 1) // BLOCK - begin + num_splits - 1) // num_splits  # blocks per split
    begin = (begin + tl.program_id(1) * blocks) * BLOCK
    ptr = logits_ptr + index.to(tl.int64) * row_stride
    row = Row(ptr, tl.maximum(first, begin), tl.minimum(stop, begin + blocks * BLOCK))
    result = (index if SELECTION.HAS_VALUES else token).to(tl.int64) * num_splits + tl.program_id(1)
    out = out_ptr + result * TOP_K
    results = Results(map_ptr + index.to(tl.int64) * row_stride, out, values_ptr + result * TOP_K)
    threshold, skipped = threshold_of(row, out, SELECTION)
    if skipped <= 0:
        write_selected(row, threshold - 1, skipped, results, False, SELECTION)
    else:
        write_selected(row, threshold, skipped, results, True, SELECTION)


NO_INDEXER = {"num_tokens": 0, "max_num_seqs": 0, "capacity": 0, "longest": 0}  # if no indexer computed the rows
ALL_SEEN = Sight(PAGED=False, RATIO=1, RELATIVE=False, HAS_NUM_SEQS=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogitRows:
    """Rows of logits, and their selectable columns."""

    logits: Any  # float32 [at least num_rows, at most row_stride]
    num_rows: int
    row_stride: int
    columns: int
    tables: tuple[Any, ...]  # starts, stops, kv_lens, cu_q_lens and num_seqs, with stand-ins for absent arrays
    numbers: dict[str, int]  # the kernel's numeric arguments about these arrays
    counted: str  # COUNTED of `Selection`
    sight: Sight = ALL_SEEN
    first_token: int = 0  # the token of the first row


def enqueue(rows: LogitRows, top_k: int, num_tokens: int, tile: Any, launch: Any, target: Any = None) -> Any:
    """Enqueue the selection from rows of logits; returns int32 [num_tokens, top_k], in `target` unless it is None."""
    positions: Any = None
    if tile.num_splits > 1:
        columns = tile.num_splits * top_k
        outputs = [((rows.num_rows, columns), "float32"), ((rows.num_rows, columns), "int32")]
        logits, positions = select(rows, top_k, tile, launch, outputs, num_splits=tile.num_splits)
        rows = dataclasses.replace(
            rows, logits=logits, row_stride=columns, columns=columns, numbers=NO_INDEXER, counted="all", sight=ALL_SEEN
        )
    outputs = [
        ((1,), "float32"),  # a stand-in, since no logits are written
        *([((num_tokens, top_k), "int32")] if target is None else []),
    ]
    return select(rows, top_k, tile, launch, outputs, positions=positions, target=target)[1]


def select(
    rows: LogitRows, top_k: int, tile: Any, launch: Any, outputs: list[Any], *, num_splits: int = 1,
    positions: Any = None, target: Any = None,
) -> Any:  # fmt: skip
    """Enqueue one launch of the kernel; `positions` has the position of each column, unless columns are positions."""
    logits = rows.logits  # also a stand-in for absent arrays
    return launch(
        select_kernel,
        (rows.num_rows, num_splits),
        (logits, logits if positions is None else positions, *rows.tables, logits if target is None else target),
        outputs,
        inplace=() if target is None else (7,),
        num_warps=tile.num_warps,
        num_stages=1,
        first_token=rows.first_token,
        num_kv_tokens=rows.columns,
        num_splits=num_splits,
        row_stride=rows.row_stride,
        SELECTION=Selection(
            TOP_K=top_k,
            TOP_K_PAD=next_power_of_2(top_k),
            BLOCK=tile.block,
            COUNTED=rows.counted,
            SIGHT=rows.sight,
            HAS_MAP=positions is not None,
            HAS_VALUES=num_splits > 1,
        ),
        **rows.numbers,
    )


def run(call: TopKIndices, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns the columns."""
    logits = launch.packed(call.logits)
    edges = [logits if array is None else launch.packed(array) for array in (call.starts, call.stops)]
    starts, stops = call.starts is not None, call.stops is not None
    counted = "ranges" if starts and stops else "starts" if starts else "stops" if stops else "all"
    rows = LogitRows(
        logits=logits,
        num_rows=call.num_tokens,
        row_stride=launch.strides(logits)[0],
        columns=call.columns,
        tables=(*edges, logits, logits, logits),
        numbers=NO_INDEXER,
        counted=counted,
    )
    return enqueue(rows, call.top_k, call.num_tokens, tile, launch)
