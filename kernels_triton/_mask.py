"""What a query sees: the one place that knows causal masks, sliding windows and draft masks.

A mask gives each query position one range of keys, [first_key, end_key), whose two ends never move backwards from one
position to the next. Everything else follows from these two functions: the keys that some query of a block sees, the
keys that every query of it sees, and the keys that a single query sees. Their inverses, first_query and end_query, give
the queries that see a key. A draft mask hides further keys, one by one.
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskKind(Constants):
    """Which masks a call has."""

    CAUSAL: bool  # a query sees no key after its own position
    HAS_WINDOW: bool
    HAS_DRAFT_MASK: bool = False  # CAUSAL is then False: the draft mask says which of the new keys a query sees


class Mask(NamedTuple):
    """The numbers of a call's masks; those of an absent mask are not used."""

    window: tl.tensor  # keys that a query sees, its own included
    draft_ptr: Any = None  # the draft mask, one row for each query token
    draft_stride: Any = 0
    draft_width: Any = 0


class Visible(NamedTuple):
    """What the rows of a block see of their sequence's keys."""

    first: tl.tensor  # some row sees the keys [first, last)
    last: tl.tensor
    low: tl.tensor  # the rows' queries have the positions [low, high]
    high: tl.tensor
    position: tl.tensor  # of each row's query
    kv_len: tl.tensor
    num_old: tl.tensor  # keys before the sequence's first query of this step
    draft_rows: tl.tensor  # where each row's entries of the draft mask begin


def window_of(call: Any) -> int | None:
    """The call's window, None where it hides nothing because no sequence can be longer."""
    return call.sliding_window if call.sliding_window and call.sliding_window < call.capacity else None


def mask_arguments(call: Any, draft_stride: int) -> tuple[MaskKind, dict[str, int]]:
    """The masks of a ragged call, and their numbers as the kernels take them."""
    window, draft_mask = window_of(call), call.draft_mask
    kind = MaskKind(
        CAUSAL=bool(call.causal) and draft_mask is None,
        HAS_WINDOW=window is not None,
        HAS_DRAFT_MASK=draft_mask is not None,
    )
    draft_width = 0 if draft_mask is None else draft_mask.shape[1]
    return kind, {"window": window or 0, "draft_stride": draft_stride, "draft_width": draft_width}


def packed_mask_arguments(call: Any) -> tuple[MaskKind, dict[str, int]]:
    """The masks of a call over packed sequences, and their numbers as the kernels take them."""
    window = call.sliding_window or 0
    if window >= call.num_kv_tokens:  # no sequence is longer, so the window hides nothing
        window = 0
    return MaskKind(CAUSAL=bool(call.causal), HAS_WINDOW=window > 0), {"window": window}


@triton.jit
def first_key(position, mask, KIND: tl.constexpr):
    """The first key that the query at a position sees; it may be negative."""
    first = 0
    if KIND.HAS_WINDOW:
        first = position - mask.window + 1
    return first


@triton.jit
def end_key(position, kv_len, KIND: tl.constexpr):
    """The end of the keys that the query at a position sees."""
    end = kv_len
    if KIND.CAUSAL:
        end = tl.minimum(position + 1, kv_len)
    return end


@triton.jit
def first_query(key, q_len, KIND: tl.constexpr):
    """The first query that sees a key. Queries and keys are counted from the sequence's first query."""
    first = 0
    if KIND.CAUSAL:
        first = tl.minimum(tl.maximum(key, 0), q_len)
    return first


@triton.jit
def end_query(key, q_len, mask, KIND: tl.constexpr):
    """The end of the queries that see a key. Queries and keys are counted from the sequence's first query."""
    end = q_len
    if KIND.HAS_WINDOW:
        end = tl.minimum(tl.maximum(key + mask.window, 0), q_len)
    return end


@triton.jit
def sees(position, key, kv_len, mask, KIND: tl.constexpr):
    """Whether the query at a position sees a key, by as few comparisons as possible.

    A row after its sequence's last query may see keys that do not exist. Positions and keys may be counted from any key
    of the sequence.
    """
    if KIND.CAUSAL and KIND.HAS_WINDOW:  # a key after the position becomes a large unsigned number
        width = tl.cast(mask.window, tl.uint32, bitcast=True)
        seen = (position - key).to(tl.uint32, bitcast=True) < width
    elif KIND.CAUSAL:
        seen = key <= position
    elif KIND.HAS_WINDOW:
        seen = (key >= first_key(position, mask, KIND)) & (key < kv_len)
    else:
        seen = key < kv_len
    return seen


@triton.jit
def key_range(low, high, kv_len, mask, KIND: tl.constexpr):
    """The keys [first, last) that some query at a position in [low, high] sees."""
    first = 0
    if KIND.HAS_WINDOW:
        first = tl.maximum(first_key(low, mask, KIND), 0)
    return first, tl.maximum(end_key(high, kv_len, KIND), first)


@triton.jit
def visible_keys(rows, low, high, q_len, kv_len, mask, GROUP: tl.constexpr, KIND: tl.constexpr):
    """`Visible` for a block of rows whose queries have the positions [low, high].

    Rows after the sequence's last query take the draft mask's row of that one, so that they read nothing outside it.
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
    """Logits [rows, keys], -inf where a row does not see a key."""
    seen = readable[None, :]
    if KIND.CAUSAL:
        seen = seen & (keys[None, :] <= visible.position[:, None])
    if KIND.HAS_WINDOW:
        seen = seen & (keys[None, :] >= first_key(visible.position, mask, KIND)[:, None])
    if KIND.HAS_DRAFT_MASK:
        new = keys - visible.num_old
        entries = tl.load(visible.draft_rows[:, None] + new[None, :],
                          mask=((new >= 0) & (new < mask.draft_width))[None, :], other=0)  # fmt: skip
        seen = seen & ((new < 0)[None, :] | (entries != 0))
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def seen_by_all(start, stop, end, visible, mask, KIND: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Of the keys [start, stop), the blocks of which every row sees every key: (first key, end), both multiples of
    BLOCK_KV. `end` is at least `stop`, and a multiple of the blocks at the ends."""
    whole_start = start
    if KIND.HAS_WINDOW:
        whole_start = tl.maximum(first_key(visible.high, mask, KIND), start)
        whole_start = tl.minimum((whole_start + BLOCK_KV - 1) // BLOCK_KV * BLOCK_KV, end)
    whole_stop = tl.minimum(stop, end_key(visible.low, visible.kv_len, KIND))
    if KIND.HAS_DRAFT_MASK:
        whole_stop = tl.minimum(whole_stop, visible.num_old)
    return whole_start, tl.maximum(whole_stop // BLOCK_KV * BLOCK_KV, whole_start)


@triton.jit
def fewest_keys(visible, mask, KIND: tl.constexpr):
    """No row of the block sees fewer keys; a draft mask is taken to hide all new keys."""
    fewest = end_key(visible.low, visible.kv_len, KIND)
    if KIND.HAS_DRAFT_MASK:
        fewest = tl.minimum(fewest, visible.num_old)
    if KIND.HAS_WINDOW:
        fewest = tl.minimum(fewest, mask.window)
    return fewest
