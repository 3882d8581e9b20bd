"""Latent attention: the loop with online softmax over blocks of a list of keys."""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._compiler import always
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._latent.lists import entries_of, keys_of
from ragged_attention.kernels_triton._latent.rows import (
    Operands,
    Rows,
    group_scale,
    key_groups,
    places_of,
    rest_columns,
)
from ragged_attention.kernels_triton._mask import in_ranges
from ragged_attention.kernels_triton._max_logits import larger
from ragged_attention.kernels_triton._softmax import matmul, online_softmax, soft_capped

# With at least this many rows and eight warps, each row's columns should be divided between warps. But if a product
# depends on another product, Triton 3.6 to 3.9 assign whole rows to each warp, and half of the warps repeat the work of
# the other half. So `logits_apart` computes products of queries and keys in a branch (see `always`) and makes them
# independent of one another: it scales each product before it adds them up.
SEPARATE_QK_ROWS = tl.constexpr(64)


class Queries(NamedTuple):
    """Query rows as operands."""

    groups: tl.tuple  # the groups of columns
    lost: tl.tuple  # the groups' rounding errors
    rest: tl.tensor  # the columns after the groups
    lost_rest: tl.tensor
    unit: tl.tensor  # the power of two that divided each row


class Cache(NamedTuple):
    """The addresses of one KV head's latent rows."""

    ptr: tl.tensor
    page_stride: tl.tensor
    slot_stride: tl.tensor
    num_slots: tl.tensor


class KeyList(NamedTuple):
    """Blocks [begin, end) of a list of keys, restricted to keys [first, last). In a list of slots, `first` is 0.

    `later` has pairs (index, block): from iteration `index` on, the loop visits `block` and the blocks that follow it.
    """

    ptr: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    first: tl.tensor
    last: tl.tensor
    later: tl.tuple = ()


class Seen(NamedTuple):
    """The keys that each row sees: the positions [lowest, limit) in the list of keys, or ranges of positions."""

    lowest: tl.tensor
    limit: tl.tensor
    row_ranges: Any = None  # the address of each row's ranges
    query_ranges: Any = None  # the address of the ranges of each query to which the rows belong
    kv_len: Any = 0


class Scales(NamedTuple):
    """The factors of logits before and after the cap. Without a cap, `inner` alone makes logits base 2.

    If the columns after the groups have a scale of their own, `rest` is the factor of their products.
    """

    inner: tl.tensor
    cap: tl.tensor
    outer: tl.tensor
    rest: Any = 0


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Loop(Constants):
    """The compile-time constants of the loop over a list of keys."""

    SPARSE: bool  # whether list entries are slots; otherwise they are pages
    CAUSAL: bool  # whether the last visible key may differ between rows of a block
    HAS_WINDOW: bool  # whether the first visible key may differ between rows of a block
    HAS_SOFT_CAP: bool
    RANGES: int = 0  # ranges of keys per query, if the loop compares them with keys; else 0
    RANGES_DIFFER: bool = False  # whether ranges may differ between rows of a block
    BLOCK_KV: int
    SUMS_BY_COLUMN: bool  # see `no_sums`
    KEEPS_LARGEST: bool = False  # see `keeps_largest`
    OPERANDS: Operands


@triton.jit
def query_times(q, q_lost, keys, logits, PRODUCTS: tl.constexpr):
    """logits + q . keys, and with two PRODUCTS also + q_lost . keys."""
    transposed = tl.trans(keys)
    logits = matmul(q, transposed, logits)
    if PRODUCTS == 2:
        logits = matmul(q_lost, transposed, logits)
    return logits


@triton.jit
def scaled_product(queries, keys, scales, GROUP: tl.constexpr, PRODUCTS: tl.constexpr):
    """The products of queries and keys over column group GROUP, times `scales[GROUP]`; see `group_scales`."""
    none = tl.zeros([queries.groups[GROUP].shape[0], keys[GROUP].shape[0]], tl.float32)
    logits = query_times(queries.groups[GROUP], queries.lost[GROUP], keys[GROUP], none, PRODUCTS)
    return logits * scales[GROUP]


@triton.jit
def block_logits(queries, keys, rest, scales, factors, FOLDED: tl.constexpr, OPERANDS: tl.constexpr):
    """The products of query rows and a block of keys, times their factors."""
    logits = tl.zeros([queries.groups[0].shape[0], keys[0].shape[0]], tl.float32)
    for group in tl.static_range(OPERANDS.GROUPS):
        if FOLDED:
            logits += scaled_product(queries, keys, scales, group, OPERANDS.PRODUCTS)
        else:
            logits = query_times(queries.groups[group], queries.lost[group], keys[group], logits, OPERANDS.PRODUCTS)
    if FOLDED:
        logits = logits * queries.unit[:, None]
    if OPERANDS.REST_SCALED:
        none = tl.zeros_like(logits)
        rotary = query_times(queries.rest, queries.lost_rest, rest, none, OPERANDS.REST_PRODUCTS)
        logits = logits * factors.inner + rotary * factors.rest
    else:
        if OPERANDS.REST > 0:
            logits = query_times(queries.rest, queries.lost_rest, rest, logits, OPERANDS.REST_PRODUCTS)
        logits = logits * factors.inner
    return logits


@triton.jit
def logits_apart(present, queries, keys, rest, scales, factors, FOLDED: tl.constexpr, OPERANDS: tl.constexpr):
    """`block_logits` for at least SEPARATE_QK_ROWS rows (see that constant). `present` is a result of `always`.

    If there are several products, one is computed before the branch on `present`, so that the logits are a product even
    if the branch is not taken. If they were zeros then, whose layout costs nothing to convert, the compiler would
    convert the layout of the logits inside the branch and compute each exponential twice.
    """
    logits = tl.zeros([queries.groups[0].shape[0], keys[0].shape[0]], tl.float32)
    BEFORE: tl.constexpr = 1 if OPERANDS.REST == 0 and OPERANDS.GROUPS > 1 else 0  # groups before the branch  # pyright: ignore[reportAssignmentType]
    if OPERANDS.REST > 0:
        rest_factor = factors.rest if OPERANDS.REST_SCALED else factors.inner
        logits = query_times(queries.rest, queries.lost_rest, rest, logits, OPERANDS.REST_PRODUCTS) * rest_factor
    elif BEFORE == 1:
        logits = scaled_product(queries, keys, scales, 0, OPERANDS.PRODUCTS)
    factor = tl.zeros_like(logits)
    if FOLDED:
        factor = factor + (queries.unit * factors.inner)[:, None]
    if present:
        for group in tl.static_range(BEFORE, OPERANDS.GROUPS):
            product = scaled_product(queries, keys, scales, group, OPERANDS.PRODUCTS)
            if FOLDED:
                product = product * factor
            logits += product
    return logits


@triton.jit
def group_scales(rows, logit_scale, GROUPS: tl.constexpr, FOLDED: tl.constexpr):
    """Each group's factor for `scaled_product`: the keys' scales if these are folded, else `logit_scale`."""
    scales = ()
    for group in tl.static_range(GROUPS):
        scale = logit_scale
        if FOLDED:
            scale = group_scale(rows, group)
        scales += (scale,)
    return scales


@triton.jit
def no_sums(m_i, BLOCK_KV: tl.constexpr, BY_COLUMN: tl.constexpr):
    """Zeros for the sums of weights: one sum per row or, if BY_COLUMN, one per row and column of a block.

    Sums by column are added up once, after the loop. Sums per row need a reduction across threads and warps in every
    iteration.
    """
    sums = tl.zeros_like(m_i)
    if BY_COLUMN:
        sums = tl.zeros([m_i.shape[0], BLOCK_KV], tl.float32)
    return sums


@triton.jit
def softmax_step(logits, m_i, sums):
    """`online_softmax` for either kind of `sums`; see `no_sums`."""
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
    """The sum of each row's weights."""
    if len(sums.shape) == 2:
        sums = tl.sum(sums, 1)
    return sums


@triton.jit
def largest_of(scales):
    """The largest magnitude of each key's scales."""
    largest = tl.abs(scales[0])
    for group in tl.static_range(1, len(scales)):
        largest = tl.maximum(largest, tl.abs(scales[group]))
    return largest


@triton.jit
def rescale(weights, logits, m_i, largest, scales):
    """(weights, alpha, largest), with weights relative to `largest`, the running maximum of logit plus log2 scale.

    The argument `weights` is relative to `m_i`. The caller multiplies its accumulators by `alpha`.
    """
    exponent = (largest_of(scales).to(tl.int32, bitcast=True) >> 23).to(tl.float32) - 127.0
    # The bound loses nothing, since values with scales below 2^-60 are negligible.
    larger = tl.maximum(largest, tl.max(logits + tl.maximum(exponent, -60.0)[None, :], 1))
    finite = tl.where(m_i == float("-inf"), 0.0, m_i)
    within = tl.where(larger == float("-inf"), 0.0, larger)
    return weights * tl.math.exp2(finite - within)[:, None], tl.math.exp2(largest - within), larger


@triton.jit
def add_values(weights, scales, keys, acc, alpha, FOLDED: tl.constexpr):
    """acc * alpha + weights @ values for each group."""
    sums = ()
    for group in tl.static_range(len(acc)):
        scaled = weights
        if FOLDED:
            scaled = weights * scales[group][None, :]
        scaled = narrow(scaled, keys[group].dtype)
        sums += (matmul(scaled, keys[group], acc[group] * alpha[:, None]),)
    return sums


@triton.jit
def block_of(index, keys_of_list):
    """The block that the loop visits in iteration `index`; see `KeyList`."""
    block = index
    for part in tl.static_range(len(keys_of_list.later)):
        first, start = keys_of_list.later[part]
        block = tl.where(index < first, block, start + (index - first))
    return block


@triton.jit
def attend(queries, state, cache, keys_of_list, seen_by_row, factors, FORMAT: tl.constexpr, LOOP: tl.constexpr):
    """Online softmax over blocks of a list of keys; returns the new `state` = (m_i, largest, sums, acc, acc_rest).

    `acc` is a tuple with one accumulator per group. If RESCALED, `acc` is relative to `largest`, the running maximum of
    logit plus log2 scale. All other values are relative to `m_i`. If KEEPS_LARGEST, `state` ends with the largest
    logits before the soft cap.
    """
    ROWS: tl.constexpr = queries.groups[0].shape[0]
    SPARSE: tl.constexpr = LOOP.SPARSE
    OPERANDS: tl.constexpr = LOOP.OPERANDS
    BLOCK_KV: tl.constexpr = LOOP.BLOCK_KV
    m_i, largest, sums, acc, acc_rest = state[0], state[1], state[2], state[3], state[4]
    uncapped = state[len(state) - 1]  # if KEEPS_LARGEST
    first, last = keys_of_list.first, keys_of_list.last
    # Entries are looked up one block ahead; `_pages.attend` explains why.
    next_entries = entries_of(keys_of_list.ptr, keys_of_list.begin, keys_of_list.begin < keys_of_list.end, first, last,
                              SPARSE, FORMAT.PAGE_SIZE, BLOCK_KV)  # fmt: skip
    for index in range(keys_of_list.begin, keys_of_list.end):
        block = block_of(index, keys_of_list)
        entries = next_entries
        next_entries = entries_of(keys_of_list.ptr, block_of(index + 1, keys_of_list), index + 1 < keys_of_list.end,
                                  first, last, SPARSE, FORMAT.PAGE_SIZE, BLOCK_KV)  # fmt: skip
        position, page, offset, readable = keys_of(entries, block, first, last, cache.num_slots, SPARSE,
                                                   FORMAT.PAGE_SIZE, BLOCK_KV)  # fmt: skip
        if LOOP.RANGES > 0:  # keys that no row sees may be NaN
            ranges = in_ranges(seen_by_row.query_ranges[:, None], position[None, :], seen_by_row.kv_len, LOOP)
            readable = readable & (tl.max(ranges.to(tl.int32), 0) != 0)
        pages = cache.ptr + page.to(tl.int64) * cache.page_stride * FORMAT.PAGE_UNIT
        pages += tl.zeros_like(offset).to(tl.int64)
        values_at, scales_at = places_of(pages, offset, cache.slot_stride, FORMAT)
        rows = Rows(values_at, scales_at, readable)
        scales = group_scales(rows, factors.inner, OPERANDS.GROUPS, FORMAT.FOLDED)
        keys = key_groups(rows, FORMAT, OPERANDS)
        rest = keys[0]  # a stand-in
        if OPERANDS.REST > 0:
            rest = rest_columns(rows, FORMAT, OPERANDS)
        if ROWS < SEPARATE_QK_ROWS:
            logits = block_logits(queries, keys, rest, scales, factors, FORMAT.FOLDED, OPERANDS)
        else:
            present = always(index, keys_of_list.begin)
            logits = logits_apart(present, queries, keys, rest, scales, factors, FORMAT.FOLDED, OPERANDS)
        if OPERANDS.DIVIDED and not FORMAT.FOLDED:
            logits = logits * queries.unit[:, None]
        products = logits
        if LOOP.HAS_SOFT_CAP:
            logits = soft_capped(logits, factors.cap) * factors.outer
        seen = readable[None, :]
        if LOOP.CAUSAL:
            seen = seen & (position[None, :] < seen_by_row.limit[:, None])
        if LOOP.HAS_WINDOW:
            seen = seen & (position[None, :] >= seen_by_row.lowest[:, None])
        if LOOP.RANGES_DIFFER:
            seen = seen & in_ranges(seen_by_row.row_ranges[:, None], position[None, :], seen_by_row.kv_len, LOOP)
        logits = tl.where(seen, logits, float("-inf"))
        if LOOP.KEEPS_LARGEST:
            uncapped = larger(uncapped, tl.where(seen, products * factors.outer, float("-inf")))
        weights, alpha, m_i, sums = softmax_step(logits, m_i, sums)
        if OPERANDS.REST_IS_VALUE:
            acc_rest = matmul(narrow(weights, rest.dtype), rest, acc_rest * alpha[:, None])
        if FORMAT.RESCALED:
            weights, alpha, largest = rescale(weights, logits, m_i, largest, scales)
        acc = add_values(weights, scales, keys, acc, alpha, FORMAT.FOLDED)
    state = (m_i, largest, sums, acc, acc_rest)
    if LOOP.KEEPS_LARGEST:
        state += (uncapped,)
    return state


@triton.jit
def first_state(BLOCK_H: tl.constexpr, LOOP: tl.constexpr):
    """The `state` of `attend` before the first block."""
    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    acc = (tl.zeros([BLOCK_H, LOOP.OPERANDS.WIDTH], tl.float32),) * LOOP.OPERANDS.GROUPS
    acc_rest = tl.zeros([BLOCK_H, LOOP.OPERANDS.REST_PAD], tl.float32)
    state = (m_i, m_i, no_sums(m_i, LOOP.BLOCK_KV, LOOP.SUMS_BY_COLUMN), acc, acc_rest)
    if LOOP.KEEPS_LARGEST:
        state += (m_i,)
    return state


@triton.jit
def restoring_factor(m_i, l_i, largest, RESCALED: tl.constexpr):
    """The factor that makes the groups' accumulators relative to `m_i` instead of `largest`."""
    factor = tl.full(m_i.shape, 1.0, tl.float32)
    if RESCALED:
        factor = tl.math.exp2(tl.where(l_i == 0.0, 0.0, largest - m_i))
    return factor


@triton.jit
def lse_in_base_2(m_i, l_i):
    """The base-2 lse of one split's rows; -inf for a row that has seen no key."""
    empty = l_i == 0.0
    return tl.where(empty, float("-inf"), m_i + tl.math.log2(tl.where(empty, 1.0, l_i)))
