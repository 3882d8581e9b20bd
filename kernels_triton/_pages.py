"""Online softmax over the pages of one sequence."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from typing import NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import INTERPRETED
from ragged_attention.kernels_triton._formats import decode, decoded_at_once, narrow
from ragged_attention.kernels_triton._sequences import Edges, block_start, end_blocks, whole_blocks
from ragged_attention.kernels_triton._softmax import always, lost_to_rounding, matmul, online_softmax, soft_capped

PAGE_SCAN: tl.constexpr = tl.constexpr(256)


class Pages(NamedTuple):
    """K and V of one KV head, and one sequence's row of the page table."""

    k_ptr: tl.tensor
    k_page_stride: tl.tensor
    k_slot_stride: tl.tensor
    v_ptr: tl.tensor
    v_page_stride: tl.tensor
    v_slot_stride: tl.tensor
    table_ptr: tl.tensor
    num_pages: tl.tensor


class Visible(NamedTuple):
    """Which keys of a sequence the rows of a block see."""

    first: tl.tensor  # some row sees the keys [first, last)
    last: tl.tensor
    low: tl.tensor  # the rows' queries have the positions [low, high]
    high: tl.tensor
    position: tl.tensor  # of each row
    kv_len: tl.tensor
    window: tl.tensor
    draft_rows: tl.tensor  # where each row's entries of the draft mask begin, for the keys from `first_new` on
    draft_width: tl.tensor
    first_new: tl.tensor


class Features(NamedTuple):
    """What hides keys or changes logits. With a draft mask CAUSAL is false."""

    CAUSAL: tl.constexpr
    HAS_WINDOW: tl.constexpr
    HAS_SOFT_CAP: tl.constexpr
    HAS_DRAFT_MASK: tl.constexpr


class PageSizes(NamedTuple):
    """The shape of pages, and how their elements are stored."""

    PAGE_SIZE: tl.constexpr
    D: tl.constexpr
    D_PAD: tl.constexpr
    DV: tl.constexpr
    DV_PAD: tl.constexpr
    FORMAT: tl.constexpr


@triton.jit
def pages_are_valid(page_row_ptr, first_page, last_page, num_pages):
    """Whether every page index in [first_page, last_page) names a page, as 1 or 0."""
    valid = 1
    for start in range(first_page, last_page, PAGE_SCAN):
        slots = start + tl.arange(0, PAGE_SCAN)
        pages = tl.load(page_row_ptr + slots, mask=slots < last_page, other=0)
        good = (pages >= 0) & (pages < num_pages)
        valid = tl.minimum(valid, tl.min(good.to(tl.int32), 0))
    return valid


@triton.jit
def pages_of(table_ptr, block, first, last, there, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr,
             BLOCK_KV: tl.constexpr):  # fmt: skip
    """The pages of the keys from `block` on, one for all where a block lies on one page.

    If the block is not `there` nothing is read and they are -1; if MASKED, so are those of keys outside [first, last).
    """
    if PAGE_SIZE % BLOCK_KV == 0:
        page = tl.load(table_ptr + block // PAGE_SIZE, mask=there, other=-1)
    else:
        keys = block + tl.arange(0, BLOCK_KV)
        if MASKED:
            readable = (keys >= first) & (keys < tl.where(there, last, first))
        else:
            readable = keys < tl.where(there, block + BLOCK_KV, block)
        page = tl.load(table_ptr + keys // PAGE_SIZE, mask=readable, other=-1)
    return page


@triton.jit
def are_readable(keys, page, first, last, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Which keys of a block are in [first, last) and on a page that there is."""
    known = (page >= 0) & (page < num_pages)
    if PAGE_SIZE % BLOCK_KV == 0:
        readable = (keys >= tl.where(known, first, last)) & (keys < last)
    else:
        readable = (keys >= first) & (keys < last) & known
    return readable


@triton.jit
def pages_of_block(table_ptr, blocks, index, visible, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr,
                   BLOCK_KV: tl.constexpr):  # fmt: skip
    """The pages of the block that a loop visits as number `index`; -1 behind the last."""
    block = block_start(blocks, index, MASKED, BLOCK_KV)
    return pages_of(table_ptr, block, visible.first, visible.last, index < blocks.num_blocks, MASKED, PAGE_SIZE,
                    BLOCK_KV)  # fmt: skip


@triton.jit
def load_slots(ptr, page_stride, slot_stride, page, keys, readable, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr,
               D: tl.constexpr, D_PAD: tl.constexpr):  # fmt: skip
    """The keys' rows [keys, D_PAD] out of the pages of K or of V; if MASKED, zero where they may not be read."""
    d = tl.arange(0, D_PAD)
    rows = ptr + page.to(tl.int64) * page_stride + (keys % PAGE_SIZE).to(tl.int64) * slot_stride
    if MASKED:
        stored = tl.load(rows[:, None] + d[None, :], mask=readable[:, None] & (d < D)[None, :], other=0)
    elif D == D_PAD:
        stored = tl.load(rows[:, None] + d[None, :])
    else:
        stored = tl.load(rows[:, None] + d[None, :], mask=(d < D)[None, :], other=0)
    return stored


@triton.jit
def hide(logits, keys, readable, visible, features):
    """Logits, -inf where a row does not see a key."""
    seen = readable[None, :]
    if features.CAUSAL:
        seen = seen & (keys[None, :] <= visible.position[:, None])
    if features.HAS_WINDOW:
        seen = seen & (keys[None, :] > visible.position[:, None] - visible.window)
    if features.HAS_DRAFT_MASK:
        new = keys - visible.first_new
        drafted = tl.load(visible.draft_rows[:, None] + new[None, :],
                          mask=((new >= 0) & (new < visible.draft_width))[None, :], other=0)  # fmt: skip
        seen = seen & ((new < 0)[None, :] | (drafted != 0))
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def twice(each):
    """Each element beside itself."""
    return tl.reshape(tl.join(each, each), [2 * each.shape[0]])


@triton.jit
def with_lost_weights(weights, rounded):
    """Rounded weights, each with what its rounding lost beside it: [rows, 2 * keys], for keys that each stand twice.

    It makes one product of two, for compilers' sake: between two, onto the same accumulator of 64 rows and 256 columns
    or more, they copied it. By count of registers Triton 3.9 no longer needs it on sm_90 (232 with and without).
    """
    return tl.reshape(tl.join(rounded, lost_to_rounding(weights, rounded)), [weights.shape[0], 2 * weights.shape[1]])


@triton.jit
def attend(
    q, unit, state, blocks, visible, pages, scales, features, sizes,
    MASKED: tl.constexpr, BLOCK_KV: tl.constexpr, WEIGHT_PARTS: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows of `q` over blocks of keys, from `state` = (m_i, l_i, acc) to what that becomes.

    Unmasked, every row must see every key of them and every page must be valid. Masked, only keys in [first, last)
    on valid pages are read at all: what no row of the tile sees takes no part, NaN or not.

    Logits are multiplied by each row's `unit`, unless that is None. Rounded to bfloat16, a weight is off by up to 2^-9
    of itself, too much where few keys share the output; a second dot of what the rounding lost (WEIGHT_PARTS 2)
    corrects that.

    The pages of a block are looked up while the block before is on its way: a lookup within the same turn would take
    up the stages that copies of keys and values are to run ahead by (Triton 3.6 to 3.9). WIDE rows have no registers
    for that. Their product with the keys stands in a branch that is always taken, past which compilers do not look:
    else they give each warp rows of its own, for the second product's sake, and half of the warps repeat the others.
    """
    m_i, l_i, acc = state
    inner_scale, outer_scale, cap = scales
    WIDE: tl.constexpr = q.shape[0] >= 64 and sizes.DV_PAD >= 512
    JOINED: tl.constexpr = WEIGHT_PARTS == 2 and q.shape[0] >= 64 and sizes.DV_PAD >= 256
    following = pages_of_block(pages.table_ptr, blocks, 0, visible, MASKED, sizes.PAGE_SIZE, BLOCK_KV)
    for index in range(blocks.num_blocks):
        if WIDE:
            page = pages_of_block(pages.table_ptr, blocks, index, visible, MASKED, sizes.PAGE_SIZE, BLOCK_KV)
        else:
            page = following
            following = pages_of_block(pages.table_ptr, blocks, index + 1, visible, MASKED, sizes.PAGE_SIZE, BLOCK_KV)
        keys = block_start(blocks, index, MASKED, BLOCK_KV) + tl.arange(0, BLOCK_KV)
        readable = are_readable(keys, page, visible.first, visible.last, pages.num_pages, sizes.PAGE_SIZE, BLOCK_KV)
        k = load_slots(pages.k_ptr, pages.k_page_stride, pages.k_slot_stride, page, keys, readable, MASKED,
                       sizes.PAGE_SIZE, sizes.D, sizes.D_PAD)  # fmt: skip
        logits = tl.zeros([q.shape[0], BLOCK_KV], tl.float32)
        if not WIDE or always(index, 0):
            logits = matmul(q, tl.trans(decode(k, sizes.FORMAT, q.dtype)), logits)
        if unit is not None:
            logits = logits * unit[:, None]
        if features.HAS_SOFT_CAP:
            logits = soft_capped(logits * inner_scale, cap)
        if MASKED:
            logits = hide(logits, keys, readable, visible, features)
        weights, alpha, m_i, l_i = online_softmax(logits, m_i, l_i, outer_scale)
        rounded = narrow(weights, q.dtype)
        if JOINED:
            rounded = with_lost_weights(weights, rounded)
            keys = twice(keys)
            readable = twice(readable)
            if sizes.PAGE_SIZE % BLOCK_KV != 0:
                page = twice(page)
        if MASKED and features.HAS_DRAFT_MASK:  # a weight of 0 does not hide a NaN where no row sees the value
            used = tl.max(logits, 0) != float("-inf")
            readable = readable & (twice(used) if JOINED else used)
        v = load_slots(pages.v_ptr, pages.v_page_stride, pages.v_slot_stride, page, keys, readable, MASKED,
                       sizes.PAGE_SIZE, sizes.DV, sizes.DV_PAD)  # fmt: skip
        values = decode(v, sizes.FORMAT, q.dtype)
        if sizes.FORMAT != "plain" and sizes.FORMAT != "e4m3_bits" and q.shape[0] < 128 and not INTERPRETED:
            values = decoded_at_once(values, readable)
        acc = matmul(rounded, values, acc * alpha[:, None])
        if WEIGHT_PARTS == 2 and not JOINED:
            acc = matmul(lost_to_rounding(weights, rounded), values, acc)
    return m_i, l_i, acc


@triton.jit
def fewest_keys(visible, features):
    """No row of the block sees fewer keys, all that are not hidden by a draft mask counted as seen."""
    fewest = visible.kv_len
    if features.CAUSAL:
        fewest = tl.minimum(fewest, visible.low + 1)
    if features.HAS_DRAFT_MASK:
        fewest = tl.minimum(fewest, visible.first_new)
    if features.HAS_WINDOW:
        fewest = tl.minimum(fewest, visible.window)
    return fewest


@triton.jit
def divide_keys(start, stop, visible, pages, features, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr,
                EDGE_KV: tl.constexpr, SPLIT_WEIGHTS_BELOW: tl.constexpr):  # fmt: skip
    """The edges of the keys [start, stop), where `start` is a block's first: of BLOCK_KV keys in the middle, of EDGE_KV
    at either end.

    A page index that names no page puts all blocks at the ends, and so does a row that sees fewer than
    SPLIT_WEIGHTS_BELOW keys: there the rounding of weights would not average out, and the masked loop multiplies by
    what it lost too. With a draft mask all keys from `first_new` on are at the end.
    """
    end = tl.maximum((stop + EDGE_KV - 1) // EDGE_KV * EDGE_KV, start)
    whole_start = start
    if features.HAS_WINDOW:
        whole_start = (tl.maximum(visible.high - visible.window + 1, start) + BLOCK_KV - 1) // BLOCK_KV * BLOCK_KV
        whole_start = tl.minimum(whole_start, end)
    whole_stop = tl.minimum(stop, visible.kv_len)
    if features.CAUSAL:
        whole_stop = tl.minimum(whole_stop, visible.low + 1)
    if features.HAS_DRAFT_MASK:
        whole_stop = tl.minimum(whole_stop, visible.first_new)
    whole_stop = tl.maximum(whole_stop // BLOCK_KV * BLOCK_KV, whole_start)
    # Where no block is whole there is nothing to scan: after a window, whole_start may lie beyond the table.
    last_page = tl.where(whole_stop > whole_start, (whole_stop + PAGE_SIZE - 1) // PAGE_SIZE, 0)
    valid = pages_are_valid(pages.table_ptr, whole_start // PAGE_SIZE, last_page, pages.num_pages)
    unmasked = (valid == 1) & (fewest_keys(visible, features) >= SPLIT_WEIGHTS_BELOW)
    return Edges(start, whole_start, tl.where(unmasked, whole_stop, whole_start), end)


@triton.jit
def attend_range(
    q, unit, start, stop, visible, pages, scales, features, sizes,
    BLOCK_KV: tl.constexpr, EDGE_KV: tl.constexpr, WEIGHT_PARTS: tl.constexpr, SPLIT_WEIGHTS_BELOW: tl.constexpr,
):  # fmt: skip
    """(m_i, l_i, acc) of the rows of `q` after the keys [start, stop), which lie within what is visible.

    Only the blocks at either end, which some row sees in part, pay for masks; see `Edges`.
    """
    edges = divide_keys(start, stop, visible, pages, features, sizes.PAGE_SIZE, BLOCK_KV, EDGE_KV, SPLIT_WEIGHTS_BELOW)
    m_i = tl.full([q.shape[0]], float("-inf"), tl.float32)
    l_i = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], sizes.DV_PAD], tl.float32)
    state = attend(q, unit, (m_i, l_i, acc), whole_blocks(edges, BLOCK_KV), visible, pages, scales, features, sizes,
                   False, BLOCK_KV, WEIGHT_PARTS)  # fmt: skip
    return attend(q, unit, state, end_blocks(edges, EDGE_KV), visible, pages, scales, features, sizes, True, EDGE_KV,
                  2 if q.dtype == tl.bfloat16 else 1)  # fmt: skip
