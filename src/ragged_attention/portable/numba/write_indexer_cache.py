"""Quantises this step's indexer keys and writes them into the indexer's pages in place on a CPU."""

from typing import Any

from ragged_attention.calls import WriteIndexerCache
from ragged_attention.portable.numba import _slots
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import group_scale, quantize_group
from ragged_attention.portable.numba._records import Fields
from ragged_attention.portable.numba._slots import list_slots, write_tokens
from ragged_attention.portable.numba._vectors import compiled, set_float

FIELDS = Fields(
    operands=("k", "cache", *_slots.OPERANDS),
    results=("new_cache",),
    numbers=(*_slots.NUMBERS, "head_dim", "power_of_two"),
    plan=_slots.PLAN,
    strides=_slots.STRIDES | {"k": "token", "cache": "page"},
    formats=("k",),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "power_of_two"})
why_not = cannot_run


def plan(address):
    return list_slots(call_of(address))


@compiled
def write(call, token, slot, row):
    """Write one token's key into its slot; the values of a page come before its scales."""
    widen(call.k_format, call.k + size_of(call.k_format) * token * call.k_token_stride, row, call.head_dim)
    scale = group_scale(row, call.head_dim, call.power_of_two)
    page, place = call.new_cache + slot // call.page_size * call.cache_page_stride, slot % call.page_size
    set_float(page + call.page_size * call.head_dim, place, scale)
    quantize_group(row, call.head_dim, scale, page + place * call.head_dim)


def work(address):
    call = call_of(address)
    return write_tokens(address, call, call.head_dim, write)


KERNEL = Kernel("write_indexer_cache", FIELDS, plan, work)


def run(call: WriteIndexerCache, tile: Any, launch: Any) -> Any:
    numbers, results = _slots.numbers_of(call), {"new_cache": "cache"}
    return KERNEL.launch(launch, call, tile, {"cache": call.cache}, numbers, results=results)["new_cache"]
