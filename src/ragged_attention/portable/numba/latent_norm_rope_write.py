"""Normalises and rotates latent rows on a CPU, writes them into the cache in place, and rotates queries.

A program has some of the tokens' queries, and the rows of the tokens for some pages, as `_slots` divides them.
"""

from typing import Any

import numpy as np

from ragged_attention.calls import LatentNormRopeWrite
from ragged_attention.portable.numba import _rotary, _slots, write_mla_cache
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import narrow, size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import ROWS, place_of, rows_fields, rows_numbers
from ragged_attention.portable.numba._records import Fields, programs, record_in, up_to
from ragged_attention.portable.numba._rotary import normalize, read_angles, rotate
from ragged_attention.portable.numba._slots import list_slots
from ragged_attention.portable.numba._vectors import LANES, allocate, compiled, copy, int_at
from ragged_attention.portable.numba.write_mla_cache import store_row

FIELDS = Fields(
    operands=("q", "kv", "cache", *_rotary.OPERANDS, "kv_weight", *_slots.OPERANDS, "kv_scale", "rope_scale"),
    results=("new_q", "new_cache"),
    numbers=(*_slots.NUMBERS, *_rotary.NUMBERS, "num_q_heads", "num_kv_heads", "width", "rope_start",
             "normalized",
             "power_of_two_scales", *rows_fields("kv_")),
    plan=_slots.PLAN,
    strides=_slots.STRIDES | _rotary.STRIDES | dict.fromkeys(("q", "kv"), "token head"),
    formats=("kv", "cos", "sin", "kv_weight"),
    scales=("kv_scale", "rope_scale"),
    floats=("eps",),
)  # fmt: skip
call_of, cache_of = FIELDS.at, record_in(ROWS, "kv_")
FEATURES = write_mla_cache.FEATURES - {"d_v"} | {"kv_weight", "eps", "interleaved"}
why_not = cannot_run


def plan(address):
    return list_slots(call_of(address))


@compiled
def rotate_queries(call, token, cos, sin, row):
    """Rotate one token's queries of all heads."""
    size, columns = size_of(call.kv_format), 2 * call.half
    for head in range(call.num_q_heads):
        widen(call.kv_format, call.q + size * (token * call.q_token_stride + head * call.q_head_stride), row, columns)
        rotate(row, cos, sin, call.half, call.interleaved)
        target = call.new_q + size * (token * call.num_q_heads + head) * columns
        narrow(call.kv_format, row, target, columns, np.float32(1))


@compiled
def write(call, token, slot, weight, cos, sin, row, rounded):
    """Write one token's rows, one for each KV head, into its slot; `rounded` is memory for a row of kv's dtype."""
    cache, size = cache_of(call), size_of(call.kv_format)
    values, scales = place_of(cache, slot // call.page_size, slot % call.page_size)
    for head in range(call.num_kv_heads):
        source = call.kv + size * (token * call.kv_token_stride + head * call.kv_head_stride)
        widen(call.kv_format, source, row, call.width)
        if call.normalized:
            # `normalize` needs zeros after the last normalised column, so these columns are read once more, on their
            # own.
            widen(call.kv_format, source, rounded, call.normalized)
            normalize(rounded, weight, call.normalized, call.eps)
            copy(row, rounded, 4 * call.normalized)
        rotate(row + 4 * (call.width - 2 * call.half), cos, sin, call.half, call.interleaved)
        narrow(call.kv_format, row, rounded, call.width, np.float32(1))
        target = call.new_cache + values + head * cache.head_step
        store_row(call, cache, head, rounded, target, call.new_cache + scales, row)


def work(address):
    """Run programs."""
    call = call_of(address)
    width = up_to(call.width, LANES) + LANES
    row = allocate(4 * 5 * width)
    rounded, cos, sin, weight = row + 4 * width, row + 8 * width, row + 12 * width, row + 16 * width
    if row and call.normalized:
        widen(call.kv_weight_format, call.kv_weight, weight, call.normalized)
    for index in programs(address, row):
        for token in range(call.num_tokens):
            slot = int_at(call.slots, token)
            writes = slot >= 0 and slot // call.page_size % call.num_programs == index
            queries = token % call.num_programs == index
            if writes or queries:
                read_angles(call, token, cos, sin)
            if queries:
                rotate_queries(call, token, cos, sin, row)
            if writes:
                write(call, token, slot, weight, cos, sin, row, rounded)
    return 0


KERNEL = Kernel("latent_norm_rope_write", FIELDS, plan, work)


def run(call: LatentNormRopeWrite, tile: Any, launch: Any) -> Any:
    numbers = {
        **_slots.numbers_of(call), **_rotary.numbers_of(call),
        **rows_numbers("kv_", call.kv_format, call.cache.shape, launch.strides(call.cache)),
        "rope_start": call.rope_start,
    }  # fmt: skip
    results = {"new_q": (call.q.shape, call.q.dtype), "new_cache": "cache"}
    return list(KERNEL.launch(launch, call, tile, {"cache": call.cache}, numbers, results=results).values())
