"""Causal masks, sliding windows and draft masks.

A mask gives each query position one range of keys, [first_key, end_key), whose ends never decrease from one position
to the next. To add a kind of mask, change `first_key`, `end_key`, `MaskKind`, `key_limit` and the arguments below. For
packed sequences also change `sees`, which saves comparisons; for gradients, the inverses `first_query` and `end_query`,
which give the queries that see a key. A draft mask hides further individual keys.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants

# The kernels' run-time arguments about masks. The combine kernel takes only those that determine the range of keys.
RANGE_NUMBERS = ("window",)
MASK_NUMBERS = (*RANGE_NUMBERS, "draft_stride", "draft_width")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskKind(Constants):
    """Which masks a call has."""

    CAUSAL: bool  # whether a query sees no key after its own position
    HAS_WINDOW: bool
    HAS_DRAFT_MASK: bool = False  # if True, CAUSAL is False, because the draft mask decides which new keys a query sees
    HAS_FIRST_KEY: bool = dataclasses.field(init=False)  # whether a sequence's first keys can be hidden from a query

    def __post_init__(self) -> None:
        object.__setattr__(self, "HAS_FIRST_KEY", self.HAS_WINDOW)
        super().__post_init__()


class Mask(NamedTuple):
    """The run-time values of a call's masks; those of an absent mask are not used."""

    window: tl.tensor  # the maximum number of keys that a query sees up to and including its own
    draft_ptr: Any = None  # the draft mask, one row for each query token
    draft_stride: Any = 0
    draft_width: Any = 0


class Visible(NamedTuple):
    """The keys of a sequence that a block of rows sees."""

    first: tl.tensor  # some row sees the keys [first, last)
    last: tl.tensor
    low: tl.tensor  # the rows' query positions are in [low, high]
    high: tl.tensor
    position: tl.tensor  # the position of each row's query
    kv_len: tl.tensor
    num_old: tl.tensor  # the number of keys before the sequence's first query of this step
    draft_rows: tl.tensor  # the address of each row's entries in the draft mask


def key_limit(call: Any) -> int | None:
    """The maximum number of keys up to its own position that masks let a query see, or None if no mask sets one.

    Tile sizes may depend on it, even in batch-invariant mode, because it does not depend on the batch.
    """
    return call.sliding_window


def window_of(call: Any) -> int | None:
    """The call's window, or None if no sequence can be longer than it."""
    return call.sliding_window if call.sliding_window and call.sliding_window < call.capacity else None


def max_visible_keys(call: Any, tokens: int) -> int:
    """An upper bound on the keys that `tokens` consecutive queries of a sequence see together."""
    limit = key_limit(call)
    return call.capacity if limit is None else min(call.capacity, limit + tokens)


def range_arguments(call: Any, *, drafted: bool = False) -> tuple[MaskKind, dict[str, int]]:
    """(`MaskKind`, the arguments in RANGE_NUMBERS) of a call over pages; `drafted` says whether it has a draft mask."""
    window = window_of(call)
    kind = MaskKind(CAUSAL=bool(call.causal) and not drafted, HAS_WINDOW=window is not None, HAS_DRAFT_MASK=drafted)
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
    return MaskKind(CAUSAL=bool(call.causal), HAS_WINDOW=window > 0), {"window": window}


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
def key_range(low, high, kv_len, mask, KIND: tl.constexpr):
    """The range [first, last) of keys that at least one query at positions [low, high] sees."""
    first = 0
    if KIND.HAS_FIRST_KEY:
        first = tl.maximum(first_key(low, mask, KIND), 0)
    return first, tl.maximum(end_key(high, kv_len, KIND), first)


@triton.jit
def visible_keys(rows, low, high, q_len, kv_len, mask, GROUP: tl.constexpr, KIND: tl.constexpr):
    """`Visible` for a block of rows with query positions [low, high].

    Rows after the sequence's last query use that query's row of the draft mask, so that they read nothing outside it.
    """
    draft_rows = 0
    if KIND.HAS_DRAFT_MASK:
        token = (rows.start + tl.minimum(rows.row // GROUP, q_len - 1)).to(tl.int64)
        draft_rows = mask.draft_ptr + token * mask.draft_stride
    num_old = kv_len - q_len
    first, last = key_range(low, high, kv_len, mask, KIND)
    return Visible(first, last, low, high, num_old + rows.row // GROUP, kv_len, num_old, draft_rows)


@triton.jit
def hide(logits, keys, readable, visible, mask, KIND: tl.constexpr):
    """The logits [rows, keys], replaced by -inf for keys that a row does not see."""
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
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def seen_by_all(start, stop, end, visible, mask, KIND: tl.constexpr, BLOCK_KV: tl.constexpr):
    """(first key, end) of those blocks of the keys [start, stop) in which every row sees every key.

    Unless equal, both are multiples of BLOCK_KV. The argument `end` is `stop`, rounded up to blocks of the masked loop.
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
    """The fewest keys that a row of the block sees; a draft mask counts as hiding all new keys."""
    if KIND.HAS_FIRST_KEY:  # rows after the last query count as that query
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
