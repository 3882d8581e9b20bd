"""The slots to which this step's rows are written: given as such, or by the block tables of the attention call."""

from typing import Any

from ragged_attention.calls import WriteKvPages, WriteMlaCache, dtype_name
from ragged_attention.portable.numba._sequences import num_sequences, packed_queries_of, within
from ragged_attention.portable.numba._vectors import allocate, compiled, int32_at, int_at, set_int

OPERANDS = ("slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs")
NUMBERS = ("num_tokens", "wide_slots", "max_num_seqs", "num_pages", "page_size", "capacity", "table_stride")
PLAN = ("slots",)
PROGRAMS = 16


@compiled
def slots_from_tables(call):
    """List the slots of the tokens of all sequences; new tokens are the last positions of their sequence."""
    for seq in range(num_sequences(call)):
        start, stop = packed_queries_of(call, seq)
        first = within(int32_at(call.kv_lens, seq), call.capacity) - stop
        for token in range(start, stop):
            position = first + token
            set_int(call.slots, token, -1)
            if position >= 0:
                page = int32_at(call.page_indices, seq * call.table_stride + position // call.page_size)
                if 0 <= page < call.num_pages:
                    set_int(call.slots, token, page * call.page_size + position % call.page_size)


@compiled
def list_slots(call):
    """Allocate and fill the list of slots, -1 for a token without one; returns False if there is no memory."""
    call.workspace = allocate(8 * call.num_tokens + 8)
    if call.workspace == 0:
        return False
    call.slots = call.workspace
    for token in range(call.num_tokens):
        slot = -1
        if call.slot_mapping:
            slot = int_at(call.slot_mapping, token) if call.wide_slots else int32_at(call.slot_mapping, token)
        set_int(call.slots, token, slot if 0 <= slot < call.num_pages * call.page_size else -1)
    if not call.slot_mapping:
        slots_from_tables(call)
    return True


@compiled
def tokens_of(call, index):
    """Yield the tokens whose pages belong to a program, with their slots; later tokens come later and so win."""
    for token in range(call.num_tokens):
        slot = int_at(call.slots, token)
        if slot >= 0 and slot // call.page_size % call.num_programs == index:
            yield token, slot


def operands_of(call: WriteKvPages | WriteMlaCache, launch: Any) -> dict[str, Any]:
    """The arrays that determine the slots."""
    found = {
        name: None if (array := getattr(call, name)) is None else launch.contiguous(array)
        for name in ("slot_mapping", "kv_lens", "cu_q_lens")
    }
    tables = None if call.page_indices is None else launch.packed(call.page_indices)
    num_seqs = None if isinstance(call.num_seqs, int) else call.num_seqs
    return {**found, "page_indices": tables, "num_seqs": num_seqs}


def numbers_of(call: Any, operands: dict[str, Any], num_pages: int, launch: Any) -> dict[str, int]:
    """The numbers that go with these arrays."""
    slots, tables = operands["slot_mapping"], operands["page_indices"]
    wide_slots = slots is not None and dtype_name(slots) == "int64"
    numbers = dict(num_tokens=call.num_tokens, wide_slots=wide_slots, num_pages=num_pages, page_size=call.page_size)
    if tables is None:
        return numbers
    max_num_seqs = call.num_seqs if isinstance(call.num_seqs, int) else tables.shape[0]
    capacity, table_stride = tables.shape[1] * call.page_size, launch.strides(tables)[0]
    return numbers | dict(max_num_seqs=max_num_seqs, capacity=capacity, table_stride=table_stride)
