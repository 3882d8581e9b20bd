"""Latent attention: online softmax over a range of blocks of a list of keys."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import triton
import triton.language as tl

from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._latent.lists import keys_of
from ragged_attention.kernels_triton._latent.rows import group_scale, key_columns, rotary_columns, whole_columns
from ragged_attention.kernels_triton._softmax import LN2, LOG2E, matmul, online_softmax

# Rows from which on eight warps share each row. Where the result of a product leads to another product, compilers give
# every warp rows of its own instead, and let half of the warps repeat what the others do. So the products of queries
# and keys stand apart, in a branch that is always taken, and each is scaled before they are added, which would make one
# chain of them.
SEPARATE_QK_ROWS = tl.constexpr(64)


@triton.jit
def always(block, begin):
    """True for a loop's `block` from `begin` on; compilers (Triton 3.6 to 3.9) do not see that, nor past the branch."""
    return block >= begin


@triton.jit
def query_times(q, q_lost, keys, logits, PARTS: tl.constexpr):
    """logits + q . keys, with what a query's rounding lost as a second part."""
    transposed = tl.trans(keys)
    logits = matmul(q, transposed, logits)
    if PARTS == 2:
        logits = matmul(q_lost, transposed, logits)
    return logits


@triton.jit
def group_logits(q, q_lost, keys, scale, logits, FOLDED: tl.constexpr, PARTS: tl.constexpr):
    if FOLDED:
        logits += query_times(q, q_lost, keys, tl.zeros(logits.shape, tl.float32), PARTS) * scale[None, :]
    elif q.shape[0] >= SEPARATE_QK_ROWS:
        logits += query_times(q, q_lost, keys, tl.zeros(logits.shape, tl.float32), PARTS) * scale
    else:
        logits = query_times(q, q_lost, keys, logits, PARTS)
    return logits


@triton.jit
def block_logits(
    q0, q1, q2, q3, lost0, lost1, lost2, lost3, q_rest, lost_rest, unit, keys0, keys1, keys2, keys3, rest,
    scale0, scale1, scale2, scale3, logit_scale,
    FOLDED: tl.constexpr, GROUPS: tl.constexpr, D_REST: tl.constexpr, GROUP_PARTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Logits, in base 2, of rows and a block of keys; for SEPARATE_QK_ROWS see there."""
    none = tl.zeros([q0.shape[0], keys0.shape[0]], tl.float32)
    logits = group_logits(q0, lost0, keys0, scale0, none, FOLDED, GROUP_PARTS)
    if GROUPS == 4:
        logits = group_logits(q1, lost1, keys1, scale1, logits, FOLDED, GROUP_PARTS)
        logits = group_logits(q2, lost2, keys2, scale2, logits, FOLDED, GROUP_PARTS)
        logits = group_logits(q3, lost3, keys3, scale3, logits, FOLDED, GROUP_PARTS)
    if q0.shape[0] < SEPARATE_QK_ROWS:
        if FOLDED:
            logits = logits * unit[:, None]
        if D_REST > 0:
            logits = query_times(q_rest, lost_rest, rest, logits, PARTS)
        logits = logits * logit_scale
    else:
        if FOLDED:
            logits = logits * (unit * logit_scale)[:, None]
        if D_REST > 0:
            logits += query_times(q_rest, lost_rest, rest, none, PARTS) * logit_scale
    return logits


@triton.jit
def group_values(weights, scale, keys, acc, FOLDED: tl.constexpr):
    if FOLDED:
        weights = weights * scale[None, :]
    return matmul(narrow(weights, keys.dtype), keys, acc)


@triton.jit
def attend(
    q0, q1, q2, q3, lost0, lost1, lost2, lost3, q_rest, lost_rest, unit,
    m_i, largest, l_i, acc0, acc1, acc2, acc3, acc_rest,
    cache_ptr, list_ptr, begin, end, last, limit, num_slots, page_stride, slot_stride, logit_scale,
    SPARSE: tl.constexpr, CAUSAL: tl.constexpr, FORMAT: tl.constexpr, CODES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_UNIT: tl.constexpr, BLOCK_KV: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D_V: tl.constexpr,
    D_REST: tl.constexpr, D_REST_PAD: tl.constexpr, GROUP_PARTS: tl.constexpr, PARTS: tl.constexpr,
    REST_IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Blocks [begin, end) of a list of keys.

    acc0 to acc3, a group of columns each, are relative to `largest`, a running maximum of logit plus log2 scale where
    scales are folded; all else is relative to `m_i`.
    """
    FOLDED: tl.constexpr = FORMAT == "fp8_v32"
    for block in range(begin, end):
        position, page, place, readable = keys_of(list_ptr, block, last, num_slots, SPARSE, PAGE_SIZE, BLOCK_KV)
        pages = cache_ptr + page.to(tl.int64) * page_stride * PAGE_UNIT + tl.zeros_like(place).to(tl.int64)
        rows = pages + place.to(tl.int64) * slot_stride
        scale0 = logit_scale
        scale1 = logit_scale
        scale2 = logit_scale
        scale3 = logit_scale
        if FOLDED:
            scale0 = group_scale(rows, readable, 0)
            scale1 = group_scale(rows, readable, 1)
            scale2 = group_scale(rows, readable, 2)
            scale3 = group_scale(rows, readable, 3)
        keys0 = key_columns(pages, rows, place, readable, 0, FORMAT, CODES, PAGE_SIZE, D_V, WIDTH, q0.dtype)
        keys1, keys2, keys3, rest = keys0, keys0, keys0, keys0
        if GROUPS == 4:
            keys1 = key_columns(pages, rows, place, readable, WIDTH, FORMAT, CODES, PAGE_SIZE, D_V, WIDTH, q0.dtype)
            keys2 = key_columns(pages, rows, place, readable, 2 * WIDTH, FORMAT, CODES, PAGE_SIZE, D_V, WIDTH, q0.dtype)
            keys3 = key_columns(pages, rows, place, readable, 3 * WIDTH, FORMAT, CODES, PAGE_SIZE, D_V, WIDTH, q0.dtype)
        if FOLDED:
            rest = rotary_columns(rows, readable, 528).to(q_rest.dtype)
        elif D_REST > 0:
            rest = whole_columns(rows, readable, D_V, D_REST, D_REST_PAD)
        logits = tl.zeros([q0.shape[0], BLOCK_KV], tl.float32)
        if q0.shape[0] < SEPARATE_QK_ROWS or always(block, begin):
            logits = block_logits(
                q0, q1, q2, q3, lost0, lost1, lost2, lost3, q_rest, lost_rest, unit, keys0, keys1, keys2, keys3, rest,
                scale0, scale1, scale2, scale3, logit_scale, FOLDED, GROUPS, D_REST, GROUP_PARTS, PARTS,
            )  # fmt: skip
        seen = readable[None, :]
        if CAUSAL:
            seen = seen & (position[None, :] < limit[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        weights, alpha, m_i, l_i = online_softmax(logits, m_i, l_i, 1.0)
        if FOLDED:
            if REST_IS_VALUE:
                acc_rest = matmul(narrow(weights, q_rest.dtype), rest, acc_rest * alpha[:, None])
            scale = tl.maximum(tl.maximum(tl.abs(scale0), tl.abs(scale1)), tl.maximum(tl.abs(scale2), tl.abs(scale3)))
            exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.float32) - 127.0
            # Scales under 2^-60 add nothing that could be distinguished from 0 beside a finite logit.
            larger = tl.maximum(largest, tl.max(logits + tl.maximum(exponent, -60.0)[None, :], 1))
            finite = tl.where(m_i == float("-inf"), 0.0, m_i)
            within = tl.where(larger == float("-inf"), 0.0, larger)
            weights = weights * tl.math.exp2(finite - within)[:, None]
            alpha = tl.math.exp2(largest - within)
            largest = larger
        acc0 = group_values(weights, scale0, keys0, acc0 * alpha[:, None], FOLDED)
        if GROUPS == 4:
            acc1 = group_values(weights, scale1, keys1, acc1 * alpha[:, None], FOLDED)
            acc2 = group_values(weights, scale2, keys2, acc2 * alpha[:, None], FOLDED)
            acc3 = group_values(weights, scale3, keys3, acc3 * alpha[:, None], FOLDED)
    return m_i, largest, l_i, acc0, acc1, acc2, acc3, acc_rest


@triton.jit
def finish(m_i, l_i, sinks_ptr, head, valid, HAS_SINKS: tl.constexpr):
    """(the accumulator's factor, the natural lse, the largest natural logit) of rows."""
    empty = l_i == 0.0
    level = tl.where(empty, 0.0, m_i)
    l_i = tl.where(empty, 1.0, l_i)
    denominator = l_i
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=float("-inf"))
        denominator += tl.math.exp2(sink * LOG2E - level)
    factor = tl.where(empty, 0.0, 1.0 / denominator)
    lse = tl.where(empty, float("-inf"), (level + tl.math.log2(l_i)) * LN2)
    return factor, lse, m_i * LN2
