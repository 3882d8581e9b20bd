"""The two matrix products of an attention kernel, over tiles. They are computed for ROWS rows (four) at a time.

A tile holds float32 or pairs of bfloat16. A *place* is 32 bits, which hold one float32 or one pair; sizes count places.
A pair holds two columns of a query or key, or two keys of the weights or values.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from ragged_attention.portable.numba._vectors import (
    F32,
    FLOATS,
    I64,
    LANES,
    PAIRS,
    ROWS,
    add_product,
    add_products_of_pairs,
    compiled,
    element,
    float_at,
    fma,
    fma_pairs,
    function_of,
    in_all_lanes,
    inlined,
    int_at,
    load,
    load_aligned,
    number,
    prefetch_line,
    prefetch_vector,
    splat,
    store,
    store_aligned,
    store_totals,
)

COLUMNS = 2 * LANES  # the number of columns is a multiple of this
# Vectors of columns computed together, as `benchmarks.cpu.blocks` finds best; AVX-512 has registers for four.
WIDE = 4 if LANES == 16 else 2


@inlined
def key_at(k, key, keys, otherwise):
    """The address of a key, or `otherwise` if there is none."""
    address = int_at(k, key) if key < keys else 0
    return address if address else otherwise


def _scores_of(fma):
    """A function for s[rows, keys] = factor * q[rows, columns] . keys[columns]; rows are whole vectors.

    `fma` adds the products of two vectors of places to a third vector. `k` lists the addresses of the keys, 0 for a
    missing key. Products with missing keys, and with those that pad the keys to a multiple of LANES / 4, are arbitrary.
    Keys need no transposition: each lane sums some columns, and then the lanes are summed. While key i
    is multiplied with the first ROWS rows, row i of the list `ahead`, which has `num_ahead` addresses, is prefetched.
    """

    @compiled
    def scores_two(q, k, s, rows, keys, columns, q_width, s_width, factor, ahead, num_ahead):
        none, factors = splat(0.0), splat(factor)
        for row in range(0, rows, ROWS):
            q0 = q + 4 * row * q_width
            q1, q2, q3 = q0 + 4 * q_width, q0 + 8 * q_width, q0 + 12 * q_width
            for key in range(0, keys, 2):
                ka, kb = key_at(k, key, keys, q0), key_at(k, key + 1, keys, q0)
                next_a, next_b = key_at(ahead, key, num_ahead, ka), key_at(ahead, key + 1, num_ahead, kb)
                a0 = b0 = a1 = b1 = a2 = b2 = a3 = b3 = none
                for d in range(0, columns, LANES):
                    a, b = load(ka, d), load(kb, d)
                    prefetch_vector(next_a, d)
                    prefetch_vector(next_b, d)
                    q_part = load(q0, d)
                    a0, b0 = fma(q_part, a, a0), fma(q_part, b, b0)
                    q_part = load(q1, d)
                    a1, b1 = fma(q_part, a, a1), fma(q_part, b, b1)
                    q_part = load(q2, d)
                    a2, b2 = fma(q_part, a, a2), fma(q_part, b, b2)
                    q_part = load(q3, d)
                    a3, b3 = fma(q_part, a, a3), fma(q_part, b, b3)
                store_totals(s + 4 * (row * s_width + key), s_width, factors, a0, b0, a1, b1, a2, b2, a3, b3)
            num_ahead = 0

    @compiled
    def scores_four(q, k, s, rows, keys, columns, q_width, s_width, factor, ahead, num_ahead):
        none, factors = splat(0.0), splat(factor)
        for row in range(0, rows, ROWS):
            q0 = q + 4 * row * q_width
            q1, q2, q3 = q0 + 4 * q_width, q0 + 8 * q_width, q0 + 12 * q_width
            for key in range(0, keys, 4):
                ka, kb = key_at(k, key, keys, q0), key_at(k, key + 1, keys, q0)
                kc, kd = key_at(k, key + 2, keys, q0), key_at(k, key + 3, keys, q0)
                next_a, next_b = key_at(ahead, key, num_ahead, ka), key_at(ahead, key + 1, num_ahead, kb)
                next_c, next_d = key_at(ahead, key + 2, num_ahead, kc), key_at(ahead, key + 3, num_ahead, kd)
                a0 = b0 = c0 = d0 = a1 = b1 = c1 = d1 = a2 = b2 = c2 = d2 = a3 = b3 = c3 = d3 = none
                for at in range(0, columns, LANES):
                    a, b, c, d = load(ka, at), load(kb, at), load(kc, at), load(kd, at)
                    prefetch_vector(next_a, at)
                    prefetch_vector(next_b, at)
                    prefetch_vector(next_c, at)
                    prefetch_vector(next_d, at)
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
            num_ahead = 0

    return scores_four if LANES == 16 else scores_two  # registers hold the products of 4 rows and 4 or 2 keys


def times_number(fma):
    """A function that multiplies a place from memory by two vectors and adds the products to two sums.

    `fma` is that of `_scores_of`.
    """

    @inlined
    def add_products(address, index, a, b, sum_a, sum_b):
        factor = splat(float_at(address, index))
        return fma(factor, a, sum_a), fma(factor, b, sum_b)

    return add_products


def _block_of(add: Any, vectors: int, listed: bool, fresh: bool) -> Any:
    """An intrinsic for out[ROWS, columns] += p[ROWS, keys] @ v[keys, columns], where columns are `vectors` vectors.

    All sums stay in registers. `add` emits the code of `fma`, or of `fma_pairs`. If `fresh`, `out` becomes `factor`
    times the product; otherwise `factor` is not used. If `listed`, `v` lists the addresses of rows, and `v_width` is
    not used; `ahead` lists rows of which `num_ahead` are prefetched meanwhile. `column` is the place in a row of `v` at
    which the block begins.
    """

    @function_of(types.none, *(types.int64,) * 9, types.float32, types.int64, types.int64)
    def block(
        builder: Any, p: Any, p_row: Any, p_key: Any, v: Any, v_width: Any, column: Any, out: Any, out_width: Any,
        keys: Any, factor: Any, ahead: Any, num_ahead: Any,
    ) -> None:  # fmt: skip
        def place(address: Any, row: Any, width: Any, index: Any) -> Any:
            return element(builder, address, builder.add(builder.mul(row, width), index), F32)

        parts = [number(part * LANES) for part in range(vectors)]
        results = [place(out, number(row), out_width, part) for row in range(ROWS) for part in parts]
        sums = [cgutils.alloca_once_value(builder, ir.Constant(FLOATS, None)) for _ in results]
        for result, total in zip(results, sums, strict=True):
            if not fresh:
                builder.store(load_aligned(builder, result, FLOATS, 4), total)
        with cgutils.for_range_slice(builder, number(0), keys, number(1)) as (key, _):
            source = builder.load(element(builder, v, key, I64)) if listed else v
            row_of_v = number(0) if listed else key
            if listed:
                coming = builder.select(
                    builder.icmp_signed("<", key, num_ahead), builder.load(element(builder, ahead, key, I64)), source
                )
                for part in parts:
                    prefetch_line(
                        builder, builder.ptrtoint(place(coming, row_of_v, v_width, builder.add(column, part)), I64)
                    )
            values = [load_aligned(builder, place(source, row_of_v, v_width, builder.add(column, part)), FLOATS, 4)
                      for part in parts]  # fmt: skip
            for row in range(ROWS):
                weight = builder.load(place(p, number(row), p_row, builder.mul(key, p_key)))
                weights = in_all_lanes(builder, weight)
                for value, total in zip(values, sums[row * vectors : (row + 1) * vectors], strict=True):
                    builder.store(add(builder, weights, value, builder.load(total)), total)
        factors = in_all_lanes(builder, factor)
        for result, total in zip(results, sums, strict=True):
            final = builder.load(total)
            store_aligned(builder, builder.fmul(final, factors) if fresh else final, result, 4)

    return block


@inlined
def span_of(spans, row, count):
    """The range of keys that ROWS rows, from row `row` on, need; all `count` if `spans` is 0.

    `spans` is the address of two int64 for each ROWS rows.
    """
    place = 2 * (row // ROWS)
    return (int_at(spans, place), int_at(spans, place + 1)) if spans else (0, count)


def _parts_of(fresh: bool, keys_per_place: int) -> Any:
    """A function for the range of places over which a block of ROWS rows sums its products; it may be empty.

    `spans` is that of `span_of`. If `fresh`, the keys are the columns of the result: a block of `size` columns, from
    `column` on, sums over all places, or over none if its rows need none of these columns. Otherwise a place holds
    `keys_per_place` keys, and a block sums over the places of the keys that its rows need.
    """

    @inlined
    def columns_of(spans, row, column, size, keys):
        first, stop = span_of(spans, row, column + size)
        return 0, keys if first < column + size and column < stop else 0

    @inlined
    def keys_of(spans, row, column, size, keys):
        first, stop = span_of(spans, row, keys * keys_per_place)
        return first // keys_per_place, (stop + keys_per_place - 1) // keys_per_place

    return columns_of if fresh else keys_of


def product_of(add: Any, listed: bool, fresh: bool, vectors: int = WIDE, keys_per_place: int = 1) -> Any:
    """A function for out[rows, columns] += p[rows, keys] @ v[keys, columns]; the arguments are those of `_block_of`.

    `p` has two strides, `v` and `out` have one. `vectors` vectors of columns are computed at a time; the columns that
    remain, two vectors at a time. Keys outside `spans` (see `span_of`) add nothing. If `listed`, the function also
    takes a list of rows, which it prefetches while it multiplies the first rows, and the length of this list.
    """
    wide_block, block = (_block_of(add, count, listed, fresh) for count in (vectors, COLUMNS // LANES))
    step, part_of = vectors * LANES, _parts_of(fresh, keys_per_place)

    @inlined
    def operands_of(p, v, first, p_key, v_width):
        return p + 4 * first * p_key, v + (8 if listed else 4 * v_width) * first

    @compiled
    def product(p, v, out, rows, keys, columns, p_row, p_key, v_width, out_width, factor, spans, ahead, num_ahead):
        wide = columns // step * step
        for column in range(0, wide, step):
            for row in range(0, rows, ROWS):
                first, stop = part_of(spans, row, column, step, keys)
                if first < stop:
                    a, b = operands_of(p + 4 * row * p_row, v, first, p_key, v_width)
                    target, count = out + 4 * (row * out_width + column), 0 if row else num_ahead
                    wide_block(
                        a, p_row, p_key, b, v_width, column, target, out_width, stop - first, factor, ahead, count
                    )
        for column in range(wide, columns, COLUMNS):
            for row in range(0, rows, ROWS):
                first, stop = part_of(spans, row, column, COLUMNS, keys)
                if first < stop:
                    a, b = operands_of(p + 4 * row * p_row, v, first, p_key, v_width)
                    target, count = out + 4 * (row * out_width + column), 0 if row else num_ahead
                    block(a, p_row, p_key, b, v_width, column, target, out_width, stop - first, factor, ahead, count)

    @inlined
    def product_of_rows(p, v, out, rows, keys, columns, p_row, p_key, v_width, out_width, factor, spans):
        product(p, v, out, rows, keys, columns, p_row, p_key, v_width, out_width, factor, spans, 0, 0)

    return product if listed else product_of_rows


def _products_of(add: Any, keys_per_place: int = 1) -> tuple[Any, Any]:
    """The function `product`, which overwrites its result, and `mix`, which adds to it."""
    product, added = (product_of(add, False, fresh, keys_per_place=keys_per_place) for fresh in (True, False))

    @inlined
    def mix(p, v, out, rows, keys, columns, p_row, p_key, v_width, out_width, spans):
        added(p, v, out, rows, keys, columns, p_row, p_key, v_width, out_width, np.float32(1), spans)

    return product, mix


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


_product_listed, _mix_listed = (product_of(add_product, True, fresh) for fresh in (True, False))


@inlined
def product_listed(p, rows_of_v, out, rows, keys, columns, p_row, out_width):
    """Set out[rows, columns] to p[rows, keys] @ v[keys, columns]; `rows_of_v` lists the addresses of the rows of v."""
    _product_listed(p, rows_of_v, out, rows, keys, columns, p_row, 1, 0, out_width, np.float32(1), 0, rows_of_v, 0)


@inlined
def mix_listed(p, rows_of_v, out, rows, keys, columns, p_row, out_width, ahead, num_ahead):
    """Add the product of `product_listed` to `out`; meanwhile prefetch the first `num_ahead` rows in `ahead`."""
    _mix_listed(p, rows_of_v, out, rows, keys, columns, p_row, 1, 0, out_width, np.float32(1), 0, ahead, num_ahead)


scores = scores_of_pairs = _scores_of(fma)
product, mix = product_of_pairs, mix_of_pairs = _products_of(add_product)
if PAIRS:
    scores_of_pairs = _scores_of(fma_pairs)
    product_of_pairs, mix_of_pairs = _products_of(add_products_of_pairs, keys_per_place=2)
