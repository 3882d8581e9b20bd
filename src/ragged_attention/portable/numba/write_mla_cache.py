"""Writes this step's latent rows into the cache in place on a CPU, and quantises them if the cache is quantised."""

from typing import Any

from ragged_attention.calls import WriteMlaCache
from ragged_attention.portable.numba import _slots
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import narrow, scale_of, size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import ROWS, place_of, rows_fields, rows_numbers, store_latent
from ragged_attention.portable.numba._records import Fields, record_in
from ragged_attention.portable.numba._slots import list_slots, write_tokens
from ragged_attention.portable.numba._vectors import LANES, compiled, copy

FIELDS = Fields(
    operands=("kv", "cache", *_slots.OPERANDS, "kv_scale", "rope_scale"),
    results=("new_cache",),
    numbers=(*_slots.NUMBERS, "num_kv_heads", "width", "rope_start", "power_of_two_scales", *rows_fields("kv_")),
    plan=_slots.PLAN,
    strides=_slots.STRIDES | {"kv": "token head"},
    formats=("kv",),
    scales=("kv_scale", "rope_scale"),
)  # fmt: skip
call_of, cache_of = FIELDS.at, record_in(ROWS, "kv_")
FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "kv_scale", "rope_scale", "d_v",
    "power_of_two_scales", "cache_format", "cache_layout",
})  # fmt: skip
why_not = cannot_run


def plan(address):
    return list_slots(call_of(address))


@compiled
def store_row(call, cache, head, source, target, scales, row):
    """Store a row of kv's dtype in the format of the cache, with scales if it has any; `row` is memory for floats."""
    kv_scale = scale_of(call.kv_scale, call.kv_scale_format, call.kv_scale_stride, call.kv_scale_number, head)
    rope_scale = scale_of(call.rope_scale, call.rope_scale_format, call.rope_scale_stride, call.rope_scale_number, head)
    if cache.group == 0 and kv_scale == 1 and rope_scale == 1 and cache.codes == call.kv_format:
        copy(target, source, size_of(call.kv_format) * call.width)
        return
    widen(call.kv_format, source, row, call.width)
    if cache.group == 0:
        start = call.rope_start
        narrow(cache.codes, row, target, start, kv_scale)
        narrow(cache.codes, row + 4 * start, target + size_of(cache.codes) * start, call.width - start, rope_scale)
    else:
        store_latent(cache, row, target, scales, call.power_of_two_scales)


@compiled
def write(call, token, slot, row):
    """Write one token's rows, one for each KV head, into its slot."""
    cache, size = cache_of(call), size_of(call.kv_format)
    values, scales = place_of(cache, slot // call.page_size, slot % call.page_size)
    for head in range(call.num_kv_heads):
        source = call.kv + size * (token * call.kv_token_stride + head * call.kv_head_stride)
        target = call.new_cache + values + head * cache.head_step
        store_row(call, cache, head, source, target, call.new_cache + scales, row)


def work(address):
    call = call_of(address)
    return write_tokens(address, call, call.width + LANES, write)


KERNEL = Kernel("write_mla_cache", FIELDS, plan, work)


def run(call: WriteMlaCache, tile: Any, launch: Any) -> Any:
    numbers = {
        **_slots.numbers_of(call), **rows_numbers("kv_", call.kv_format, call.cache.shape, launch.strides(call.cache)),
        "width": call.kv.shape[2], "rope_start": call.rope_start,
    }  # fmt: skip
    results = {"new_cache": "cache"}
    return KERNEL.launch(launch, call, tile, {"cache": call.cache}, numbers, results=results)["new_cache"]
