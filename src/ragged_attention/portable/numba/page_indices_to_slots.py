"""Converts token positions to slots of the cache on a CPU."""

import math
from typing import Any

from ragged_attention.calls import PageIndicesToSlots
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._records import Fields, claimed
from ragged_attention.portable.numba._vectors import int32_at, set_int32

FIELDS = Fields(
    operands=("positions", "page_indices"),
    results=("slots",),
    numbers=("num_seqs", "num_positions", "pages_per_seq", "page_size"),
    strides={"page_indices": "seq"},
)
call_of = FIELDS.at
SLOTS = 2**31  # the number of slots that int32 can index
why_not = cannot_run


def plan(address):
    return call_of(address).num_seqs


def work(address):
    """Run programs; each handles one sequence."""
    call = call_of(address)
    for seq in claimed(address):
        for index in range(seq * call.num_positions, (seq + 1) * call.num_positions):
            position, slot = int32_at(call.positions, index), -1
            if position >= 0 and position // call.page_size < call.pages_per_seq:
                page = int32_at(call.page_indices, seq * call.page_indices_seq_stride + position // call.page_size)
                slot = page * call.page_size + position % call.page_size if page >= 0 else -1
            set_int32(call.slots, index, slot if slot < SLOTS else -1)
    return 0


KERNEL = Kernel("page_indices_to_slots", FIELDS, plan, work)


def run(call: PageIndicesToSlots, tile: Any, launch: Any) -> Any:
    num_seqs, pages_per_seq = call.page_indices.shape
    numbers = {
        "num_seqs": num_seqs, "num_positions": math.prod(call.positions.shape[1:]), "pages_per_seq": pages_per_seq,
        "page_size": min(call.page_size, SLOTS),
    }  # fmt: skip
    return KERNEL.launch(launch, call, tile, {}, numbers)["slots"]
