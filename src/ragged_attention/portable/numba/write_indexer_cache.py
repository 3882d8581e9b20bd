"""This step's keys of the indexer, quantised and written into the indexer's pages on a CPU, in place.

A program writes the tokens of some pages in their order, so the later one of two tokens for one slot wins.
"""

from typing import Any

from ragged_attention.calls import WriteIndexerCache, dtype_name
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import group_scale, quantize_group
from ragged_attention.portable.numba._records import Fields, programs
from ragged_attention.portable.numba._vectors import allocate, compiled, int32_at, int_at, set_float

FIELDS = Fields(
    operands=("k", "cache", "slot_mapping"),
    results=("new_cache",),
    numbers=("num_tokens", "head_dim", "wide_slots", "num_slots", "page_size", "power_of_two"),
    strides={"k": "token", "cache": "page"},
    formats=("k",),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({"power_of_two"})
PROGRAMS = 16
why_not = cannot_run


def plan(address):
    return min(PROGRAMS, call_of(address).num_tokens)


@compiled
def write(call, token, slot, row):
    """Write one token's key into its slot; the values of a page come before its scales."""
    widen(call.k_format, call.k + size_of(call.k_format) * token * call.k_token_stride, row, call.head_dim)
    scale = group_scale(row, call.head_dim, call.power_of_two)
    page, place = call.new_cache + slot // call.page_size * call.cache_page_stride, slot % call.page_size
    set_float(page + call.page_size * call.head_dim, place, scale)
    quantize_group(row, call.head_dim, scale, page + place * call.head_dim)


def work(address):
    """Run programs; each writes the tokens of some pages."""
    call = call_of(address)
    row = allocate(4 * call.head_dim)
    for index in programs(address, row):
        for token in range(call.num_tokens):
            slot = int_at(call.slot_mapping, token) if call.wide_slots else int32_at(call.slot_mapping, token)
            if 0 <= slot < call.num_slots and slot // call.page_size % call.num_programs == index:
                write(call, token, slot, row)
    return 0


KERNEL = Kernel("write_indexer_cache", FIELDS, plan, work)


def run(call: WriteIndexerCache, tile: Any, launch: Any) -> Any:
    numbers = {"num_tokens": call.k.shape[0], "wide_slots": dtype_name(call.slot_mapping) == "int64"}
    results = {"new_cache": "cache"}
    return KERNEL.launch(launch, call, tile, {"cache": call.cache}, numbers, results=results)["new_cache"]
