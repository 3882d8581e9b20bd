"""The combine kernel: it merges the KV splits of each row, always in the same order, into the row's result."""

import dataclasses
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import load_scale, narrow
from ragged_attention.kernels_triton._sequences import VARYING, count_sequences, query_edge
from ragged_attention.kernels_triton._softmax import LN2, finish, merge_parts
from ragged_attention.kernels_triton._tiles import dependent, next_power_of_2, overlaps


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Combination(Constants):
    """The layout of split results in memory, and of the merged results.

    An *item* is the unit that is split: a sequence, or one query token if every token has its own list of keys.
    """

    GROUP: int  # query heads of a KV head
    NUM_HEADS: int
    ROWS: int  # rows of memory per split; an item with more rows was not split
    DV: int  # columns of a row
    DV_PAD: int
    MERGED: int  # splits merged at a time
    Q_TOKENS: int  # query tokens per item; 0: `cu_q_lens` has their number
    ITEMS: int  # items per sequence
    RANGES: int  # ranges of splits per sequence: one for each item, or one for all items
    LSE_BY_HEAD: bool  # whether lse is [S, H, Q] instead of [T, H]
    HAS_NUM_SEQS: bool
    HAS_SINKS: bool
    V_SCALE_STRIDE: int
    PDL: bool


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    parts_ptr, part_lses_ptr, part_maxima_ptr, ranges_ptr, cu_q_lens_ptr, num_seqs_ptr, sinks_ptr, v_scale_ptr,
    given_out_ptr, given_lse_ptr, given_max_ptr, out_ptr, lse_ptr, max_ptr,
    num_tokens, max_num_seqs, num_parts, range_end, v_scale_factor, COMBINATION: tl.constexpr,
):  # fmt: skip
    """Merge the splits of an item's rows of one KV head; the programs along the grid's third axis share the rows.

    The item's splits have the numbers [first, last), which `ranges` has at two indices that are `range_end` apart. An
    item with one split already has its result.
    """
    if COMBINATION.PDL:
        gdc_wait()
    GROUP: tl.constexpr = COMBINATION.GROUP
    NUM_HEADS: tl.constexpr = COMBINATION.NUM_HEADS
    KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    DV: tl.constexpr = COMBINATION.DV
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = item // COMBINATION.ITEMS
    if COMBINATION.Q_TOKENS == 0:
        q_len = query_edge(cu_q_lens_ptr, seq + 1, num_tokens) - query_edge(cu_q_lens_ptr, seq, num_tokens)
        num_rows = q_len * GROUP
        live = seq < count_sequences(num_seqs_ptr, max_num_seqs, COMBINATION.HAS_NUM_SEQS)
        num_rows = tl.where(live & (num_rows <= COMBINATION.ROWS), num_rows, 0)
    else:
        num_rows = COMBINATION.Q_TOKENS * GROUP
    if tl.program_id(2) < num_rows:
        range_ptr = ranges_ptr + (item if COMBINATION.RANGES == COMBINATION.ITEMS else seq)
        first = tl.minimum(tl.maximum(tl.load(range_ptr), 0), num_parts)
        last = tl.minimum(tl.load(range_ptr + range_end), num_parts)
        step: tl.constexpr = COMBINATION.ITEMS * KV_HEADS * COMBINATION.ROWS
        dv = tl.arange(0, COMBINATION.DV_PAD)
        for row in range(tl.program_id(2), tl.where(last - first != 1, num_rows, 0), tl.num_programs(2)):
            part = (first.to(tl.int64) * COMBINATION.ITEMS + item % COMBINATION.ITEMS) * KV_HEADS + kv_head
            part = part * COMBINATION.ROWS + row
            acc, m_i, l_i = merge_parts(
                parts_ptr + part * DV, part_lses_ptr + part, last - first, step, 1.0, COMBINATION.MERGED, DV,
                COMBINATION.DV_PAD,
            )  # fmt: skip
            v_scale = load_scale(v_scale_ptr, kv_head, v_scale_factor, COMBINATION.V_SCALE_STRIDE)
            start = item * COMBINATION.Q_TOKENS
            if COMBINATION.Q_TOKENS == 0:  # load it again: for sm_80, ptxas would spill the value loaded above
                start = query_edge(cu_q_lens_ptr, seq, num_tokens)
            token = start + row // GROUP
            head = kv_head * GROUP + row % GROUP
            factor, lse = finish(m_i, l_i, sinks_ptr, head, row < num_rows, v_scale, COMBINATION.HAS_SINKS)
            out = tl.cast(token, tl.int64) * NUM_HEADS + head
            tl.store(out_ptr + out * DV + dv, narrow(acc * factor, out_ptr.dtype.element_ty), mask=dv < DV)
            if COMBINATION.LSE_BY_HEAD:
                Q: tl.constexpr = COMBINATION.ITEMS * COMBINATION.Q_TOKENS
                out = (seq.to(tl.int64) * NUM_HEADS + head) * Q + token - seq * Q
            tl.store(lse_ptr + out, lse)
            if max_ptr is not None:
                largest = float("-inf")
                for number in range(0, last - first, COMBINATION.MERGED):
                    number += tl.arange(0, COMBINATION.MERGED)
                    maxima = tl.load(part_maxima_ptr + part + number.to(tl.int64) * step, mask=number < last - first,
                                     other=float("-inf"))  # fmt: skip
                    largest = tl.maximum(largest, tl.max(maxima, 0))
                tl.store(max_ptr + out, largest * LN2)


def combine(launch: Any, call: Any, stored: Any, results: Any, operands: Any, numbers: Any, **constants: Any) -> Any:
    """Enqueue the kernel; returns `results`, in which it writes the rows that were split.

    `stored` has the parts [splits, ITEMS, K, ROWS, DV], their lses and largest logits without the last axis (or a
    stand-in), and the ranges. `results` has out, lse and optionally the largest logits. `operands` has cu_q_lens,
    num_seqs, sinks and v_scale. `constants` has the fields of `Combination` that do not follow from the call, and
    `most_rows`, the maximum number of rows of an item.
    """
    wants_max, most_rows = len(results) == 3, constants.pop("most_rows")
    combination = Combination(
        NUM_HEADS=call.num_q_heads,
        DV=call.out_shape[-1],
        DV_PAD=next_power_of_2(call.out_shape[-1]),
        HAS_SINKS=call.sinks is not None,
        PDL=overlaps(call),
        **constants,
    )
    return launch(
        combine_kernel,
        (numbers["max_num_seqs"] * constants["ITEMS"], call.num_q_heads // constants["GROUP"], most_rows),
        (*stored, *operands, *results, *([] if wants_max else results[1:])),
        [],
        inplace=(8, 9, 10) if wants_max else (8, 9),
        **({} if wants_max else {"max_ptr": None}),
        **dependent(overlaps(call)),
        num_stages=1,
        COMBINATION=combination,
        **numbers,
    )
