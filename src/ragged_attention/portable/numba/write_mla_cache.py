"""This step's latent rows, written (and quantised) into the pages of the cache on a CPU, in place.

A program writes the tokens of some pages, in their order, so that of two tokens for one slot the later one wins.
"""

from typing import Any

from ragged_attention.calls import WriteMlaCache, dtype_name
from ragged_attention.portable._no_tuning import Tile as Tile
from ragged_attention.portable._no_tuning import heuristic as heuristic
from ragged_attention.portable.numba import _slots
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import CODES, narrow, size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import PLAIN, code_of, place_of, store_latent
from ragged_attention.portable.numba._records import NO_MEMORY, Fields, programs
from ragged_attention.portable.numba._scales import fields_of, numbers_of, scale_of
from ragged_attention.portable.numba._slots import list_slots, tokens_of
from ragged_attention.portable.numba._vectors import LANES, allocate, compiled, copy, release

FIELDS = Fields(
    operands=("kv", "cache", *_slots.OPERANDS, "kv_scale"),
    results=("new_cache",),
    numbers=(*_slots.NUMBERS, "num_kv_heads", "width", "format", "cache_format", "token_stride", "kv_head_stride",
             "page_stride", "slot_stride", "head_stride", "layout", "power_of_two", *fields_of("kv_scale"),
             "num_threads"),
    plan=_slots.PLAN,
    floats=("kv_scale_number",),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "kv_scale", "power_of_two_scales",
    "cache_format", "cache_layout",
})  # fmt: skip


def why_not(call: WriteMlaCache) -> str | None:
    return cannot_run(call)


def plan(address):
    """Find the slot of each token."""
    call = call_of(address)
    return min(_slots.PROGRAMS, call.num_tokens) if list_slots(call) else NO_MEMORY


@compiled
def write(call, token, slot, row):
    """One token's row, or rows of all KV heads, into its slot."""
    page, slot = slot // call.page_size, slot % call.page_size
    size, stored = size_of(call.format), size_of(call.cache_format)
    for head in range(call.num_kv_heads):
        kv_scale = scale_of(call.kv_scale, call.kv_scale_format, call.kv_scale_stride, call.kv_scale_number, head)
        source = call.kv + size * (token * call.token_stride + head * call.kv_head_stride)
        if call.layout == PLAIN:
            target = page * call.page_stride + slot * call.slot_stride + head * call.head_stride
            if kv_scale == 1 and call.cache_format == call.format:
                copy(call.new_cache + size * target, source, size * call.width)
            else:
                widen(call.format, source, row, call.width)
                narrow(call.cache_format, row, call.new_cache + stored * target, call.width, kv_scale)
        else:
            values, scales = place_of(call.layout, 1, page, slot, call.page_stride, call.slot_stride, call.page_size)
            widen(call.format, source, row, call.width)
            store_latent(call.layout, row, call.new_cache + values, call.new_cache + scales, call.power_of_two)


def work(address):
    """Programs, each of the tokens of some pages."""
    call = call_of(address)
    row = allocate(4 * (call.width + LANES))
    if row == 0:
        return NO_MEMORY
    for index in programs(address, call.num_programs):
        for token, slot in tokens_of(call, index):
            write(call, token, slot, row)
    release(row)
    return 0


KERNEL = Kernel("write_mla_cache", FIELDS, plan, work)


def run(call: WriteMlaCache, tile: Tile, launch: Any) -> Any:
    del tile
    kv, places = launch.packed(call.kv), _slots.operands_of(call, launch)
    _, num_kv_heads, width = kv.shape
    token_stride, kv_head_stride = launch.strides(kv)[:2]
    page_stride, slot_stride, head_stride = launch.strides(call.cache)[:3]
    kv_scale, scale_numbers = numbers_of("kv_scale", call.kv_scale, launch)
    numbers = {
        **_slots.numbers_of(call, places, call.cache.shape[0], launch),
        "num_kv_heads": num_kv_heads,
        "width": width,
        "format": CODES[dtype_name(kv)],
        "cache_format": CODES[dtype_name(call.cache)] if call.format == "plain" else CODES["int8"],
        "token_stride": token_stride,
        "kv_head_stride": kv_head_stride,
        "page_stride": page_stride,
        "slot_stride": slot_stride,
        "head_stride": head_stride,
        "layout": code_of(call.layout),
        "power_of_two": call.power_of_two_scales,
        **scale_numbers,
        "num_threads": launch.num_threads,
    }
    operands = {"kv": kv, "cache": call.cache, **places, "kv_scale": kv_scale}
    return launch.native(KERNEL, operands, {"new_cache": "cache"}, numbers)["new_cache"]
