"""Merges partial attention results over disjoint ranges of keys on a CPU."""

import math
from typing import Any

from ragged_attention.calls import MergeAttentionStates, dtype_name
from ragged_attention.portable.numba._call import cannot_run
from ragged_attention.portable.numba._formats import CODES, narrow, read_some, size_of
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._records import Fields, programs
from ragged_attention.portable.numba._softmax import LN2, LOG2E, NOTHING, power, weight_of_sink
from ragged_attention.portable.numba._vectors import (
    LANES,
    allocate,
    compiled,
    float_at,
    fma,
    load,
    set_float,
    splat,
    store,
    zero,
)

FIELDS = Fields(
    operands=("outs", "lses", "sinks"),
    results=("out", "lse"),
    numbers=("num_parts", "num_rows", "num_heads", "width", "out_format"),
    formats=("outs",),
)
call_of = FIELDS.at
FEATURES = frozenset({"sinks", "out_dtype"})
ROWS = 256  # rows per program
why_not = cannot_run


def plan(address):
    return (call_of(address).num_rows + ROWS - 1) // ROWS


@compiled
def merge(call, row, out):
    """Merge one row of all parts; `out` is memory for its sums. Parts without keys are ignored, even if NaN."""
    m_i, l_i, width, size = NOTHING, 0.0, call.width, size_of(call.outs_format)
    for part in range(call.num_parts):
        m_i = max(m_i, float_at(call.lses, part * call.num_rows + row))
    zero(out, 4 * (width + LANES))
    for part in range(call.num_parts if m_i > NOTHING else 0):
        place = part * call.num_rows + row
        weight = power((float_at(call.lses, place) - m_i) * LOG2E)
        l_i += weight
        for column in range(0, width if weight > 0 else 0, LANES):
            values = read_some(call.outs_format, call.outs + size * place * width, column, width - column)
            store(out, column, fma(splat(weight), values, load(out, column)))
    divisor = 1.0
    if m_i > NOTHING:
        divisor = l_i + weight_of_sink(call.sinks, row % call.num_heads, m_i * LOG2E)
    narrow(call.out_format, out, call.out + size_of(call.out_format) * row * width, width, divisor)
    set_float(call.lse, row, m_i + math.log2(l_i) * LN2 if m_i > NOTHING else NOTHING)


def work(address):
    """Run programs; each handles ROWS rows."""
    call = call_of(address)
    out = allocate(4 * (call.width + LANES))
    for index in programs(address, out):
        for row in range(index * ROWS, min((index + 1) * ROWS, call.num_rows)):
            merge(call, row, out)
    return 0


KERNEL = Kernel("merge_attention_states", FIELDS, plan, work)


def run(call: MergeAttentionStates, tile: Any, launch: Any) -> Any:
    num_parts, num_tokens, num_heads, width = call.outs.shape
    numbers = {
        "num_parts": num_parts, "num_rows": num_tokens * num_heads, "num_heads": num_heads, "width": width,
        "out_format": CODES[call.out_dtype or dtype_name(call.outs)],
    }  # fmt: skip
    return tuple(KERNEL.launch(launch, call, tile, {}, numbers).values())
