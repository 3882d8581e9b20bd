"""Causal masks, sliding windows, draft masks and ranges of keys.

A mask gives each query position one range of keys, [first_key, end_key), whose ends never decrease from one position to
the next. To add a kind of mask, change `first_key`, `end_key`, `MaskKind`, `key_limit` and the functions below that
return kernel arguments. For packed sequences also change `sees`, which saves comparisons; for gradients, the inverses
`first_query` and `end_query`, which give the queries that see a key. A draft mask hides further individual keys.

Ranges of keys from the caller have no order, and replace the other masks. A program loads the ranges of its block of
rows (`RowRanges`). `_key_ranges` determines which blocks of keys the program visits.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants

LARGEST_INT: tl.constexpr = tl.constexpr(2**31 - 1)
COMPARED: tl.constexpr = tl.constexpr(16)  # queries whose ranges are compared with keys at once
# The kernels' run-time arguments about masks. The combine kernel takes only those that determine the range of keys.
RANGE_NUMBERS = ("window",)
MASK_NUMBERS = (*RANGE_NUMBERS, "draft_stride", "draft_width")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskKind(Constants):
    """Which masks a call has."""

    CAUSAL: bool  # whether a query sees no key after its own position
    HAS_WINDOW: bool
    HAS_DRAFT_MASK: bool = False  # if True, CAUSAL is False, because the draft mask decides which new keys a query sees
    RANGES: int = 0  # ranges of keys that each query has; if there are any, there are no other masks
    HAS_FIRST_KEY: bool = dataclasses.field(init=False)  # whether a window can hide a sequence's first keys
    HIDES: bool = dataclasses.field(init=False)  # whether anything but a draft mask can hide keys from a query

    def __post_init__(self) -> None:
        object.__setattr__(self, "HAS_FIRST_KEY", self.HAS_WINDOW)
        object.__setattr__(self, "HIDES", self.CAUSAL or self.HAS_WINDOW or self.RANGES > 0)
        super().__post_init__()


class Mask(NamedTuple):
    """The run-time values of a call's masks; those of an absent mask are not used."""

    window: tl.tensor  # the maximum number of keys that a query sees, including its own key
    draft_ptr: Any = None  # the draft mask, one row for each query token
    draft_stride: Any = 0
    draft_width: Any = 0
    ranges_ptr: Any = None  # the ranges of keys, RANGES pairs (begin, end) for each query token


class Visible(NamedTuple):
    """The keys of a sequence that a block of rows sees."""

    first: tl.tensor  # no row sees a key outside [first, last)
    last: tl.tensor
    low: tl.tensor  # the rows' query positions are in [low, high]
    high: tl.tensor
    position: tl.tensor  # the position of each row's query
    kv_len: tl.tensor
    num_old: tl.tensor  # the number of keys before the sequence's first query of this step
    draft_rows: tl.tensor  # the address of each row's entries in the draft mask
    ranges: Any = None  # the rows' ranges of keys, if there are any; see `RowRanges`


class RowRanges(NamedTuple):
    """The key ranges of a block of rows. Element i of each tuple describes all rows' ranges with index i.

    Each row's range i lies within [first[i], last[i]), and contains [whole_first[i], whole_last[i]) unless that is
    empty.
    """

    ptr: tl.tensor  # the address of the ranges of the sequence's first query
    rows: tl.tensor  # the address of each row's ranges
    first: tl.tuple
    last: tl.tuple
    whole_first: tl.tuple
    whole_last: tl.tuple
    solid: tl.tensor  # whether it is certain that some row sees each key in [first[i], last[i])


def key_limit(call: Any) -> int | None:
    """The maximum number of keys that masks let a query see, up to its own position; None if no mask limits it.

    Tile sizes may depend on this limit, even in batch-invariant mode, because it does not depend on the batch.
    """
    return call.sliding_window


def hides_first_keys(call: Any) -> bool:
    """Whether masks may hide the first keys of a sequence, which takes registers."""
    return call.sliding_window is not None or call.key_ranges is not None


def window_of(call: Any) -> int | None:
    """The call's window; None if there is none, or if no sequence can be longer than the window."""
    return call.sliding_window if call.sliding_window and call.sliding_window < call.capacity else None


def max_visible_keys(call: Any, tokens: int) -> int:
    """An upper bound on the keys that `tokens` consecutive queries of a sequence see together."""
    limit = key_limit(call)
    return call.capacity if limit is None else min(call.capacity, limit + tokens)


def range_arguments(call: Any, *, drafted: bool = False) -> tuple[MaskKind, dict[str, int]]:
    """(`MaskKind`, the arguments in RANGE_NUMBERS) of a call over pages; `drafted` says whether it has a draft mask."""
    window = window_of(call)
    causal = bool(call.causal) and not drafted and not call.num_ranges
    kind = MaskKind(CAUSAL=causal, HAS_WINDOW=window is not None, HAS_DRAFT_MASK=drafted, RANGES=call.num_ranges)
    return kind, {"window": window or 0}


def mask_arguments(call: Any, draft_stride: int) -> tuple[MaskKind, dict[str, int]]:
    """(`MaskKind`, the arguments in MASK_NUMBERS) of a call over pages."""
    draft_mask = call.draft_mask
    kind, numbers = range_arguments(call, drafted=draft_mask is not None)
    draft_width = 0 if draft_mask is None else draft_mask.shape[1]
    return kind, {**numbers, "draft_stride": draft_stride, "draft_width": draft_width}


def packed_mask_arguments(call: Any) -> tuple[MaskKind, dict[str, int]]:
    """(`MaskKind`, the kernels' mask arguments) of a call over packed sequences."""
    window = call.sliding_window or 0
    if window >= call.num_kv_tokens:  # no sequence is longer, so the window hides nothing
        window = 0
    return MaskKind(CAUSAL=bool(call.causal), HAS_WINDOW=window > 0, RANGES=call.num_ranges), {"window": window}


def ranges_array(call: Any, launch: Any, absent: Any) -> Any:
    """The call's ranges of keys, or the stand-in `absent` if it has none."""
    return absent if call.key_ranges is None else launch.contiguous(call.key_ranges)


@triton.jit
def first_key(position, mask, KIND: tl.constexpr):
    """The first key that the query at `position` sees; the index may be negative."""
    first = 0
    if KIND.HAS_WINDOW:
        first = position - mask.window + 1
    return first


@triton.jit
def end_key(position, kv_len, KIND: tl.constexpr):
    """One past the last key that the query at `position` sees."""
    end = kv_len
    if KIND.CAUSAL:
        end = tl.minimum(position + 1, kv_len)
    return end


@triton.jit
def first_query(key, q_len, KIND: tl.constexpr):
    """The first query that sees `key`. Queries and keys are counted from the sequence's first query."""
    first = 0
    if KIND.CAUSAL:
        first = tl.minimum(tl.maximum(key, 0), q_len)
    return first


@triton.jit
def end_query(key, q_len, mask, KIND: tl.constexpr):
    """One past the last query that sees `key`. Queries and keys are counted from the sequence's first query."""
    end = q_len
    if KIND.HAS_WINDOW:
        end = tl.minimum(tl.maximum(key + mask.window, 0), q_len)
    return end


@triton.jit
def sees(position, key, kv_len, mask, KIND: tl.constexpr):
    """Whether the query at `position` sees `key`, with as few comparisons as possible.

    For a row after its sequence's last query, the result may be True for keys that do not exist. `position`, `key` and
    `kv_len` may be counted from any common origin.
    """
    if KIND.CAUSAL and KIND.HAS_WINDOW:  # a key after the position becomes a large unsigned number
        width = tl.cast(mask.window, tl.uint32, bitcast=True)
        seen = (position - key).to(tl.uint32, bitcast=True) < width
    elif KIND.CAUSAL:
        seen = key <= position
    elif KIND.HAS_FIRST_KEY:
        seen = (key >= first_key(position, mask, KIND)) & (key < kv_len)
    else:
        seen = key < kv_len
    return seen


@triton.jit
def load_range(rows, index, kv_len, exists):
    """(begin, end) of each row's range `index`, within [0, kv_len]; (0, 0) unless `exists`."""
    begin = tl.load(rows + 2 * index, mask=exists, other=0)
    end = tl.load(rows + (2 * index + 1), mask=exists, other=0)
    return tl.minimum(tl.maximum(begin, 0), kv_len), tl.minimum(tl.maximum(end, 0), kv_len)


@triton.jit
def in_ranges(rows, key, kv_len, KIND: tl.constexpr):
    """Whether `key` is in one of the ranges at the addresses `rows`; `key` and `rows` broadcast."""
    begin, end = load_range(rows, 0, kv_len, True)
    seen = (key >= begin) & (key < end)
    for index in tl.static_range(1, KIND.RANGES):
        begin, end = load_range(rows, index, kv_len, True)
        seen = seen | ((key >= begin) & (key < end))
    return seen


@triton.jit
def meet_ranges(rows, first, last, kv_len, exists, KIND: tl.constexpr):
    """(whether a range at the addresses `rows` has a key in [first, last), whether a range has all of these keys)."""
    begin, end = load_range(rows, 0, kv_len, exists)
    meets = tl.maximum(begin, first) < tl.minimum(end, last)
    covers = (begin <= first) & (end >= last)
    for index in tl.static_range(1, KIND.RANGES):
        begin, end = load_range(rows, index, kv_len, exists)
        meets = meets | (tl.maximum(begin, first) < tl.minimum(end, last))
        covers = covers | ((begin <= first) & (end >= last))
    return meets, covers


@triton.jit
def sees_of(visible, key, mask, KIND: tl.constexpr):
    """Whether the rows of a block see keys, [rows, keys]; see `sees`."""
    if KIND.RANGES:
        seen = in_ranges(visible.ranges.rows[:, None], key[None, :], visible.kv_len, KIND)
    else:
        seen = sees(visible.position[:, None], key[None, :], visible.kv_len, mask, KIND)
    return seen


@triton.jit
def some_query_sees(key, visible, KIND: tl.constexpr):
    """Whether at least one query of a block of rows sees a key, for each key.

    The loop compares COMPARED queries at once. All queries at once would take too many registers.
    """
    count = tl.zeros_like(key)
    for low in range(visible.low, visible.high + 1, COMPARED):
        position = low + tl.arange(0, COMPARED)
        query = tl.minimum(position, visible.high) - visible.num_old
        rows = visible.ranges.ptr + query.to(tl.int64) * (2 * KIND.RANGES)
        seen = in_ranges(rows[:, None], key[None, :], visible.kv_len, KIND)
        count = tl.maximum(count, tl.max(seen.to(tl.int32), 0))
    return count > 0


@triton.jit
def may_read(key, visible, KIND: tl.constexpr, EXACT: tl.constexpr):
    """A mask of the keys that some row sees. Unless EXACT, the rows' ranges must be solid; see `RowRanges`."""
    readable = (key >= visible.first) & (key < visible.last)
    if KIND.RANGES > 0 and EXACT:
        readable = readable & some_query_sees(key, visible, KIND)
    elif KIND.RANGES > 1:
        within = (key >= visible.ranges.first[0]) & (key < visible.ranges.last[0])
        for index in tl.static_range(1, KIND.RANGES):
            within = within | ((key >= visible.ranges.first[index]) & (key < visible.ranges.last[index]))
        readable = readable & within
    return readable


@triton.jit
def ranges_of_rows(start, query, kv_len, mask, KIND: tl.constexpr):
    """`RowRanges` of rows of the sequence that starts at token `start`. If kv_len is 0, nothing is read."""
    ptr = mask.ranges_ptr + tl.cast(start, tl.int64) * (2 * KIND.RANGES)
    rows = ptr + query.to(tl.int64) * (2 * KIND.RANGES)
    firsts = ()
    lasts = ()
    whole_firsts = ()
    whole_lasts = ()
    solid = kv_len >= 0
    for index in tl.static_range(KIND.RANGES):
        begin, end = load_range(rows, index, kv_len, tl.zeros_like(query) < kv_len)
        empty = begin >= end
        last = tl.max(tl.where(empty, 0, end), 0)
        highest_begin = tl.max(tl.where(empty, 0, begin), 0)
        lowest_end = tl.min(tl.where(empty, kv_len, end), 0)
        lasts += (last,)
        firsts += (tl.minimum(tl.min(tl.where(empty, kv_len, begin), 0), last),)
        whole_firsts += (highest_begin,)
        whole_lasts += (tl.where(tl.max(empty.to(tl.int32), 0) == 0, lowest_end, 0),)
        solid = solid & ((highest_begin < lowest_end) | (last == 0))  # ranges with a key in common leave no gap
    return RowRanges(ptr, rows, firsts, lasts, whole_firsts, whole_lasts, solid)


@triton.jit
def hull_of(ranges, KIND: tl.constexpr):
    """(first, last) of the smallest range of keys that contains all ranges of a block of rows."""
    first = LARGEST_INT
    last = 0
    for index in tl.static_range(KIND.RANGES):
        first = tl.minimum(first, tl.where(ranges.last[index] > 0, ranges.first[index], LARGEST_INT))
        last = tl.maximum(last, ranges.last[index])
    return tl.minimum(first, last), last


@triton.jit
def key_range(low, high, kv_len, mask, KIND: tl.constexpr):
    """The range [first, last) of keys that at least one query at positions [low, high] sees."""
    first = 0
    if KIND.HAS_FIRST_KEY:
        first = tl.maximum(first_key(low, mask, KIND), 0)
    return first, tl.maximum(end_key(high, kv_len, KIND), first)


@triton.jit
def visible_keys(rows, low, high, q_len, kv_len, mask, GROUP: tl.constexpr, KIND: tl.constexpr):
    """`Visible` for a block of rows with query positions [low, high].

    Rows after the sequence's last query use that query's row of the draft mask, or its ranges of keys, so that they
    read nothing outside these arrays.
    """
    draft_rows = 0
    if KIND.HAS_DRAFT_MASK:
        token = (rows.start + tl.minimum(rows.row // GROUP, q_len - 1)).to(tl.int64)
        draft_rows = mask.draft_ptr + token * mask.draft_stride
    num_old = kv_len - q_len
    first, last = key_range(low, high, kv_len, mask, KIND)
    ranges = 0
    if KIND.RANGES:
        ranges = ranges_of_rows(rows.start, tl.minimum(rows.row // GROUP, q_len - 1), kv_len, mask, KIND)
        first, last = hull_of(ranges, KIND)
    return Visible(first, last, low, high, num_old + rows.row // GROUP, kv_len, num_old, draft_rows, ranges)


@triton.jit
def hide(logits, keys, readable, visible, mask, KIND: tl.constexpr):
    """The logits [rows, keys], with -inf for the keys that a row does not see."""
    seen = readable[None, :]
    if KIND.CAUSAL:
        seen = seen & (keys[None, :] <= visible.position[:, None])
    if KIND.HAS_FIRST_KEY:
        seen = seen & (keys[None, :] >= first_key(visible.position, mask, KIND)[:, None])
    if KIND.HAS_DRAFT_MASK:
        new = keys - visible.num_old
        entries = tl.load(visible.draft_rows[:, None] + new[None, :],
                          mask=((new >= 0) & (new < mask.draft_width))[None, :], other=0)  # fmt: skip
        seen = seen & ((new < 0)[None, :] | (entries != 0))
    if KIND.RANGES:
        seen = seen & in_ranges(visible.ranges.rows[:, None], keys[None, :], visible.kv_len, KIND)
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def seen_by_all(start, stop, end, visible, mask, KIND: tl.constexpr, BLOCK_KV: tl.constexpr):
    """(first key, end) of the blocks within [start, stop) in which every row sees every key.

    If there are such blocks, both results are multiples of BLOCK_KV. The argument `end` is `stop`, rounded up to blocks
    of the masked loop.
    """
    whole_start = start
    if KIND.HAS_FIRST_KEY:
        whole_start = tl.maximum(first_key(visible.high, mask, KIND), start)
        whole_start = tl.minimum((whole_start + BLOCK_KV - 1) // BLOCK_KV * BLOCK_KV, end)
    whole_stop = tl.minimum(stop, end_key(visible.low, visible.kv_len, KIND))
    if KIND.HAS_DRAFT_MASK:
        whole_stop = tl.minimum(whole_stop, visible.num_old)
    return whole_start, tl.maximum(whole_stop // BLOCK_KV * BLOCK_KV, whole_start)


@triton.jit
def fewest_keys(visible, mask, KIND: tl.constexpr):
    """The fewest keys that a row of the block sees; a draft mask counts as hiding all new keys.

    The ranges of a row may overlap, so only the largest range of each row counts.
    """
    if KIND.RANGES:
        most = tl.zeros_like(visible.position)
        exists = most < visible.kv_len
        for index in tl.static_range(KIND.RANGES):
            begin, end = load_range(visible.ranges.rows, index, visible.kv_len, exists)
            most = tl.maximum(most, end - begin)
        fewest = tl.min(most, 0)
    elif KIND.HAS_FIRST_KEY:  # rows after the last query have that query's position
        position = tl.minimum(visible.position, visible.high)
        end = end_key(position, visible.kv_len, KIND)
        if KIND.HAS_DRAFT_MASK:
            end = tl.minimum(end, visible.num_old)
        fewest = tl.min(end - tl.maximum(first_key(position, mask, KIND), 0))
    else:
        fewest = end_key(visible.low, visible.kv_len, KIND)
        if KIND.HAS_DRAFT_MASK:
            fewest = tl.minimum(fewest, visible.num_old)
    return fewest
