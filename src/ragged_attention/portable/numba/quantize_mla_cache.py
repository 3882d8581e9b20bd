"""A latent cache, quantised on a CPU."""

from typing import Any

from ragged_attention.calls import QuantizeMlaCache, dtype_name
from ragged_attention.portable._no_tuning import Tile as Tile
from ragged_attention.portable._no_tuning import heuristic as heuristic
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import CODES, size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import code_of, place_of, store_latent
from ragged_attention.portable.numba._records import NO_MEMORY, Fields, programs
from ragged_attention.portable.numba._vectors import allocate, release

FIELDS = Fields(
    operands=("kv",),
    results=("cache",),
    numbers=("num_pages", "page_size", "width", "token_bytes", "format", "page_stride", "slot_stride", "layout",
             "power_of_two", "num_threads"),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({"power_of_two_scales", "cache_layout"})


def why_not(call: QuantizeMlaCache) -> str | None:
    return cannot_run(call)


def plan(address):
    return call_of(address).num_pages


def work(address):
    """Programs, each of one page."""
    call = call_of(address)
    row = allocate(4 * call.width)
    if row == 0:
        return NO_MEMORY
    for page in programs(address, call.num_programs):
        for slot in range(call.page_size):
            source = call.kv + size_of(call.format) * (page * call.page_stride + slot * call.slot_stride)
            widen(call.format, source, row, call.width)
            page_stride = call.page_size * call.token_bytes
            values, scales = place_of(call.layout, 1, page, slot, page_stride, call.token_bytes, call.page_size)
            store_latent(call.layout, row, call.cache + values, call.cache + scales, call.power_of_two)
    release(row)
    return 0


KERNEL = Kernel("quantize_mla_cache", FIELDS, plan, work)


def run(call: QuantizeMlaCache, tile: Tile, launch: Any) -> Any:
    del tile
    kv = launch.packed(call.kv)
    num_pages, page_size, _, width = kv.shape
    page_stride, slot_stride = launch.strides(kv)[:2]
    numbers = {
        "num_pages": num_pages,
        "page_size": page_size,
        "width": width,
        "token_bytes": call.out_shape[3],
        "format": CODES[dtype_name(kv)],
        "page_stride": page_stride,
        "slot_stride": slot_stride,
        "layout": code_of(call.kv_format),
        "power_of_two": call.power_of_two_scales,
        "num_threads": launch.num_threads,
    }
    return launch.native(KERNEL, {"kv": kv}, {"cache": (call.out_shape, "uint8")}, numbers)["cache"]
