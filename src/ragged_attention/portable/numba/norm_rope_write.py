"""Normalises and rotates this step's queries and keys on a CPU, and writes keys and values into the pages in place.

A program has some of the tokens' queries, and the keys and values of the tokens for some pages, as `_slots` divides
them.
"""

from typing import Any

import numpy as np

from ragged_attention.calls import NormRopeWrite, dtype_name
from ragged_attention.portable.numba import _rotary, _slots, write_kv_pages
from ragged_attention.portable.numba._call import cannot_run, numbers_of_pages
from ragged_attention.portable.numba._formats import CODES, narrow, scale_of, size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._records import Fields, programs, up_to
from ragged_attention.portable.numba._rotary import normalize, read_angles, rotate
from ragged_attention.portable.numba._slots import list_slots
from ragged_attention.portable.numba._vectors import LANES, allocate, compiled, int_at
from ragged_attention.portable.numba.write_kv_pages import store_row

FIELDS = Fields(
    operands=("q", "k", "v", "k_pages", "v_pages", *_rotary.OPERANDS, "q_weight", "k_weight", *_slots.OPERANDS,
              "k_scale", "v_scale"),
    results=("new_q", "new_k_pages", "new_v_pages"),
    numbers=(*_slots.NUMBERS, *_rotary.NUMBERS, "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "format",
             "k_codes", "v_codes", "v_offset"),
    plan=_slots.PLAN,
    strides=_slots.STRIDES
    | _rotary.STRIDES
    | dict.fromkeys(("q", "k", "v"), "token head")
    | dict.fromkeys(("k_pages", "v_pages"), "page slot head"),
    formats=("cos", "sin", "q_weight", "k_weight"),
    scales=("k_scale", "v_scale"),
    floats=("eps",),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = write_kv_pages.FEATURES - {"k_scale_pages", "v_scale_pages"} | {"q_weight", "k_weight", "eps", "interleaved"}
why_not = cannot_run


def plan(address):
    return list_slots(call_of(address))


@compiled
def prepare(call, source, weight, cos, sin, row):
    """Read a head of a token, normalise it if it has weights, and rotate it."""
    widen(call.format, source, row, call.head_dim)
    if weight:
        normalize(row, weight, call.head_dim, call.eps)
    rotate(row, cos, sin, call.half, call.interleaved)


@compiled
def prepare_queries(call, token, weight, cos, sin, row):
    """Normalise and rotate one token's queries of all heads."""
    size = size_of(call.format)
    for head in range(call.num_q_heads):
        source = call.q + size * (token * call.q_token_stride + head * call.q_head_stride)
        prepare(call, source, weight, cos, sin, row)
        target = call.new_q + size * (token * call.num_q_heads + head) * call.head_dim
        narrow(call.format, row, target, call.head_dim, np.float32(1))


@compiled
def write(call, token, slot, weight, cos, sin, row, rounded):
    """Write one token's K and V of all heads into its slot; `rounded` is memory for a row of K's dtype."""
    page, slot = slot // call.page_size, slot % call.page_size
    size = size_of(call.format)
    v_pages = call.new_v_pages if call.new_v_pages else call.new_k_pages
    for head in range(call.num_kv_heads):
        source = call.k + size * (token * call.k_token_stride + head * call.k_head_stride)
        prepare(call, source, weight, cos, sin, row)
        narrow(call.format, row, rounded, call.head_dim, np.float32(1))
        target = page * call.k_pages_page_stride + slot * call.k_pages_slot_stride + head * call.k_pages_head_stride
        scale = scale_of(call.k_scale, call.k_scale_format, call.k_scale_stride, call.k_scale_number, head)
        target = call.new_k_pages + size_of(call.k_codes) * target
        store_row(call, call.k_codes, rounded, target, call.head_dim, scale, row)
        source = call.v + size * (token * call.v_token_stride + head * call.v_head_stride)
        target = page * call.v_pages_page_stride + slot * call.v_pages_slot_stride + head * call.v_pages_head_stride
        scale = scale_of(call.v_scale, call.v_scale_format, call.v_scale_stride, call.v_scale_number, head)
        target = v_pages + size_of(call.v_codes) * (target + call.v_offset)
        store_row(call, call.v_codes, source, target, call.v_head_dim, scale, row)


def work(address):
    """Run programs."""
    call = call_of(address)
    width = up_to(max(call.head_dim, call.v_head_dim), LANES) + LANES
    row = allocate(4 * 6 * width)
    rounded, cos, sin = row + 4 * width, row + 8 * width, row + 12 * width
    q_weight, k_weight = row + 16 * width, row + 20 * width
    if row:
        if call.q_weight:
            widen(call.q_weight_format, call.q_weight, q_weight, call.head_dim)
        if call.k_weight:
            widen(call.k_weight_format, call.k_weight, k_weight, call.head_dim)
    for index in programs(address, row):
        for token in range(call.num_tokens):
            slot = int_at(call.slots, token)
            writes = slot >= 0 and slot // call.page_size % call.num_programs == index
            queries = token % call.num_programs == index
            if writes or queries:
                read_angles(call, token, cos, sin)
            if queries:
                prepare_queries(call, token, q_weight if call.q_weight else 0, cos, sin, row)
            if writes:
                write(call, token, slot, k_weight if call.k_weight else 0, cos, sin, row, rounded)
    return 0


KERNEL = Kernel("norm_rope_write", FIELDS, plan, work)


def run(call: NormRopeWrite, tile: Any, launch: Any) -> list[Any]:
    k_pages, v_pages = (call.kv_pages, None) if call.combined else call.kv_pages
    operands = {"k_pages": k_pages, "v_pages": v_pages}
    numbers: dict[str, Any] = {
        "format": CODES[dtype_name(call.k)], "k_codes": CODES[call.k_format.codes],
        "v_codes": CODES[call.v_format.codes], **_slots.numbers_of(call),
        **_rotary.numbers_of(call), **numbers_of_pages(call, launch),
    }  # fmt: skip
    places = {"new_k_pages": "k_pages", "new_v_pages": None if call.combined else "v_pages"}
    results = KERNEL.launch(
        launch, call, tile, operands, numbers, results={"new_q": (call.q.shape, call.q.dtype), **places}
    )
    return [array for array in results.values() if array is not None]
