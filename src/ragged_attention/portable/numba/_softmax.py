"""Online softmax in base 2: a row's state is its largest logit `m_i`, its sum of weights `l_i` and its accumulator."""

import math

import numpy as np

from ragged_attention.portable.numba._vectors import (
    LANES,
    compiled,
    exp2,
    fill,
    float_at,
    fma,
    inlined,
    lane_numbers,
    largest,
    load,
    magnitude,
    maximum,
    set_float,
    splat,
    store,
    total,
    where_less,
    with_sign,
)

LOG2E, LN2 = np.float32(math.log2(math.e)), np.float32(math.log(2))
NOTHING = np.float32(-np.inf)  # the largest logit of a row without keys
MANY = np.float32(128)  # with this many equal weights, rounding them to bfloat16 keeps the result in its error bounds


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
    """The logits of consecutive keys with what ALiBi adds; the first key is at `distance` after the query."""
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


@compiled
def scale_row(row, columns, factor):
    factors = splat(factor)
    for column in range(0, columns, LANES):
        store(row, column, load(row, column) * factors)


@compiled
def multiply_row(row, factors, count):
    """Multiply `count` numbers by as many factors."""
    for index in range(0, count, LANES):
        store(row, index, load(row, index) * load(factors, index))


@compiled
def multiply_weights(s, factors, count, row, l_i, means):
    """Multiply a row's `count` weights, of which `l_i` has the sum, by the finite factors of their keys.

    `means` has the mean magnitude of the factors of all keys so far, by their weights, in each row. Returns whether few
    keys have most of the products, as `weigh` does for weights.
    """
    sums = products = squares = splat(0.0)
    for index in range(0, count, LANES):
        weights = load(s, index)
        each = weights * load(factors, index)
        store(s, index, each)
        sums, products, squares = sums + weights, products + magnitude(each), fma(each, each, squares)
    weight = float_at(l_i, row)
    whole = float_at(means, row) * max(weight - total(sums), np.float32(0)) + total(products)
    if weight > 0:
        set_float(means, row, whole / weight)
    return total(squares) * MANY > whole * whole


@compiled
def weigh(s, first, stop, count, row, m_i, l_i, out, columns, paired):
    """Replace a row's logits by weights, 0 outside [first, stop), and update its softmax state.

    `count` is a multiple of LANES. `m_i` and `l_i` are arrays over all rows, `out` is the row's accumulator. In a
    `paired` tile, returns whether few keys have most of the row's weight; rounding it would show in the result.
    """
    if stop <= first:
        fill(s, 0, count, np.float32(0))
        return False
    fill(s, 0, first, NOTHING)
    fill(s, stop, count, NOTHING)
    high = load(s, 0)
    for index in range(LANES, count, LANES):
        high = maximum(high, load(s, index))
    old_m_i = float_at(m_i, row)
    new_m_i = max(largest(high), old_m_i)
    base = new_m_i if new_m_i > NOTHING else np.float32(0)
    origin, sums, squares = splat(base), splat(0.0), splat(0.0)
    for index in range(0, count, LANES):
        weights = exp2(load(s, index) - origin)
        store(s, index, weights)
        sums, squares = sums + weights, fma(weights, weights, squares)
    if new_m_i > old_m_i:
        alpha = power(old_m_i - base)
        set_float(l_i, row, float_at(l_i, row) * alpha + total(sums))
        scale_row(out, columns, alpha)
    else:
        set_float(l_i, row, float_at(l_i, row) + total(sums))
    if new_m_i == NOTHING and float_at(l_i, row) != 0:  # all keys so far are NaN, which no maximum shows
        new_m_i = float_at(l_i, row)
    set_float(m_i, row, new_m_i)
    return paired and total(squares) * MANY > float_at(l_i, row) * float_at(l_i, row)
