"""Online softmax in base 2: a row's state is its largest logit `m_i`, its sum of weights `l_i` and its accumulator."""

import math

import numpy as np

from ragged_attention.portable.numba._vectors import (
    LANES,
    compiled,
    exp2,
    float_at,
    fma,
    inlined,
    lane_numbers,
    largest_by_rows,
    load,
    load_by_rows,
    magnitude,
    maximum,
    row_0,
    row_1,
    row_2,
    row_3,
    rows_above,
    set_float,
    splat,
    store,
    store_by_rows,
    total,
    totals_by_rows,
    where_less,
    with_sign,
)

LOG2E, LN2 = np.float32(math.log2(math.e)), np.float32(math.log(2))
NOTHING = np.float32(-np.inf)  # the largest logit of a row without keys
MANY = np.float32(64)  # if a row has this many equal weights, the result tolerates rounding them to bfloat16


@inlined
def soft_capped(logits, cap):
    """cap * tanh(logits / cap); near 0 it is a polynomial (Cephes' tanhf) of the logits themselves.

    Small logits thus keep their digits, even if `cap` is so large that logits / cap is subnormal and flushed to 0.
    """
    size = magnitude(logits)
    x = size / cap
    square = x * x
    p = fma(splat(-5.70498872745e-3), square, splat(2.06390887954e-2))
    p = fma(p, square, splat(-5.37397155531e-2))
    p = fma(p, square, splat(1.33314422036e-1))
    p = fma(p, square, splat(-3.33332819422e-1))
    near = fma(p * square, size, size)
    e = exp2(x * splat(-2 * LOG2E))
    far = (splat(1.0) - e) / (splat(1.0) + e) * cap
    return with_sign(where_less(x, splat(0.625), near, far), logits)


@compiled
def capped(s, count, soft_cap):
    """Replace logits by log2(e) * `soft_cap` * tanh(logit / soft_cap)."""
    for index in range(0, count, LANES):
        store(s, index, soft_capped(load(s, index), splat(soft_cap)) * splat(LOG2E))


@inlined
def sloped(logits, slope, distance):
    """The logits of consecutive keys with ALiBi's biases; the first key is at `distance` after the query."""
    return fma(splat(slope), splat(np.float32(distance)) + lane_numbers(), logits)


@compiled
def add_slope(s, count, slope, distance):
    """`sloped` for a row of logits in place; base-2 logits need a slope times log2(e)."""
    for index in range(0, count, LANES):
        store(s, index, sloped(load(s, index), slope, distance + index))


@inlined
def power(x):
    """2 ** x for one number; 0 for minus infinity."""
    return np.float32(math.exp2(x))


@inlined
def log_sum_exp(m_i, l_i):
    """The natural log-sum-exp of a row's logits from its softmax state; minus infinity without keys."""
    return NOTHING if m_i == NOTHING else (m_i + math.log2(l_i)) * LN2


@inlined
def weight_of_sink(sinks, head, m_i):
    """The weight that a head's sink adds to a row's sum of weights; 0 without sinks."""
    return power(float_at(sinks, head) * LOG2E - m_i) if sinks else 0.0


@inlined
def multiply_by(row, columns, factors):
    """Multiply each vector of a row by the same vector."""
    for column in range(0, columns, LANES):
        store(row, column, load(row, column) * factors)


@compiled
def scale_row(row, columns, factor):
    multiply_by(row, columns, splat(factor))


@compiled
def multiply_row(row, factors, count):
    """Multiply each of `count` numbers by its own factor."""
    for index in range(0, count, LANES):
        store(row, index, load(row, index) * load(factors, index))


@compiled
def multiply_weights(s, factors, count, row, l_i, means):
    """Multiply a row's `count` weights by the finite factors of their keys; `l_i` already includes these weights.

    `means` has, for each row, the mean magnitude of the factors so far, weighted by the keys' weights. Returns whether
    few keys have most of the sum of the products, as `weigh` does for weights.
    """
    sums = products = squares = splat(0.0)
    for index in range(0, count, LANES):
        weights = load(s, index)
        scaled = weights * load(factors, index)
        store(s, index, scaled)
        sums, products, squares = sums + weights, products + magnitude(scaled), fma(scaled, scaled, squares)
    weight = float_at(l_i, row)
    whole = float_at(means, row) * max(weight - total(sums), np.float32(0)) + total(products)
    if weight > 0:
        set_float(means, row, whole / weight)
    return total(squares) * MANY > whole * whole


@compiled
def weigh(s, s_width, count, row, m_i, l_i, out, columns):
    """Replace the logits of ROWS rows, from row `row` on, by weights, and update the softmax state of these rows.

    `s` and `out` are the logits and the accumulator of row `row`. `count` is a multiple of LANES; a logit whose
    weight must be 0 is NOTHING. Returns a bit for each row in which few keys have most of the weight, so that rounding
    weights to bfloat16 would show in the result.
    """
    s0, s1, s2, s3 = s, s + 4 * s_width, s + 8 * s_width, s + 12 * s_width
    high0, high1, high2, high3 = load(s0, 0), load(s1, 0), load(s2, 0), load(s3, 0)
    for index in range(LANES, count, LANES):
        high0, high1 = maximum(high0, load(s0, index)), maximum(high1, load(s1, index))
        high2, high3 = maximum(high2, load(s2, index)), maximum(high3, load(s3, index))
    old, weight, nothing = load_by_rows(m_i, row), load_by_rows(l_i, row), splat(NOTHING)
    new = maximum(largest_by_rows(high0, high1, high2, high3), old)
    base = where_less(nothing, new, new, splat(0.0))
    base0, base1, base2, base3 = row_0(base), row_1(base), row_2(base), row_3(base)
    sum0 = sum1 = sum2 = sum3 = square0 = square1 = square2 = square3 = splat(0.0)
    for index in range(0, count, LANES):
        a, b = exp2(load(s0, index) - base0), exp2(load(s1, index) - base1)
        c, d = exp2(load(s2, index) - base2), exp2(load(s3, index) - base3)
        store(s0, index, a)
        store(s1, index, b)
        store(s2, index, c)
        store(s3, index, d)
        sum0, sum1, sum2, sum3 = sum0 + a, sum1 + b, sum2 + c, sum3 + d
        square0, square1 = fma(a, a, square0), fma(b, b, square1)
        square2, square3 = fma(c, c, square2), fma(d, d, square3)
    raised = rows_above(new, old)
    if raised:
        alpha = exp2(old - base)
        weight = weight * alpha
        if raised & 1:
            multiply_by(out, columns, row_0(alpha))
        if raised & 2:
            multiply_by(out + 4 * columns, columns, row_1(alpha))
        if raised & 4:
            multiply_by(out + 8 * columns, columns, row_2(alpha))
        if raised & 8:
            multiply_by(out + 12 * columns, columns, row_3(alpha))
    weight = weight + totals_by_rows(sum0, sum1, sum2, sum3)
    store_by_rows(l_i, row, weight)
    # If all logits of a row so far are NaN, `maximum` has ignored them, but the sum of weights is NaN: store that.
    store_by_rows(m_i, row, where_less(nothing, new, new, where_less(weight, splat(np.inf), new, weight)))
    squares = totals_by_rows(square0, square1, square2, square3)
    return rows_above(squares * splat(MANY), weight * weight)
