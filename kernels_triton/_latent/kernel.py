"""Latent attention: the attention kernel and its launch."""

import dataclasses
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ragged_attention.calls import CacheFormat
from ragged_attention.kernels_triton._combine import combine
from ragged_attention.kernels_triton._compiler import zero_after
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._latent.lists import ListKind, Lists, list_blocks, token_and_head
from ragged_attention.kernels_triton._latent.operands import is_copied, operands
from ragged_attention.kernels_triton._latent.plan import MIN_INVARIANT_SPLIT, MIN_SPLIT, Tile, Work
from ragged_attention.kernels_triton._latent.rows import Finished, RowFormat, load_queries, store_groups, zeros_like
from ragged_attention.kernels_triton._latent.softmax import (
    SEPARATE_QK_ROWS,
    Cache,
    KeyList,
    Loop,
    Queries,
    Scales,
    Seen,
    attend,
    first_state,
    lse_in_base_2,
    restoring_factor,
    sum_of_each_row,
)
from ragged_attention.kernels_triton._mask import Mask, MaskKind, first_key
from ragged_attention.kernels_triton._sequences import VARYING
from ragged_attention.kernels_triton._softmax import LN2, LOG2E, finish
from ragged_attention.kernels_triton._splits import divide_blocks, find_entry
from ragged_attention.kernels_triton._tiles import OLDER_COMPILER, Sizes, cdiv, next_power_of_2, overlaps

MAX_PROGRAMS = 2**16 - 1  # the limit of a grid's third axis


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Config(Constants):
    """The compile-time constants of a launch of the kernel."""

    FORMAT: RowFormat
    EXTRA_FORMAT: RowFormat  # the format of the second cache's rows
    LOOP: Loop
    LISTS: ListKind
    NUM_HEADS: int
    GROUP: int  # query heads per KV head
    ROWS: int  # rows per job and KV head
    BLOCK_H: int  # rows per program
    DV: int  # columns of a result row
    CAP_UNIT: float  # see `unit_under_cap`
    HAS_SINKS: bool
    HAS_MAX: bool  # whether the kernel also returns each row's largest logit
    SCHEDULED: bool  # whether a schedule says how many splits each sequence has
    SPLIT_KV: bool  # whether a job can have several splits
    PDL: bool  # programmatic dependent launch: the combine kernel may begin before this one has ended


@triton.jit(do_not_specialize=VARYING)
def latent_kernel(
    q_ptr, cache_ptr, list_ptr, lens_ptr, extra_cache_ptr, extra_list_ptr, extra_lens_ptr, num_splits_ptr, sinks_ptr,
    out_ptr, lse_ptr, max_ptr, parts_ptr, part_lses_ptr, part_maxima_ptr,
    num_seqs, num_entries, fixed_splits, q_seq_stride, q_token_stride, q_head_stride,
    page_stride, slot_stride, head_stride, num_slots, longest, list_seq_stride, list_token_stride, list_head_stride,
    extra_page_stride, extra_slot_stride, extra_num_slots, extra_longest, extra_list_seq_stride,
    extra_list_token_stride, window, logit_scale, soft_cap, CONFIG: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_H rows of one job for one KV head to one split of the job's keys.

    The result of a job with one split is final. Otherwise the split's normalised result goes to parts [entries, JOBS,
    K, ROWS, DV]; its base-2 lse and largest logit go to arrays without the last axis. Without a schedule, the combine
    kernel computes again how many splits a job has.
    """
    LOOP: tl.constexpr = CONFIG.LOOP
    FORMAT: tl.constexpr = CONFIG.FORMAT
    OPERANDS: tl.constexpr = LOOP.OPERANDS
    KIND: tl.constexpr = CONFIG.LISTS.MASK
    NUM_HEADS: tl.constexpr = CONFIG.NUM_HEADS
    GROUP: tl.constexpr = CONFIG.GROUP
    Q_TOKENS: tl.constexpr = CONFIG.LISTS.Q_TOKENS
    ROWS: tl.constexpr = CONFIG.ROWS
    BLOCK_H: tl.constexpr = CONFIG.BLOCK_H
    BLOCK_KV: tl.constexpr = LOOP.BLOCK_KV
    JOBS: tl.constexpr = Q_TOKENS if LOOP.SPARSE else 1  # pyright: ignore[reportAssignmentType]
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_H - 1) // BLOCK_H
    if CONFIG.PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(1)
    row = tl.program_id(0) % ROW_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    job = tl.program_id(0) // ROW_BLOCKS % JOBS
    entry = tl.program_id(0) // (ROW_BLOCKS * JOBS)
    mask = Mask(window)
    seq, split, count = find_entry(entry, num_splits_ptr, num_seqs, num_entries, fixed_splits, CONFIG.SCHEDULED)
    num_keys, num_extra_keys, skipped, num_blocks = list_blocks(
        Lists(lens_ptr, extra_lens_ptr, longest, extra_longest), seq, job, mask, CONFIG.LISTS
    )
    all_blocks = num_blocks + (num_extra_keys + BLOCK_KV - 1) // BLOCK_KV
    splits, blocks_each = divide_blocks(all_blocks, count, CONFIG.SCHEDULED, CONFIG.LISTS.MIN_BLOCKS)
    if split < splits:
        begin = tl.minimum(split * blocks_each, all_blocks)
        end = tl.minimum(begin + blocks_each, all_blocks)
        valid = row < ROWS
        token, head = token_and_head(row, job, kv_head, GROUP, LOOP.SPARSE)
        sequence = seq.to(tl.int64)
        limit = num_keys - (Q_TOKENS - 1) + token
        seen_first = 0
        seen_end = num_keys
        extra_start = num_blocks  # the first block of the second list
        if KIND.HAS_FIRST_KEY:  # the first keys, which no row sees, are not read
            extra_start += skipped
            first_token = tl.program_id(0) % ROW_BLOCKS * BLOCK_H // GROUP
            seen_first = tl.maximum(first_key(num_keys - Q_TOKENS + first_token, mask, KIND), 0)
            begin = tl.maximum(begin + skipped, seen_first // BLOCK_KV)
            end += skipped
        if KIND.CAUSAL:  # the last keys, which no row sees, are not read
            last_token = tl.minimum((tl.program_id(0) % ROW_BLOCKS * BLOCK_H + BLOCK_H - 1) // GROUP, Q_TOKENS - 1)
            seen_end = tl.maximum(num_keys - (Q_TOKENS - 1) + last_token, 0)
            end = tl.minimum(end, (seen_end + BLOCK_KV - 1) // BLOCK_KV)
        q_rows = (
            q_ptr + sequence * q_seq_stride + token.to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
        )
        cache = cache_ptr + kv_head.to(tl.int64) * head_stride
        wide_job = job.to(tl.int64)
        list_row = list_ptr + sequence * list_seq_stride + wide_job * list_token_stride
        list_row += kv_head.to(tl.int64) * list_head_stride
        extra_row = extra_list_ptr + sequence * extra_list_seq_stride + wide_job * extra_list_token_stride
        extra_begin = tl.maximum(begin - extra_start, 0)
        extra_end = tl.maximum(end - extra_start, 0)
        begin = tl.minimum(begin, extra_start)
        end = tl.minimum(end, extra_start)
        groups, lost, q_rest, lost_rest, unit = load_queries(q_rows, valid, OPERANDS)
        state = first_state(BLOCK_H, LOOP)
        # If queries are only loaded, Triton 3.6 to 3.9 keep them in shared memory, where wgmma reads them. Computed
        # queries are copied into registers in every iteration, unless they are carried by a loop. So an outer loop
        # carries them. It has one iteration, but compilers cannot know this. For decoded rows with folded scales,
        # queries are only loaded; the outer loop is used because it lets the products with values overlap.
        CARRIED: tl.constexpr = (OPERANDS.DIVIDED or FORMAT.FOLDED) and BLOCK_H >= SEPARATE_QK_ROWS
        once = 1
        if CARRIED:
            once = tl.minimum(splits - split, 1)
        for _ in range(once):
            queries = Queries(groups, lost, q_rest, lost_rest, unit)
            state = attend(
                queries, state, Cache(cache, page_stride, slot_stride, num_slots),
                KeyList(list_row, begin, end, seen_first, seen_end), Seen(limit - window, limit),
                Scales(logit_scale, soft_cap, LOG2E / CONFIG.CAP_UNIT), FORMAT, LOOP,
            )  # fmt: skip
            if CONFIG.LISTS.HAS_EXTRA:
                state = attend(
                    queries, state, Cache(extra_cache_ptr, extra_page_stride, extra_slot_stride, extra_num_slots),
                    KeyList(extra_row, extra_begin, extra_end, 0, num_extra_keys), Seen(limit - window, limit),
                    Scales(logit_scale, soft_cap, LOG2E / CONFIG.CAP_UNIT), CONFIG.EXTRA_FORMAT, LOOP,
                )  # fmt: skip
            if CARRIED:
                groups = zeros_like(groups)
        m_i, largest, sums, acc, acc_rest = state
        l_i = sum_of_each_row(sums)
        restored = restoring_factor(m_i, l_i, largest, FORMAT.RESCALED)
        row = tl.program_id(0) % ROW_BLOCKS * BLOCK_H + zero_after(l_i) + tl.arange(0, BLOCK_H)
        valid = row < ROWS
        token, head = token_and_head(row, job, kv_head, GROUP, LOOP.SPARSE)
        if not CONFIG.SPLIT_KV or splits == 1:
            factor, lse = finish(m_i, l_i, sinks_ptr, head, valid, 1.0, CONFIG.HAS_SINKS)
            index = (sequence * Q_TOKENS + token) * NUM_HEADS + head
            store_groups(out_ptr, index, Finished(acc, factor * restored, acc_rest, factor), valid, OPERANDS,
                         OPERANDS.REST_IS_VALUE, CONFIG.DV)  # fmt: skip
            index = (sequence * NUM_HEADS + head) * Q_TOKENS + token
            tl.store(lse_ptr + index, lse, mask=valid)
            if CONFIG.HAS_MAX:
                tl.store(max_ptr + index, m_i * LN2, mask=valid)
        else:
            factor = 1.0 / tl.where(l_i == 0.0, 1.0, l_i)
            index = ((entry.to(tl.int64) * JOBS + job) * (NUM_HEADS // GROUP) + kv_head) * ROWS + row
            store_groups(parts_ptr, index, Finished(acc, factor * restored, acc_rest, factor), valid, OPERANDS,
                         OPERANDS.REST_IS_VALUE, CONFIG.DV)  # fmt: skip
            tl.store(part_lses_ptr + index, lse_in_base_2(m_i, l_i), mask=valid)
            if CONFIG.HAS_MAX:
                tl.store(part_maxima_ptr + index, m_i, mask=valid)


def capped_scale(scale: float, soft_cap: float | None) -> tuple[dict[str, float], float]:
    """(the kernels' arguments for `Scales`, the constant CAP_UNIT)."""
    unit = 1.0 if soft_cap is None or soft_cap < 1 else 0.0625  # as in `unit_under_cap`
    factor = LOG2E.value if soft_cap is None else unit
    return {"logit_scale": scale * factor, "soft_cap": (soft_cap or 1.0) * unit}, unit


def sums_by_column(call: Any, form: CacheFormat, sizes: Sizes, *, decoded: bool = False) -> bool:
    """Whether the softmax keeps its sums by column; see `no_sums`.

    Such sums take registers. 32 rows on four warps leave too few registers, and so do 64 rows with two cache formats.
    64 rows with a plain cache leave enough, but Triton 3.6 to 3.9 would then give the sums an operand's layout and
    compute each exponential twice.
    """
    if call.d_v > 512:
        return False
    if is_copied(form, decoded):
        return sizes.rows < SEPARATE_QK_ROWS.value and sizes.warps * 8 > sizes.rows
    return {16: sizes.stages > 1, 32: not OLDER_COMPILER, 64: sizes.stages > 2}.get(sizes.rows, True)


def config_of(
    work: Work, tile: Tile, launch: Any, lists: ListKind, *, split_kv: bool, cap_unit: float, max_logits: bool
) -> Config:
    """The `Config` of a call's launch."""
    call, keys, extra = work.call, work.keys, work.extra or work.keys
    arch, sizes = call.device.arch, Sizes(tile.block_h, tile.block_kv, tile.num_warps, tile.num_stages)
    return Config(
        FORMAT=keys.row_format(arch, launch),
        EXTRA_FORMAT=extra.row_format(arch, launch),
        LOOP=Loop(
            SPARSE=work.sparse,
            CAUSAL=work.causal,
            HAS_WINDOW=work.window is not None,
            HAS_SOFT_CAP=work.soft_cap is not None,
            BLOCK_KV=tile.block_kv,
            SUMS_BY_COLUMN=sums_by_column(call, keys.form, sizes, decoded=keys.decoded),
            OPERANDS=operands(call, tile.block_h, decoded=keys.decoded),
        ),
        LISTS=lists,
        NUM_HEADS=call.num_q_heads,
        GROUP=call.group,
        ROWS=work.rows,
        BLOCK_H=tile.block_h,
        DV=call.d_v,
        CAP_UNIT=cap_unit,
        HAS_SINKS=call.sinks is not None,
        HAS_MAX=max_logits,
        SCHEDULED=work.schedule is not None,
        SPLIT_KV=split_kv,
        PDL=overlaps(call),
    )


def list_kind(work: Work, tile: Tile) -> ListKind:
    """The `ListKind` of a call."""
    lens, extra_lens = work.keys.lens, None if work.extra is None else work.extra.lens
    return ListKind(
        MASK=MaskKind(CAUSAL=work.causal, HAS_WINDOW=work.window is not None),
        Q_TOKENS=work.num_q_tokens,
        HAS_LENS=lens is not None,
        LENS_OF_TOKENS=lens is not None and len(lens.shape) == 2,
        HAS_EXTRA=work.extra is not None,
        HAS_EXTRA_LENS=extra_lens is not None,
        EXTRA_LENS_OF_TOKENS=extra_lens is not None and len(extra_lens.shape) == 2,
        BLOCK_KV=tile.block_kv,
        MIN_BLOCKS=cdiv(MIN_INVARIANT_SPLIT if tile.invariant else MIN_SPLIT, tile.block_kv),
    )


def run(work: Work, tile: Tile, launch: Any, *, max_logits: bool) -> Any:
    """Enqueue the kernels; returns out, lse and max_logits. Unless requested, max_logits is a stand-in."""
    call, keys, extra, scheduled = work.call, work.keys, work.extra or work.keys, work.schedule is not None
    entries = work.num_seqs * tile.num_splits
    if scheduled and work.num_seqs:  # programs search the schedule, so it must not be empty
        entries = work.num_seqs + work.schedule[0].shape[0]
    split_kv = tile.num_splits > 1 or scheduled
    absent = work.q  # a stand-in for absent arrays
    lens, extra_lens = (absent if side.lens is None else launch.contiguous(side.lens) for side in (keys, extra))
    num_splits = launch.packed(work.schedule[1]) if scheduled else absent
    sinks = absent if call.sinks is None else launch.packed(call.sinks)
    scales, cap_unit = capped_scale(call.scale, work.soft_cap)
    items, lists = work.jobs_per_seq, list_kind(work, tile)
    parts = (entries, items, call.num_kv_heads, work.rows)
    nothing = ((1,), "float32")
    out, lse, maxima, *partial = launch(
        latent_kernel,
        (entries * items * cdiv(work.rows, tile.block_h), call.num_kv_heads),
        (work.q, keys.cache, keys.lists, lens, extra.cache, extra.lists, extra_lens, num_splits, sinks),
        [
            (call.out_shape, call.result_dtype),
            (work.lse_shape, "float32"),
            (work.lse_shape, "float32") if max_logits else nothing,
            ((*parts, call.d_v), "float32") if split_kv else nothing,
            (parts, "float32") if split_kv else nothing,
            (parts, "float32") if split_kv and max_logits else nothing,
        ],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        num_seqs=work.num_seqs,
        num_entries=entries,
        fixed_splits=1 if scheduled else tile.num_splits,
        **dict(zip(("q_seq_stride", "q_token_stride", "q_head_stride"), work.q_strides, strict=True)),
        **keys.addresses(launch),
        # The second cache has one KV head. Without a second cache, these arguments are not used.
        **{f"extra_{name}": number for name, number in extra.addresses(launch).items() if "head" not in name},
        window=work.window or 0,
        **scales,
        CONFIG=config_of(work, tile, launch, lists, split_kv=split_kv, cap_unit=cap_unit, max_logits=max_logits),
    )
    if not split_kv or not work.num_seqs:
        return out, lse, maxima
    results = (out, lse, maxima) if max_logits else (out, lse)
    inputs = (absent, absent, sinks, absent, lens, extra_lens)
    numbers = {"num_parts": entries, "longest": keys.longest, "extra_longest": extra.longest}
    lists = None if scheduled else lists
    out, lse, *largest = _combine_lists(launch, work, tile, (*partial, num_splits), results, inputs, numbers, lists)
    return out, lse, *(largest or [maxima])


def _combine_lists(
    launch: Any, work: Work, tile: Tile, stored: Any, results: Any, operands: Any, numbers: dict[str, int], lists: Any
) -> Any:
    """`combine` for a call's lists of keys, or for its schedule if `lists` is None."""
    call = work.call
    sizes = {
        "num_tokens": work.num_seqs * work.num_q_tokens,
        "max_num_seqs": work.num_seqs,
        "num_splits": tile.num_splits,
        "window": work.window or 0,
        "v_scale_factor": 1.0,
    }
    return combine(
        launch,
        call,
        stored,
        results,
        operands,
        sizes | numbers,
        GROUP=call.group,
        ROWS=work.rows,
        Q_TOKENS=work.num_q_tokens // work.jobs_per_seq,
        ITEMS=work.jobs_per_seq,
        DIVISION=None,
        MASK=None,
        LISTS=lists,
        LSE_BY_HEAD=True,
        HAS_NUM_SEQS=False,
        V_SCALE_STRIDE=-1,
        MERGED=min(next_power_of_2(tile.num_splits), max(1, 4096 // next_power_of_2(call.d_v))),
        most_rows=min(work.rows, MAX_PROGRAMS),
    )
