"""What both gradients share: the memory of a program, a row's terms, the derivative of its softmax.

With weights p, the share r that a sink leaves to the keys, and delta = out . d_out, a logit's gradient is
p (r (d_out . v - delta) + d_lse), and a value's the sum of r p d_out.
"""

import math

import numpy as np

from ragged_attention.portable.numba._formats import size_of, widen
from ragged_attention.portable.numba._products import COLUMNS, ROWS
from ragged_attention.portable.numba._records import record_at
from ragged_attention.portable.numba._softmax import LOG2E, NOTHING, soft_capped
from ragged_attention.portable.numba._tiles import up_to
from ragged_attention.portable.numba._vectors import (
    LANES,
    allocate,
    compiled,
    exp2,
    fill,
    float_at,
    fma,
    load,
    set_float,
    set_int,
    splat,
    store,
    total,
    zero,
)

SIZES = ("rows", "keys", "width", "v_width")
ROW_TERMS = ("lse", "share", "delta", "d_lse")
ADDRESSES = ("q", "d_out", "k", "v", "k_rows", "v_rows", "s", "d_s", "dk", "dv", "out_row", "left", "right",
             "sources", "scales", *ROW_TERMS)  # fmt: skip
tile_at = record_at(np.dtype([(name, np.int64) for name in (*SIZES, *ADDRESSES)]))
HEADER = -(-8 * (len(SIZES) + len(ADDRESSES)) // 64) * 64  # bytes of the record


@compiled
def new_tile(rows, keys, width, v_width, latent):
    """The address of a new tile, all of whose numbers are 0; 0 if there is no memory.

    In a `latent` one the keys hold the values.
    Rows of queries, keys and values are widened to what a product takes together, with zeros behind their columns.
    """
    rows, keys = up_to(rows, ROWS), up_to(keys, LANES)
    width, v_width = up_to(width, COLUMNS), up_to(v_width, COLUMNS)
    floats = (rows + 2 * keys) * (width + v_width) + 2 * rows * keys + v_width + 4 * rows
    size = HEADER + 4 * floats + 8 * (2 * rows + 4 * keys) + 64 * len(ADDRESSES)
    address = allocate(size)
    if address == 0:
        return address
    zero(address, size)
    tile = tile_at(address)
    tile.rows, tile.keys, tile.width, tile.v_width = rows, keys, width, v_width
    end = address + HEADER
    tile.q, end = end, up_to(end + 4 * rows * width, 64)
    tile.d_out, end = end, up_to(end + 4 * rows * v_width, 64)
    tile.k, end = end, up_to(end + 4 * keys * width, 64)
    tile.v, end = end, up_to(end + 4 * keys * v_width, 64)
    tile.k_rows, end = end, up_to(end + 8 * keys, 64)
    tile.v_rows, end = end, up_to(end + 8 * keys, 64)
    tile.s, end = end, up_to(end + 4 * rows * keys, 64)
    tile.d_s, end = end, up_to(end + 4 * rows * keys, 64)
    tile.dk, end = end, up_to(end + 4 * keys * width, 64)
    tile.dv, end = end, up_to(end + 4 * keys * v_width, 64)
    tile.out_row, end = end, up_to(end + 4 * v_width, 64)
    tile.left, end = end, up_to(end + 8 * rows, 64)
    tile.right, end = end, up_to(end + 8 * rows, 64)
    tile.sources, end = end, up_to(end + 8 * keys, 64)
    tile.scales, end = end, up_to(end + 8 * keys, 64)
    tile.lse, tile.share, tile.delta, tile.d_lse = end, end + 4 * rows, end + 8 * rows, end + 12 * rows
    for key in range(keys):
        set_int(tile.k_rows, key, tile.k + 4 * key * width)
        set_int(tile.v_rows, key, (tile.k + 4 * key * width) if latent else (tile.v + 4 * key * v_width))
    return address


@compiled
def dot(a, b, count):
    """The inner product of two rows of whole vectors."""
    sums = splat(0.0)
    for index in range(0, count, LANES):
        sums = fma(load(a, index), load(b, index), sums)
    return total(sums)


@compiled
def share_of(lse, sinks, head):
    """What a head's sink leaves to the keys."""
    return np.float32(1 / (1 + math.exp(float_at(sinks, head) - lse))) if sinks else np.float32(1)


@compiled
def read_row(call, tile, row, token, head, source):
    """Read a query, what its result's gradient is, and its terms; `source` is the query's address.

    Returns False, and leaves zeros, if it has seen no key.
    """
    place, size, width = token * call.num_q_heads + head, size_of(call.format), call.v_head_dim
    q, d_out, lse = tile.q + 4 * row * tile.width, tile.d_out + 4 * row * tile.v_width, float_at(call.lse, place)
    if lse == NOTHING:
        zero(q, 4 * tile.width)
        zero(d_out, 4 * tile.v_width)
        return False
    widen(call.format, source, q, call.head_dim)
    widen(call.format, call.d_out + size * place * width, d_out, width)
    widen(call.format, call.out + size * place * width, tile.out_row, width)
    set_float(tile.lse, row, lse)
    set_float(tile.share, row, share_of(lse, call.sinks, head))
    set_float(tile.delta, row, dot(d_out, tile.out_row, up_to(width, LANES)))
    set_float(tile.d_lse, row, float_at(call.d_lse, place) if call.d_lse else np.float32(0))
    return True


@compiled
def differentiate(tile, row, left, right, count, scale, soft_cap):
    """Turn a row's products with keys and with values into weights and gradients, 0 outside [left, right)."""
    s, d_s, whole = tile.s + 4 * row * tile.keys, tile.d_s + 4 * row * tile.keys, up_to(count, LANES)
    if right <= left:
        fill(s, 0, whole, np.float32(0))
        fill(d_s, 0, whole, np.float32(0))
        return
    share, delta, d_lse = float_at(tile.share, row), float_at(tile.delta, row), float_at(tile.d_lse, row)
    lse = splat(float_at(tile.lse, row) * LOG2E)
    for index in range(0, whole, LANES):
        logits, slope = load(s, index) * splat(scale), splat(scale)
        if soft_cap > 0:
            logits = soft_capped(logits, splat(soft_cap))
            bent = logits / splat(soft_cap)
            slope = slope * (splat(1.0) - bent * bent)
        weights = exp2(logits * splat(LOG2E) - lse)
        gradients = fma(splat(share), load(d_s, index) - splat(delta), splat(d_lse))
        store(d_s, index, slope * weights * gradients)
        store(s, index, weights * splat(share))
    for products in (s, d_s):
        fill(products, 0, left, np.float32(0))
        fill(products, right, whole, np.float32(0))


@compiled
def sink_gradient(call, tile, head):
    """The gradient of a head's sink, over all queries that have seen a key."""
    gradient, size, width = 0.0, size_of(call.format), call.v_head_dim
    for token in range(call.num_tokens):
        place = token * call.num_q_heads + head
        lse = float_at(call.lse, place)
        if lse > NOTHING:
            widen(call.format, call.d_out + size * place * width, tile.d_out, width)
            widen(call.format, call.out + size * place * width, tile.out_row, width)
            delta = dot(tile.d_out, tile.out_row, up_to(width, LANES))
            gradient += (share_of(lse, call.sinks, head) - 1) * delta
    set_float(call.d_sinks, head, np.float32(gradient))
