"""Attention to selected blocks of keys over a paged cache: one program per job, KV head and split of the job's blocks.

`_selected` explains jobs. If there are few jobs, as in decode, their blocks are divided into splits, whose results the
combine kernel merges.
"""

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.kernels_triton import _paged_tiles
from ragged_attention.kernels_triton._combine import combine
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import array_heads, load_scale
from ragged_attention.kernels_triton._mask import Mask, Visible
from ragged_attention.kernels_triton._max_logits import absent, larger, unchanged
from ragged_attention.kernels_triton._pages import (
    Attention,
    Loop,
    Pages,
    add_values,
    load_keys,
    logits_of,
    nothing_seen,
    page_entries,
    table_of,
    with_segment,
)
from ragged_attention.kernels_triton._ragged import Shared, results
from ragged_attention.kernels_triton._rows import (
    Factors,
    Output,
    QueryArray,
    Rows,
    Scaling,
    load_queries,
    raise_largest_of_rows,
    store_rows,
    store_split,
)
from ragged_attention.kernels_triton._selected import (
    ListKind,
    Visits,
    blocks_of_step,
    join,
    joined_tokens,
    keys_of_blocks,
    keys_of_step,
    list_kind,
    named_blocks,
    num_jobs,
    steps_of,
)
from ragged_attention.kernels_triton._sequences import VARYING, count_sequences
from ragged_attention.kernels_triton._softmax import online_softmax
from ragged_attention.kernels_triton._splits import MANY_TOKENS, Batch, find_rows, length_of, short_tokens
from ragged_attention.kernels_triton._stored import RowPages, Slots
from ragged_attention.kernels_triton._tiles import OLDER_COMPILER, WGMMA, cdiv, next_power_of_2, on_cuda_cores

MIN_SPLIT = 256  # minimum keys per split
MAX_SPLITS = 16
SEGMENTS = 8  # segments into which batch-invariant mode divides a token's blocks; some may be empty
MIN_SEGMENT = 512  # minimum keys per segment, except the last one


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Config(Constants):
    """The compile-time constants of the attention kernel."""

    ATTENTION: Attention
    SCALING: Scaling
    LISTS: ListKind
    BLOCK_Q: int  # rows per program
    SPLITS: int  # splits per job and KV head
    SEGMENTS: int  # segments of a job's blocks, or 0; each segment is a split, or one program visits all segments
    LEAST_STEPS: int  # minimum steps of each segment or split except the last
    COMBINED: bool  # whether K and V are interleaved in one array
    HAS_NUM_SEQS: bool


@triton.jit
def pages_of_blocks(pages, block, step, last, LISTS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The page of each key of a step, or a single page if one page and one block hold all keys; -1 without a page."""
    if LISTS.BLOCK_SIZE >= BLOCK_KV and PAGE_SIZE > 0 and PAGE_SIZE % BLOCK_KV == 0:
        keys = block * LISTS.BLOCK_SIZE + step % (LISTS.BLOCK_SIZE // BLOCK_KV) * BLOCK_KV
    else:
        keys = keys_of_blocks(block, step, LISTS, BLOCK_KV)
    return page_entries(pages.table_ptr, keys, (keys >= 0) & (keys < last), PAGE_SIZE)


@triton.jit
def attend_to_blocks(queries, visits, visible, mask, pages, ATTENTION: tl.constexpr, LISTS: tl.constexpr):
    """The state of `_pages.attend` for a job's query rows, after the blocks that a program visits.

    Blocks and their pages are looked up one iteration ahead.
    """
    SHAPE: tl.constexpr = ATTENTION.SHAPE
    BLOCK_KV: tl.constexpr = ATTENTION.LOOP.BLOCK_KV
    m_i, l_i, acc = nothing_seen(queries.q.shape[0], SHAPE.DV_PAD)
    largest = m_i
    next_block = blocks_of_step(visits, visits.begin, LISTS, BLOCK_KV)
    next_page = pages_of_blocks(pages, next_block, visits.begin, visits.kv_len, LISTS, SHAPE.PAGE_SIZE, BLOCK_KV)
    for step in range(visits.begin, visits.end):
        block = next_block
        page = next_page
        next_block = blocks_of_step(visits, step + 1, LISTS, BLOCK_KV)
        next_page = pages_of_blocks(pages, next_block, step + 1, visits.kv_len, LISTS, SHAPE.PAGE_SIZE, BLOCK_KV)
        keys, readable, seen = keys_of_step(visits, block, step, mask, LISTS, BLOCK_KV)
        known = (page >= 0) & (page < pages.num_pages)
        slots = Slots(keys, page, readable & known)
        k = load_keys(pages, slots, queries.q.dtype, True, SHAPE)
        logits, scale, products = logits_of(queries, k, pages, slots, step, visible, ATTENTION, True)
        seen = seen & slots.readable[None, :]
        logits = tl.where(seen, logits, float("-inf"))
        if ATTENTION.KEEPS_LARGEST:
            largest = larger(largest, tl.where(seen, unchanged(products, queries, ATTENTION), float("-inf")))
        weights, alpha, m_i, l_i = online_softmax(logits, m_i, l_i, scale)
        acc = add_values(
            acc * alpha[:, None], weights, logits, pages, slots, ATTENTION.LOOP.WEIGHT_TERMS, True, SHAPE
        )  # fmt: skip
    state = (m_i, l_i, acc)
    if ATTENTION.KEEPS_LARGEST:
        state += (largest,)
    return state


@triton.jit(do_not_specialize=VARYING)
def selected_kernel(
    q_ptr, k_ptr, v_ptr, kv_lens_ptr, page_indices_ptr, cu_q_lens_ptr, num_seqs_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr, k_scales_ptr, v_scales_ptr, mask_ptr, slopes_ptr, bias_ptr, given_max_ptr, lists_ptr,
    parts_ptr, part_lses_ptr, out_ptr, lse_ptr, max_ptr,
    num_tokens, max_num_seqs, num_pages, capacity, table_stride,
    q_token_stride, q_head_stride, k_page_stride, k_slot_stride, k_head_stride,
    v_page_stride, v_slot_stride, v_head_stride, k_scales_stride, v_scales_stride,
    sm_scale, soft_cap, v_scale_factor, window, draft_stride, draft_width,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_Q rows of one job and KV head to one split of the job's blocks.

    If there is one split, its result is final. Otherwise a job is one token, and the split's normalised result goes to
    parts [T, SPLITS, K, rows, DV], and its base-2 lse to an array without the last axis. Tokens without a sequence see
    no key.
    """
    SHAPE: tl.constexpr = CONFIG.ATTENTION.SHAPE
    LISTS: tl.constexpr = CONFIG.LISTS
    GROUP: tl.constexpr = SHAPE.GROUP
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    SPLITS: tl.constexpr = CONFIG.SPLITS
    ROW_BLOCKS: tl.constexpr = (LISTS.TOKENS * GROUP + BLOCK_Q - 1) // BLOCK_Q
    job = tl.num_programs(0) // (SPLITS * ROW_BLOCKS) - 1 - tl.program_id(0) // (SPLITS * ROW_BLOCKS)
    block_of_rows = tl.program_id(0) // SPLITS % ROW_BLOCKS
    split = tl.program_id(0) % SPLITS
    kv_head = tl.program_id(1)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, CONFIG.HAS_NUM_SEQS)
    batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
    mask = Mask(window, mask_ptr, draft_stride, draft_width, mask_ptr)
    seq, start, q_len, first, live = find_rows(job, batch, 1, LISTS.TOKENS)
    if (first >= 0) & (first < q_len):
        low = 0
        high = 0
        kv_len = 0
        if live:
            kv_len = length_of(seq, kv_lens_ptr, capacity, SHAPE.PAGE_SIZE == 0)
            low = kv_len - q_len + first
            high = kv_len - q_len + tl.minimum(first + LISTS.TOKENS, q_len) - 1
        first_row = first * GROUP
        num_rows = tl.minimum(first + LISTS.TOKENS, q_len) * GROUP
        row = block_of_rows * BLOCK_Q + tl.arange(0, BLOCK_Q)
        rows = Rows(first_row + row, num_rows, start, kv_head)
        queries = load_queries(
            QueryArray(q_ptr, q_token_stride, q_head_stride), rows,
            Factors(sm_scale, soft_cap, k_scale_ptr, slopes_ptr, bias_ptr), CONFIG.SCALING, SHAPE,
        )  # fmt: skip
        k_head, v_head = array_heads(kv_head.to(tl.int64), CONFIG.COMBINED)
        row_of_table = tl.where(live, seq, 0)
        pages = Pages(
            RowPages(
                k_ptr + k_head * k_head_stride, k_page_stride, k_slot_stride,
                k_scales_ptr + kv_head.to(tl.int64) * k_scales_stride,
            ),
            RowPages(
                v_ptr + v_head * v_head_stride, v_page_stride, v_slot_stride,
                v_scales_ptr + kv_head.to(tl.int64) * v_scales_stride,
            ),
            table_of(page_indices_ptr, row_of_table, table_stride, kv_lens_ptr, capacity, SHAPE.PAGE_SIZE), num_pages,
        )  # fmt: skip
        position = kv_len - q_len + rows.row // GROUP
        visible = Visible(0, kv_len, low, high, position, kv_len, kv_len - q_len, 0, 0)
        named = named_blocks(lists_ptr, job, kv_head, LISTS)
        steps = steps_of(named, LISTS, CONFIG.ATTENTION.LOOP.BLOCK_KV)
        parts: tl.constexpr = SPLITS if CONFIG.SEGMENTS == 0 else CONFIG.SEGMENTS
        each = (steps + parts - 1) // parts
        if CONFIG.LEAST_STEPS > 1:
            each = tl.maximum(each, CONFIG.LEAST_STEPS)
        if CONFIG.SEGMENTS > SPLITS:
            state = nothing_seen(BLOCK_Q, SHAPE.DV_PAD)
            state += (state[0],)
            for begin in range(0, steps, each):
                visits = Visits(
                    named.ptr, named.num_blocks, begin, tl.minimum(begin + each, steps), row, start + first, low,
                    kv_len - q_len, kv_len,
                )  # fmt: skip
                part = attend_to_blocks(queries, visits, visible, mask, pages, CONFIG.ATTENTION, LISTS)
                state = with_segment(state, part)
        else:
            begin = tl.minimum(split * each, steps)
            visits = Visits(
                named.ptr, named.num_blocks, begin, tl.minimum(begin + each, steps), row, start + first, low,
                kv_len - q_len, kv_len,
            )  # fmt: skip
            state = attend_to_blocks(queries, visits, visible, mask, pages, CONFIG.ATTENTION, LISTS)
        if max_ptr is not None:
            raise_largest_of_rows(max_ptr, state, rows, SHAPE)
        if SPLITS == 1:
            v_scale = load_scale(v_scale_ptr, kv_head, v_scale_factor, CONFIG.SCALING.V_SCALE_STRIDE)
            store_rows(Output(out_ptr, lse_ptr), state, rows, sinks_ptr, v_scale, CONFIG.SCALING.HAS_SINKS, SHAPE)
        else:
            part = ((start + first).to(tl.int64) * SPLITS + split) * (SHAPE.NUM_HEADS // GROUP) + kv_head
            rows = Rows(tl.arange(0, BLOCK_Q), num_rows - first_row - block_of_rows * BLOCK_Q, start, kv_head)
            store_split(parts_ptr, part_lses_ptr, state, rows, part * ROW_BLOCKS + block_of_rows, BLOCK_Q, SHAPE)


# ---- host side


def tile_fields(call: Any) -> dict[str, int]:
    """The fields of a `Tile`: joined lists for prompts, and splits if there are too few jobs to fill the GPU."""
    tokens = 1 if decodes(call) else joined_tokens(call, rows_of_prompts(call), call.capacity)
    while tokens > 1 and num_programs(call, tokens) < 2 * call.device.num_multiprocessors:
        tokens //= 2
    splits = 1
    if tokens == 1:
        wanted = cdiv(8 * call.device.num_multiprocessors, num_programs(call, 1))
        splits = min(wanted, MAX_SPLITS, max(call.num_selected * call.block_size // MIN_SPLIT, 1))
    return {**sizes_of(call, tokens), "num_splits": splits, "joined_tokens": tokens}


def num_programs(call: Any, tokens: int) -> int:
    """The number of programs with work, at least 1, if a job has `tokens` tokens and its blocks are not split."""
    return max(cdiv(call.num_tokens, tokens) * call.num_kv_heads, 1)


def invariant_fields(call: Any) -> dict[str, int]:
    """`tile_fields` for batch-invariant mode: sizes that affect the bits do not depend on the batch or lists' padding.

    Blocks are split only if there are too few tokens to fill the GPU, because splits take memory.
    """
    few = num_programs(call, 1) < 2 * call.device.num_multiprocessors
    fields = sizes_of(call, 1, looked_up=_paged_tiles.looks_up_always(call))
    if call.device.arch == "sm_120" and OLDER_COMPILER:  # three stages would spill
        fields["num_stages"] = min(fields["num_stages"], 2)
    return {**fields, "num_splits": SEGMENTS if few else 1}


def decodes(call: Any) -> bool:
    """Whether the host expects only a few query tokens per sequence."""
    return call.num_tokens <= call.max_num_seqs * MANY_TOKENS and short_tokens(call) <= MANY_TOKENS


def rows_of_prompts(call: Any) -> int:
    """The rows per program if a job has several tokens."""
    if on_cuda_cores(call):
        return 16
    if call.device.arch in WGMMA:
        return 64
    return 32 if max(call.head_dim, call.v_head_dim) <= 128 else 16  # more would spill


def sizes_of(call: Any, tokens: int, *, looked_up: bool | None = None) -> dict[str, int]:
    """The sizes of the attention kernel, which has the same loop as the split kernel; see `split_sizes`."""
    rows = min(max(16, next_power_of_2(tokens * call.group)), 64)
    sizes = _paged_tiles.split_sizes(call, rows, looked_up=looked_up)
    few = _paged_tiles.decodes(call) or on_cuda_cores(call) or max(call.head_dim, call.v_head_dim) > 128
    if few and call.device.arch == "sm_120" and OLDER_COMPILER:  # three stages would spill
        sizes = sizes._replace(stages=min(sizes.stages, 2))
    sizes = _paged_tiles.fitting_pages(call, sizes)
    return sizes.fields("block_q")


def run(call: Any, tile: Any, launch: Any, shared: Shared, weight_terms: int) -> list[Any]:
    """Enqueue the kernels; returns the results."""
    numbers, attention = shared.numbers, shared.constants["ATTENTION"]
    splits, segments = tile.num_splits, SEGMENTS if tile.invariant else 0
    if segments and splits > 1:
        splits = segments
    lists = list_kind(call, 1 if splits > 1 or segments else tile.joined_tokens, call.capacity, attention["MASK"])
    rows = lists.plain.TOKENS * call.group
    block_q = max(16, min(next_power_of_2(rows), tile.block_q))
    row_blocks = cdiv(rows, block_q)
    cu_q_lens, kv_lens, num_seqs = (shared.arrays[name] for name in ("cu_q_lens", "kv_lens", "num_seqs"))
    named = join(
        call,
        launch,
        lists,
        (cu_q_lens, kv_lens, num_seqs),
        {name: numbers[name] for name in ("num_tokens", "max_num_seqs", "capacity", "window")},
        has_num_seqs=call.num_seqs is not None,
        packed=call.page_size == 0,
    )
    constants = {name: shared.constants[name] for name in ("SCALING", "COMBINED", "HAS_NUM_SEQS")}
    loop = Loop(BLOCK_KV=tile.block_kv, EDGE_KV=tile.block_kv, WEIGHT_TERMS=weight_terms, MASKED_BELOW=0)
    parts = (max(call.num_tokens, 1), splits, call.num_kv_heads, row_blocks * block_q)
    jobs = num_jobs(call.num_tokens, call.max_num_seqs, lists)
    part_values, part_lses, out, lse, *others = launch(
        selected_kernel,
        (jobs * row_blocks * splits, call.num_kv_heads),
        (*shared.arrays.values(), named),
        [
            ((*parts, call.v_head_dim) if splits > 1 else (1,), "float32"),
            (parts if splits > 1 else (1,), "float32"),
            *results(call),
        ],
        inplace=shared.max_logits(call),
        **absent(call),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        CONFIG=Config(
            ATTENTION=Attention(LOOP=loop, **attention),
            LISTS=lists,
            BLOCK_Q=block_q,
            SPLITS=splits,
            SEGMENTS=segments,
            LEAST_STEPS=MIN_SEGMENT // tile.block_kv if segments else 1,
            **constants,
        ),
        **numbers,
    )
    if splits == 1 or not call.num_tokens:
        return [out, lse, *others]
    stored, rows = [part_values, part_lses], row_blocks * block_q
    merged = merge_splits(call, launch, shared, stored, (out, lse), splits, rows, in_order=segments > 0)
    return [*merged, *others]


def merge_splits(
    call: Any,
    launch: Any,
    shared: Shared,
    stored: list[Any],
    target: tuple[Any, Any],
    splits: int,
    rows: int,
    *,
    in_order: bool,
) -> list[Any]:
    """Enqueue the merge of the splits' results into `target`. Each token, KV head and split has `rows` stored rows."""
    cu_q_lens, kv_lens, num_seqs = (shared.arrays[name] for name in ("cu_q_lens", "kv_lens", "num_seqs"))
    return combine(
        launch,
        call,
        (*stored, stored[1], cu_q_lens),
        target,
        (cu_q_lens, num_seqs, shared.arrays["sinks"], shared.arrays["v_scale"], kv_lens, kv_lens),
        {
            "num_tokens": call.num_tokens,
            "max_num_seqs": call.num_tokens,
            "v_scale_factor": shared.numbers["v_scale_factor"],
            "window": 0,
            "num_parts": call.num_tokens * splits,
            "num_splits": splits,
            "longest": 0,
            "extra_longest": 0,
        },
        GROUP=call.group,
        ROWS=rows,
        Q_TOKENS=1,
        ITEMS=1,
        DIVISION=None,
        MASK=None,
        LISTS=None,
        EVEN=True,
        IN_ORDER=in_order,
        LSE_BY_HEAD=False,
        HAS_NUM_SEQS=False,
        V_SCALE_STRIDE=shared.constants["SCALING"].plain.V_SCALE_STRIDE,
        MERGED=min(next_power_of_2(splits), max(1, 512 // next_power_of_2(call.v_head_dim))),
        most_rows=call.group,
    )
