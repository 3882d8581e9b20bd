"""Online softmax over the pages of one sequence."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import triton
import triton.language as tl

from ragged_attention.kernels_triton._formats import INTERPRETED, decode, decoded_at_once, narrow
from ragged_attention.kernels_triton._softmax import lost_to_rounding, matmul, online_softmax, tanh

PAGE_SCAN: tl.constexpr = tl.constexpr(256)


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
def pages_of(page_row_ptr, block, keys, first, last, num_pages, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr,
             BLOCK_KV: tl.constexpr):  # fmt: skip
    """The pages of keys within a block, one for all where a block lies on one page, and which keys may be read."""
    readable = keys < last
    if PAGE_SIZE % BLOCK_KV == 0:
        page = tl.load(page_row_ptr + block // PAGE_SIZE)
        if MASKED:
            known = (page >= 0) & (page < num_pages)
            readable = (keys >= tl.where(known, first, last)) & readable
    elif MASKED:
        readable = (keys >= first) & readable
        page = tl.load(page_row_ptr + keys // PAGE_SIZE, mask=readable, other=-1)
        readable = readable & (page >= 0) & (page < num_pages)
    else:
        page = tl.load(page_row_ptr + keys // PAGE_SIZE)
    return page, readable


@triton.jit
def attend(
    q, m_i, l_i, acc,
    k_ptr, v_ptr, page_row_ptr, left, left_blocks, right, num_blocks, first, last, position, window, num_pages,
    k_page_stride, k_slot_stride, v_page_stride, v_slot_stride, inner_scale, outer_scale,
    draft_rows, draft_width, first_new,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    HAS_DRAFT_MASK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, FORMAT: tl.constexpr, WEIGHT_PARTS: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows of `q` over `num_blocks` blocks of keys: `left_blocks` from `left` on, the rest from
    `right` on.

    Unmasked, every row must see every key of them and every page must be valid. Masked, only keys in [first, last)
    on valid pages are read at all: what no row of the tile sees takes no part, NaN or not.

    Rounded to bfloat16, a weight is off by up to 2^-9 of itself, too much where few keys share the output; a second
    dot of what the rounding lost (WEIGHT_PARTS 2) corrects that.
    """
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    for index in range(num_blocks):
        block = left + index * BLOCK_KV
        if MASKED:
            block = tl.where(index < left_blocks, block, right + (index - left_blocks) * BLOCK_KV)
        keys = block + tl.arange(0, BLOCK_KV)
        page, readable = pages_of(page_row_ptr, block, keys, first, last, num_pages, MASKED, PAGE_SIZE, BLOCK_KV)
        k_rows = k_ptr + page.to(tl.int64) * k_page_stride + (keys % PAGE_SIZE).to(tl.int64) * k_slot_stride
        if MASKED:
            k = tl.load(k_rows[:, None] + d[None, :], mask=readable[:, None] & (d < D)[None, :], other=0)
        elif D == D_PAD:
            k = tl.load(k_rows[:, None] + d[None, :])
        else:
            k = tl.load(k_rows[:, None] + d[None, :], mask=(d < D)[None, :], other=0)
        logits = tl.zeros([q.shape[0], BLOCK_KV], tl.float32)
        logits = matmul(q, tl.trans(decode(k, FORMAT, q.dtype)), logits)
        if HAS_SOFT_CAP:
            logits = tanh(logits * inner_scale)
        if MASKED:
            seen = readable[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (keys[None, :] > position[:, None] - window)
            if HAS_DRAFT_MASK:
                new = keys - first_new
                drafted = tl.load(draft_rows[:, None] + new[None, :], mask=((new >= 0) & (new < draft_width))[None, :],
                                  other=0)  # fmt: skip
                seen = seen & ((new < 0)[None, :] | (drafted != 0))
            logits = tl.where(seen, logits, float("-inf"))
        weights, alpha, m_i, l_i = online_softmax(logits, m_i, l_i, outer_scale)
        rounded = narrow(weights, q.dtype)
        twice: tl.constexpr = WEIGHT_PARTS == 2 and q.shape[0] >= 64 and DV_PAD >= 256
        if twice:  # as one dot, each key standing twice: chained dots of that size would copy the accumulator
            rounded = tl.reshape(tl.join(rounded, lost_to_rounding(weights, rounded)), [q.shape[0], 2 * BLOCK_KV])
            keys = block + tl.arange(0, 2 * BLOCK_KV) // 2
            page, readable = pages_of(page_row_ptr, block, keys, first, last, num_pages, MASKED, PAGE_SIZE, BLOCK_KV)
        v_rows = v_ptr + page.to(tl.int64) * v_page_stride + (keys % PAGE_SIZE).to(tl.int64) * v_slot_stride
        if MASKED:
            v = tl.load(v_rows[:, None] + dv[None, :], mask=readable[:, None] & (dv < DV)[None, :], other=0)
        elif DV == DV_PAD:
            v = tl.load(v_rows[:, None] + dv[None, :])
        else:
            v = tl.load(v_rows[:, None] + dv[None, :], mask=(dv < DV)[None, :], other=0)
        values = decode(v, FORMAT, q.dtype)
        if FORMAT != "plain" and FORMAT != "e4m3_bits" and q.shape[0] < 128 and not INTERPRETED:
            values = decoded_at_once(values, readable)
        acc = matmul(rounded, values, acc * alpha[:, None])
        if WEIGHT_PARTS == 2 and not twice:
            acc = matmul(lost_to_rounding(weights, rounded), values, acc)
    return m_i, l_i, acc


@triton.jit
def attend_range(
    q, start, stop, first, last, low, high, kv_len,
    k_ptr, v_ptr, page_row_ptr, position, window, num_pages,
    k_page_stride, k_slot_stride, v_page_stride, v_slot_stride, inner_scale, outer_scale,
    draft_rows, draft_width, first_new,
    ROWS: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    HAS_DRAFT_MASK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr, EDGE_KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, FORMAT: tl.constexpr, WEIGHT_PARTS: tl.constexpr,
    SPLIT_WEIGHTS_BELOW: tl.constexpr,
):  # fmt: skip
    """Attention over keys [start, stop) within [first, last) for queries at positions [low, high]; start is a block's.

    Only the blocks at either end, of EDGE_KV keys, which some query sees in part, pay for masks. A page index that
    names no page makes all blocks of the range such ends, and so does a query that sees fewer than
    SPLIT_WEIGHTS_BELOW keys: there the rounding of weights would not average out, and the masked loop multiplies by
    what it lost too. With a draft mask, of which `draft_rows` are the rows' own, all keys from `first_new` on are such
    ends, and CAUSAL is false.

        first                                                          last    keys that some query sees
          |  some see  |      every query sees these       |  some see  |
        start     whole_start                         whole_stop       end    (multiples of a block)
          | left_blocks|  no masks, BLOCK_KV keys per step |   right    |
          |   masked   |                                   |   masked   |     one loop, EDGE_KV keys per step
    """
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    end = tl.maximum((stop + EDGE_KV - 1) // EDGE_KV * EDGE_KV, start)
    whole_start = start
    if HAS_WINDOW:
        whole_start = (tl.maximum(high - window + 1, start) + BLOCK_KV - 1) // BLOCK_KV * BLOCK_KV
        whole_start = tl.minimum(whole_start, end)
    whole_stop = tl.minimum(stop, kv_len)
    if CAUSAL:
        whole_stop = tl.minimum(whole_stop, low + 1)
    if HAS_DRAFT_MASK:
        whole_stop = tl.minimum(whole_stop, first_new)
    whole_stop = tl.maximum(whole_stop // BLOCK_KV * BLOCK_KV, whole_start)
    valid = pages_are_valid(
        page_row_ptr, whole_start // PAGE_SIZE, (whole_stop + PAGE_SIZE - 1) // PAGE_SIZE, num_pages
    )
    fewest = kv_len
    if CAUSAL:
        fewest = tl.minimum(fewest, low + 1)
    if HAS_DRAFT_MASK:
        fewest = tl.minimum(fewest, first_new)
    if HAS_WINDOW:
        fewest = tl.minimum(fewest, window)
    whole_stop = tl.where((valid == 1) & (fewest >= SPLIT_WEIGHTS_BELOW), whole_stop, whole_start)
    whole_blocks = (whole_stop - whole_start) // BLOCK_KV
    m_i, l_i, acc = attend(
        q, m_i, l_i, acc, k_ptr, v_ptr, page_row_ptr, whole_start, 0, 0, whole_blocks, first, last, position,
        window, num_pages, k_page_stride, k_slot_stride, v_page_stride, v_slot_stride, inner_scale, outer_scale,
        draft_rows, draft_width, first_new, False, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_DRAFT_MASK, PAGE_SIZE,
        BLOCK_KV, D, D_PAD, DV, DV_PAD, FORMAT,
        WEIGHT_PARTS,
    )  # fmt: skip
    left_blocks = (whole_start - start) // EDGE_KV
    num_blocks = left_blocks + (end - whole_stop) // EDGE_KV
    return attend(
        q, m_i, l_i, acc, k_ptr, v_ptr, page_row_ptr, start, left_blocks, whole_stop, num_blocks, first, last,
        position, window, num_pages, k_page_stride, k_slot_stride, v_page_stride, v_slot_stride, inner_scale,
        outer_scale, draft_rows, draft_width, first_new, True, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_DRAFT_MASK,
        PAGE_SIZE, EDGE_KV, D, D_PAD, DV, DV_PAD, FORMAT,
        2 if q.dtype == tl.bfloat16 else 1,
    )  # fmt: skip
