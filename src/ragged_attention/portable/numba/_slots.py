"""The slots to which this step's rows are written: given as such, or by the block tables of the attention call."""

from ragged_attention.calls import WriteKvPages, WriteMlaCache, dtype_name
from ragged_attention.portable.numba._sequences import most_sequences, num_sequences, packed_queries_of, within
from ragged_attention.portable.numba._vectors import allocate, compiled, int32_at, int_at, set_int

OPERANDS = ("slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs")
NUMBERS = ("num_tokens", "wide_slots", "max_num_seqs", "num_pages", "page_size", "capacity")
STRIDES = {"page_indices": "seq"}
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
                page = int32_at(call.page_indices, seq * call.page_indices_seq_stride + position // call.page_size)
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


def numbers_of(call: WriteKvPages | WriteMlaCache) -> dict[str, int]:
    """The numbers of these arrays that the call does not have under the same names."""
    if call.page_indices is None:
        return {"wide_slots": dtype_name(call.slot_mapping) == "int64", "capacity": 0}
    num_rows, pages_per_seq = call.page_indices.shape
    return {"max_num_seqs": most_sequences(call, num_rows), "capacity": pages_per_seq * call.page_size}
