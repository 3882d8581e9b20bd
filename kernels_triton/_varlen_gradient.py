"""Functions that the kernels of the gradient of attention over packed sequences share: rows' terms, and logits.

A row needs only two numbers: `norm` in base 2, so that weight = 2^(logit - norm), and `offset`, so that d_logit =
weight * (d_out . v + offset). The sink is included in `norm`. But if lse has a gradient, too, the sink is a separate
factor instead, `share`: the fraction of the softmax's denominator that is not the sink.
"""

import triton
import triton.language as tl

from ragged_attention.kernels_triton._compiler import aligned_down
from ragged_attention.kernels_triton._rows import logit_scales
from ragged_attention.kernels_triton._softmax import soft_capped

TERMS: tl.constexpr = tl.constexpr(4)  # numbers stored per row: norm, offset, share, and the ALiBi slope in base 2


@triton.jit
def signed_scales(sm_scale, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """`logit_scales`; the factor that contains `sm_scale` also has its sign."""
    inner, cap, outer = logit_scales(sm_scale, soft_cap, HAS_SOFT_CAP)
    sign = tl.where(sm_scale < 0, -1.0, 1.0)
    if HAS_SOFT_CAP:
        inner *= sign
    else:
        outer *= sign
    return inner, cap, outer


@triton.jit
def weigh(products, norm, seen, scales, MASKED: tl.constexpr, HAS_SOFT_CAP: tl.constexpr):
    """(2^(logit - norm), the soft cap's slope) for `products` = q . k of rows and keys."""
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
    terms = ()
    for index in tl.static_range(TERMS):
        term = tl.load(row_terms + index, mask=readable, other=0.0) if MASKED else tl.load(row_terms + index)
        terms += (term,)
    return terms
