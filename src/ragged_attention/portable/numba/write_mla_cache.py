"""This step's latent rows, written (and quantised) into the pages of the cache on a CPU, in place.

A program writes the tokens of some pages, in their order, so that of two tokens for one slot the later one wins.
"""

from typing import Any

from ragged_attention.calls import WriteMlaCache, dtype_name
from ragged_attention.portable._no_tuning import Tile as Tile
from ragged_attention.portable._no_tuning import heuristic as heuristic
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import CODES, size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import PLAIN, code_of, place_of, store_latent
from ragged_attention.portable.numba._records import Fields, programs
from ragged_attention.portable.numba._vectors import LANES, allocate, compiled, copy, int32_at, int_at, release

FIELDS = Fields(
    operands=("kv", "cache", "slot_mapping"),
    results=("new_cache",),
    numbers=("num_tokens", "num_kv_heads", "width", "format", "token_stride", "kv_head_stride", "wide_slots",
             "num_pages", "page_size", "page_stride", "slot_stride", "head_stride", "layout", "power_of_two",
             "num_threads"),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({"power_of_two_scales", "cache_format", "cache_layout"})
PROGRAMS = 16


def why_not(call: WriteMlaCache) -> str | None:
    return cannot_run(call)


def plan(address):
    return min(PROGRAMS, call_of(address).num_tokens)


@compiled
def write(call, token, page, slot, row):
    """One token's row, or rows of all KV heads, into its slot."""
    size = size_of(call.format)
    for head in range(call.num_kv_heads):
        source = call.kv + size * (token * call.token_stride + head * call.kv_head_stride)
        if call.layout == PLAIN:
            target = page * call.page_stride + slot * call.slot_stride + head * call.head_stride
            copy(call.new_cache + size * target, source, size * call.width)
        else:
            values, scales = place_of(call.layout, 1, page, slot, call.page_stride, call.slot_stride, call.page_size)
            widen(call.format, source, row, call.width)
            store_latent(call.layout, row, call.new_cache + values, call.new_cache + scales, call.power_of_two)


def work(address):
    """Programs, each of the tokens of some pages."""
    call = call_of(address)
    row = allocate(4 * (call.width + LANES))
    for index in programs(address, call.num_programs):
        for token in range(call.num_tokens):
            slot = int_at(call.slot_mapping, token) if call.wide_slots else int32_at(call.slot_mapping, token)
            if 0 <= slot < call.num_pages * call.page_size and slot // call.page_size % call.num_programs == index:
                write(call, token, slot // call.page_size, slot % call.page_size, row)
    release(row)
    return 0


KERNEL = Kernel("write_mla_cache", FIELDS, plan, work)


def run(call: WriteMlaCache, tile: Tile, launch: Any) -> Any:
    del tile
    kv, slots = launch.packed(call.kv), launch.contiguous(call.slot_mapping)
    num_tokens, num_kv_heads, width = kv.shape
    token_stride, kv_head_stride = launch.strides(kv)[:2]
    page_stride, slot_stride, head_stride = launch.strides(call.cache)[:3]
    numbers = {
        "num_tokens": num_tokens,
        "num_kv_heads": num_kv_heads,
        "width": width,
        "format": CODES[dtype_name(kv)],
        "token_stride": token_stride,
        "kv_head_stride": kv_head_stride,
        "wide_slots": dtype_name(slots) == "int64",
        "num_pages": call.cache.shape[0],
        "page_size": call.page_size,
        "page_stride": page_stride,
        "slot_stride": slot_stride,
        "head_stride": head_stride,
        "layout": code_of(call.layout),
        "power_of_two": call.power_of_two_scales,
        "num_threads": launch.num_threads,
    }
    operands = {"kv": kv, "cache": call.cache, "slot_mapping": slots}
    return launch.native(KERNEL, operands, {"new_cache": "cache"}, numbers)["new_cache"]
