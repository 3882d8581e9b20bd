"""Writes this step's K and V into the pages in place on a CPU, and quantises them if the pages are quantised."""

from typing import Any

from ragged_attention.calls import WriteKvPages, dtype_name
from ragged_attention.portable.numba import _slots
from ragged_attention.portable.numba._call import cannot_run, numbers_of_pages
from ragged_attention.portable.numba._formats import CODES, INT8, narrow, scale_of, size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._records import Fields
from ragged_attention.portable.numba._slots import list_slots, write_tokens
from ragged_attention.portable.numba._vectors import LANES, compiled

FIELDS = Fields(
    operands=("k", "v", "k_pages", "v_pages", *_slots.OPERANDS, "k_scale", "v_scale"),
    results=("new_k_pages", "new_v_pages"),
    numbers=(*_slots.NUMBERS, "num_kv_heads", "head_dim", "v_head_dim", "format", "cache_format", "v_offset"),
    plan=_slots.PLAN,
    strides=_slots.STRIDES
    | dict.fromkeys(("k", "v"), "token head")
    | dict.fromkeys(("k_pages", "v_pages"), "page slot head"),
    scales=("k_scale", "v_scale"),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale"})
why_not = cannot_run


def plan(address):
    return list_slots(call_of(address))


@compiled
def store_row(call, source, pages, target, count, scale, row):
    """Write a row of K or V, divided by its scale, to element `target` of the pages; `row` is memory for floats."""
    widen(call.format, source, row, count)
    narrow(call.cache_format, row, pages + size_of(call.cache_format) * target, count, scale)


@compiled
def write(call, token, slot, row):
    """Write one token's K and V of all heads into its slot."""
    page, slot = slot // call.page_size, slot % call.page_size
    size = size_of(call.format)
    v_pages = call.new_v_pages if call.new_v_pages else call.new_k_pages
    for head in range(call.num_kv_heads):
        scale = scale_of(call.k_scale, call.k_scale_format, call.k_scale_stride, call.k_scale_number, head)
        source = call.k + size * (token * call.k_token_stride + head * call.k_head_stride)
        target = page * call.k_pages_page_stride + slot * call.k_pages_slot_stride + head * call.k_pages_head_stride
        store_row(call, source, call.new_k_pages, target, call.head_dim, scale, row)
        scale = scale_of(call.v_scale, call.v_scale_format, call.v_scale_stride, call.v_scale_number, head)
        source = call.v + size * (token * call.v_token_stride + head * call.v_head_stride)
        target = page * call.v_pages_page_stride + slot * call.v_pages_slot_stride + head * call.v_pages_head_stride
        store_row(call, source, v_pages, target + call.v_offset, call.v_head_dim, scale, row)


def work(address):
    call = call_of(address)
    return write_tokens(address, call, max(call.head_dim, call.v_head_dim) + LANES, write)


KERNEL = Kernel("write_kv_pages", FIELDS, plan, work)


def run(call: WriteKvPages, tile: Any, launch: Any) -> list[Any]:
    k_pages, v_pages = (call.kv_pages, None) if call.combined else call.kv_pages
    operands: dict[str, Any] = {"k_pages": k_pages, "v_pages": v_pages}
    numbers: dict[str, Any] = {
        "format": CODES[dtype_name(call.k)], "cache_format": CODES[call.cache_dtype], **_slots.numbers_of(call),
        **numbers_of_pages(call, launch),
    }  # fmt: skip
    if call.copies:  # treat elements as int8 without scales, whose bits survive the conversion to float32 and back
        operands |= {"k_scale": None, "v_scale": None}
        numbers |= {"format": INT8, "cache_format": INT8}
    places = {"new_k_pages": "k_pages", "new_v_pages": None if call.combined else "v_pages"}
    results = KERNEL.launch(launch, call, tile, operands, numbers, results=places)
    return [array for array in results.values() if array is not None]
