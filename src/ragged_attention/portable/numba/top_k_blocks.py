"""Selects the blocks with the largest scores of each token and head on a CPU."""

from typing import Any

from ragged_attention.calls import TopKBlocks
from ragged_attention.portable.numba._blocks import force
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._records import Fields, programs, up_to
from ragged_attention.portable.numba._selection import scratch_size, select
from ragged_attention.portable.numba._vectors import LANES, allocate
from ragged_attention.portable.numba.top_k_indices import read_ordered

FIELDS = Fields(
    operands=("scores",),
    results=("blocks",),
    numbers=("num_tokens", "num_heads", "num_blocks", "top_k", "init_blocks", "local_blocks"),
    strides={"scores": "token head"},
)
call_of = FIELDS.at
FEATURES = frozenset({"init_blocks", "local_blocks"})
BATCH_INVARIANT = True  # the selection is exact, whatever the batch
why_not = cannot_run


def plan(address):
    call = call_of(address)
    return call.num_tokens * call.num_heads


def work(address):
    """Run programs; each handles one token and head."""
    call = call_of(address)
    size = up_to(4 * (call.num_blocks + LANES), 64)
    order = allocate(size + scratch_size(call.top_k))
    scratch = order + size
    for row in programs(address, order):
        token, head = row // call.num_heads, row % call.num_heads
        scores = call.scores + 4 * (token * call.scores_token_stride + head * call.scores_head_stride)
        read_ordered(scores, order, call.num_blocks)
        if call.init_blocks or call.local_blocks:
            force(scores, order, call.num_blocks, call.init_blocks, call.local_blocks)
        select(order, call.num_blocks, call.top_k, 0, 0, call.blocks + 4 * row * call.top_k, scratch)
    return 0


KERNEL = Kernel("top_k_blocks", FIELDS, plan, work)


def run(call: TopKBlocks, tile: Any, launch: Any) -> Any:
    return KERNEL.launch(launch, call, tile, {}, {})["blocks"]
