"""Online softmax: matrix products, the running maximum and sum, and merging of partial results.

Logits are in base 2, because the hardware has an `exp2` instruction.
"""

from typing import Any

import triton
import triton.language as tl

from ragged_attention.kernels_triton._compiler import fence_copies
from ragged_attention.kernels_triton._constants import INTERPRETED
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._sequences import VARYING
from ragged_attention.kernels_triton._tiles import cdiv

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def unit_under_cap(soft_cap):
    """A factor for logits and their soft cap, such that neither the scaled cap nor its inverse is subnormal."""
    return tl.where(soft_cap < 1.0, 1.0, 0.0625)


@triton.jit
def soft_capped(logits, cap):
    """cap * tanh(logits / cap), with a relative error of about 4e-7.

    The closed form would cancel near 0, so a series replaces it there. The series multiplies the logits themselves,
    because logits / cap is subnormal under a huge cap, and many devices flush subnormals to 0.
    """
    x = logits * (1.0 / cap)
    square = x * x
    series = 1 + square * (-0.33333334 + square * (0.13333334 + square * (-0.05396825 + square * 0.02186949)))
    small = tl.math.exp2(tl.abs(x) * (-2 * LOG2E))
    closed = cap * ((1 - small) / (1 + small))
    return tl.where(tl.abs(x) < 0.25, logits * series, tl.where(x < 0, -closed, closed))


@triton.jit
def matmul(a, b, acc):
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    fence_copies(a)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def lost_to_rounding(exact, rounded):
    return narrow(exact - rounded.to(tl.float32), rounded.dtype)


@triton.jit
def online_softmax(logits, m_i, l_i, scale):
    """(weights, alpha, m_i, l_i) after a block of logits; `scale`, a positive factor, converts the logits to base 2.

    The caller multiplies its accumulator by `alpha`. A row that has seen no key keeps m_i = -inf and l_i = 0.
    """
    higher = tl.maximum(m_i, tl.max(logits, 1) * scale)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.math.exp2(logits * scale - finite[:, None])
    alpha = tl.math.exp2(m_i - finite)
    return weights, alpha, higher, l_i * alpha + tl.sum(weights, 1)


@triton.jit
def finish(m_i, l_i, sinks_ptr, head, valid, v_scale, HAS_SINKS: tl.constexpr):
    """(factor, lse) of finished rows. `acc * factor` is the result; `lse`, in natural logarithms, excludes the sink.

    A row that has seen no key has a factor of 0 and an lse of -inf.
    """
    empty = l_i == 0.0
    m_i = tl.where(empty, 0.0, m_i)
    l_i = tl.where(empty, 1.0, l_i)
    denominator = l_i
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=float("-inf"))
        denominator += tl.math.exp2(sink * LOG2E - m_i)
    lse = tl.where(empty, float("-inf"), (m_i + tl.math.log2(l_i)) * LN2)
    return tl.where(empty, 0.0, v_scale / denominator), lse


@triton.jit
def sum_of_products(a, b, live, AXIS: tl.constexpr):
    """The sum of a * b over the `live` elements along an axis.

    The `where` separates the product from the sum. Otherwise the compiler fuses the product with the first addition
    across threads. A thread then rounds its partner's term but not its own. So two threads that should hold equal sums
    differ in the last bit.
    """
    return tl.sum(tl.where(live, a * b, 0.0), AXIS)


@triton.jit
def merge_parts(
    parts_ptr, lses_ptr, count, stride, LSE_UNIT: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr,
):  # fmt: skip
    """Merge one row's `count` partial results into (acc [D_PAD], m_i, l_i); the merged result is acc / l_i.

    Partial results are `stride` rows apart, and PARTS of them are merged at a time. LSE_UNIT converts their lses to
    base 2, the base of m_i. A partial result whose lse is -inf is not read.
    """
    m_i = float("-inf")
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        lse = tl.load(lses_ptr + part.to(tl.int64) * stride, mask=part < count, other=float("-inf"))
        m_i = tl.maximum(m_i, tl.max(lse * LSE_UNIT, 0))
    finite = tl.where(m_i == float("-inf"), 0.0, m_i)
    d = tl.arange(0, D_PAD)
    acc = tl.zeros([D_PAD], tl.float32)
    l_i = 0.0
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        lse = tl.load(lses_ptr + part.to(tl.int64) * stride, mask=part < count, other=float("-inf"))
        weights = tl.math.exp2(lse * LSE_UNIT - finite)
        # A NaN lse must reach the result, so the test is "not -inf" instead of "above -inf".
        live = (part < count) & (lse != float("-inf"))
        rows = parts_ptr + part.to(tl.int64) * stride * D
        values = tl.load(rows[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0).to(tl.float32)
        acc += sum_of_products(weights[:, None], values, live[:, None], 0)
        l_i += tl.sum(weights, 0)
    return acc, m_i, l_i


@triton.jit(do_not_specialize=VARYING)
def sum_kernel(terms_ptr, sums_ptr, num_rows, num_columns, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        acc += tl.load(terms_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :], mask=mask, other=0)
    tl.store(sums_ptr + column, tl.sum(acc, 0), mask=column < num_columns)


def column_sums(terms: Any, launch: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Enqueue the column sums of a float32 array [rows, columns]. The order of summation is fixed.

    The result has the given `shape`, with as many numbers as there are columns; by default it is [columns].
    """
    num_rows, num_columns = terms.shape
    (sums,) = launch(
        sum_kernel,
        (cdiv(num_columns, 16),),
        (terms,),
        [(shape or (num_columns,), "float32")],
        num_rows=num_rows,
        num_columns=num_columns,
        BLOCK=64,
        COLUMNS=16,
    )
    return sums
