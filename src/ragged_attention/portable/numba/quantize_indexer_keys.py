"""Quantises the indexer's keys on a CPU."""

from typing import Any

from ragged_attention.calls import QuantizeIndexerKeys
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import group_scale, quantize_group
from ragged_attention.portable.numba._records import Fields, programs
from ragged_attention.portable.numba._vectors import allocate, set_float

FIELDS = Fields(
    operands=("k",),
    results=("values", "scale"),
    numbers=("num_rows", "head_dim", "power_of_two"),
    strides={"k": "token"},
    formats=("k",),
)
call_of = FIELDS.at
FEATURES = frozenset({"power_of_two"})
ROWS = 64  # rows per program
why_not = cannot_run


def plan(address):
    return (call_of(address).num_rows + ROWS - 1) // ROWS


def work(address):
    """Run programs; each handles ROWS rows."""
    call = call_of(address)
    row = allocate(4 * call.head_dim)
    for index in programs(address, row):
        for place in range(index * ROWS, min((index + 1) * ROWS, call.num_rows)):
            widen(call.k_format, call.k + size_of(call.k_format) * place * call.k_token_stride, row, call.head_dim)
            scale = group_scale(row, call.head_dim, call.power_of_two)
            set_float(call.scale, place, scale)
            quantize_group(row, call.head_dim, scale, call.values + place * call.head_dim)
    return 0


KERNEL = Kernel("quantize_indexer_keys", FIELDS, plan, work)


def run(call: QuantizeIndexerKeys, tile: Any, launch: Any) -> Any:
    num_rows, head_dim = call.k.shape
    return tuple(KERNEL.launch(launch, call, tile, {}, {"num_rows": num_rows, "head_dim": head_dim}).values())
