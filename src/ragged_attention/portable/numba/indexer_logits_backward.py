"""The gradient of the lightning indexer's logits on a CPU.

A single program computes each sum, in a fixed order. There are two kinds of programs. A program of the first kind takes
a token and sums the gradients of its queries and weights over the keys that it sees. A program of the second kind, an
*owner*, takes every n-th run of RUN keys, if there are n owners, and sums the gradients of these keys over all tokens
that see them. Both kinds recompute the products.
"""

from typing import Any

import numpy as np

from ragged_attention.calls import IndexerLogitsBackward
from ragged_attention.portable.numba._call import why_not as why_not
from ragged_attention.portable.numba._entries import begin_tile, entries_of, key_of, read_heads
from ragged_attention.portable.numba._formats import narrow, size_of
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_call import Blocks as Tile
from ragged_attention.portable.numba._products import COLUMNS, ROWS, mix, scores
from ragged_attention.portable.numba._records import (
    NO_MEMORY,
    Fields,
    allocate_arena,
    on_stack,
    programs,
    record_at,
    up_to,
)
from ragged_attention.portable.numba._tiles import read_rows
from ragged_attention.portable.numba._vectors import (
    LANES,
    add_row,
    allocate,
    compiled,
    fill,
    float_at,
    fma,
    inlined,
    int_at,
    load,
    set_float,
    set_int,
    splat,
    store,
    total,
    where_less,
    zero,
)

FIELDS = Fields(
    operands=("d_logits", "q", "keys", "weights", "key_scale", "starts", "stops", "indices"),
    results=("d_q", "d_keys", "d_weights"),
    numbers=(
        "num_tokens", "num_heads", "head_dim", "num_keys", "columns", "relative", "listed", "block_rows", "block_kv",
    ),
    plan=("sums", "owners"),
    strides={
        "d_logits": "token", "q": "token head", "weights": "token", "keys": "slot", "key_scale": "slot",
        "indices": "token",
    },
    formats=("q",),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({"key_scale", "starts", "stops", "relative", "max_keys", "indices"})
RUN = 16  # neighbouring keys with one owner
MAX_OWNERS = 32
NUMBERS = ("rows", "keys", "width")
BUFFERS = ("q", "k", "k_rows", "s", "towards", "d_q", "d_k", "d_w", "weights", "sources", "places")
tile_at = record_at((*NUMBERS, *BUFFERS))


def plan(address):
    """Count the programs: the owners, and one for each token."""
    call = call_of(address)
    call.owners = min((call.num_keys + RUN - 1) // RUN, MAX_OWNERS)
    call.workspace = allocate(4 * call.num_keys * up_to(call.head_dim, LANES) + 64)
    if call.workspace == 0:
        return NO_MEMORY
    call.sums = call.workspace
    return call.owners + call.num_tokens


@compiled
def new_tile(rows, keys, head_dim):
    """Allocate a tile of zeros for `rows` heads and `keys` keys; returns its address, 0 if there is no memory."""
    rows, keys, width = up_to(rows, ROWS), up_to(keys, LANES), up_to(head_dim, COLUMNS)
    q, k = 4 * rows * width, 4 * keys * width
    sizes = (q, k, 8 * keys, 4 * rows * keys, 4 * keys, q, k, 4 * rows, 4 * rows, 8 * keys, 8 * keys)
    address = allocate_arena(len(NUMBERS), on_stack(sizes))
    if address == 0:
        return address
    begin_tile(tile_at(address), rows, keys, width)
    return address


@compiled
def list_keys(call, tile, token, entry, owner, owners):
    """List the keys of a token's entries, from `entry` on, that belong to `owner`, until the tile is full.

    Writes their addresses to `sources`, their indices to `places` and the gradients of their sums over heads to
    `towards`. Returns their number and the next entry.
    """
    count, (start, length) = 0, entries_of(call, token)
    row, size = call.d_logits + 4 * token * call.d_logits_token_stride, size_of(call.q_format)
    while entry < length and count < tile.keys:
        key, this_entry = key_of(call, token, start, entry), entry
        entry += 1
        if key < 0:
            continue
        if key // RUN % owners != owner:
            if not call.listed:
                entry += RUN - 1 - key % RUN  # skip the rest of the run
            continue
        column = this_entry if call.listed or call.relative else key
        scale = float_at(call.key_scale, key * call.key_scale_slot_stride) if call.key_scale else np.float32(1)
        set_int(tile.sources, count, call.keys + size * key * call.keys_slot_stride)
        set_int(tile.places, count, key)
        set_float(tile.towards, count, float_at(row, column) * scale)
        count += 1
    if count:
        read_rows(call.q_format, tile.sources, tile.k, tile.width, call.head_dim, count)
        fill(tile.towards, count, up_to(count, LANES), np.float32(0))
    return count, entry


@compiled
def read_queries(call, tile, token, first, last):
    """Read the queries and weights of the heads [first, last), padded with zeros; returns the padded number of rows."""
    rows = last - first
    whole = up_to(rows, ROWS)
    read_heads(call, tile, token, first, last, whole)
    for row in range(rows):
        set_float(tile.weights, row, float_at(call.weights, token * call.weights_token_stride + first + row))
    fill(tile.weights, rows, whole, np.float32(0))
    return whole


@compiled
def differentiate(tile, rows, count):
    """Write the gradients of the products of `rows` queries and `count` keys to `s`; add those of weights to `d_w`."""
    scores(tile.q, tile.k_rows, tile.s, rows, count, tile.width, tile.width, tile.keys, np.float32(1), 0, 0)
    none = splat(0.0)
    for row in range(rows):
        s, sums, weight = tile.s + 4 * row * tile.keys, none, splat(float_at(tile.weights, row))
        fill(s, count, up_to(count, LANES), np.float32(0))  # products beyond the last key are arbitrary
        for key in range(0, count, LANES):
            products, towards = load(s, key), load(tile.towards, key)
            sums = fma(where_less(none, products, products, none), towards, sums)
            store(s, key, where_less(none, products, weight * towards, none))
        set_float(tile.d_w, row, float_at(tile.d_w, row) + total(sums))


@compiled
def query_gradients(call, tile, token):
    """Write the gradients of a token's queries and weights."""
    for first in range(0, call.num_heads, call.block_rows):
        last = min(first + call.block_rows, call.num_heads)
        rows, entry, length = read_queries(call, tile, token, first, last), 0, entries_of(call, token)[1]
        zero(tile.d_q, 4 * rows * tile.width)
        zero(tile.d_w, 4 * rows)
        while entry < length:
            count, entry = list_keys(call, tile, token, entry, 0, 1)
            if count:
                differentiate(tile, rows, count)
                mix(tile.s, tile.k, tile.d_q, rows, count, tile.width, tile.keys, 1, tile.width, tile.width, 0)
        for row in range(last - first):
            place = token * call.num_heads + first + row
            target = call.d_q + size_of(call.q_format) * place * call.head_dim
            narrow(call.q_format, tile.d_q + 4 * row * tile.width, target, call.head_dim, 1.0)
            set_float(call.d_weights, place, float_at(tile.d_w, row))


@inlined
def owned_keys(call, owner):
    """Yield the keys of an owner."""
    for first in range(owner * RUN, call.num_keys, call.owners * RUN):
        for key in range(first, min(first + RUN, call.num_keys)):  # noqa: UP028, Numba has no "yield from"
            yield key


@compiled
def key_gradients(call, tile, owner):
    """Write the gradients of an owner's keys, summed over all tokens."""
    width = up_to(call.head_dim, LANES)
    for key in owned_keys(call, owner):
        zero(call.sums + 4 * key * width, 4 * width)
    for token in range(call.num_tokens):
        entry, length = 0, entries_of(call, token)[1]
        while entry < length:
            count, entry = list_keys(call, tile, token, entry, owner, call.owners)
            if count == 0:
                continue
            zero(tile.d_k, 4 * tile.keys * tile.width)
            for first in range(0, call.num_heads, call.block_rows):
                rows = read_queries(call, tile, token, first, min(first + call.block_rows, call.num_heads))
                differentiate(tile, rows, count)
                written, columns = up_to(count, ROWS), tile.width
                mix(tile.s, tile.q, tile.d_k, written, rows, columns, 1, tile.keys, columns, columns, 0)
            for key in range(count):
                add_row(call.sums + 4 * int_at(tile.places, key) * width, tile.d_k + 4 * key * tile.width, width)
    for key in owned_keys(call, owner):
        target = call.d_keys + size_of(call.q_format) * key * call.head_dim
        narrow(call.q_format, call.sums + 4 * key * width, target, call.head_dim, 1.0)


def work(address):
    """Run programs until none is left."""
    call = call_of(address)
    memory = new_tile(call.block_rows, call.block_kv, call.head_dim)
    for index in programs(address, memory):
        if index < call.owners:  # these programs come first because they take the longest
            key_gradients(call, tile_at(memory), index)
        else:
            query_gradients(call, tile_at(memory), index - call.owners)
    return 0


KERNEL = Kernel("indexer_logits_backward", FIELDS, plan, work)


def heuristic(call: IndexerLogitsBackward) -> Tile:
    del call
    return Tile(block_rows=64, block_kv=32)


def run(call: IndexerLogitsBackward, tile: Tile, launch: Any) -> tuple[Any, ...]:
    operands = {"keys": call.keys, "key_scale": call.key_scale}
    return tuple(KERNEL.launch(launch, call, tile, operands, {"num_keys": call.keys.shape[0]}).values())
