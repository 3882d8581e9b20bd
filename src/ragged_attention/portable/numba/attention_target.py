"""The target of an indexer on a CPU: attention probabilities summed over heads, then normalised for each token.

A program computes one token's row. It visits blocks of heads, and for each of them the token's keys, a tile at a time.
"""

import math
from typing import Any

from ragged_attention.calls import AttentionTarget
from ragged_attention.portable.numba._call import why_not as why_not
from ragged_attention.portable.numba._entries import begin_tile, entries_of, key_of, read_heads
from ragged_attention.portable.numba._formats import size_of
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent import length_of
from ragged_attention.portable.numba._latent_call import Blocks as Tile
from ragged_attention.portable.numba._products import COLUMNS, ROWS, scores
from ragged_attention.portable.numba._records import Fields, allocate_arena, on_stack, programs, record_at, up_to
from ragged_attention.portable.numba._softmax import LOG2E
from ragged_attention.portable.numba._tiles import read_rows
from ragged_attention.portable.numba._vectors import (
    LANES,
    compiled,
    exp2,
    fill,
    float_at,
    fma,
    int_at,
    load,
    set_float,
    set_int,
    splat,
    store,
)

FIELDS = Fields(
    operands=("q", "keys", "lse", "indices", "topk_lens", "starts", "stops"),
    results=("target",),
    numbers=(
        "num_tokens", "num_heads", "head_dim", "num_keys", "columns", "relative", "listed", "scale", "block_rows",
        "block_kv",
    ),
    strides={"q": "token head", "keys": "slot", "indices": "token"},
    formats=("q",),
    floats=("scale",),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({"indices", "sm_scale", "topk_lens", "starts", "stops", "relative", "max_keys"})
NUMBERS = ("rows", "keys", "width")
BUFFERS = ("q", "k", "k_rows", "s", "sums", "lse", "sources", "places")
tile_at = record_at((*NUMBERS, *BUFFERS))


def plan(address):
    """Count the programs: one for each token."""
    return call_of(address).num_tokens


@compiled
def new_tile(rows, keys, head_dim):
    """Allocate a tile for `rows` heads and `keys` keys; returns its address, 0 if there is no memory."""
    rows, keys, width = up_to(rows, ROWS), up_to(keys, LANES), up_to(head_dim, COLUMNS)
    q, k, addresses = 4 * rows * width, 4 * keys * width, 8 * keys
    sizes = (q, k, addresses, 4 * rows * keys, 4 * keys, 4 * rows, addresses, addresses)
    address = allocate_arena(len(NUMBERS), on_stack(sizes))
    if address == 0:
        return address
    begin_tile(tile_at(address), rows, keys, width)
    return address


@compiled
def list_keys(call, tile, token, start, entry, length):
    """Read the keys of a token's entries, from `entry` on, until the tile is full, and write their columns to `places`.

    Returns their number and the next entry.
    """
    count, size = 0, size_of(call.q_format)
    while entry < length and count < tile.keys:
        key = key_of(call, token, start, entry)
        if key >= 0:
            set_int(tile.sources, count, call.keys + size * key * call.keys_slot_stride)
            set_int(tile.places, count, entry if call.listed or call.relative else key)
            count += 1
        entry += 1
    read_rows(call.q_format, tile.sources, tile.k, tile.width, call.head_dim, count)
    return count, entry


@compiled
def read_queries(call, tile, token, first, last):
    """Read the queries and lse of the heads [first, last), padded with zeros; returns the padded number of rows."""
    rows = last - first
    whole = up_to(rows, ROWS)
    read_heads(call, tile, token, first, last, whole)
    for row in range(rows):
        set_float(tile.lse, row, float_at(call.lse, token * call.num_heads + first + row))
    fill(tile.lse, rows, whole, -math.inf)
    return whole


@compiled
def add_heads(call, tile, row, rows, count):
    """Add the probabilities of the tile's heads for `count` keys to their columns of a row of the target."""
    scores(tile.q, tile.k_rows, tile.s, rows, count, tile.width, tile.width, tile.keys, 1.0, 0, 0)
    factor = splat(call.scale * LOG2E)
    for key in range(0, count, LANES):
        sums = splat(0.0)
        for head in range(rows):
            lse = float_at(tile.lse, head)
            if abs(lse) != math.inf:  # a head without keys adds nothing
                sums = sums + exp2(fma(load(tile.s + 4 * head * tile.keys, key), factor, splat(-lse * LOG2E)))
        store(tile.sums, key, sums)
    for key in range(count):
        place = int_at(tile.places, key)
        set_float(row, place, float_at(row, place) + float_at(tile.sums, key))


@compiled
def write_row(call, tile, token):
    """Write one token's row of the target."""
    row, (start, length) = call.target + 4 * token * call.columns, entries_of(call, token)
    if call.listed:
        length = length_of(call.topk_lens, token, call.columns)
    fill(row, 0, call.columns, 0.0)
    for first in range(0, call.num_heads, call.block_rows):
        rows = read_queries(call, tile, token, first, min(first + call.block_rows, call.num_heads))
        entry = 0
        while entry < length:
            count, entry = list_keys(call, tile, token, start, entry, length)
            add_heads(call, tile, row, rows, count)
    total = 0.0
    for column in range(call.columns):
        total += float_at(row, column)
    for column in range(call.columns if total != 0 else 0):
        set_float(row, column, float_at(row, column) / total)


def work(address):
    """Run programs until none is left."""
    call = call_of(address)
    memory = new_tile(call.block_rows, call.block_kv, call.head_dim)
    for index in programs(address, memory):
        write_row(call, tile_at(memory), index)
    return 0


KERNEL = Kernel("attention_target", FIELDS, plan, work)


def heuristic(call: AttentionTarget) -> Tile:
    del call
    return Tile(block_rows=64, block_kv=64)


invariant_tile = heuristic  # a program's sums depend on its token alone


def run(call: AttentionTarget, tile: Tile, launch: Any) -> Any:
    return KERNEL.launch(launch, call, tile, {"keys": call.keys}, {"num_keys": call.keys.shape[0]})["target"]
