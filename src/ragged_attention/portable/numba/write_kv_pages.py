"""Writes this step's K and V into the pages in place on a CPU, and quantises them if the pages are quantised."""

from typing import Any

from ragged_attention.calls import WriteKvPages, dtype_name
from ragged_attention.calls.cache_formats import UNSCALED_FORMATS
from ragged_attention.portable.numba import _slots
from ragged_attention.portable.numba._call import cannot_run, numbers_of_pages, numbers_of_sides
from ragged_attention.portable.numba._formats import CODES, INT8, narrow, scale_of, size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._quantized_rows import LARGEST, quantize
from ragged_attention.portable.numba._records import Fields, record_in
from ragged_attention.portable.numba._scaled_rows import SIDE, side_fields
from ragged_attention.portable.numba._slots import list_slots, write_tokens
from ragged_attention.portable.numba._vectors import LANES, compiled

FIELDS = Fields(
    operands=("k", "v", "k_pages", "v_pages", *_slots.OPERANDS, "k_scale", "v_scale", "k_scales", "v_scales"),
    results=("new_k_pages", "new_v_pages", "new_k_scales", "new_v_scales"),
    numbers=(*_slots.NUMBERS, "num_kv_heads", "head_dim", "v_head_dim", "format", "v_offset", "k_largest", "v_largest",
             *side_fields("k_"), *side_fields("v_")),
    plan=_slots.PLAN,
    strides=_slots.STRIDES
    | dict.fromkeys(("k", "v"), "token head")
    | dict.fromkeys(("k_pages", "v_pages", "k_scales", "v_scales"), "page slot head"),
    scales=("k_scale", "v_scale"),
    floats=("k_largest", "v_largest"),
)  # fmt: skip
call_of = FIELDS.at
keys_of, values_of = record_in(SIDE, "k_"), record_in(SIDE, "v_")
FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale", "k_scale_pages",
    "v_scale_pages",
})  # fmt: skip
why_not = cannot_run


def plan(address):
    return list_slots(call_of(address))


@compiled
def store_row(call, code, source, target, count, scale, row):
    """Write a row of K or V, divided by its scale, to the address `target` as numbers of a format.

    `row` is memory for floats.
    """
    widen(call.format, source, row, count)
    narrow(code, row, target, count, scale)


@compiled
def store_scaled_row(call, side, source, target, scales, count, scale, largest, row):
    """`store_row` for a row of K or V, the `side`. If it has scales, they are written to the address `scales`."""
    if side.num_scales == 0:
        store_row(call, side.codes, source, target, count, scale, row)
        return
    widen(call.format, source, row, count)
    quantize(side, row, count, scale, largest, target, scales)


@compiled
def write(call, token, slot, row):
    """Write one token's K and V of all heads into its slot."""
    page, slot = slot // call.page_size, slot % call.page_size
    size, keys, values = size_of(call.format), keys_of(call), values_of(call)
    v_pages = call.new_v_pages if call.new_v_pages else call.new_k_pages
    for head in range(call.num_kv_heads):
        scale = scale_of(call.k_scale, call.k_scale_format, call.k_scale_stride, call.k_scale_number, head)
        source = call.k + size * (token * call.k_token_stride + head * call.k_head_stride)
        target = page * call.k_pages_page_stride + slot * call.k_pages_slot_stride + head * call.k_pages_head_stride
        scales = page * call.k_scales_page_stride + slot * call.k_scales_slot_stride + head * call.k_scales_head_stride
        target, scales = size_of(keys.codes) * target, size_of(keys.scale_codes) * scales
        store_scaled_row(call, keys, source, call.new_k_pages + target, call.new_k_scales + scales, call.head_dim,
                         scale, call.k_largest, row)  # fmt: skip
        scale = scale_of(call.v_scale, call.v_scale_format, call.v_scale_stride, call.v_scale_number, head)
        source = call.v + size * (token * call.v_token_stride + head * call.v_head_stride)
        target = page * call.v_pages_page_stride + slot * call.v_pages_slot_stride + head * call.v_pages_head_stride
        scales = page * call.v_scales_page_stride + slot * call.v_scales_slot_stride + head * call.v_scales_head_stride
        target, scales = size_of(values.codes) * (target + call.v_offset), size_of(values.scale_codes) * scales
        store_scaled_row(call, values, source, v_pages + target, call.new_v_scales + scales, call.v_head_dim, scale,
                         call.v_largest, row)  # fmt: skip


def work(address):
    call = call_of(address)
    return write_tokens(address, call, max(call.head_dim, call.v_head_dim) + LANES, write)


KERNEL = Kernel("write_kv_pages", FIELDS, plan, work)


def run(call: WriteKvPages, tile: Any, launch: Any) -> list[Any]:
    k_pages, v_pages = (call.kv_pages, None) if call.combined else call.kv_pages
    operands: dict[str, Any] = {"k_pages": k_pages, "v_pages": v_pages}
    operands |= {"k_scales": call.k_scale_pages, "v_scales": call.v_scale_pages}
    forms = call.k_format, call.v_format
    numbers: dict[str, Any] = {
        "format": CODES[dtype_name(call.k)], **_slots.numbers_of(call), **numbers_of_pages(call, launch),
        "k_largest": LARGEST.get(forms[0].codes, 0.0), "v_largest": LARGEST.get(forms[1].codes, 0.0),
    }  # fmt: skip
    if call.copies:  # treat elements as int8 without scales, whose bits survive the conversion to float32 and back
        operands |= {"k_scale": None, "v_scale": None}
        forms = (UNSCALED_FORMATS["int8"],) * 2
        numbers["format"] = INT8
    numbers |= numbers_of_sides(forms, call.scale_pages, launch)
    places = {"new_k_pages": "k_pages", "new_v_pages": None if call.combined else "v_pages"}
    for name, of in zip(("k_scales", "v_scales"), call.scale_pages, strict=True):
        places[f"new_{name}"] = None if of is None else name
    results = KERNEL.launch(launch, call, tile, operands, numbers, results=places)
    return [array for array in results.values() if array is not None]
