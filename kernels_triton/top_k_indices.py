"""The columns of the largest logits of each row, in Triton: what a program finds by counting, not by sorting.

Numbers become integers of the same order. A pass over the row finds the least and the largest, and how many there are.
Further passes divide the range that the smallest chosen number lies in and count what falls into each piece, until that
number's piece holds no more than the row of results: there they are put aside, and the number is found among them, bit
by bit. The last pass writes the positions of what is larger, in order, and of what is equal the last ones.

A row is one program's. Where rows are fewer than programs that fit, it is divided first: each part's largest come with
their values, and a program of the same kind chooses among these.
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

import dataclasses
import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.calls import TopKIndices
from ragged_attention.kernels_triton._indexer import Tables, seen_by
from ragged_attention.kernels_triton._sequences import VARYING, count_sequences
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
LEAST_NUMBER: tl.constexpr = tl.constexpr(0x007FFFFF)  # -inf among ordered integers; NaN comes to stand there too
LARGEST_UINT: tl.constexpr = tl.constexpr(0xFFFFFFFF)
BIN_BITS: tl.constexpr = tl.constexpr(7)
BINS: tl.constexpr = tl.constexpr(1 << 7)  # pieces of a range
MOST_SPLITS = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned."""

    block: int = 2048  # columns at a time
    num_warps: int = 4
    num_splits: int = 1  # parts of a row that are chosen from first

    def __post_init__(self) -> None:
        expect_power_of_two(self, block=(64, 16384), num_warps=(1, 32))
        expect_between(self, num_splits=(1, MOST_SPLITS))


def why_not(call: TopKIndices) -> str | None:
    return launchable(call, select_kernel)


def heuristic(call: TopKIndices) -> Tile:
    return tile_for(call, call.num_tokens, call.columns)


def invariant_tile(call: TopKIndices) -> Tile:
    """Whatever the tile, there is one answer."""
    return heuristic(call)


def tile_for(call: Any, num_rows: int, columns: int) -> Tile:
    """Parts as long as there are multiprocessors for them, and results of all parts are fewer than a part's columns."""
    count, arch = call.device.num_multiprocessors, call.device.arch
    best = math.isqrt(columns // call.top_k)
    splits = max(1, min(cdiv(2 * count, max(num_rows, 1)), best, MOST_SPLITS))
    # Few warps have more numbers each and count faster; more leave fewer alone. Other numbers spilled.
    if num_rows * splits >= 4 * count and (arch == "sm_90" or arch not in WGMMA):
        num_warps = 4
    else:
        num_warps = 16 if OLDER_COMPILER and arch.startswith("sm_") and arch != "sm_90" else 8
    return Tile(
        block=min(2048, max(64, next_power_of_2(cdiv(columns, splits)))),
        num_warps=num_warps,
        num_splits=splits,
    )


class Row(NamedTuple):
    """Logits in the columns [first, stop) of a row."""

    ptr: tl.tensor
    first: tl.tensor
    stop: tl.tensor


@triton.jit
def load_block(row, start, BLOCK: tl.constexpr):
    """Logits of a block of columns, -inf where they do not count, and as unsigned integers of the same order."""
    column = start + tl.arange(0, BLOCK)
    logits = tl.load(row.ptr + column, mask=(column >= row.first) & (column < row.stop), other=float("-inf"))
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # of a zero without its sign
    number = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    number = tl.where(logits == logits, number, LEAST_NUMBER)
    return column, logits, number


@triton.jit
def first_block(row, BLOCK: tl.constexpr):
    """The multiple of BLOCK where a walk over a row begins, so that loads are aligned."""
    return row.first // BLOCK * BLOCK


@triton.jit
def range_of(row, BLOCK: tl.constexpr):
    """(count, least, largest) of the numbers of a row that may be chosen."""
    count = tl.zeros([BLOCK], tl.int32)
    least = tl.full([BLOCK], LARGEST_UINT, tl.uint32)
    largest = tl.full([BLOCK], 0, tl.uint32)
    for start in range(first_block(row, BLOCK), row.stop, BLOCK):
        _, _, number = load_block(row, start, BLOCK)
        count += (number > LEAST_NUMBER).to(tl.int32)
        least = tl.minimum(least, number - (LEAST_NUMBER + 1))  # what may not be chosen becomes the largest
        largest = tl.maximum(largest, number)
    return tl.sum(count, 0), tl.min(least, 0) + (LEAST_NUMBER + 1), tl.max(largest, 0)


@triton.jit
def narrowed(row, low, span, wanted, BLOCK: tl.constexpr):
    """The piece of [low, low + span] that the number of rank `wanted` from above lies in.

    Returns (low, span, wanted, inside): the piece, the rank in it, and how many numbers it has.
    """
    shift = tl.full([], 0, tl.uint32)
    for bit in tl.static_range(BIN_BITS, 32):
        shift += ((span >> bit) > 0).to(tl.uint32)
    counts = tl.zeros([2 * BINS], tl.int32)
    for start in range(first_block(row, BLOCK), row.stop, BLOCK):
        _, _, number = load_block(row, start, BLOCK)
        offset = number - low
        # Numbers outside are counted apart, in pieces that nobody asks for: a mask would part the threads of a warp.
        piece = tl.where(offset <= span, offset >> shift, BINS + (offset & (BINS - 1)))
        counts += tl.histogram(piece.to(tl.int32), 2 * BINS)
    index = tl.arange(0, 2 * BINS)
    counts = tl.where(index < BINS, counts, 0)
    upward = tl.cumsum(counts, 0, reverse=True)  # in each piece and those above it
    own = index == tl.sum((upward >= wanted).to(tl.int32), 0) - 1
    inside = tl.sum(tl.where(own, counts, 0), 0)
    above = tl.sum(tl.where(own, upward, 0), 0) - inside
    below = tl.sum(tl.where(own, index, 0), 0).to(tl.uint32) << shift
    last = (tl.full([], 1, tl.uint32) << shift) - 1  # of a piece
    return low + below, tl.minimum(span - below, last), wanted - above, inside


@triton.jit
def put_aside(row, low, span, kept_ptr, BLOCK: tl.constexpr):
    """The numbers in [low, low + span], less `low`, one after another from `kept_ptr` on."""
    count = 0
    for start in range(first_block(row, BLOCK), row.stop, BLOCK):
        _, _, number = load_block(row, start, BLOCK)
        offset = number - low
        inside = offset <= span
        ones = inside.to(tl.int32)
        place = count + tl.cumsum(ones, 0) - 1
        tl.store(kept_ptr + place, offset.to(tl.int32, bitcast=True), mask=inside)
        count += tl.sum(ones, 0)


@triton.jit
def ranked(kept_ptr, count, span, wanted, KEPT: tl.constexpr):
    """Of `count` numbers put aside: (the one of rank `wanted` from above, how many of those equal to it are not among
    the first so many)."""
    index = tl.arange(0, KEPT)
    there = index < count
    offset = tl.load(kept_ptr + index, mask=there, other=0).to(tl.uint32, bitcast=True)
    found = tl.full([], 0, tl.uint32)
    for place in range(32):
        bit = tl.full([], 0x80000000, tl.uint32) >> place
        if bit <= span:
            higher = found | bit
            enough = tl.sum((there & (offset >= higher)).to(tl.int32), 0) >= wanted
            found = tl.where(enough, higher, found)
    larger = tl.sum((there & (offset > found)).to(tl.int32), 0)
    equal = tl.sum((there & (offset == found)).to(tl.int32), 0)
    return found, equal - (wanted - larger)


@triton.jit
def threshold_of(row, kept_ptr, TOP_K: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """(threshold, skipped): chosen is what is larger, and of what is equal all but the first `skipped`."""
    count, low, largest = range_of(row, BLOCK)
    threshold = tl.full([], LEAST_NUMBER + 1, tl.uint32)
    skipped = tl.full([], 0, tl.int32)
    if count > TOP_K:
        span = largest - low
        wanted = tl.full([], TOP_K, tl.int32)
        inside = count
        while (inside > TOP_K) & (span > 0):
            low, span, wanted, inside = narrowed(row, low, span, wanted, BLOCK)
        if inside == wanted:  # all of the piece
            threshold = low
        elif span == 0:
            threshold = low
            skipped = inside - wanted
        else:
            put_aside(row, low, span, kept_ptr, BLOCK)
            tl.debug_barrier()  # what one thread put there, another reads
            offset, skipped = ranked(kept_ptr, inside, span, wanted, KEPT)
            tl.debug_barrier()  # and results take its place
            threshold = low + offset
    return threshold, skipped


@triton.jit
def write_chosen(row, threshold, skipped, map_ptr, out_ptr, values_ptr, TIES: tl.constexpr, MAPPED: tl.constexpr,
                 VALUES: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The columns of what is chosen, or what `map_ptr` has in them, in ascending order, then -1; and their logits.

    Without TIES nothing equal to the threshold is chosen.
    """
    chosen = 0
    equal = 0
    for start in range(first_block(row, BLOCK), row.stop, BLOCK):
        column, logits, number = load_block(row, start, BLOCK)
        taken = number > threshold
        ones = taken.to(tl.int32)
        if TIES:
            same = number == threshold
            # Both counts in one number; a block has less than 2^15 columns.
            ones += same.to(tl.int32) << 16
            counts = tl.cumsum(ones, 0)
            total = tl.sum(ones, 0)
            rank = equal + (counts >> 16)
            before = tl.maximum(equal - skipped, 0)
            taken = taken | (same & (rank > skipped))
            place = chosen + (counts & 0xFFFF) + tl.maximum(rank - skipped, 0) - before - 1
            equal += total >> 16
            chosen += (total & 0xFFFF) + tl.maximum(equal - skipped, 0) - before
        else:
            place = chosen + tl.cumsum(ones, 0) - 1
            chosen += tl.sum(ones, 0)
        position = column
        if MAPPED:
            position = tl.load(map_ptr + column, mask=taken, other=-1)
        tl.store(out_ptr + place, position, mask=taken)
        if VALUES:
            tl.store(values_ptr + place, logits, mask=taken)
    for start in range(chosen // BLOCK * BLOCK, TOP_K, BLOCK):
        index = start + tl.arange(0, BLOCK)
        rest = (index >= chosen) & (index < TOP_K)
        tl.store(out_ptr + index, tl.full([BLOCK], -1, tl.int32), mask=rest)
        if VALUES:
            tl.store(values_ptr + index, tl.full([BLOCK], float("-inf"), tl.float32), mask=rest)


@triton.jit(do_not_specialize=VARYING)
def select_kernel(
    logits_ptr, map_ptr, starts_ptr, stops_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs_ptr, given_out_ptr, values_ptr,
    out_ptr,
    first_token, num_tokens, max_num_seqs, capacity, num_kv_tokens, longest, num_splits, row_stride,
    HAS_NUM_SEQS: tl.constexpr, PAGE_SIZE: tl.constexpr, RATIO: tl.constexpr, RELATIVE: tl.constexpr,
    COUNTED: tl.constexpr, MAPPED: tl.constexpr, VALUES: tl.constexpr, TOP_K: tl.constexpr, KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of logits, or a part of it, whose results are then a row of their own, with VALUES.

    COUNTED are `all` of the row's columns, those of `ranges`, or those that a token of the indexer has `seen`.
    """
    index = tl.program_id(0)
    token = first_token + index
    first = 0
    stop = num_kv_tokens
    if COUNTED == "seen":
        num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
        tables = Tables(starts_ptr, stops_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs, num_tokens, capacity,
                        num_kv_tokens, longest)  # fmt: skip
        _, first, stop = seen_by(token, tables, PAGE_SIZE > 0, RATIO)
        if RELATIVE:
            stop = stop - first
            first = 0
    elif COUNTED != "all":
        if COUNTED != "stops":
            first = tl.minimum(tl.maximum(tl.load(starts_ptr + token), 0), num_kv_tokens)
        if COUNTED != "starts":
            stop = tl.minimum(tl.maximum(tl.load(stops_ptr + token), first), num_kv_tokens)
    begin = first // BLOCK
    each = ((stop + BLOCK - 1) // BLOCK - begin + num_splits - 1) // num_splits
    begin = (begin + tl.program_id(1) * each) * BLOCK
    ptr = logits_ptr + index.to(tl.int64) * row_stride
    row = Row(ptr, tl.maximum(first, begin), tl.minimum(stop, begin + each * BLOCK))
    result = (index if VALUES else token).to(tl.int64) * num_splits + tl.program_id(1)
    out = out_ptr + result * TOP_K
    threshold, skipped = threshold_of(row, out, TOP_K, KEPT, BLOCK)
    map_row = map_ptr + index.to(tl.int64) * row_stride
    values = values_ptr + result * TOP_K
    if skipped <= 0:
        write_chosen(row, threshold - 1, skipped, map_row, out, values, False, MAPPED, VALUES, TOP_K, BLOCK)
    else:
        write_chosen(row, threshold, skipped, map_row, out, values, True, MAPPED, VALUES, TOP_K, BLOCK)


NOT_SEEN = {
    "num_tokens": 0,
    "max_num_seqs": 0,
    "capacity": 0,
    "longest": 0,
    "HAS_NUM_SEQS": False,
    "PAGE_SIZE": 0,
    "RATIO": 1,
    "RELATIVE": False,
}  # where rows are not an indexer's


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of logits and what of them counts."""

    logits: Any  # f32 [num_rows, row_stride or fewer]
    num_rows: int
    row_stride: int
    columns: int
    tables: tuple[Any, ...]  # starts, stops, kv_lens, cu_q_lens, num_seqs, or what stands for them
    arguments: dict[str, Any]  # of the kernel, about those
    first_token: int = 0


def enqueue(
    rows: Rows, top_k: int, num_tokens: int, tile: Any, launch: Any, given: Any = None
) -> Any:  # fmt: skip
    """Enqueue the choice among rows of logits; returns i32 [num_tokens, top_k], which is `given` if that is not None.

    Rows are those of the tokens from `first_token` on.
    """
    common = {
        "num_warps": tile.num_warps,
        "num_stages": 1,
        "first_token": rows.first_token,
        "TOP_K": top_k,
        "KEPT": next_power_of_2(top_k),
        "BLOCK": tile.block,
    }
    logits, positions, row_stride = rows.logits, rows.logits, rows.row_stride
    arguments = {"num_kv_tokens": rows.columns, **rows.arguments}
    if tile.num_splits > 1:
        found = (rows.num_rows, tile.num_splits * top_k)
        logits, positions = launch(
            select_kernel,
            (rows.num_rows, tile.num_splits),
            (logits, logits, *rows.tables, logits),
            [(found, "float32"), (found, "int32")],
            num_splits=tile.num_splits,
            row_stride=row_stride,
            MAPPED=False,
            VALUES=True,
            **arguments,
            **common,
        )
        row_stride = found[1]
        arguments = {**NOT_SEEN, "num_kv_tokens": row_stride, "COUNTED": "all"}
    return launch(
        select_kernel,
        (rows.num_rows, 1),
        (logits, positions, *rows.tables, logits if given is None else given),
        [((1,), "float32"), *([((num_tokens, top_k), "int32")] if given is None else [])],  # there are no values
        inplace=() if given is None else (7,),
        num_splits=1,
        row_stride=row_stride,
        MAPPED=tile.num_splits > 1,
        VALUES=False,
        **arguments,
        **common,
    )[1]


def run(call: TopKIndices, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns the columns."""
    logits = launch.packed(call.logits)
    edges = [logits if array is None else launch.packed(array) for array in (call.starts, call.stops)]
    counted = {
        (False, False): "all",
        (True, False): "starts",
        (False, True): "stops",
        (True, True): "ranges",
    }[call.starts is not None, call.stops is not None]
    rows = Rows(
        logits=logits,
        num_rows=call.num_tokens,
        row_stride=launch.strides(logits)[0],
        columns=call.columns,
        tables=(*edges, logits, logits, logits),
        arguments={**NOT_SEEN, "COUNTED": counted},
    )
    return enqueue(rows, call.top_k, call.num_tokens, tile, launch)
