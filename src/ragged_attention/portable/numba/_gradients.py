"""Code shared by `varlen_attention_backward` and `sparse_mla_prefill_backward`: tiles, and the softmax's derivative.

Let p be the softmax weights of a query over its keys alone, r the fraction of all weight that the sink leaves to the
keys (`share`), and delta = out . d_out. Then the gradient of a logit is p (r (d_out . v - delta) + d_lse), and the
gradient of a value is the sum of r p d_out over queries.
"""

import math

import numpy as np

from ragged_attention.portable.numba._formats import size_of, widen
from ragged_attention.portable.numba._products import COLUMNS, ROWS, scores, scores_of_pairs
from ragged_attention.portable.numba._records import allocate_arena, list_rows, on_stack, record_at, up_to
from ragged_attention.portable.numba._sequences import within
from ragged_attention.portable.numba._softmax import LOG2E, NOTHING, sloped, soft_capped
from ragged_attention.portable.numba._vectors import (
    LANES,
    compiled,
    copy,
    exp2,
    fill,
    float_at,
    fma,
    inlined,
    int_at,
    load,
    set_float,
    splat,
    store,
    total,
    zero,
)

NUMBERS = ("rows", "keys", "width", "v_width", "bias_width", "bias_at_own", "sums", "sums_stride", "max_gaps",
           "paired")  # fmt: skip
BUFFERS = ("q", "d_out", "q_pairs", "d_out_pairs", "k", "v", "k_rows", "v_rows", "s", "d_s", "dk", "dv", "out_row",
         "left", "right", "sources", "slots", "lse", "share", "delta", "d_lse", "slopes", "positions",
         "tables", "d_tables", "bias", "num_gaps", "gaps",
         "own_positions", "own_k", "own_v", "own_dk", "own_dv", "dq")  # fmt: skip
tile_at = record_at((*NUMBERS, *BUFFERS))


@compiled
def new_tile(rows, keys, width, v_width, latent, max_gaps, listed, paired):
    """Allocate a tile of zeros; returns its address, 0 if there is no memory.

    In a `latent` tile a value is the beginning of its key's row. A `paired` tile also holds the queries and the
    gradients of their results as bfloat16, in which they are multiplied with keys and values. `max_gaps` is the largest
    number of gaps between the keys that a row sees. Rows are padded with zeros to the width that the products need. If
    `listed`, the tile also holds a list of keys, and `dk` and `dv` have one more row, which nothing reads.
    """
    rows, keys = up_to(rows, ROWS), up_to(keys, LANES)
    width, v_width = up_to(width, COLUMNS), up_to(v_width, COLUMNS)
    q, d_out, k, v = 4 * rows * width, 4 * rows * v_width, 4 * keys * width, 4 * keys * v_width
    logits, addresses, floats = 4 * rows * keys, 8 * keys, 4 * rows
    dk, dv = k + (4 * width if listed else 0), v + (4 * v_width if listed else 0)
    own = (addresses, addresses, addresses, addresses, addresses, q) if listed else (0, 0, 0, 0, 0, 0)
    pairs = (q // 2, d_out // 2) if paired else (0, 0)
    sizes = (
        q, d_out, *pairs, k, v, addresses, addresses, logits, logits, dk, dv, 4 * v_width, 2 * floats, 2 * floats,
        addresses, addresses, floats, floats, floats, floats, floats, 2 * floats,
        2 * floats, 2 * floats, 4 * keys, 2 * floats, 16 * max_gaps * rows, *own,
    )  # fmt: skip
    address = allocate_arena(len(NUMBERS), on_stack(sizes))
    if address == 0:
        return address
    tile = tile_at(address)
    zero(tile.q, tile.gaps - tile.q)
    tile.paired = paired
    tile.bias_width = tile.bias_at_own = tile.sums = tile.sums_stride = 0
    tile.rows, tile.keys, tile.width, tile.v_width, tile.max_gaps = rows, keys, width, v_width, max_gaps
    list_rows(tile.k_rows, keys, tile.k, 4 * width)
    list_rows(tile.v_rows, keys, tile.k if latent else tile.v, 4 * (width if latent else v_width))
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
    """The fraction of all weight that a head's sink leaves to the keys; 1 without sinks."""
    return np.float32(1 / (1 + math.exp(float_at(sinks, head) - lse))) if sinks else np.float32(1)


@compiled
def read_row(call, tile, row, token, head, source):
    """Read the query at the address `source` and the gradient of its result, and compute the scalars of its row.

    If the query sees no key, its row and the row of its gradient become 0, and False is returned.
    """
    place, size, width = token * call.num_q_heads + head, size_of(call.q_format), call.v_head_dim
    q, d_out, lse = tile.q + 4 * row * tile.width, tile.d_out + 4 * row * tile.v_width, float_at(call.lse, place)
    if lse == NOTHING:
        zero(q, 4 * tile.width)
        zero(d_out, 4 * tile.v_width)
        if tile.paired:
            zero(tile.q_pairs + 2 * row * tile.width, 2 * tile.width)
            zero(tile.d_out_pairs + 2 * row * tile.v_width, 2 * tile.v_width)
        return False
    if tile.paired:
        copy(tile.q_pairs + 2 * row * tile.width, source, size * call.head_dim)
        copy(tile.d_out_pairs + 2 * row * tile.v_width, call.d_out + size * place * width, size * width)
    widen(call.q_format, source, q, call.head_dim)
    widen(call.q_format, call.d_out + size * place * width, d_out, width)
    widen(call.q_format, call.out + size * place * width, tile.out_row, width)
    set_float(tile.lse, row, lse)
    set_float(tile.share, row, share_of(lse, call.sinks, head))
    set_float(tile.delta, row, dot(d_out, tile.out_row, up_to(width, LANES)))
    set_float(tile.d_lse, row, float_at(call.d_lse, place) if call.d_lse else np.float32(0))
    return True


@inlined
def gap_at(tile, row, index):
    """The positions (first, one past the last) of a gap in the keys that a row sees."""
    place = 2 * (row * tile.max_gaps + index)
    return int_at(tile.gaps, place), int_at(tile.gaps, place + 1)


@inlined
def derive(tile, row, count, scale, soft_cap, alibi, distance, biased):
    """Replace the first `count` of a row's products in `s` and `d_s` by weights and gradients, see `differentiate`.

    If `biased`, the tile's `bias` is added to the logits. If the row has a table for the gradients of its biases,
    `bias` is then replaced by the gradients of the logits.
    """
    s, d_s, d_table = tile.s + 4 * row * tile.keys, tile.d_s + 4 * row * tile.keys, int_at(tile.d_tables, row)
    share, delta, d_lse = float_at(tile.share, row), float_at(tile.delta, row), float_at(tile.d_lse, row)
    lse = splat(float_at(tile.lse, row) * LOG2E)
    for index in range(0, count, LANES):
        logits, slope = load(s, index) * splat(scale), splat(scale)
        if soft_cap > 0:
            logits = soft_capped(logits, splat(soft_cap))
            tanh = logits / splat(soft_cap)
            slope = slope * (splat(1.0) - tanh * tanh)
        if alibi != 0:
            logits = sloped(logits, alibi, distance + index)
        if biased:
            logits = logits + load(tile.bias, index)
        weights = exp2(logits * splat(LOG2E) - lse)
        gradients = fma(splat(share), load(d_s, index) - splat(delta), splat(d_lse))
        if d_table:
            store(tile.bias, index, weights * gradients)
        store(d_s, index, slope * weights * gradients)
        store(s, index, weights * splat(share))


@compiled
def differentiate(tile, row, first, left, right, count, scale, soft_cap):
    """Replace a row's products q . k in `s` by weights r p, and d_out . v in `d_s` by the gradients of q . k.

    The weights and gradients are 0 for keys outside [left, right) and in the row's gaps. The first key is at position
    `first`. If the gradient of the relative bias is a result, the gradients of the logits are added to the row's table.
    """
    s, d_s, whole = tile.s + 4 * row * tile.keys, tile.d_s + 4 * row * tile.keys, up_to(count, LANES)
    if right <= left:
        fill(s, 0, whole, np.float32(0))
        fill(d_s, 0, whole, np.float32(0))
        return
    alibi, distance, table = float_at(tile.slopes, row), first - int_at(tile.positions, row), int_at(tile.tables, row)
    d_table = int_at(tile.d_tables, row)
    for key in range(count if table else 0):
        column = min(max(tile.bias_at_own - distance - key, 0), tile.bias_width - 1)
        set_float(tile.bias, key, float_at(table, column))
    derive(tile, row, whole, scale, soft_cap, alibi, distance, table)
    for gap in range(int_at(tile.num_gaps, row)):
        begin, end = gap_at(tile, row, gap)
        begin, end = within(begin - first, count), within(end - first, count)
        for products in (s, d_s, tile.bias):
            fill(products, begin, end, np.float32(0))
    for key in range(left, right if d_table else left):
        column = min(max(tile.bias_at_own - distance - key, 0), tile.bias_width - 1)
        set_float(d_table, column, float_at(d_table, column) + float_at(tile.bias, key))
    for products in (s, d_s):
        fill(products, 0, left, np.float32(0))
        fill(products, right, whole, np.float32(0))


@compiled
def differentiate_own(tile, row, count, scale, soft_cap):
    """`differentiate` for a list of `count` keys, if the row sees all of them."""
    s, d_s, whole = tile.s + 4 * row * tile.keys, tile.d_s + 4 * row * tile.keys, up_to(count, LANES)
    alibi, table, d_table = float_at(tile.slopes, row), int_at(tile.tables, row), int_at(tile.d_tables, row)
    biased = table != 0 or alibi != 0
    for key in range(count if biased else 0):
        distance = int_at(tile.own_positions, key) - int_at(tile.positions, row)
        bias = alibi * np.float32(distance)
        if table:
            bias += float_at(table, within(tile.bias_at_own - distance, tile.bias_width - 1))
        set_float(tile.bias, key, bias)
    derive(tile, row, whole, scale, soft_cap, np.float32(0), 0, biased)
    for key in range(count if d_table else 0):
        distance = int_at(tile.own_positions, key) - int_at(tile.positions, row)
        column = within(tile.bias_at_own - distance, tile.bias_width - 1)
        set_float(d_table, column, float_at(d_table, column) + float_at(tile.bias, key))
    for products in (s, d_s):
        fill(products, count, whole, np.float32(0))


@inlined
def differentiate_rows(call, tile, rows, first, offset, count, soft_cap):
    """Compute the weights `s` and the gradients `d_s` of q . k for the tile's rows and `count` of its keys.

    The first of these keys is key `offset` of the tile, at position `first`.
    """
    whole, values = up_to(rows, ROWS), up_to(call.v_head_dim, LANES)
    k, v = tile.k_rows + 8 * offset, tile.v_rows + 8 * offset
    if tile.paired:
        width, v_width = tile.width // 2, tile.v_width // 2
        scores_of_pairs(tile.q_pairs, k, tile.s, whole, count, width, width, tile.keys, 1.0, 0, 0)
        scores_of_pairs(tile.d_out_pairs, v, tile.d_s, whole, count, v_width, v_width, tile.keys, 1.0, 0, 0)
    else:
        scores(tile.q, k, tile.s, whole, count, tile.width, tile.width, tile.keys, 1.0, 0, 0)
        scores(tile.d_out, v, tile.d_s, whole, count, values, tile.v_width, tile.keys, 1.0, 0, 0)
    for row in range(whole):
        left = within(int_at(tile.left, row) - first, count) if row < rows else 0
        right = within(int_at(tile.right, row) - first, count) if row < rows else 0
        differentiate(tile, row, first, left, right, count, call.scale, soft_cap)


@compiled
def sink_gradient(call, tile, head):
    """Write the gradient of a head's sink, summed over all queries that see a key."""
    gradient, size, width = 0.0, size_of(call.q_format), call.v_head_dim
    for token in range(call.num_tokens):
        place = token * call.num_q_heads + head
        lse = float_at(call.lse, place)
        if lse > NOTHING:
            widen(call.q_format, call.d_out + size * place * width, tile.d_out, width)
            widen(call.q_format, call.out + size * place * width, tile.out_row, width)
            delta = dot(tile.d_out, tile.out_row, up_to(width, LANES))
            gradient += (share_of(lse, call.sinks, head) - 1) * delta
    set_float(call.d_sinks, head, np.float32(gradient))
