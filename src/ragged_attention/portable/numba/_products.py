"""The two matrix products of an attention over tiles, computed four rows at a time.

A tile holds float32 or pairs of bfloat16. A *place* is 32 bits, which hold one float32 or one pair; sizes count places.
A pair holds two columns of a query or key, or two keys of the weights or values.
"""

from ragged_attention.portable.numba._vectors import (
    LANES,
    PAIRS,
    compiled,
    float_at,
    fma,
    fma_pairs,
    inlined,
    int_at,
    load,
    splat,
    store,
    store_totals,
)

ROWS = 4  # rows computed together
COLUMNS = 2 * LANES  # columns of values computed together


@inlined
def key_at(k, key, keys, otherwise):
    """The address of a key, or `otherwise` if there is none."""
    address = int_at(k, key) if key < keys else 0
    return address if address else otherwise


def _scores_of(fma):
    """A function for s[rows, keys] = factor * q[rows, columns] . keys[columns]; rows are whole vectors.

    `fma` adds the products of two vectors of places to a third vector. `k` lists the addresses of the keys, 0 for a
    missing key. Products with missing keys, and with those that pad the keys to a multiple of LANES / 4, are arbitrary.
    Keys need no transposition: each lane sums some columns, and then the lanes are summed.
    """

    @compiled
    def scores_two(q, k, s, rows, keys, columns, q_width, s_width, factor):
        none, factors = splat(0.0), splat(factor)
        for row in range(0, rows, ROWS):
            q0 = q + 4 * row * q_width
            q1, q2, q3 = q0 + 4 * q_width, q0 + 8 * q_width, q0 + 12 * q_width
            for key in range(0, keys, 2):
                ka, kb = key_at(k, key, keys, q0), key_at(k, key + 1, keys, q0)
                a0 = b0 = a1 = b1 = a2 = b2 = a3 = b3 = none
                for d in range(0, columns, LANES):
                    a, b = load(ka, d), load(kb, d)
                    q_part = load(q0, d)
                    a0, b0 = fma(q_part, a, a0), fma(q_part, b, b0)
                    q_part = load(q1, d)
                    a1, b1 = fma(q_part, a, a1), fma(q_part, b, b1)
                    q_part = load(q2, d)
                    a2, b2 = fma(q_part, a, a2), fma(q_part, b, b2)
                    q_part = load(q3, d)
                    a3, b3 = fma(q_part, a, a3), fma(q_part, b, b3)
                store_totals(s + 4 * (row * s_width + key), s_width, factors, a0, b0, a1, b1, a2, b2, a3, b3)

    @compiled
    def scores_four(q, k, s, rows, keys, columns, q_width, s_width, factor):
        none, factors = splat(0.0), splat(factor)
        for row in range(0, rows, ROWS):
            q0 = q + 4 * row * q_width
            q1, q2, q3 = q0 + 4 * q_width, q0 + 8 * q_width, q0 + 12 * q_width
            for key in range(0, keys, 4):
                ka, kb = key_at(k, key, keys, q0), key_at(k, key + 1, keys, q0)
                kc, kd = key_at(k, key + 2, keys, q0), key_at(k, key + 3, keys, q0)
                a0 = b0 = c0 = d0 = a1 = b1 = c1 = d1 = a2 = b2 = c2 = d2 = a3 = b3 = c3 = d3 = none
                for at in range(0, columns, LANES):
                    a, b, c, d = load(ka, at), load(kb, at), load(kc, at), load(kd, at)
                    q_part = load(q0, at)
                    a0, b0, c0, d0 = fma(q_part, a, a0), fma(q_part, b, b0), fma(q_part, c, c0), fma(q_part, d, d0)
                    q_part = load(q1, at)
                    a1, b1, c1, d1 = fma(q_part, a, a1), fma(q_part, b, b1), fma(q_part, c, c1), fma(q_part, d, d1)
                    q_part = load(q2, at)
                    a2, b2, c2, d2 = fma(q_part, a, a2), fma(q_part, b, b2), fma(q_part, c, c2), fma(q_part, d, d2)
                    q_part = load(q3, at)
                    a3, b3, c3, d3 = fma(q_part, a, a3), fma(q_part, b, b3), fma(q_part, c, c3), fma(q_part, d, d3)
                store_totals(
                    s + 4 * (row * s_width + key), s_width, factors,
                    a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3,
                )  # fmt: skip

    return scores_four if LANES == 16 else scores_two  # registers hold the products of 4 rows and 4 or 2 keys


def times_number(fma):
    """A function that adds a place from memory times two vectors to two sums; `fma` is that of `_scores_of`."""

    @inlined
    def add_products(address, index, a, b, sum_a, sum_b):
        factor = splat(float_at(address, index))
        return fma(factor, a, sum_a), fma(factor, b, sum_b)

    return add_products


@inlined
def _row_in_order(rows, index, width):
    return rows + 4 * index * width


@inlined
def _row_of_list(rows, index, _):
    return int_at(rows, index)


def _mix_of(fma, row_at):
    """A function for out[rows, columns] += p[rows, keys] @ v[keys, columns], or = if `fresh`.

    `fma` is that of `_scores_of`; `row_at` finds the rows of `v`. `p` has two strides, `v` and `out` have one. Columns
    are computed COLUMNS at a time.
    """
    add = times_number(fma)

    @compiled
    def mix(p, v, out, rows, keys, columns, p_row, p_key, v_width, out_width, fresh):
        for column in range(0, columns, COLUMNS):
            for row in range(0, rows, ROWS):
                p0, r0 = p + 4 * row * p_row, out + 4 * (row * out_width + column)
                p1, p2, p3 = p0 + 4 * p_row, p0 + 8 * p_row, p0 + 12 * p_row
                r1, r2, r3 = r0 + 4 * out_width, r0 + 8 * out_width, r0 + 12 * out_width
                a0 = b0 = a1 = b1 = a2 = b2 = a3 = b3 = splat(0.0)
                if not fresh:
                    a0, a1, a2, a3 = load(r0, 0), load(r1, 0), load(r2, 0), load(r3, 0)
                    b0, b1, b2, b3 = load(r0, LANES), load(r1, LANES), load(r2, LANES), load(r3, LANES)
                for key in range(keys):
                    values = row_at(v, key, v_width)
                    a, b = load(values, column), load(values, column + LANES)
                    a0, b0 = add(p0, key * p_key, a, b, a0, b0)
                    a1, b1 = add(p1, key * p_key, a, b, a1, b1)
                    a2, b2 = add(p2, key * p_key, a, b, a2, b2)
                    a3, b3 = add(p3, key * p_key, a, b, a3, b3)
                for row_out, low, high in ((r0, a0, b0), (r1, a1, b1), (r2, a2, b2), (r3, a3, b3)):
                    store(row_out, 0, low)
                    store(row_out, LANES, high)

    return mix


_add_product = times_number(fma)


@compiled
def spread(p, q, targets, rows, keys, columns, p_row, q_width):
    """Add p[rows, keys]^T @ q[rows, columns] to the rows of floats whose addresses `targets` lists.

    Keys are computed ROWS at a time, so `targets` lists up to ROWS - 1 more addresses, all of rows that nothing reads.
    """
    for key in range(0, keys, ROWS):
        t0, t1 = int_at(targets, key), int_at(targets, key + 1)
        t2, t3 = int_at(targets, key + 2), int_at(targets, key + 3)
        for column in range(0, columns, COLUMNS):
            after = column + LANES
            a0, a1, a2, a3 = load(t0, column), load(t1, column), load(t2, column), load(t3, column)
            b0, b1, b2, b3 = load(t0, after), load(t1, after), load(t2, after), load(t3, after)
            for row in range(rows):
                a, b, place = load(q, row * q_width + column), load(q, row * q_width + after), row * p_row + key
                a0, b0 = _add_product(p, place, a, b, a0, b0)
                a1, b1 = _add_product(p, place + 1, a, b, a1, b1)
                a2, b2 = _add_product(p, place + 2, a, b, a2, b2)
                a3, b3 = _add_product(p, place + 3, a, b, a3, b3)
            for target, low, high in ((t0, a0, b0), (t1, a1, b1), (t2, a2, b2), (t3, a3, b3)):
                store(target, column, low)
                store(target, after, high)


scores, mix = _scores_of(fma), _mix_of(fma, _row_in_order)
mix_listed = _mix_of(fma, _row_of_list)  # `v` is a list of the addresses of rows, and has no stride
scores_of_pairs, mix_of_pairs = scores, mix
if PAIRS:
    scores_of_pairs, mix_of_pairs = _scores_of(fma_pairs), _mix_of(fma_pairs, _row_in_order)
