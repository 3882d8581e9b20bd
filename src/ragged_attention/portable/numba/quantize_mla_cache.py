"""Quantises the rows of a latent cache on a CPU."""

from typing import Any

from ragged_attention.calls import QuantizeMlaCache
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import ROWS, place_of, rows_fields, rows_numbers, store_latent
from ragged_attention.portable.numba._records import Fields, programs, record_in
from ragged_attention.portable.numba._vectors import allocate

FIELDS = Fields(
    operands=("kv",),
    results=("cache",),
    numbers=("width", "power_of_two_scales", *rows_fields("cache_")),
    strides={"kv": "page slot"},
    formats=("kv",),
)  # fmt: skip
call_of, cache_of = FIELDS.at, record_in(ROWS, "cache_")
FEATURES = frozenset({"power_of_two_scales", "cache_layout"})
why_not = cannot_run


def plan(address):
    return call_of(address).cache_num_pages


def work(address):
    """Run programs; each handles one page."""
    call = call_of(address)
    cache, row = cache_of(call), allocate(4 * call.width)
    for page in programs(address, row):
        for slot in range(cache.page_size):
            source = call.kv + size_of(call.kv_format) * (page * call.kv_page_stride + slot * call.kv_slot_stride)
            widen(call.kv_format, source, row, call.width)
            values, scales = place_of(cache, page, slot)
            store_latent(cache, row, call.cache + values, call.cache + scales, call.power_of_two_scales)
    return 0


KERNEL = Kernel("quantize_mla_cache", FIELDS, plan, work)


def run(call: QuantizeMlaCache, tile: Any, launch: Any) -> Any:
    _, page_size, _, token_bytes = call.out_shape
    strides = (page_size * token_bytes, token_bytes, token_bytes, 1)
    numbers = {"width": call.kv.shape[3]} | rows_numbers("cache_", call.kv_format, call.out_shape, strides)
    return KERNEL.launch(launch, call, tile, {}, numbers)["cache"]
