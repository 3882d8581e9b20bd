"""The two products of an attention over float32 tiles, four rows at a time."""

from ragged_attention.portable.numba._vectors import (
    LANES,
    compiled,
    float_at,
    fma,
    int_at,
    load,
    splat,
    store,
    store_totals,
)

ROWS = 4  # taken together
COLUMNS = 2 * LANES  # of values, taken together


@compiled
def scores(q, k, s, rows, keys, columns, q_width, s_width):
    """s[rows, keys] = q[rows, columns] . keys [columns], whole vectors; `k` lists the keys' addresses, 0 for none.

    Of each row of `s` an even number is written; a key that is not has any product. Dot products, so that keys stay as
    they were read: each lane sums a share of the columns, then the lanes are summed.
    """
    none = splat(0.0)
    for row in range(0, rows, ROWS):
        q0 = q + 4 * row * q_width
        q1, q2, q3 = q0 + 4 * q_width, q0 + 8 * q_width, q0 + 12 * q_width
        for key in range(0, keys, 2):
            k0, k1 = int_at(k, key), int_at(k, key + 1) if key + 1 < keys else 0
            k0, k1 = k0 if k0 else q0, k1 if k1 else q0
            a0 = b0 = a1 = b1 = a2 = b2 = a3 = b3 = none
            for d in range(0, columns, LANES):
                a, b = load(k0, d), load(k1, d)
                each = load(q0, d)
                a0, b0 = fma(each, a, a0), fma(each, b, b0)
                each = load(q1, d)
                a1, b1 = fma(each, a, a1), fma(each, b, b1)
                each = load(q2, d)
                a2, b2 = fma(each, a, a2), fma(each, b, b2)
                each = load(q3, d)
                a3, b3 = fma(each, a, a3), fma(each, b, b3)
            store_totals(s + 4 * (row * s_width + key), s_width, a0, b0, a1, b1, a2, b2, a3, b3)


@compiled
def mix(p, v, out, rows, keys, columns, p_row, p_key, v_width, out_width):
    """out[rows, columns] += p[rows, keys] @ v[keys, columns], with the strides of `p` and the widths of the others."""
    for row in range(0, rows, ROWS):
        p0 = p + 4 * row * p_row
        p1, p2, p3 = p0 + 4 * p_row, p0 + 8 * p_row, p0 + 12 * p_row
        for column in range(0, columns, COLUMNS):
            r0, values = out + 4 * (row * out_width + column), v + 4 * column
            r1, r2, r3 = r0 + 4 * out_width, r0 + 8 * out_width, r0 + 12 * out_width
            a0, a1, a2, a3 = load(r0, 0), load(r1, 0), load(r2, 0), load(r3, 0)
            b0, b1, b2, b3 = load(r0, LANES), load(r1, LANES), load(r2, LANES), load(r3, LANES)
            for key in range(keys):
                a, b = load(values, key * v_width), load(values, key * v_width + LANES)
                weight = splat(float_at(p0, key * p_key))
                a0, b0 = fma(weight, a, a0), fma(weight, b, b0)
                weight = splat(float_at(p1, key * p_key))
                a1, b1 = fma(weight, a, a1), fma(weight, b, b1)
                weight = splat(float_at(p2, key * p_key))
                a2, b2 = fma(weight, a, a2), fma(weight, b, b2)
                weight = splat(float_at(p3, key * p_key))
                a3, b3 = fma(weight, a, a3), fma(weight, b, b3)
            store(r0, 0, a0)
            store(r0, LANES, b0)
            store(r1, 0, a1)
            store(r1, LANES, b1)
            store(r2, 0, a2)
            store(r2, LANES, b2)
            store(r3, 0, a3)
            store(r3, LANES, b3)
