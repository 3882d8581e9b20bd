"""The gradients of keys and values if queries have lists of blocks: sums over the queries whose lists name a block.

The first kernel gives each entry of the lists a code for its KV head and its block, with blocks numbered across all
sequences. Sorting these codes transposes the lists: the entries that name a block become neighbours, in the order of
their queries. A program of the second kernel holds keys of one block, or of a few small blocks, and visits the rows of
the entries that name them. The order of summation depends on the lists alone.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._compiler import first_of_block
from ragged_attention.kernels_triton._mask import LARGEST_INT, Mask, MaskKind
from ragged_attention.kernels_triton._selected import visible_blocks
from ragged_attention.kernels_triton._sequences import VARYING, max_blocks, query_edge
from ragged_attention.kernels_triton._splits import Batch, find_rows, length_of
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    Sizes,
    next_power_of_2,
    on_cuda_cores,
    stride_arguments,
)
from ragged_attention.kernels_triton._varlen import (
    Config,
    gather_rows,
    load_rows,
    product,
    rows_of,
    store_rows,
    times,
    zeros,
)
from ragged_attention.kernels_triton._varlen_gradient import (
    TERMS,
    KeyBlock,
    LoadedRows,
    RowArrays,
    Seeing,
    add_rows,
    load_terms_at,
    row_ranges,
    seen_by_rows,
    signed_scales,
    tables_of_head,
)

CODED_TOKENS = 16  # query tokens per program of the first kernel
MOST_CODED = 2048  # entries that a program of the first kernel loads at a time


@triton.jit
def first_code(head, seq, kv_start, num_kv_tokens, num_seqs, BLOCK_SIZE: tl.constexpr):
    """The code of a sequence's first block, for a head of the lists. The codes of sequences do not overlap."""
    return head * (num_kv_tokens // BLOCK_SIZE + num_seqs + 1) + kv_start // BLOCK_SIZE + seq


@triton.jit(do_not_specialize=VARYING)
def code_kernel(
    selected_ptr, cu_q_lens_ptr, cu_kv_lens_ptr,
    codes_ptr,
    num_q_tokens, num_kv_tokens, num_seqs, window, selected_token_stride, selected_head_stride,
    N: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, KIND: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the codes [heads, tokens, N] of a few tokens' lists; LARGEST_INT for an entry that names no visible key."""
    head = tl.program_id(1)
    batch = Batch(cu_q_lens_ptr, cu_kv_lens_ptr, num_seqs, num_seqs, num_q_tokens, num_kv_tokens)
    seq, start, q_len, first, live = find_rows(tl.program_id(0), batch, 1, TOKENS)
    if (first >= 0) & (first < q_len):
        kv_len = 0
        code = 0
        if live:
            kv_len = length_of(seq, cu_kv_lens_ptr, num_kv_tokens, True)
            kv_start = query_edge(cu_kv_lens_ptr, seq, num_kv_tokens)
            code = first_code(head, seq, kv_start, num_kv_tokens, num_seqs, BLOCK_SIZE)
        query = first + tl.arange(0, TOKENS)[:, None]
        lists = selected_ptr + head.to(tl.int64) * selected_head_stride
        target = (head.to(tl.int64) * num_q_tokens + start + query) * N
        for left in range(0, N, COLUMNS):
            column = left + tl.arange(0, COLUMNS)[None, :]
            exists = (query < q_len) & (column < N)
            entries = lists + (start + query).to(tl.int64) * selected_token_stride + column
            block = visible_blocks(entries, exists, query, kv_len - q_len, kv_len, Mask(window), KIND, BLOCK_SIZE)
            tl.store(codes_ptr + target + column, tl.where(block >= 0, code + block, LARGEST_INT), mask=exists)


@triton.jit
def entries_below(codes_ptr, count, code):
    """The number of sorted codes that are less than `code`."""
    low = 0
    high = count
    while low < high:
        middle = low + (high - low) // 2
        less = tl.load(codes_ptr + middle) < code
        low = tl.where(less, middle + 1, low)
        high = tl.where(less, high, middle)
    return low


class Entries(NamedTuple):
    """The sorted entries that name the blocks of a program's keys."""

    codes_ptr: tl.tensor
    order_ptr: tl.tensor  # the index of each entry in the lists
    begin: tl.tensor
    end: tl.tensor
    code: tl.tensor  # the code of each key's block
    q_start: tl.tensor  # the sequence's first query token
    num_q_tokens: tl.tensor


@triton.jit
def visit_entries(keys, arrays, entries, seeing, mask, N: tl.constexpr, CONFIG: tl.constexpr):
    """(dk / sm_scale, dv) of a block of keys, summed over the rows of the entries."""
    GROUP: tl.constexpr = CONFIG.Q.GROUP
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    sums = (zeros(keys.k[0].shape[0], CONFIG.K), zeros(keys.v[0].shape[0], CONFIG.V))
    steps = (tl.cast(entries.end - entries.begin, tl.int64) * GROUP + BLOCK_Q - 1) // BLOCK_Q
    for step in range(tl.cast(steps, tl.int32)):
        place = tl.cast(step, tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        entry = entries.begin + (place // GROUP).to(tl.int32)
        head = (place % GROUP).to(tl.int32)
        exists = entry < entries.end
        code = tl.load(entries.codes_ptr + entry, mask=exists, other=-1)
        origin = tl.load(entries.order_ptr + entry, mask=exists, other=0) // N
        code_before = tl.load(entries.codes_ptr + entry - 1, mask=exists & (entry > entries.begin), other=-1)
        origin_before = tl.load(entries.order_ptr + entry - 1, mask=exists & (entry > entries.begin), other=0) // N
        exists = exists & ((code != code_before) | (origin != origin_before))  # a list may name a block twice
        query = tl.where(exists, origin % entries.num_q_tokens - entries.q_start, 0)
        row = query * GROUP + head
        seen = seen_by_rows(row_ranges(seeing, row, GROUP, CONFIG.MASK), row, seeing, mask, GROUP, CONFIG.MASK)
        seen = seen & exists[None, :] & (entries.code[:, None] == code[None, :])
        readable = tl.max(seen.to(tl.int32), 0) > 0
        q = gather_rows(arrays.q, query, head, readable, CONFIG.Q)
        d_out = gather_rows(arrays.d_out, query, head, readable, CONFIG.OUT)
        row_terms = arrays.terms_ptr + row.to(tl.int64) * TERMS
        norm, offset, share, alibi = load_terms_at(row_terms, readable, True)
        rows = LoadedRows(q, d_out, norm, offset, share, alibi, row, readable, arrays.tables_ptr)
        sums = add_rows(keys, sums, rows, product(keys.k, q), seen, True, True, CONFIG)
    return sums


@triton.jit(do_not_specialize=VARYING)
def selected_dkv_kernel(
    d_out_ptr, q_ptr, k_ptr, v_ptr, terms_ptr, cu_q_lens_ptr, cu_kv_lens_ptr, bias_ptr, ranges_ptr,
    codes_ptr, order_ptr, dk_ptr, dv_ptr,
    num_q_tokens, num_kv_tokens, num_seqs, window, d_out_head_stride, q_head_stride, k_head_stride, v_head_stride,
    sm_scale, soft_cap, count, N: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one KV head's block of keys over the rows whose lists name them. Other keys get 0."""
    GROUP: tl.constexpr = CONFIG.Q.GROUP
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    kv_head = tl.program_id(1)
    mask = Mask(window, ranges_ptr=ranges_ptr)
    batch = Batch(cu_kv_lens_ptr, cu_kv_lens_ptr, num_seqs, num_seqs, num_kv_tokens, num_kv_tokens)
    seq, start, kv_len, low, live = find_rows(tl.program_id(0), batch, 1, BLOCK_KV)
    if (low >= 0) & (low < kv_len):
        base = 0
        begin = 0
        end = 0
        q_start = 0
        q_len = 0
        if live:
            q_start = query_edge(cu_q_lens_ptr, seq, num_q_tokens)
            q_len = tl.maximum(query_edge(cu_q_lens_ptr, seq + 1, num_q_tokens) - q_start, 0)
            base = first_code(kv_head if HEADS > 1 else 0, seq, start, num_kv_tokens, num_seqs, BLOCK_SIZE)
            begin = entries_below(codes_ptr, count, base + low // BLOCK_SIZE)
            last = tl.minimum(low + BLOCK_KV, kv_len) - 1
            end = entries_below(codes_ptr, count, base + last // BLOCK_SIZE + 1)
        readable = first_of_block(kv_len - low, BLOCK_KV)
        arrays = RowArrays(
            rows_of(q_ptr, q_start, kv_head, q_head_stride, CONFIG.Q),
            rows_of(d_out_ptr, q_start, kv_head, d_out_head_stride, CONFIG.OUT),
            terms_ptr + (kv_head.to(tl.int64) * num_q_tokens + q_start) * (GROUP * TERMS),
            tables_of_head(bias_ptr, q_start, kv_head, CONFIG.BIAS, GROUP),
        )
        k_rows = rows_of(k_ptr, start, kv_head, k_head_stride, CONFIG.K)
        v_rows = rows_of(v_ptr, start, kv_head, v_head_stride, CONFIG.V)
        k = load_rows(k_rows, low, readable, True, BLOCK_KV, CONFIG.K)
        v = load_rows(v_rows, low, readable, True, BLOCK_KV, CONFIG.V)
        key = low + tl.arange(0, BLOCK_KV)
        ranges = ranges_ptr + tl.cast(q_start, tl.int64) * (2 * CONFIG.MASK.RANGES)
        seeing = Seeing(0, 0, key - (kv_len - q_len), q_len, kv_len - q_len, ranges, 0, 0)
        scales = signed_scales(sm_scale, soft_cap, CONFIG.HAS_SOFT_CAP)
        entries = Entries(codes_ptr, order_ptr, begin, end, base + key // BLOCK_SIZE, q_start, num_q_tokens)
        keys = KeyBlock(k, v, seeing.key, scales)
        dk, dv = visit_entries(keys, arrays, entries, seeing, mask, N, CONFIG)
        store_rows(dk_ptr, start + low, kv_head, 0, times(dk, sm_scale), readable, BLOCK_KV, CONFIG.K)
        store_rows(dv_ptr, start + low, kv_head, 0, dv, readable, BLOCK_KV, CONFIG.V)


# ---- host side


def sizes(call: Any, dkv: Sizes, dq: Sizes) -> tuple[Sizes, Sizes]:
    """(sizes of the dk and dv kernel, sizes of the dq kernel), given those for calls without lists."""
    arch = call.device.arch
    if not arch.startswith("sm_"):
        return dkv, dq
    if on_cuda_cores(call):  # the addresses of gathered rows take registers
        dkv, dq = dkv._replace(warps=8), dq._replace(warps=8 if arch == "sm_120" and OLDER_COMPILER else 4)
    dkv = dkv._replace(rows=min(dkv.rows, 32))
    if call.key_ranges is not None:
        dkv = dkv._replace(rows=16, keys=min(dkv.keys, 32) if OLDER_COMPILER else dkv.keys)
    return dkv, dq


def too_many(call: Any) -> str | None:
    """The reason why the entries of a call's lists cannot be sorted; None if they can, or if there are no lists."""
    if call.selected is None:
        return None
    entries = call.num_q_tokens * call.selected.shape[1] * call.num_selected
    blocks = (call.num_kv_tokens // call.block_size + call.num_seqs + 1) * call.selected.shape[1]
    if max(entries, blocks) < LARGEST_INT.value:
        return None
    limits = "fewer than 2**31 - 1 entries in lists, and blocks of all KV heads"
    return f"expected {limits}, got {entries} entries and {blocks} blocks"


def transposed(call: Any, launch: Any, edges: tuple[Any, Any], kind: MaskKind, window: int) -> tuple[Any, Any]:
    """Enqueue the transposition of the lists; returns the sorted codes, and each code's index in the lists."""
    selected, heads = launch.packed(call.selected), call.selected.shape[1]
    columns = min(next_power_of_2(call.num_selected), MOST_CODED // CODED_TOKENS)
    [codes] = launch(
        code_kernel,
        (max_blocks(call.num_q_tokens, CODED_TOKENS, call.num_seqs), heads),
        (selected, *edges),
        [((heads * call.num_q_tokens * call.num_selected,), "int32")],
        num_warps=4,
        num_stages=1,
        num_q_tokens=call.num_q_tokens,
        num_kv_tokens=call.num_kv_tokens,
        num_seqs=call.num_seqs,
        window=window,
        **stride_arguments(launch, ("token", "head"), selected=selected),
        N=call.num_selected,
        COLUMNS=columns,
        TOKENS=CODED_TOKENS,
        KIND=kind,
        BLOCK_SIZE=call.block_size,
    )
    return launch.sorted(codes)


def key_gradients(
    call: Any, tile: Any, launch: Any, inputs: tuple[Any, ...], edges: tuple[Any, Any], numbers: Any,
    config: dict[str, Any],
) -> list[Any]:  # fmt: skip
    """Enqueue the kernels; returns dk and dv.

    `edges` has cu_q_lens and cu_kv_lens. The other arguments are those of `varlen_attention_backward.key_gradients`.
    """
    block_kv = min(tile.block_kv, max(16, call.block_size))
    codes, order = transposed(call, launch, edges, config["MASK"], numbers["window"])
    return launch(
        selected_dkv_kernel,
        (max_blocks(call.num_kv_tokens, block_kv, call.num_seqs), call.num_kv_heads),
        (*inputs, codes, order),
        [(call.k.shape, call.k.dtype), (call.v.shape, call.v.dtype)],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **numbers,
        count=codes.shape[0],
        N=max(call.num_selected, 1),
        HEADS=call.selected.shape[1],
        BLOCK_SIZE=call.block_size,
        CONFIG=Config(BLOCK_Q=tile.block_q, BLOCK_KV=block_kv, **config),
    )
