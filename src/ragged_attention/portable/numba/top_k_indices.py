"""Selects the columns with the largest logits of each row on a CPU."""

from typing import Any

from ragged_attention.calls import TopKIndices
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import FLOAT32, read_some
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._records import Fields, programs, up_to
from ragged_attention.portable.numba._selection import ordered, scratch_size, select
from ragged_attention.portable.numba._sequences import within
from ragged_attention.portable.numba._vectors import LANES, allocate, compiled, int32_at, load, store

FIELDS = Fields(
    operands=("logits", "starts", "stops"),
    results=("indices",),
    numbers=("num_tokens", "columns", "top_k"),
    strides={"logits": "token"},
)
call_of = FIELDS.at
FEATURES = frozenset({"starts", "stops"})
BATCH_INVARIANT = True  # the selection is exact, whatever the batch
why_not = cannot_run


def plan(address):
    return call_of(address).num_tokens


@compiled
def read_ordered(source, target, count):
    """Store `count` floats as `ordered` integers, in whole vectors."""
    whole = count // LANES * LANES
    for index in range(0, whole, LANES):
        store(target, index, ordered(load(source, index)))
    if whole < count:
        store(target, whole, ordered(read_some(FLOAT32, source, whole, count - whole)))


def work(address):
    """Run programs; each handles one row."""
    call = call_of(address)
    size = up_to(4 * (call.columns + LANES), 64)
    values = allocate(size + scratch_size(call.top_k))
    scratch = values + size
    for token in programs(address, values):
        start = within(int32_at(call.starts, token), call.columns) if call.starts else 0
        stop = within(int32_at(call.stops, token), call.columns) if call.stops else call.columns
        count = max(stop - start, 0)
        read_ordered(call.logits + 4 * (token * call.logits_token_stride + start), values, count)
        select(values, count, call.top_k, start, 0, call.indices + 4 * token * call.top_k, scratch)
    return 0


KERNEL = Kernel("top_k_indices", FIELDS, plan, work)


def run(call: TopKIndices, tile: Any, launch: Any) -> Any:
    return KERNEL.launch(launch, call, tile, {}, {})["indices"]
