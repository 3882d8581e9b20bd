"""This step's K and V, written (and quantised) into the pages on a CPU, in place.

A program writes the tokens of some pages, in their order, so that of two tokens for one slot the later one wins.
"""

from typing import Any

from ragged_attention.calls import WriteKvPages, dtype_name
from ragged_attention.portable._no_tuning import Tile as Tile
from ragged_attention.portable._no_tuning import heuristic as heuristic
from ragged_attention.portable.numba._call import AXES, cannot_run, strides_of_pages, strides_of_rows
from ragged_attention.portable.numba._formats import CODES, narrow, size_of, widen
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._records import NO_MEMORY, Fields, programs
from ragged_attention.portable.numba._scales import fields_of, numbers_of, scale_of
from ragged_attention.portable.numba._sequences import PACKED, kv_len_of, num_sequences, queries_of
from ragged_attention.portable.numba._vectors import (
    LANES,
    allocate,
    compiled,
    int32_at,
    int_at,
    release,
    set_int,
)

FIELDS = Fields(
    operands=("k", "v", "k_pages", "v_pages", "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "cu_kv_lens",
              "num_seqs", "k_scale", "v_scale"),
    results=("new_k_pages", "new_v_pages"),
    numbers=(
        "num_tokens", "num_kv_heads", "head_dim", "v_head_dim", "max_num_seqs", "layout", "format", "cache_format",
        "new_k_token_stride", "new_k_head_stride", "new_v_token_stride", "new_v_head_stride", "wide_slots",
        "num_pages", "page_size", "capacity", "table_stride",
        *(f"{name}_{axis}_stride" for name in "kv" for axis in AXES), "v_offset",
        *fields_of("k_scale"), *fields_of("v_scale"), "num_threads",
    ),
    plan=("slots",),
    floats=("k_scale_number", "v_scale_number"),
)  # fmt: skip
call_of = FIELDS.at
FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale"})
PROGRAMS = 16


def why_not(call: WriteKvPages) -> str | None:
    return cannot_run(call)


@compiled
def slots_from_tables(call):
    """The slot of each token that a sequence has; the step's tokens are the last ones of its length."""
    for seq in range(num_sequences(call)):
        start, stop = queries_of(call, seq)
        for token in range(start, stop):
            position = kv_len_of(call, seq) - stop + token
            set_int(call.slots, token, -1)
            if position >= 0:
                page = int32_at(call.page_indices, seq * call.table_stride + position // call.page_size)
                if 0 <= page < call.num_pages:
                    set_int(call.slots, token, page * call.page_size + position % call.page_size)


def plan(address):
    """Find the slot of each token, -1 for none."""
    call = call_of(address)
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
def write(call, token, slot, row):
    """One token's K and V of all heads into its slot."""
    page, slot = slot // call.page_size, slot % call.page_size
    size, stored = size_of(call.format), size_of(call.cache_format)
    for head in range(call.num_kv_heads):
        scale = scale_of(call.k_scale, call.k_scale_format, call.k_scale_stride, call.k_scale_number, head)
        source = call.k + size * (token * call.new_k_token_stride + head * call.new_k_head_stride)
        target = page * call.k_page_stride + slot * call.k_slot_stride + head * call.k_head_stride
        widen(call.format, source, row, call.head_dim)
        narrow(call.cache_format, row, call.new_k_pages + stored * target, call.head_dim, scale)
        scale = scale_of(call.v_scale, call.v_scale_format, call.v_scale_stride, call.v_scale_number, head)
        source = call.v + size * (token * call.new_v_token_stride + head * call.new_v_head_stride)
        target = page * call.v_page_stride + slot * call.v_slot_stride + head * call.v_head_stride + call.v_offset
        widen(call.format, source, row, call.v_head_dim)
        narrow(
            call.cache_format,
            row,
            (call.new_v_pages if call.new_v_pages else call.new_k_pages) + stored * target,
            call.v_head_dim,
            scale,
        )


def work(address):
    """Programs, each of the tokens of some pages."""
    call = call_of(address)
    row = allocate(4 * (max(call.head_dim, call.v_head_dim) + LANES))
    for index in programs(address, call.num_programs):
        for token in range(call.num_tokens):
            slot = int_at(call.slots, token)
            if slot >= 0 and slot // call.page_size % call.num_programs == index:
                write(call, token, slot, row)
    release(row)
    return 0


KERNEL = Kernel("write_kv_pages", FIELDS, plan, work)


def _table_numbers(call: WriteKvPages, tables: Any, launch: Any) -> dict[str, int]:
    if tables is None:
        return dict.fromkeys(("max_num_seqs", "capacity", "table_stride"), 0)
    return {
        "max_num_seqs": call.num_seqs if isinstance(call.num_seqs, int) else tables.shape[0],
        "capacity": call.capacity,
        "table_stride": launch.strides(tables)[0],
    }


def run(call: WriteKvPages, tile: Tile, launch: Any) -> list[Any]:
    del tile
    k, v = launch.packed(call.k), launch.packed(call.v)
    k_pages, v_pages = (call.kv_pages, None) if call.combined else call.kv_pages
    k_scale, k_numbers = numbers_of("k_scale", call.k_scale, launch)
    v_scale, v_numbers = numbers_of("v_scale", call.v_scale, launch)
    tables = None if call.page_indices is None else launch.packed(call.page_indices)
    slots = None if call.slot_mapping is None else launch.contiguous(call.slot_mapping)
    results = launch.native(
        KERNEL,
        {
            "k": k,
            "v": v,
            "k_pages": k_pages,
            "v_pages": v_pages,
            "slot_mapping": slots,
            "page_indices": tables,
            "kv_lens": None if tables is None else launch.contiguous(call.kv_lens),
            "cu_q_lens": None if tables is None else launch.contiguous(call.cu_q_lens),
            "cu_kv_lens": None,
            "num_seqs": None if isinstance(call.num_seqs, int) else call.num_seqs,
            "k_scale": k_scale,
            "v_scale": v_scale,
        },
        {"new_k_pages": "k_pages", "new_v_pages": None if call.combined else "v_pages"},
        {
            "num_tokens": call.num_tokens,
            "num_kv_heads": call.num_kv_heads,
            "head_dim": call.head_dim,
            "v_head_dim": call.v_head_dim,
            "layout": PACKED,
            "format": CODES[dtype_name(k)],
            "cache_format": CODES[call.cache_dtype],
            **strides_of_rows("new_k", k, launch),
            **strides_of_rows("new_v", v, launch),
            "wide_slots": slots is not None and dtype_name(slots) == "int64",
            "num_pages": call.num_pages,
            "page_size": call.page_size,
            **_table_numbers(call, tables, launch),
            **strides_of_pages(call, "PGKD", launch),
            **k_numbers,
            **v_numbers,
            "num_threads": launch.num_threads,
        },
    )
    return [results["new_k_pages"]] if call.combined else [results["new_k_pages"], results["new_v_pages"]]
