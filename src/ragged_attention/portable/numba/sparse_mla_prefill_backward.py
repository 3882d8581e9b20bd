"""The gradient of sparse MLA prefill on a CPU.

A single program computes each sum, in a fixed order. Besides the programs of the sinks, there are two kinds. A program
of the first kind takes a block of a query token's rows and sums their gradients over the token's list. A program of the
second kind, an *owner*, takes every n-th slot of the cache, if there are n owners, and sums the gradients of these
slots over all tokens that list them. Both kinds recompute the weights.
"""

from typing import Any

import numpy as np

from ragged_attention.calls import SparseMlaPrefillBackward
from ragged_attention.portable.numba._call import why_not as why_not
from ragged_attention.portable.numba._formats import narrow, size_of
from ragged_attention.portable.numba._gradients import differentiate_rows, new_tile, read_row, sink_gradient, tile_at
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent import length_of
from ragged_attention.portable.numba._latent_call import Blocks as Tile
from ragged_attention.portable.numba._products import ROWS, mix
from ragged_attention.portable.numba._records import NO_MEMORY, Fields, programs, up_to
from ragged_attention.portable.numba._tiles import read_rows
from ragged_attention.portable.numba._vectors import LANES, add_row, allocate, compiled, int32_at, int_at, set_int, zero

FIELDS = Fields(
    operands=("d_out", "q", "kv", "indices", "out", "lse", "d_lse", "sinks", "topk_lens"),
    results=("dq", "dkv", "d_sinks"),
    numbers=(
        "num_tokens", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "topk", "num_slots", "page_size",
        "scale", "block_rows", "block_kv",
    ),
    plan=("sums", "blocks", "owners"),
    strides={"q": "token head", "kv": "page slot head", "indices": "token head"},
    formats=("q",),
    floats=("scale",),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({"d_lse", "sm_scale", "d_v", "sinks", "topk_lens", "deterministic"})
MIN_OWNERS, MAX_OWNERS = 4, 32
KEYS_OF_AN_OWNER = 16  # average number of keys per list that an owner has


def plan(address):
    """Count the programs: per KV head the owners and the blocks of each token's rows, then one per sink."""
    call = call_of(address)
    group = call.num_q_heads // call.num_kv_heads
    call.blocks = (group + call.block_rows - 1) // call.block_rows
    call.owners = min(max(call.topk // KEYS_OF_AN_OWNER, MIN_OWNERS), MAX_OWNERS)
    call.workspace = allocate(4 * call.num_slots * call.num_kv_heads * up_to(call.head_dim, LANES) + 64)
    if call.workspace == 0:
        return NO_MEMORY
    call.sums = call.workspace
    per_head = call.num_tokens * call.blocks + call.owners
    return per_head * call.num_kv_heads + (call.num_q_heads if call.sinks else 0)


@compiled
def list_keys(call, tile, token, head, entry, length, owner, owners):
    """List the keys of a token's list, from `entry` on, whose slots belong to `owner`, until the tile is full.

    Writes their addresses to `sources` and their slots to `slots`. Returns their number and the next entry.
    """
    count, lists = 0, token * call.indices_token_stride + head * call.indices_head_stride
    while entry < length and count < tile.keys:
        slot = int32_at(call.indices, lists + entry)
        entry += 1
        if 0 <= slot < call.num_slots and slot % owners == owner:
            place = slot // call.page_size * call.kv_page_stride + slot % call.page_size * call.kv_slot_stride
            set_int(tile.sources, count, call.kv + size_of(call.q_format) * (place + head * call.kv_head_stride))
            set_int(tile.slots, count, slot)
            count += 1
    return count, entry


@compiled
def read_queries(call, tile, token, head, first, last):
    """Read the rows [first, last) of a KV head's group; rows that see any key see the whole tile."""
    group, rows = call.num_q_heads // call.num_kv_heads, last - first
    for row in range(rows):
        q_head = head * group + first + row
        source = call.q + size_of(call.q_format) * (token * call.q_token_stride + q_head * call.q_head_stride)
        sees = read_row(call, tile, row, token, q_head, source)
        set_int(tile.right, row, tile.keys if sees else 0)
    zero(tile.q + 4 * rows * tile.width, 4 * (tile.rows - rows) * tile.width)
    zero(tile.d_out + 4 * rows * tile.v_width, 4 * (tile.rows - rows) * tile.v_width)
    return rows


@compiled
def query_gradients(call, tile, token, head, block):
    """Write the gradients of a block of a token's rows."""
    group, entry, length = call.num_q_heads // call.num_kv_heads, 0, length_of(call.topk_lens, token, call.topk)
    first = block * call.block_rows
    rows = read_queries(call, tile, token, head, first, min(first + call.block_rows, group))
    zero(tile.dk, 4 * tile.rows * tile.width)  # here `dk` holds the gradients of queries
    while entry < length:
        count, entry = list_keys(call, tile, token, head, entry, length, 0, 1)
        read_rows(call.q_format, tile.sources, tile.k, tile.width, call.head_dim, count)
        differentiate_rows(call, tile, rows, 0, 0, count, np.float32(0))
        width = tile.width
        mix(tile.d_s, tile.k, tile.dk, up_to(rows, ROWS), count, width, tile.keys, 1, width, width, 0)
    for row in range(rows):
        place = (token * call.num_q_heads + head * group + first + row) * call.head_dim
        target = call.dq + size_of(call.q_format) * place
        narrow(call.q_format, tile.dk + 4 * row * tile.width, target, call.head_dim, 1.0)


@compiled
def add_rows(call, tile, head, count):
    """Add the gradients of the tile's keys to the sums of their slots."""
    width = up_to(call.head_dim, LANES)
    for key in range(count):
        row = call.sums + 4 * (int_at(tile.slots, key) * call.num_kv_heads + head) * width
        add_row(row, tile.dk + 4 * key * tile.width, width)


@compiled
def key_gradients(call, tile, head, owner):
    """Write the gradients of an owner's slots, summed over all tokens."""
    group, width = call.num_q_heads // call.num_kv_heads, up_to(call.head_dim, LANES)
    for slot in range(owner, call.num_slots, call.owners):
        zero(call.sums + 4 * (slot * call.num_kv_heads + head) * width, 4 * width)
    for token in range(call.num_tokens):
        entry, length = 0, length_of(call.topk_lens, token, call.topk)
        while entry < length:
            count, entry = list_keys(call, tile, token, head, entry, length, owner, call.owners)
            if count == 0:
                continue
            read_rows(call.q_format, tile.sources, tile.k, tile.width, call.head_dim, count)
            zero(tile.dk, 4 * tile.keys * tile.width)
            written = up_to(count, ROWS)
            for first in range(0, group, call.block_rows):
                rows = read_queries(call, tile, token, head, first, min(first + call.block_rows, group))
                differentiate_rows(call, tile, rows, 0, 0, count, np.float32(0))
                keys, v_width = tile.keys, tile.v_width
                mix(tile.d_s, tile.q, tile.dk, written, rows, tile.width, 1, keys, tile.width, tile.width, 0)
                mix(tile.s, tile.d_out, tile.dk, written, rows, v_width, 1, keys, v_width, tile.width, 0)
            add_rows(call, tile, head, count)
    for slot in range(owner, call.num_slots, call.owners):
        place = slot * call.num_kv_heads + head
        target = call.dkv + size_of(call.q_format) * place * call.head_dim
        narrow(call.q_format, call.sums + 4 * place * width, target, call.head_dim, 1.0)


@compiled
def program(call, tile, index):
    head, job = index % call.num_kv_heads, index // call.num_kv_heads
    if job < call.owners:  # these programs come first because they take the longest
        key_gradients(call, tile, head, job)
    elif job < call.owners + call.num_tokens * call.blocks:
        job -= call.owners
        query_gradients(call, tile, job // call.blocks, head, job % call.blocks)
    else:
        sink_gradient(call, tile, index - (call.owners + call.num_tokens * call.blocks) * call.num_kv_heads)


def work(address):
    """Run programs until none is left."""
    call = call_of(address)
    keys = max(call.block_kv, call.block_rows)
    memory = new_tile(call.block_rows, keys, call.head_dim, call.v_head_dim, True, 0, False, False)
    for index in programs(address, memory):
        program(call, tile_at(memory), index)
    return 0


KERNEL = Kernel("sparse_mla_prefill_backward", FIELDS, plan, work)


def heuristic(call: SparseMlaPrefillBackward) -> Tile:
    del call
    return Tile(block_rows=32, block_kv=32)


def run(call: SparseMlaPrefillBackward, tile: Tile, launch: Any) -> tuple[Any, ...]:
    axes = {"kv": "page slot head" if len(call.kv.shape) == 4 else "page head"}
    numbers = {"head_dim": call.d_qk, "v_head_dim": call.d_v}
    return tuple(KERNEL.launch(launch, call, tile, {}, numbers, axes=axes).values())
