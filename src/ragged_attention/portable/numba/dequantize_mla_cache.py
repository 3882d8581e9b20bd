"""Dequantises the rows of a latent cache on a CPU."""

from typing import Any

from ragged_attention.calls import DequantizeMlaCache
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import CODES, narrow, size_of
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_call import cache_of
from ragged_attention.portable.numba._latent_rows import ROWS, place_of, read_latents, rows_fields, rows_numbers
from ragged_attention.portable.numba._records import Fields, programs, record_in
from ragged_attention.portable.numba._vectors import LANES, allocate, set_int

FIELDS = Fields(
    operands=("cache",),
    results=("rows",),
    numbers=("width", "format", *rows_fields("kv_")),
)
call_of, kv_of = FIELDS.at, record_in(ROWS, "kv_")
FEATURES = frozenset({"format", "dtype", "cache_layout"})
why_not = cannot_run


def plan(address):
    return call_of(address).kv_num_pages


def work(address):
    """Run programs; each handles one page."""
    call = call_of(address)
    kv, row_bytes = kv_of(call), 4 * (call.width + LANES)
    memory = allocate(16 + 2 * row_bytes)
    source, scale, row = memory, memory + 8, memory + 16
    for page in programs(address, memory):
        for slot in range(kv.page_size):
            values, scales = place_of(kv, page, slot)
            set_int(source, 0, call.cache + values)
            set_int(scale, 0, call.cache + scales)
            read_latents(kv, source, scale, row, call.width, call.width, 1, row + row_bytes)
            target = (page * kv.page_size + slot) * call.width * size_of(call.format)
            narrow(call.format, row, call.rows + target, call.width, 1.0)
    return 0


KERNEL = Kernel("dequantize_mla_cache", FIELDS, plan, work)


def run(call: DequantizeMlaCache, tile: Any, launch: Any) -> Any:
    cache, form = cache_of(call.cache, call.kv_format, launch), call.kv_format
    numbers = rows_numbers("kv_", form, cache.shape, launch.strides(cache))
    numbers |= {"width": form.width, "format": CODES[call.dtype]}
    return KERNEL.launch(launch, call, tile, {"cache": cache}, numbers)["rows"]
