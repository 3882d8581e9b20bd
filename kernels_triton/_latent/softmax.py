"""Latent attention: online softmax over a range of blocks of a list of keys."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._latent.lists import entries_of, keys_of
from ragged_attention.kernels_triton._latent.rows import Found, group_scale, key_groups, rotary_columns, whole_columns
from ragged_attention.kernels_triton._softmax import LN2, LOG2E, matmul, online_softmax

# Rows from which on eight warps share each row. Where the result of a product leads to another product, compilers
# (Triton 3.6 to 3.9) give every warp rows of its own instead, and let half of the warps repeat what the others do. So
# the products of queries and keys stand apart, in a branch that is always taken, and each is scaled before they are
# added, which would make one chain of them.
SEPARATE_QK_ROWS = tl.constexpr(64)


class Queries(NamedTuple):
    """Rows of queries as operands."""

    groups: tl.tuple  # the columns before D_V, group by group
    lost: tl.tuple  # what rounding them lost
    rest: tl.tensor  # the other columns
    lost_rest: tl.tensor
    unit: tl.tensor  # what each row was divided by


class Cache(NamedTuple):
    """One KV head's latent rows."""

    ptr: tl.tensor
    page_stride: tl.tensor
    slot_stride: tl.tensor
    num_slots: tl.tensor


class KeyList(NamedTuple):
    """Blocks [begin, end) of a list of keys, of which those before `last` count."""

    ptr: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    last: tl.tensor


class Features(NamedTuple):
    SPARSE: tl.constexpr
    CAUSAL: tl.constexpr
    REST_IS_VALUE: tl.constexpr  # of `fp8_v32` rows the rotary columns too


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
def block_logits(queries, keys, rest, scales, logit_scale, columns, FOLDED: tl.constexpr):
    """Logits, in base 2, of rows and a block of keys; for SEPARATE_QK_ROWS see there."""
    none = tl.zeros([queries.groups[0].shape[0], keys[0].shape[0]], tl.float32)
    logits = none
    for group in tl.static_range(columns.GROUPS):
        logits = group_logits(queries.groups[group], queries.lost[group], keys[group], scales[group], logits, FOLDED,
                              columns.GROUP_PARTS)  # fmt: skip
    if none.shape[0] < SEPARATE_QK_ROWS:
        if FOLDED:
            logits = logits * queries.unit[:, None]
        if columns.D_REST > 0:
            logits = query_times(queries.rest, queries.lost_rest, rest, logits, columns.PARTS)
        logits = logits * logit_scale
    else:
        if FOLDED:
            logits = logits * (queries.unit * logit_scale)[:, None]
        if columns.D_REST > 0:
            logits += query_times(queries.rest, queries.lost_rest, rest, none, columns.PARTS) * logit_scale
    return logits


@triton.jit
def group_scales(found, logit_scale, columns, FOLDED: tl.constexpr):
    """By what each group's products are multiplied to become logits: its keys' scales, where these are folded."""
    scales = ()
    for group in tl.static_range(columns.GROUPS):
        scale = logit_scale
        if FOLDED:
            scale = group_scale(found.rows, found.readable, group)
        scales += (scale,)
    return scales


@triton.jit
def rescale(weights, logits, m_i, largest, scales):
    """(weights, alpha, largest) relative to `largest`, a running maximum of logit plus log2 of the key's scale.

    `weights` come relative to `m_i`. `alpha` is for what was summed so far.
    """
    scale = tl.maximum(
        tl.maximum(tl.abs(scales[0]), tl.abs(scales[1])), tl.maximum(tl.abs(scales[2]), tl.abs(scales[3]))
    )
    exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.float32) - 127.0
    # Scales under 2^-60 add nothing that could be distinguished from 0 beside a finite logit.
    larger = tl.maximum(largest, tl.max(logits + tl.maximum(exponent, -60.0)[None, :], 1))
    finite = tl.where(m_i == float("-inf"), 0.0, m_i)
    within = tl.where(larger == float("-inf"), 0.0, larger)
    return weights * tl.math.exp2(finite - within)[:, None], tl.math.exp2(largest - within), larger


@triton.jit
def add_values(weights, scales, keys, acc, alpha, FOLDED: tl.constexpr):
    """acc * alpha + weights @ values, group by group."""
    sums = ()
    for group in tl.static_range(len(acc)):
        scaled = weights
        if FOLDED:
            scaled = weights * scales[group][None, :]
        scaled = narrow(scaled, keys[group].dtype)
        sums += (matmul(scaled, keys[group], acc[group] * alpha[:, None]),)
    return sums


@triton.jit
def attend(queries, state, cache, keys_of_list, limit, logit_scale, features, layout, columns, BLOCK_KV: tl.constexpr):
    """Blocks of a list of keys: `state` = (m_i, largest, l_i, acc, acc_rest), and what it becomes.

    `acc`, a tuple of the groups' sums, is relative to `largest`, a running maximum of logit plus log2 scale where
    scales are folded; all else is relative to `m_i`.
    """
    FOLDED: tl.constexpr = layout.FORMAT == "fp8_v32"
    ROWS: tl.constexpr = queries.groups[0].shape[0]
    m_i, largest, l_i, acc, acc_rest = state
    # See `_pages.attend` for why entries are looked up a block ahead. Many rows leave no registers for that.
    AHEAD: tl.constexpr = ROWS < SEPARATE_QK_ROWS
    following = 0
    if AHEAD:
        following = entries_of(keys_of_list.ptr, keys_of_list.begin, keys_of_list.begin < keys_of_list.end,
                               keys_of_list.last, features.SPARSE, layout.PAGE_SIZE, BLOCK_KV)  # fmt: skip
    for block in range(keys_of_list.begin, keys_of_list.end):
        if AHEAD:
            entries = following
            following = entries_of(keys_of_list.ptr, block + 1, block + 1 < keys_of_list.end, keys_of_list.last,
                                   features.SPARSE, layout.PAGE_SIZE, BLOCK_KV)  # fmt: skip
        else:
            entries = entries_of(keys_of_list.ptr, block, tl.full([], 1, tl.int1), keys_of_list.last, features.SPARSE,
                                 layout.PAGE_SIZE, BLOCK_KV)  # fmt: skip
        position, page, offset, readable = keys_of(entries, block, keys_of_list.last, cache.num_slots, features.SPARSE,
                                                   layout.PAGE_SIZE, BLOCK_KV)  # fmt: skip
        pages = cache.ptr + page.to(tl.int64) * cache.page_stride * layout.PAGE_UNIT
        pages += tl.zeros_like(offset).to(tl.int64)
        found = Found(pages, pages + offset.to(tl.int64) * cache.slot_stride, offset, readable)
        scales = group_scales(found, logit_scale, columns, FOLDED)
        keys = key_groups(found, layout, columns, queries.groups[0].dtype)
        rest = keys[0]
        if FOLDED:
            rest = rotary_columns(found.rows, readable, 528).to(queries.rest.dtype)
        elif columns.D_REST > 0:
            rest = whole_columns(found.rows, readable, columns.D_V, columns.D_REST, columns.D_REST_PAD)
        logits = tl.zeros([ROWS, BLOCK_KV], tl.float32)
        if ROWS < SEPARATE_QK_ROWS or always(block, keys_of_list.begin):
            logits = block_logits(queries, keys, rest, scales, logit_scale, columns, FOLDED)
        seen = readable[None, :]
        if features.CAUSAL:
            seen = seen & (position[None, :] < limit[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        weights, alpha, m_i, l_i = online_softmax(logits, m_i, l_i, 1.0)
        if FOLDED:
            if features.REST_IS_VALUE:
                acc_rest = matmul(narrow(weights, queries.rest.dtype), rest, acc_rest * alpha[:, None])
            weights, alpha, largest = rescale(weights, logits, m_i, largest, scales)
        acc = add_values(weights, scales, keys, acc, alpha, FOLDED)
    return m_i, largest, l_i, acc, acc_rest


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
