"""Latent attention: the kernels, and how they are launched."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragged_attention.calls import CacheFormat
from ragged_attention.kernels_triton._latent.lists import (
    divide,
    find_entry,
    first_seen,
    list_length,
    split_edge,
    token_and_head,
)
from ragged_attention.kernels_triton._latent.operands import is_copied, operands
from ragged_attention.kernels_triton._latent.plan import MIN_SPLIT, OWN_SPLIT, Tile, Work
from ragged_attention.kernels_triton._latent.rows import (
    load_queries,
    store_columns,
    store_groups,
    zero_after,
    zeros_like,
)
from ragged_attention.kernels_triton._latent.softmax import (
    SEPARATE_QK_ROWS,
    Cache,
    Features,
    KeyList,
    Queries,
    Scales,
    Seen,
    attend,
    finish,
    no_sums,
    sum_of_each_row,
)
from ragged_attention.kernels_triton._sequences import VARYING
from ragged_attention.kernels_triton._softmax import LN2, LOG2E, merge_parts
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    cdiv,
    dependent,
    next_power_of_2,
    overlaps,
)


@triton.jit(do_not_specialize=VARYING)
def latent_kernel(
    q_ptr, cache_ptr, list_ptr, lens_ptr, extra_cache_ptr, extra_list_ptr, extra_lens_ptr, num_splits_ptr, sinks_ptr,
    out_ptr, lse_ptr, max_ptr, parts_ptr, part_lses_ptr, part_max_ptr,
    num_seqs, num_entries, fixed_splits, q_seq_stride, q_token_stride, q_head_stride,
    page_stride, slot_stride, head_stride, num_slots, longest,
    list_seq_stride, list_token_stride, list_head_stride, lens_seq_stride, lens_token_stride,
    extra_page_stride, extra_slot_stride, extra_num_slots, extra_longest,
    extra_list_seq_stride, extra_list_token_stride, extra_lens_seq_stride, extra_lens_token_stride,
    window, logit_scale, soft_cap, capped_scale,
    SPARSE: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    HAS_LENS: tl.constexpr, HAS_EXTRA: tl.constexpr, HAS_EXTRA_LENS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_MAX: tl.constexpr, SCHEDULED: tl.constexpr,
    FORMAT: tl.constexpr, EXTRA_FORMAT: tl.constexpr, OPERANDS: tl.constexpr,
    NUM_Q: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_KV: tl.constexpr, SUMS_BY_COLUMN: tl.constexpr,
    WHOLE: tl.constexpr, MIN_BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_H rows of one job for one KV head to one split of its keys.

    The result of a job with one split is final. Otherwise the split's normalised result goes to parts [entries, jobs of
    a sequence, K, ROWS, DV]; its base-2 lse and largest logit go to arrays of that shape without DV.
    """
    if PDL:
        gdc_launch_dependents()
    JOBS: tl.constexpr = NUM_Q if SPARSE else 1  # pyright: ignore[reportAssignmentType]
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_H - 1) // BLOCK_H
    KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    kv_head = tl.program_id(1)
    row = tl.program_id(0) % ROW_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    job = tl.program_id(0) // ROW_BLOCKS % JOBS
    entry = tl.program_id(0) // (ROW_BLOCKS * JOBS)
    seq, split, count = find_entry(entry, num_splits_ptr, num_seqs, num_entries, fixed_splits, SCHEDULED)
    last = list_length(lens_ptr, seq, job, longest, lens_seq_stride, lens_token_stride, HAS_LENS)
    skipped = first_seen(last - NUM_Q, window, HAS_WINDOW) // BLOCK_KV
    blocks = (last + BLOCK_KV - 1) // BLOCK_KV - skipped
    extra_last = 0
    if HAS_EXTRA:
        extra_last = list_length(extra_lens_ptr, seq, job, extra_longest, extra_lens_seq_stride,
                                 extra_lens_token_stride, HAS_EXTRA_LENS)  # fmt: skip
    all_blocks = blocks + (extra_last + BLOCK_KV - 1) // BLOCK_KV
    blocks_each, used = divide(all_blocks, count, SCHEDULED, MIN_BLOCKS)
    if split < used:
        begin = tl.minimum(split * blocks_each, all_blocks)
        end = tl.minimum(begin + blocks_each, all_blocks)
        valid = row < ROWS
        token, head = token_and_head(row, job, kv_head, GROUP, SPARSE)
        sequence = seq.to(tl.int64)
        limit = last - (NUM_Q - 1) + token
        first = 0
        if HAS_WINDOW:  # keys that all rows have left behind are not read
            blocks += skipped
            first_token = tl.program_id(0) % ROW_BLOCKS * BLOCK_H // GROUP
            first = first_seen(last - NUM_Q + first_token, window, HAS_WINDOW)
            begin = tl.maximum(begin + skipped, first // BLOCK_KV)
            end += skipped
        if CAUSAL:  # keys that no row sees yet are not read
            last_token = tl.minimum((tl.program_id(0) % ROW_BLOCKS * BLOCK_H + BLOCK_H - 1) // GROUP, NUM_Q - 1)
            last = tl.maximum(last - (NUM_Q - 1) + last_token, 0)
            end = tl.minimum(end, (last + BLOCK_KV - 1) // BLOCK_KV)
        q_rows = (
            q_ptr + sequence * q_seq_stride + token.to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
        )
        cache = cache_ptr + kv_head.to(tl.int64) * head_stride
        wide_job = job.to(tl.int64)
        list_row = list_ptr + sequence * list_seq_stride + wide_job * list_token_stride
        list_row += kv_head.to(tl.int64) * list_head_stride
        extra_row = extra_list_ptr + sequence * extra_list_seq_stride + wide_job * extra_list_token_stride
        first_extra = tl.maximum(begin - blocks, 0)
        last_extra = tl.maximum(end - blocks, 0)
        begin = tl.minimum(begin, blocks)
        end = tl.minimum(end, blocks)
        m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
        largest = m_i
        groups, lost, q_rest, lost_rest, unit = load_queries(q_rows, valid, OPERANDS)
        acc = (tl.zeros([BLOCK_H, OPERANDS.WIDTH], tl.float32),) * OPERANDS.GROUPS
        acc_rest = tl.zeros([BLOCK_H, OPERANDS.REST_PAD], tl.float32)
        state = (m_i, largest, no_sums(m_i, BLOCK_KV, SUMS_BY_COLUMN), acc, acc_rest)
        # Compilers (Triton 3.6 to 3.9) leave queries that were just loaded in shared memory, where wgmma reads them,
        # but copy computed ones into registers in every iteration. Queries that a loop carries stay in shared memory,
        # too. So an outer loop carries them: it has one iteration, which compilers cannot know. For decoded rows with
        # folded scales, queries are only loaded, but the loop lets the products with values overlap.
        CARRIED: tl.constexpr = (OPERANDS.DIVIDED or FORMAT.FOLDED) and BLOCK_H >= SEPARATE_QK_ROWS
        once = 1
        if CARRIED:
            once = tl.minimum(used - split, 1)
        for _ in range(once):
            queries = Queries(groups, lost, q_rest, lost_rest, unit)
            state = attend(
                queries, state, Cache(cache, page_stride, slot_stride, num_slots),
                KeyList(list_row, begin, end, first, last), Seen(limit - window, limit),
                Scales(logit_scale, soft_cap, capped_scale),
                Features(SPARSE, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP), FORMAT, OPERANDS, BLOCK_KV,
            )  # fmt: skip
            if HAS_EXTRA:
                state = attend(
                    queries, state, Cache(extra_cache_ptr, extra_page_stride, extra_slot_stride, extra_num_slots),
                    KeyList(extra_row, first_extra, last_extra, 0, extra_last), Seen(limit - window, limit),
                    Scales(logit_scale, soft_cap, capped_scale),
                    Features(SPARSE, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP), EXTRA_FORMAT, OPERANDS, BLOCK_KV,
                )  # fmt: skip
            if CARRIED:
                groups = zeros_like(groups)
        m_i, largest, sums, acc, acc_rest = state
        l_i = sum_of_each_row(sums)
        restored = tl.full([BLOCK_H], 1.0, tl.float32)  # factor that makes `acc` relative to `m_i`
        if FORMAT.RESCALED:
            restored = tl.math.exp2(tl.where(l_i == 0.0, 0.0, largest - m_i))
        row = tl.program_id(0) % ROW_BLOCKS * BLOCK_H + zero_after(l_i) + tl.arange(0, BLOCK_H)
        valid = row < ROWS
        token, head = token_and_head(row, job, kv_head, GROUP, SPARSE)
        if WHOLE or used == 1:
            factor, lse, largest_logit = finish(m_i, l_i, sinks_ptr, head, valid, HAS_SINKS)
            index = (sequence * NUM_Q + token) * NUM_HEADS + head
            store_groups(out_ptr, index, acc, acc_rest, factor * restored, factor, valid, OPERANDS,
                         OPERANDS.REST_IS_VALUE, DV)  # fmt: skip
            index = (sequence * NUM_HEADS + head) * NUM_Q + token
            tl.store(lse_ptr + index, lse, mask=valid)
            if HAS_MAX:
                tl.store(max_ptr + index, largest_logit, mask=valid)
        else:
            factor = 1.0 / tl.where(l_i == 0.0, 1.0, l_i)
            index = ((entry.to(tl.int64) * JOBS + job) * KV_HEADS + kv_head) * ROWS + row
            store_groups(parts_ptr, index, acc, acc_rest, factor * restored, factor, valid, OPERANDS,
                         OPERANDS.REST_IS_VALUE, DV)  # fmt: skip
            lse = tl.where(l_i == 0.0, float("-inf"), m_i + tl.math.log2(tl.where(l_i == 0.0, 1.0, l_i)))
            tl.store(part_lses_ptr + index, lse, mask=valid)
            if HAS_MAX:
                tl.store(part_max_ptr + index, m_i, mask=valid)


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    parts_ptr, part_lses_ptr, part_max_ptr, lens_ptr, extra_lens_ptr, num_splits_ptr, sinks_ptr,
    given_out_ptr, given_lse_ptr, given_max_ptr, out_ptr, lse_ptr, max_ptr,
    num_entries, fixed_splits, longest, lens_seq_stride, lens_token_stride,
    extra_longest, extra_lens_seq_stride, extra_lens_token_stride, window,
    SPARSE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_LENS: tl.constexpr, HAS_EXTRA: tl.constexpr,
    HAS_EXTRA_LENS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_MAX: tl.constexpr, SCHEDULED: tl.constexpr,
    NUM_Q: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_KV: tl.constexpr, WHOLE: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row of a job, in their order."""
    if PDL:
        gdc_wait()
    JOBS: tl.constexpr = NUM_Q if SPARSE else 1  # pyright: ignore[reportAssignmentType]
    KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    kv_head = tl.program_id(1)
    row = tl.program_id(0) % ROWS
    job = tl.program_id(0) // ROWS % JOBS
    seq = tl.program_id(0) // (ROWS * JOBS)
    if SCHEDULED:
        first = split_edge(num_splits_ptr, seq, num_entries)
        used = split_edge(num_splits_ptr, seq + 1, num_entries) - first
    else:
        first = seq * fixed_splits
        last = list_length(lens_ptr, seq, job, longest, lens_seq_stride, lens_token_stride, HAS_LENS)
        blocks = (last + BLOCK_KV - 1) // BLOCK_KV - first_seen(last - NUM_Q, window, HAS_WINDOW) // BLOCK_KV
        if HAS_EXTRA:
            last = list_length(extra_lens_ptr, seq, job, extra_longest, extra_lens_seq_stride,
                               extra_lens_token_stride, HAS_EXTRA_LENS)  # fmt: skip
            blocks += (last + BLOCK_KV - 1) // BLOCK_KV
        _, used = divide(blocks, fixed_splits, SCHEDULED, MIN_BLOCKS)
    if used != 1:
        step = JOBS * KV_HEADS * ROWS
        index = ((first.to(tl.int64) * JOBS + job) * KV_HEADS + kv_head) * ROWS + row
        acc, m_i, l_i = merge_parts(
            parts_ptr + index * DV, part_lses_ptr + index, used, step * DV, step, 1.0, MERGED, DV, DV_PAD
        )
        zero = tl.zeros([1], tl.float32)
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        if SPARSE:
            token = job
            head = kv_head * GROUP + row
        valid = tl.full([1], 1, tl.int1)
        heads = head + tl.zeros([1], tl.int32)
        factor, lse, _m_i = finish(m_i + zero, l_i + zero, sinks_ptr, heads, valid, HAS_SINKS)
        out_index = ((seq.to(tl.int64) * NUM_Q + token) * NUM_HEADS + head) + tl.zeros([1], tl.int64)
        store_columns(out_ptr, out_index, acc[None, :], factor, valid, 0, DV, DV)
        lse_index = ((seq.to(tl.int64) * NUM_HEADS + head) * NUM_Q + token) + tl.zeros([1], tl.int64)
        tl.store(lse_ptr + lse_index, lse)
        if HAS_MAX:
            largest = float("-inf")
            for start in range(0, used, MERGED):
                part = start + tl.arange(0, MERGED)
                maxima = tl.load(part_max_ptr + index + part.to(tl.int64) * step, mask=part < used,
                                 other=float("-inf"))  # fmt: skip
                largest = tl.maximum(largest, tl.max(maxima, 0))
            tl.store(max_ptr + lse_index, largest * LN2 + zero)


def as_extra(arguments: dict[str, int]) -> dict[str, int]:
    """Arguments about the second cache, which serves one KV head."""
    return {f"extra_{name}": value for name, value in arguments.items() if "head" not in name}


def shared_arguments(work: Work, tile: Tile, entries: int, max_logits: bool, launch: Any) -> dict[str, Any]:
    """The arguments of both kernels."""
    keys, extra = work.keys, work.extra
    return {
        "num_entries": entries,
        **keys.lengths(launch),
        # Without a second cache, the kernels do not use these.
        **as_extra((extra or keys).lengths(launch)),
        "window": work.window or 0,
        "SPARSE": work.sparse,
        "HAS_WINDOW": work.window is not None,
        "HAS_LENS": keys.lens is not None,
        "HAS_EXTRA": extra is not None,
        "HAS_EXTRA_LENS": extra is not None and extra.lens is not None,
        "HAS_SINKS": work.call.sinks is not None,
        "HAS_MAX": max_logits,
        "SCHEDULED": work.schedule is not None,
        "NUM_Q": work.num_q_tokens,
        "NUM_HEADS": work.call.num_q_heads,
        "GROUP": work.group,
        "ROWS": work.rows,
        "DV": work.call.d_v,
        "BLOCK_KV": tile.block_kv,
        "fixed_splits": 1 if work.schedule is not None else tile.num_splits,
        "WHOLE": tile.num_splits == 1 and work.schedule is None,
        "MIN_BLOCKS": cdiv(OWN_SPLIT if tile.invariant else MIN_SPLIT, tile.block_kv),
        "PDL": overlaps(work.call),
    }


def logit_scales(scale: float, soft_cap: float | None) -> dict[str, Any]:
    """The kernels' arguments for `Scales`, and whether there is a cap."""
    if soft_cap is None:
        return {"logit_scale": scale * LOG2E.value, "soft_cap": 1.0, "capped_scale": 1.0, "HAS_SOFT_CAP": False}
    unit = 1.0 if soft_cap < 1 else 0.0625  # as `unit_under_cap` has it
    scales = {"logit_scale": scale * unit, "soft_cap": soft_cap * unit, "capped_scale": LOG2E.value / unit}
    return scales | {"HAS_SOFT_CAP": True}


def sums_by_column(call: Any, form: CacheFormat, tile: Tile, *, decoded: bool = False) -> bool:
    """Whether registers suffice for sums by column; 32 rows on four warps leave none, nor do 64 rows of two formats.

    64 rows of a plain cache leave enough, but compilers (Triton 3.6 to 3.9) would lay the sums out as an operand, and
    compute each exponential twice.
    """
    if call.d_v > 512:
        return False
    if is_copied(form, decoded):
        return tile.block_h < SEPARATE_QK_ROWS.value and tile.num_warps * 8 > tile.block_h
    return {16: tile.num_stages > 1, 32: not OLDER_COMPILER, 64: tile.num_stages > 2}.get(tile.block_h, True)


def attention_arguments(work: Work, tile: Tile, launch: Any) -> dict[str, Any]:
    """The further arguments of the attention kernel."""
    call, keys, extra = work.call, work.keys, work.extra or work.keys
    arch = call.device.arch
    seq_stride, token_stride, head_stride = work.q_strides
    return {
        "num_seqs": work.num_seqs,
        "q_seq_stride": seq_stride,
        "q_token_stride": token_stride,
        "q_head_stride": head_stride,
        **keys.addresses(launch),
        **as_extra(extra.addresses(launch)),
        **logit_scales(call.scale, work.soft_cap),
        "CAUSAL": work.causal,
        "FORMAT": keys.row_format(arch, launch),
        "EXTRA_FORMAT": extra.row_format(arch, launch),
        "OPERANDS": operands(call, tile.block_h, decoded=keys.decoded),
        "BLOCK_H": tile.block_h,
        "SUMS_BY_COLUMN": sums_by_column(call, keys.form, tile, decoded=keys.decoded),
    }


def run(work: Work, tile: Tile, launch: Any, *, max_logits: bool) -> Any:
    """Enqueue the kernels; returns out, lse and max_logits, or a stand-in for the latter if it is not requested."""
    call, keys, extra, scheduled = work.call, work.keys, work.extra or work.keys, work.schedule is not None
    entries = work.num_seqs * tile.num_splits
    if scheduled and work.num_seqs:  # a program of a schedule looks for its sequence, so one has to exist
        entries = work.num_seqs + work.schedule[0].shape[0]
    whole = tile.num_splits == 1 and not scheduled
    absent = work.q  # stands for arrays that the call does not have
    lens = absent if keys.lens is None else keys.lens
    extra_lens = absent if extra.lens is None else extra.lens
    num_splits = launch.packed(work.schedule[1]) if scheduled else absent
    sinks = absent if call.sinks is None else launch.packed(call.sinks)
    shared = shared_arguments(work, tile, entries, max_logits, launch)
    parts = (entries, work.jobs_per_seq, work.num_kv_heads, work.rows)
    nothing = ((1,), "float32")
    out, lse, maxima, *partial = launch(
        latent_kernel,
        (entries * work.jobs_per_seq * cdiv(work.rows, tile.block_h), work.num_kv_heads),
        (work.q, keys.cache, keys.lists, lens, extra.cache, extra.lists, extra_lens, num_splits, sinks),
        [
            (call.out_shape, call.result_dtype),
            (work.lse_shape, "float32"),
            (work.lse_shape, "float32") if max_logits else nothing,
            nothing if whole else ((*parts, call.d_v), "float32"),
            nothing if whole else (parts, "float32"),
            (parts, "float32") if max_logits and not whole else nothing,
        ],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **shared,
        **attention_arguments(work, tile, launch),
    )
    if whole or not work.num_seqs:
        return out, lse, maxima
    return launch(
        combine_kernel,
        (work.num_seqs * work.jobs_per_seq * work.rows, work.num_kv_heads),
        (*partial, lens, extra_lens, num_splits, sinks, out, lse, maxima),
        [],
        inplace=(7, 8, 9),
        **dependent(shared["PDL"]),
        num_warps=4,
        num_stages=1,
        DV_PAD=next_power_of_2(call.d_v),
        MERGED=min(next_power_of_2(tile.num_splits), max(1, 4096 // next_power_of_2(call.d_v))),
        **shared,
    )
