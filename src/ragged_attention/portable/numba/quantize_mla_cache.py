"""The rows of a latent cache, quantised on a CPU."""

from typing import Any

from ragged_attention.calls import QuantizeMlaCache, dtype_name
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import CODES, size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import ROWS, place_of, rows_fields, rows_numbers, store_latent
from ragged_attention.portable.numba._records import Fields, programs, record_in
from ragged_attention.portable.numba._vectors import allocate

FIELDS = Fields(
    operands=("kv",),
    results=("cache",),
    numbers=("num_pages", "page_size", "width", "format", "page_stride", "slot_stride", *rows_fields("cache_"),
             "power_of_two", "num_threads"),
)  # fmt: skip
call_of, cache_of = FIELDS.at, record_in(ROWS, "cache_")
FEATURES = frozenset({"power_of_two_scales", "cache_layout"})
why_not = cannot_run


def plan(address):
    return call_of(address).num_pages


def work(address):
    """Run programs; each handles one page."""
    call = call_of(address)
    cache, row = cache_of(call), allocate(4 * call.width)
    for page in programs(address, row):
        for slot in range(call.page_size):
            source = call.kv + size_of(call.format) * (page * call.page_stride + slot * call.slot_stride)
            widen(call.format, source, row, call.width)
            values, scales = place_of(cache, page, slot)
            store_latent(cache, row, call.cache + values, call.cache + scales, call.power_of_two)
    return 0


KERNEL = Kernel("quantize_mla_cache", FIELDS, plan, work)


def run(call: QuantizeMlaCache, tile: Any, launch: Any) -> Any:
    kv = launch.packed(call.kv)
    num_pages, page_size, _, width = kv.shape
    page_stride, slot_stride = launch.strides(kv)[:2]
    token_bytes = call.out_shape[3]
    numbers = {
        "num_pages": num_pages, "page_size": page_size, "width": width, "format": CODES[dtype_name(kv)],
        "page_stride": page_stride, "slot_stride": slot_stride, "power_of_two": call.power_of_two_scales,
        **rows_numbers(
            "cache_", call.kv_format, width=width, page_size=page_size, page_stride=page_size * token_bytes,
            slot_stride=token_bytes,
        ),
    }  # fmt: skip
    return KERNEL.launch(launch, tile, {"kv": kv}, {"cache": (call.out_shape, "uint8")}, numbers)["cache"]
