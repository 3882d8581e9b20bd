"""The combine kernel: it merges the KV splits of each row, always in the same order, into the row's result."""

import dataclasses
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import load_scale, narrow
from ragged_attention.kernels_triton._latent.lists import ListKind, Lists, list_splits
from ragged_attention.kernels_triton._mask import Mask, MaskKind
from ragged_attention.kernels_triton._segments import with_later
from ragged_attention.kernels_triton._sequences import VARYING, count_sequences, query_edge
from ragged_attention.kernels_triton._softmax import LN2, finish, merge_parts
from ragged_attention.kernels_triton._splits import Batch, Division, schedule_edge, stored_splits
from ragged_attention.kernels_triton._tiles import OLDER_COMPILER, dependent, next_power_of_2, overlaps

TOGETHER: tl.constexpr = tl.constexpr(4)  # segments merged in one iteration
# The values that a warp merges at a time. With other numbers of warps, some shapes spill 8 to 16 bytes on sm_80.
VALUES_PER_WARP = 2048 if OLDER_COMPILER else 1024


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Combination(Constants):
    """The layout of split results in memory, and of the merged results.

    An *item* is the unit that is split: a sequence, or one query token if every token has its own list of keys.
    """

    GROUP: int  # query heads per KV head
    NUM_HEADS: int
    ROWS: int  # rows stored per split, padding included; an item with more rows was not split
    DV: int  # columns of a row
    DV_PAD: int
    MERGED: int  # splits merged at a time
    Q_TOKENS: int  # query tokens per item, or 0 if `cu_q_lens` determines them
    ITEMS: int  # items per sequence
    DIVISION: Division | None  # how the attention kernel divided sequences; None for lists of keys
    MASK: MaskKind | None  # the attention kernel's masks
    LISTS: ListKind | None  # the lists that the attention kernel divided; None if a schedule divided them
    LSE_BY_HEAD: bool  # whether lse is [S, H, Q] instead of [T, H]
    HAS_NUM_SEQS: bool
    HAS_SINKS: bool
    V_SCALE_STRIDE: int
    PDL: bool
    EVEN: bool = False  # whether each item has `num_splits` splits
    IN_ORDER: bool = False  # whether splits are segments, merged one after the other; see `_segments`


@triton.jit
def merge_segments(parts_ptr, lses_ptr, count, stride, DV: tl.constexpr, DV_PAD: tl.constexpr):
    """`merge_parts`, but in the order of the parts: the bits equal those of one program that visits all segments."""
    dv = tl.arange(0, DV_PAD)
    one = tl.arange(0, 1)
    state = (tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32), tl.zeros([1, DV_PAD], tl.float32))
    for start in range(0, count, TOGETHER):
        for index in tl.static_range(TOGETHER):  # unrolled, so that all loads can precede the sums
            place = (start + index + one).to(tl.int64) * stride
            exists = start + index + one < count
            lse = tl.load(lses_ptr + place, mask=exists, other=float("-inf"))
            exists = (exists & (lse != float("-inf")))[:, None] & (dv < DV)[None, :]
            rows = tl.load(parts_ptr + place[:, None] * DV + dv[None, :], mask=exists, other=0)
            state = with_later(state, rows, lse)
    m_i, l_i, acc = state
    return tl.reshape(acc, [DV_PAD]), tl.max(m_i, 0), tl.max(l_i, 0)


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    parts_ptr, part_lses_ptr, part_maxima_ptr, schedule_ptr, cu_q_lens_ptr, num_seqs_ptr, sinks_ptr, v_scale_ptr,
    lens_ptr, extra_lens_ptr, given_out_ptr, given_lse_ptr, given_max_ptr, out_ptr, lse_ptr, max_ptr,
    num_tokens, max_num_seqs, num_parts, v_scale_factor, num_splits, longest, extra_longest, window,
    COMBINATION: tl.constexpr,
):  # fmt: skip
    """Merge the splits of an item's rows of one KV head; the programs along the grid's third axis share the rows.

    The kernel computes how the item was split in the same way as the attention kernel. An item with one split already
    has its result.
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
        mask = Mask(window)
        if COMBINATION.DIVISION is not None:
            num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, COMBINATION.HAS_NUM_SEQS)
            batch = Batch(cu_q_lens_ptr, lens_ptr, num_seqs, max_num_seqs, num_tokens, longest)
            first, count = stored_splits(seq, batch, mask, num_splits, COMBINATION.MASK, COMBINATION.DIVISION)
        elif COMBINATION.LISTS is not None:
            lists = Lists(lens_ptr, extra_lens_ptr, longest, extra_longest)
            first = seq * num_splits
            count = list_splits(lists, seq, item % COMBINATION.ITEMS, num_splits, mask, COMBINATION.LISTS)
        elif COMBINATION.EVEN:
            first = seq * num_splits
            count = num_splits
        else:
            first = schedule_edge(schedule_ptr, seq, num_parts)
            count = schedule_edge(schedule_ptr, seq + 1, num_parts) - first
        step: tl.constexpr = COMBINATION.ITEMS * KV_HEADS * COMBINATION.ROWS
        dv = tl.arange(0, COMBINATION.DV_PAD)
        for row in range(tl.program_id(2), tl.where(count != 1, num_rows, 0), tl.num_programs(2)):
            part = (first.to(tl.int64) * COMBINATION.ITEMS + item % COMBINATION.ITEMS) * KV_HEADS + kv_head
            part = part * COMBINATION.ROWS + row
            if COMBINATION.IN_ORDER:
                acc, m_i, l_i = merge_segments(
                    parts_ptr + part * DV, part_lses_ptr + part, count, step, DV, COMBINATION.DV_PAD
                )
            else:
                acc, m_i, l_i = merge_parts(
                    parts_ptr + part * DV, part_lses_ptr + part, count, step, 1.0, COMBINATION.MERGED, DV,
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
                for number in range(0, count, COMBINATION.MERGED):
                    number += tl.arange(0, COMBINATION.MERGED)
                    maxima = tl.load(part_maxima_ptr + part + number.to(tl.int64) * step, mask=number < count,
                                     other=float("-inf"))  # fmt: skip
                    largest = tl.maximum(largest, tl.max(maxima, 0))
                tl.store(max_ptr + out, largest * LN2)


def combine(launch: Any, call: Any, stored: Any, results: Any, operands: Any, numbers: Any, **constants: Any) -> Any:
    """Enqueue the kernel; returns `results`, in which the kernel writes the rows that were split.

    `stored` has the parts [splits, ITEMS, K, ROWS, DV], their lses and largest logits without the last axis, and the
    schedule. `results` has out, lse and optionally the largest logits. `operands` has cu_q_lens, num_seqs, sinks,
    v_scale and the lengths of the sequences or of both lists. Stand-ins replace absent arrays. `constants` has the
    fields of `Combination` that do not follow from the call, and `most_rows`, the programs per item and KV head.
    """
    has_max, most_rows = len(results) == 3, constants.pop("most_rows")
    width = next_power_of_2(call.out_shape[-1])
    at_once = 2 * TOGETHER.value if constants.get("IN_ORDER") else constants["MERGED"]  # partial rows in registers
    combination = Combination(
        NUM_HEADS=call.num_q_heads,
        DV=call.out_shape[-1],
        DV_PAD=width,
        HAS_SINKS=call.sinks is not None,
        PDL=overlaps(call),
        **constants,
    )
    return launch(
        combine_kernel,
        (numbers["max_num_seqs"] * constants["ITEMS"], call.num_q_heads // constants["GROUP"], most_rows),
        (*stored, *operands, *results, *([] if has_max else results[1:])),
        [],
        inplace=(10, 11, 12) if has_max else (10, 11),
        **({} if has_max else {"max_ptr": None}),
        **dependent(overlaps(call)),
        num_warps=min(max(at_once * width // VALUES_PER_WARP, 1), 4),
        num_stages=1,
        COMBINATION=combination,
        **numbers,
    )
