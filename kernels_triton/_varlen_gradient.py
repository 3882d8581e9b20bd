"""Functions for the gradient of attention over packed sequences, shared by its kernels: rows' terms, and logits.

A row needs only two numbers, its *terms*: `norm` in base 2, with weight = 2^(logit - norm), and `offset`, with d_logit
= weight * (d_out . v + offset). `norm` includes the sink. But if there is a sink and lse has a gradient, `norm`
excludes the sink, and a third term, `share`, is the fraction of the softmax's denominator that is not the sink. Then
d_logit = weight * (share * d_out . v + offset).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._bias import entries
from ragged_attention.kernels_triton._compiler import aligned_down
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._mask import in_ranges, sees
from ragged_attention.kernels_triton._rows import logit_scales
from ragged_attention.kernels_triton._softmax import soft_capped
from ragged_attention.kernels_triton._varlen import Array, accumulate, product

TERMS: tl.constexpr = tl.constexpr(4)  # numbers stored per row: norm, offset, share, and the ALiBi slope in base 2


@triton.jit
def signed_scales(sm_scale, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """The result of `logit_scales`, in which the factor that contains `sm_scale` also has its sign."""
    inner, cap, outer = logit_scales(sm_scale, soft_cap, HAS_SOFT_CAP)
    sign = tl.where(sm_scale < 0, -1.0, 1.0)
    if HAS_SOFT_CAP:
        inner *= sign
    else:
        outer *= sign
    return inner, cap, outer


@triton.jit
def weigh(products, norm, seen, scales, MASKED: tl.constexpr, HAS_SOFT_CAP: tl.constexpr):
    """(2^(logit - norm), derivative of the soft cap) for the `products` q . k of rows and keys."""
    inner, cap, outer = scales
    slope = 1.0
    if HAS_SOFT_CAP:
        products = soft_capped(products * inner, cap)
        share_of_cap = products * (1.0 / cap)
        slope = 1 - share_of_cap * share_of_cap
    exponents = products * outer - norm
    if MASKED:
        exponents = tl.where(seen, exponents, float("-inf"))
    return tl.math.exp2(exponents), slope


@triton.jit
def logit_gradients(weights, slope, d_weights, offset, share, CONFIG: tl.constexpr):
    """The gradients of the products q . k, divided by sm_scale; `d_weights` is d_out . v."""
    if CONFIG.HAS_SHARE:
        d_weights = share * d_weights
    d_logits = weights * d_weights + weights * offset
    if CONFIG.HAS_SOFT_CAP:
        d_logits = d_logits * slope
    return d_logits


@triton.jit
def load_terms(terms_ptr, first, readable, MASKED: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr = 1,
               STRIDE: tl.constexpr = TERMS):  # fmt: skip
    """(norm, offset, share, slope) of the rows [first, first + BLOCK). If MASKED, they are 0 for unreadable rows.

    Each number has its own load, so that it does not take registers before it is needed. The terms of consecutive rows
    are STRIDE numbers apart.
    """
    base, rest = aligned_down(first, STEP)
    row_terms = terms_ptr + tl.cast(base, tl.int64) * STRIDE + (rest + tl.arange(0, BLOCK)) * STRIDE
    return load_terms_at(row_terms, readable, MASKED)


@triton.jit
def load_terms_at(row_terms, readable, MASKED: tl.constexpr):
    """`load_terms` of the rows whose terms are at the addresses `row_terms`."""
    terms = ()
    for index in tl.static_range(TERMS):
        term = tl.load(row_terms + index, mask=readable, other=0.0) if MASKED else tl.load(row_terms + index)
        terms += (term,)
    return terms


class KeyBlock(NamedTuple):
    """A block of keys and values, and the factors of logits; see `signed_scales`."""

    k: tl.tuple
    v: tl.tuple
    key: tl.tensor  # the positions of the keys, counted from the same origin as those of the rows
    scales: tl.tuple


class RowArrays(NamedTuple):
    """The addresses of one sequence's rows of one KV head, and of their tables of the relative bias."""

    q: Array
    d_out: Array
    terms_ptr: tl.tensor
    tables_ptr: tl.tensor


class LoadedRows(NamedTuple):
    """A block of rows that a loop has loaded, with their terms; see `prepare_kernel`."""

    q: tl.tuple
    d_out: tl.tuple
    norm: tl.tensor
    offset: tl.tensor
    share: tl.tensor
    alibi: tl.tensor  # the rows' slopes
    row: tl.tensor  # the rows' indices, counted from the sequence's first query
    readable: tl.tensor
    tables_ptr: tl.tensor  # the address of the first table of the relative bias


class Seeing(NamedTuple):
    """The rows that see the keys of a block, and these keys.

    Keys and rows are counted from the sequence's first query, because positions would take more registers.
    """

    first: tl.tensor  # no row outside [first, last) sees one of the keys
    last: tl.tensor
    key: tl.tensor
    q_len: tl.tensor  # the number of queries, and so the end of the keys counted from the first query
    num_old: tl.tensor  # the number of keys before the sequence's first query
    ranges_ptr: tl.tensor  # the address of the queries' ranges of keys, if there are any
    low: tl.tensor  # with ranges: the keys [low, high) of the block, counted from the sequence's first key
    high: tl.tensor


@triton.jit
def tables_of_head(bias_ptr, start, kv_head, BIAS: tl.constexpr, GROUP: tl.constexpr):
    """The address of the first table of a sequence and KV head."""
    return bias_ptr + start.to(tl.int64) * BIAS.TOKEN_STRIDE + kv_head.to(tl.int64) * (GROUP * BIAS.WIDTH)


@triton.jit
def row_tables(tables_ptr, row, BIAS: tl.constexpr, GROUP: tl.constexpr):
    """The addresses of the tables of rows of a sequence and KV head."""
    return tables_ptr + (row // GROUP).to(tl.int64) * BIAS.TOKEN_STRIDE + (row % GROUP) * BIAS.WIDTH


@triton.jit
def row_ranges(seeing, row, GROUP: tl.constexpr, KIND: tl.constexpr):
    """The addresses of the rows' ranges of keys; rows after the last query use that query's ranges."""
    ranges = row
    if KIND.RANGES:
        query = tl.minimum(row // GROUP, seeing.q_len - 1)
        ranges = seeing.ranges_ptr + query.to(tl.int64) * (2 * KIND.RANGES)
    return ranges


@triton.jit
def seen_by_rows(ranges, row, seeing, mask, GROUP: tl.constexpr, KIND: tl.constexpr):
    """Whether keys are seen by rows, [keys, rows]."""
    if KIND.RANGES:
        key = seeing.key + seeing.num_old
        seen = in_ranges(ranges[None, :], key[:, None], seeing.num_old + seeing.q_len, KIND)
    else:
        seen = sees((row // GROUP)[None, :], seeing.key[:, None], seeing.q_len, mask, KIND)
    return seen


@triton.jit
def add_rows(keys, sums, rows, products, seen, HIDDEN: tl.constexpr, NANS: tl.constexpr, CONFIG: tl.constexpr):
    """Add the contributions of rows to the `sums` (dk / sm_scale, dv) of a block of keys; returns the new sums.

    `products` is keys @ rows.T, and `seen` has its shape; without HIDDEN, every row sees every key. NANS says whether
    keys that no row sees may be NaN.
    """
    GROUP: tl.constexpr = CONFIG.Q.GROUP
    dk, dv = sums
    query = (rows.row // GROUP)[None, :]
    norm = rows.norm[None, :]
    if CONFIG.HAS_ALIBI:
        norm = norm - rows.alibi[None, :] * (keys.key[:, None] - query).to(tl.float32)
    if CONFIG.BIAS.WIDTH:
        distance = query - keys.key[:, None]
        tables = row_tables(rows.tables_ptr, rows.row, CONFIG.BIAS, GROUP)
        norm = norm - entries(tables[None, :], distance, rows.readable[None, :], CONFIG.BIAS)
    weights, slope = weigh(products, norm, seen, keys.scales, HIDDEN, CONFIG.HAS_SOFT_CAP)
    shared = weights
    if CONFIG.HAS_SHARE:
        shared = weights * rows.share[None, :]
    dv = accumulate(narrow(shared, rows.d_out[0].dtype), rows.d_out, dv)
    d_weights = product(keys.v, rows.d_out)
    d_logits = logit_gradients(weights, slope, d_weights, rows.offset[None, :], rows.share[None, :], CONFIG)
    if NANS:
        d_logits = tl.where(seen, d_logits, 0.0)
    dk = accumulate(narrow(d_logits, rows.q[0].dtype), rows.q, dk)
    return dk, dv
