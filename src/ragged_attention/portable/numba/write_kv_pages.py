"""This step's K and V, written (and quantised) into the pages on a CPU, in place.

A program writes the tokens of some pages in their order, so the later one of two tokens for one slot wins.
"""

from typing import Any

from ragged_attention.calls import WriteKvPages, dtype_name
from ragged_attention.portable.numba import _slots
from ragged_attention.portable.numba._call import AXES, cannot_run, strides_of_pages, strides_of_rows
from ragged_attention.portable.numba._formats import CODES, narrow, size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._records import NO_MEMORY, Fields, programs
from ragged_attention.portable.numba._scales import fields_of, numbers_of, scale_of
from ragged_attention.portable.numba._slots import list_slots, tokens_of
from ragged_attention.portable.numba._vectors import LANES, allocate, compiled

FIELDS = Fields(
    operands=("k", "v", "k_pages", "v_pages", *_slots.OPERANDS, "k_scale", "v_scale"),
    results=("new_k_pages", "new_v_pages"),
    numbers=(
        *_slots.NUMBERS, "num_kv_heads", "head_dim", "v_head_dim", "format", "cache_format",
        "new_k_token_stride", "new_k_head_stride", "new_v_token_stride", "new_v_head_stride",
        *(f"{name}_{axis}_stride" for name in "kv" for axis in AXES), "v_offset",
        *fields_of("k_scale"), *fields_of("v_scale"), "num_threads",
    ),
    plan=_slots.PLAN,
    floats=("k_scale_number", "v_scale_number"),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale"})
why_not = cannot_run


def plan(address):
    """List the slot of each token."""
    call = call_of(address)
    return min(_slots.PROGRAMS, call.num_tokens) if list_slots(call) else NO_MEMORY


@compiled
def write(call, token, slot, row):
    """Write one token's K and V of all heads into its slot."""
    page, slot = slot // call.page_size, slot % call.page_size
    size, stored = size_of(call.format), size_of(call.cache_format)
    v_pages = call.new_v_pages if call.new_v_pages else call.new_k_pages
    for head in range(call.num_kv_heads):
        scale = scale_of(call.k_scale, call.k_scale_format, call.k_scale_stride, call.k_scale_number, head)
        source = call.k + size * (token * call.new_k_token_stride + head * call.new_k_head_stride)
        target = page * call.k_page_stride + slot * call.k_slot_stride + head * call.k_head_stride
        widen(call.format, source, row, call.head_dim)
        narrow(call.cache_format, row, call.new_k_pages + stored * target, call.head_dim, scale)
        scale = scale_of(call.v_scale, call.v_scale_format, call.v_scale_stride, call.v_scale_number, head)
        source = call.v + size * (token * call.new_v_token_stride + head * call.new_v_head_stride)
        target = page * call.v_page_stride + slot * call.v_slot_stride + head * call.v_head_stride + call.v_offset
        widen(call.format, source, row, call.v_head_dim)
        narrow(call.cache_format, row, v_pages + stored * target, call.v_head_dim, scale)


def work(address):
    """Run programs; each writes the tokens of some pages."""
    call = call_of(address)
    row = allocate(4 * (max(call.head_dim, call.v_head_dim) + LANES))
    for index in programs(address, row):
        for token, slot in tokens_of(call, index):
            write(call, token, slot, row)
    return 0


KERNEL = Kernel("write_kv_pages", FIELDS, plan, work)


def run(call: WriteKvPages, tile: Any, launch: Any) -> list[Any]:
    k, v = launch.packed(call.k), launch.packed(call.v)
    k_pages, v_pages = (call.kv_pages, None) if call.combined else call.kv_pages
    # Values that are copied pass through float32 as 8-bit integers, which keeps their bits.
    scales = (None, None) if call.copies else (call.k_scale, call.v_scale)
    format, cache_format = ("int8", "int8") if call.copies else (dtype_name(k), call.cache_dtype)
    k_scale, k_numbers = numbers_of("k_scale", scales[0], launch)
    v_scale, v_numbers = numbers_of("v_scale", scales[1], launch)
    places = _slots.operands_of(call, launch)
    results = KERNEL.launch(
        launch,
        tile,
        {
            "k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, **places, "k_scale": k_scale, "v_scale": v_scale,
        },
        {"new_k_pages": "k_pages", "new_v_pages": None if call.combined else "v_pages"},
        {
            **_slots.numbers_of(call, places, call.num_pages, launch), "num_kv_heads": call.num_kv_heads,
            "head_dim": call.head_dim, "v_head_dim": call.v_head_dim, "format": CODES[format],
            "cache_format": CODES[cache_format], **strides_of_rows("new_k", k, launch),
            **strides_of_rows("new_v", v, launch), **strides_of_pages(call, "PGKD", launch), **k_numbers, **v_numbers,
        },
    )  # fmt: skip
    return [results["new_k_pages"]] if call.combined else [results["new_k_pages"], results["new_v_pages"]]
