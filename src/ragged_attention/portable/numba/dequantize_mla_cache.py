"""The rows that a quantised latent cache holds, on a CPU."""

from typing import Any

from ragged_attention.calls import DequantizeMlaCache
from ragged_attention.portable._no_tuning import Tile as Tile
from ragged_attention.portable._no_tuning import heuristic as heuristic
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import CODES, narrow, size_of
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import PLAIN, code_of, place_of, read_latents
from ragged_attention.portable.numba._records import NO_MEMORY, Fields, programs
from ragged_attention.portable.numba._vectors import allocate, release, set_int

FIELDS = Fields(
    operands=("cache",),
    results=("rows",),
    numbers=("num_pages", "page_size", "width", "format", "page_stride", "slot_stride", "layout", "num_threads"),
)
call_of = FIELDS.at
FEATURES = frozenset({"format", "dtype", "cache_layout"})


def why_not(call: DequantizeMlaCache) -> str | None:
    return cannot_run(call)


def plan(address):
    return call_of(address).num_pages


def work(address):
    """Programs, each of one page."""
    call = call_of(address)
    memory = allocate(16 + 4 * call.width)
    if memory == 0:
        return NO_MEMORY
    source, scale, row = memory, memory + 8, memory + 16
    for page in programs(address, call.num_programs):
        for slot in range(call.page_size):
            place, its = place_of(call.layout, 1, page, slot, call.page_stride, call.slot_stride, call.page_size)
            set_int(source, 0, call.cache + place)
            set_int(scale, 0, call.cache + its)
            read_latents(call.layout, 1, PLAIN, 0, source, scale, row, call.width, call.width, 1)
            target = (page * call.page_size + slot) * call.width * size_of(call.format)
            narrow(call.format, row, call.rows + target, call.width, 1.0)
    release(memory)
    return 0


KERNEL = Kernel("dequantize_mla_cache", FIELDS, plan, work)


def run(call: DequantizeMlaCache, tile: Tile, launch: Any) -> Any:
    del tile
    cache = launch.words(call.cache, packed_rows=call.kv_format.planar)
    page_stride, slot_stride = launch.strides(cache)[:2]
    numbers = {
        "num_pages": cache.shape[0],
        "page_size": cache.shape[1],
        "width": call.out_shape[3],
        "format": CODES[call.dtype],
        "page_stride": page_stride,
        "slot_stride": slot_stride,
        "layout": code_of(call.kv_format),
        "num_threads": launch.num_threads,
    }
    return launch.native(KERNEL, {"cache": cache}, {"rows": (call.out_shape, call.dtype)}, numbers)["rows"]
