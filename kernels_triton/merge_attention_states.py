"""The merge of partial attention results in Triton, with one program per row."""

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import MergeAttentionStates
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._sequences import VARYING
from ragged_attention.kernels_triton._softmax import LN2, LOG2E, merge_parts
from ragged_attention.kernels_triton._tiles import expect_power_of_two, launchable, next_power_of_2

FEATURES = frozenset({"sinks", "out_dtype"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    num_warps: int = 4

    def __post_init__(self) -> None:
        expect_power_of_two(self, num_warps=(1, 16))


def why_not(call: MergeAttentionStates) -> str | None:
    return launchable(call, merge_kernel)


def heuristic(call: MergeAttentionStates) -> Tile:
    return Tile(num_warps=1 if call.outs.shape[0] * call.outs.shape[3] <= 1024 else 4)


@triton.jit(do_not_specialize=VARYING)
def merge_kernel(outs_ptr, lses_ptr, sinks_ptr, out_ptr, lse_ptr, count, rows, HAS_SINKS: tl.constexpr,
                 NUM_HEADS: tl.constexpr, PARTS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr):  # fmt: skip
    """Merge one row of `count` partial results, PARTS of them at a time."""
    row = tl.program_id(0).to(tl.int64)
    acc, m_i, l_i = merge_parts(
        outs_ptr + row * DV, lses_ptr + row, count, tl.cast(rows, tl.int64), LSE_UNIT=LOG2E, PARTS=PARTS, D=DV,
        D_PAD=DV_PAD,
    )  # fmt: skip
    empty = l_i == 0.0  # then acc is 0
    l_i = tl.where(empty, 1.0, l_i)
    lse = tl.where(empty, float("-inf"), (m_i + tl.math.log2(l_i)) * LN2)
    if HAS_SINKS:
        l_i += tl.math.exp2(tl.load(sinks_ptr + row % NUM_HEADS) * LOG2E - tl.where(empty, 0.0, m_i))
    out = acc / l_i
    dv = tl.arange(0, DV_PAD)
    tl.store(out_ptr + row * DV + dv, narrow(out, out_ptr.dtype.element_ty), mask=dv < DV)
    tl.store(lse_ptr + row, lse)


def run(call: MergeAttentionStates, tile: Tile, launch: Any) -> Any:
    count, num_tokens, num_heads, width = call.outs.shape
    outs, lses = launch.contiguous(call.outs), launch.contiguous(call.lses)
    sinks = lses if call.sinks is None else launch.packed(call.sinks)
    out, lse = launch(
        merge_kernel,
        (num_tokens * num_heads,),
        (outs, lses, sinks),
        call.results(),
        num_warps=tile.num_warps,
        num_stages=1,
        count=count,
        rows=num_tokens * num_heads,
        HAS_SINKS=call.sinks is not None,
        NUM_HEADS=num_heads,
        PARTS=min(next_power_of_2(count), max(1, 8192 // next_power_of_2(width))),
        DV=width,
        DV_PAD=next_power_of_2(width),
    )
    return out, lse
