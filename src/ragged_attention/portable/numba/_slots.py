"""The slots to which this step's rows are written: from `slot_mapping`, or from the block tables.

A program writes the tokens of some pages, in order, so if two tokens have the same slot, the later one wins.
"""

from ragged_attention.calls import dtype_name
from ragged_attention.calls.paged import TableWrite
from ragged_attention.portable.numba._records import NO_MEMORY, programs
from ragged_attention.portable.numba._sequences import max_sequences, num_sequences, packed_queries_of, within
from ragged_attention.portable.numba._vectors import allocate, compiled, int32_at, int_at, set_int

OPERANDS = ("slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs")
NUMBERS = ("num_tokens", "wide_slots", "max_num_seqs", "num_pages", "page_size", "capacity")
STRIDES = {"page_indices": "seq"}
PLAN = ("slots",)
PROGRAMS = 16


@compiled
def slots_from_tables(call):
    """List the slots of all sequences' tokens; a sequence's tokens are at its last positions."""
    for seq in range(num_sequences(call)):
        start, stop = packed_queries_of(call, seq)
        first = within(int32_at(call.kv_lens, seq), call.capacity) - stop
        for token in range(start, stop):
            position = first + token
            set_int(call.slots, token, -1)
            if position >= 0:
                page = int32_at(call.page_indices, seq * call.page_indices_seq_stride + position // call.page_size)
                if 0 <= page < call.num_pages:
                    set_int(call.slots, token, page * call.page_size + position % call.page_size)


@compiled
def list_slots(call):
    """List the slot of each token, -1 if it has none; returns the number of programs, or NO_MEMORY."""
    call.workspace = allocate(8 * call.num_tokens + 8)
    if call.workspace == 0:
        return NO_MEMORY
    call.slots = call.workspace
    for token in range(call.num_tokens):
        slot = -1
        if call.slot_mapping:
            slot = int_at(call.slot_mapping, token) if call.wide_slots else int32_at(call.slot_mapping, token)
        set_int(call.slots, token, slot if 0 <= slot < call.num_pages * call.page_size else -1)
    if not call.slot_mapping:
        slots_from_tables(call)
    return min(PROGRAMS, call.num_tokens)


@compiled
def write_tokens(address, call, size, write):
    """Run programs: each calls `write(call, token, slot, row)` for its tokens; `row` is memory for `size` floats."""
    row = allocate(4 * size)
    for index in programs(address, row):
        for token in range(call.num_tokens):
            slot = int_at(call.slots, token)
            if slot >= 0 and slot // call.page_size % call.num_programs == index:
                write(call, token, slot, row)
    return 0


def numbers_of(call: TableWrite) -> dict[str, int]:
    """The NUMBERS that are not properties of the call."""
    if call.slot_mapping is not None:
        return {"wide_slots": dtype_name(call.slot_mapping) == "int64", "capacity": 0}
    num_rows, pages_per_seq = call.page_indices.shape
    return {"max_num_seqs": max_sequences(call, num_rows), "capacity": pages_per_seq * call.page_size}
