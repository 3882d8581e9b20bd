"""Converts token positions to slots of the cache on a CPU."""

import math
from typing import Any

from ragged_attention.calls import PageIndicesToSlots
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._records import Fields, claimed, up_to
from ragged_attention.portable.numba._sequences import max_sequences, num_sequences, packed_queries_of
from ragged_attention.portable.numba._vectors import compiled, int32_at, set_int32

FIELDS = Fields(
    operands=("positions", "page_indices", "cu_q_lens", "num_seqs"),
    results=("slots",),
    numbers=("num_tokens", "max_num_seqs", "num_positions", "pages_per_seq", "page_size"),
    strides={"page_indices": "seq"},
)
call_of = FIELDS.at
SLOTS = 2**31  # the number of slots that int32 can index
ROWS = 16  # rows of positions for each program
FEATURES = frozenset({"cu_q_lens", "num_seqs"})
why_not = cannot_run


def plan(address):
    return up_to(call_of(address).num_tokens, ROWS) // ROWS


@compiled
def convert_row(call, row, seq):
    """Write the slots of one row of positions in sequence `seq`, all of them -1 if `seq` is -1."""
    for index in range(row * call.num_positions, (row + 1) * call.num_positions):
        position, slot = int32_at(call.positions, index), -1
        if seq >= 0 and position >= 0 and position // call.page_size < call.pages_per_seq:
            page = int32_at(call.page_indices, seq * call.page_indices_seq_stride + position // call.page_size)
            slot = page * call.page_size + position % call.page_size if page >= 0 else -1
        set_int32(call.slots, index, slot if slot < SLOTS else -1)


@compiled
def convert_packed_rows(call, first, stop):
    """Write the slots of rows [first, stop) of a ragged batch."""
    seq = 0
    for row in range(first, stop):
        while seq < num_sequences(call) and packed_queries_of(call, seq)[1] <= row:
            seq += 1
        is_live = seq < num_sequences(call) and packed_queries_of(call, seq)[0] <= row
        convert_row(call, row, seq if is_live else -1)


def work(address):
    """Run programs; each converts ROWS rows of positions."""
    call = call_of(address)
    for index in claimed(address):
        first, stop = ROWS * index, min(ROWS * (index + 1), call.num_tokens)
        if call.cu_q_lens:
            convert_packed_rows(call, first, stop)
        else:
            for row in range(first, stop):
                convert_row(call, row, row)
    return 0


KERNEL = Kernel("page_indices_to_slots", FIELDS, plan, work)


def run(call: PageIndicesToSlots, tile: Any, launch: Any) -> Any:
    num_rows, pages_per_seq = call.page_indices.shape
    numbers = {
        "max_num_seqs": max_sequences(call, num_rows), "num_positions": math.prod(call.positions.shape[1:]),
        "pages_per_seq": pages_per_seq, "page_size": min(call.page_size, SLOTS),
    }  # fmt: skip
    return KERNEL.launch(launch, call, tile, {}, numbers)["slots"]
