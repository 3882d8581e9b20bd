"""Latent attention: online softmax over a range of blocks of a list of keys."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._compiler import always
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._latent.lists import entries_of, keys_of
from ragged_attention.kernels_triton._latent.rows import Found, group_scale, key_groups, rest_columns, rotary_columns
from ragged_attention.kernels_triton._softmax import LN2, LOG2E, matmul, online_softmax, soft_capped

# Rows from which on eight warps share each row. Where the result of a product leads to another product, compilers
# (Triton 3.6 to 3.9) give every warp rows of its own instead, and let half of the warps repeat what the others do. So
# the products of queries and keys stand apart (`logits_apart`), and each is scaled before they are added, which would
# make one chain of them.
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
    """Blocks [begin, end) of a list of keys, of which [first, last) count; in a list of slots `first` is 0."""

    ptr: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    first: tl.tensor
    last: tl.tensor


class Seen(NamedTuple):
    """Of the keys that count each row sees those at positions in [lowest, limit)."""

    lowest: tl.tensor
    limit: tl.tensor


class Scales(NamedTuple):
    """What logits are multiplied by, before the cap and after it; without one, the first makes them base 2."""

    inner: tl.tensor
    cap: tl.tensor
    outer: tl.tensor


class Features(NamedTuple):
    SPARSE: tl.constexpr
    CAUSAL: tl.constexpr
    HAS_WINDOW: tl.constexpr
    HAS_SOFT_CAP: tl.constexpr
    REST_IS_VALUE: tl.constexpr  # of `fp8_v32` rows the rotary columns too


@triton.jit
def query_times(q, q_lost, keys, logits, PARTS: tl.constexpr):
    """logits + q . keys, with what a query's rounding lost as a second part."""
    transposed = tl.trans(keys)
    logits = matmul(q, transposed, logits)
    if PARTS == 2:
        logits = matmul(q_lost, transposed, logits)
    return logits


@triton.jit
def scaled_product(queries, keys, scales, group: tl.constexpr, parts: tl.constexpr):
    """A group's products of queries and keys, by themselves."""
    none = tl.zeros([queries.groups[group].shape[0], keys[group].shape[0]], tl.float32)
    logits = query_times(queries.groups[group], queries.lost[group], keys[group], none, parts)
    return logits * scales[group]


@triton.jit
def block_logits(queries, keys, rest, scales, logit_scale, columns, FOLDED: tl.constexpr):
    """Logits, in base 2, of rows and a block of keys."""
    logits = tl.zeros([queries.groups[0].shape[0], keys[0].shape[0]], tl.float32)
    for group in tl.static_range(columns.GROUPS):
        if FOLDED:
            logits += scaled_product(queries, keys, scales, group, columns.GROUP_PARTS)
        else:
            logits = query_times(queries.groups[group], queries.lost[group], keys[group], logits, columns.GROUP_PARTS)
    if FOLDED:
        logits = logits * queries.unit[:, None]
    if columns.D_REST > 0:
        logits = query_times(queries.rest, queries.lost_rest, rest, logits, columns.PARTS)
    return logits * logit_scale


@triton.jit
def logits_apart(present, queries, keys, rest, scales, logit_scale, columns, FOLDED: tl.constexpr):
    """`block_logits` of SEPARATE_QK_ROWS rows and more, see there; `present` is `always` true.

    One of several products stands before the branch. If the other way through the branch gave zeros, whose layout needs
    no work to change, compilers would change that of the logits inside, and take each exponential once for either.
    """
    logits = tl.zeros([queries.groups[0].shape[0], keys[0].shape[0]], tl.float32)
    BEFORE: tl.constexpr = 1 if columns.D_REST == 0 and columns.GROUPS > 1 else 0  # pyright: ignore[reportAssignmentType]
    if columns.D_REST > 0:
        logits = query_times(queries.rest, queries.lost_rest, rest, logits, columns.PARTS) * logit_scale
    elif BEFORE == 1:
        logits = scaled_product(queries, keys, scales, 0, columns.GROUP_PARTS)
    factor = tl.zeros_like(logits)
    if FOLDED:
        factor = factor + (queries.unit * logit_scale)[:, None]
    if present:
        for group in tl.static_range(BEFORE, columns.GROUPS):
            product = scaled_product(queries, keys, scales, group, columns.GROUP_PARTS)
            if FOLDED:
                product = product * factor
            logits += product
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
def no_sums(m_i, BLOCK_KV: tl.constexpr, BY_COLUMN: tl.constexpr):
    """Sums of weights before the first block: of each row or, BY_COLUMN, of each of its columns in a block.

    Those of columns are added up once, behind the loop, instead of over threads and warps in every turn.
    """
    sums = tl.zeros_like(m_i)
    if BY_COLUMN:
        sums = tl.zeros([m_i.shape[0], BLOCK_KV], tl.float32)
    return sums


@triton.jit
def softmax_step(logits, m_i, sums):
    """`online_softmax`, with either kind of `sums`."""
    if len(sums.shape) == 1:
        weights, alpha, higher, sums = online_softmax(logits, m_i, sums, 1.0)
    else:
        higher = tl.maximum(m_i, tl.max(logits, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.math.exp2(logits - finite[:, None])
        alpha = tl.math.exp2(m_i - finite)
        sums = sums * alpha[:, None] + weights
    return weights, alpha, higher, sums


@triton.jit
def sum_of_each_row(sums):
    if len(sums.shape) == 2:
        sums = tl.sum(sums, 1)
    return sums


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
def attend(queries, state, cache, keys_of_list, seen_by_row, factors, features, layout, columns,
           BLOCK_KV: tl.constexpr):  # fmt: skip
    """Blocks of a list of keys: `state` = (m_i, largest, sums, acc, acc_rest), and what it becomes.

    `acc`, a tuple of the groups' sums, is relative to `largest`, a running maximum of logit plus log2 scale where
    weights times scales are float16; all else is relative to `m_i`.
    """
    RESCALED: tl.constexpr = layout.FORMAT == "fp8_v32"
    FOLDED: tl.constexpr = RESCALED or layout.FORMAT == "decoded_v32"
    ROWS: tl.constexpr = queries.groups[0].shape[0]
    m_i, largest, sums, acc, acc_rest = state
    # See `_pages.attend` for why entries are looked up a block ahead.
    following = entries_of(keys_of_list.ptr, keys_of_list.begin, keys_of_list.begin < keys_of_list.end,
                           keys_of_list.first, keys_of_list.last, features.SPARSE, layout.PAGE_SIZE,
                           BLOCK_KV)  # fmt: skip
    for block in range(keys_of_list.begin, keys_of_list.end):
        entries = following
        following = entries_of(keys_of_list.ptr, block + 1, block + 1 < keys_of_list.end, keys_of_list.first,
                               keys_of_list.last, features.SPARSE, layout.PAGE_SIZE, BLOCK_KV)  # fmt: skip
        position, page, offset, readable = keys_of(entries, block, keys_of_list.first, keys_of_list.last,
                                                   cache.num_slots, features.SPARSE, layout.PAGE_SIZE,
                                                   BLOCK_KV)  # fmt: skip
        pages = cache.ptr + page.to(tl.int64) * cache.page_stride * layout.PAGE_UNIT
        pages += tl.zeros_like(offset).to(tl.int64)
        found = Found(pages, pages + offset.to(tl.int64) * cache.slot_stride, offset, readable)
        scales = group_scales(found, factors.inner, columns, FOLDED)
        keys = key_groups(found, layout, columns, queries.groups[0].dtype)
        rest = keys[0]
        if FOLDED:
            rest = rotary_columns(found.rows, readable, 528 if RESCALED else 520).to(queries.rest.dtype)
        elif columns.D_REST > 0:
            rest = rest_columns(found, layout, columns, queries.rest.dtype)
        if ROWS < SEPARATE_QK_ROWS:
            logits = block_logits(queries, keys, rest, scales, factors.inner, columns, FOLDED)
        else:
            present = always(block, keys_of_list.begin)
            logits = logits_apart(present, queries, keys, rest, scales, factors.inner, columns, FOLDED)
        if layout.FORMAT == "codes":
            logits = logits * queries.unit[:, None]
        if features.HAS_SOFT_CAP:
            logits = soft_capped(logits, factors.cap) * factors.outer
        seen = readable[None, :]
        if features.CAUSAL:
            seen = seen & (position[None, :] < seen_by_row.limit[:, None])
        if features.HAS_WINDOW:
            seen = seen & (position[None, :] >= seen_by_row.lowest[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        weights, alpha, m_i, sums = softmax_step(logits, m_i, sums)
        if FOLDED:
            if features.REST_IS_VALUE:
                acc_rest = matmul(narrow(weights, queries.rest.dtype), rest, acc_rest * alpha[:, None])
            if RESCALED:
                weights, alpha, largest = rescale(weights, logits, m_i, largest, scales)
        acc = add_values(weights, scales, keys, acc, alpha, FOLDED)
    return m_i, largest, sums, acc, acc_rest


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
