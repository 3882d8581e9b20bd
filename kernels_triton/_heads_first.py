"""Attention over heads-first pages in Triton.

Most calls run the kernels of `ragged_paged_attention` with other strides. Pages with one scale per slot go to
`scaled_kernel`. It multiplies a key's logits by the K scale and its weights by the V scale, so that the operands of the
matrix products are the stored codes, which are exact in 16 bits. It has no KV splits.
"""

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.kernels_triton import ragged_paged_attention
from ragged_attention.kernels_triton._formats import decode, narrow
from ragged_attention.kernels_triton._mask import Mask, MaskKind, Visible, hide, key_range, window_of
from ragged_attention.kernels_triton._ragged import results
from ragged_attention.kernels_triton._rows import Output, QueryArray, Rows, load_rows, logit_scales, store_rows
from ragged_attention.kernels_triton._sequences import VARYING
from ragged_attention.kernels_triton._softmax import lost_to_rounding, matmul, online_softmax, soft_capped
from ragged_attention.kernels_triton._tiles import WGMMA, Sizes, cdiv, stride_arguments
from ragged_attention.kernels_triton.ragged_paged_attention import Tile, shape_of

EDGES = 256  # elements of `cu_q_lens` that one program writes


class HeadsFirstStrides:
    """A launcher that reports the strides of heads-first pages in the axis order of the ragged operation's pages."""

    def __init__(self, launch: Any) -> None:
        self.launch = launch

    def __call__(self, *arguments: Any, **options: Any) -> list[Any]:
        return self.launch(*arguments, **options)

    def strides(self, array: Any) -> tuple[int, ...]:
        strides = self.launch.strides(array)
        return (*strides[1:3], strides[0], strides[3]) if len(strides) == 4 else strides

    def packed(self, array: Any) -> Any:
        return self.launch.packed(array)


@triton.jit
def live_rows(length, num_tokens, ALIGN: tl.constexpr):
    """The number of a chunk's query tokens that the sequence has; with ALIGN "chunk", this can be fewer than all."""
    live = num_tokens
    if ALIGN == "chunk":
        live = tl.where(length > 0, (length - 1) % tl.maximum(num_tokens, 1) + 1, 0)
    return live


@triton.jit(do_not_specialize=VARYING)
def decode_edges_kernel(lengths_ptr, edges_ptr, count, BLOCK: tl.constexpr):
    """Write `cu_q_lens` for a batch with one query per sequence."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(edges_ptr + index, index, mask=index < count)


@triton.jit(do_not_specialize=VARYING)
def chunk_edges_kernel(length_ptr, edges_ptr, num_tokens, capacity, ALIGN: tl.constexpr):
    """Write `cu_q_lens` for a prefill chunk of one sequence."""
    length = tl.minimum(tl.maximum(tl.load(length_ptr), 0), capacity)
    tl.store(edges_ptr, 0)
    tl.store(edges_ptr + 1, live_rows(length, num_tokens, ALIGN))


@triton.jit(do_not_specialize=VARYING)
def scaled_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, lengths_ptr, page_indices_ptr,
    out_ptr, lse_ptr,
    blocks, num_tokens, num_pages, capacity, window, table_stride, q_token_stride, q_head_stride,
    k_head_stride, k_page_stride, k_slot_stride, v_head_stride, v_page_stride, v_slot_stride,
    ks_head_stride, ks_page_stride, ks_slot_stride, vs_head_stride, vs_page_stride, vs_slot_stride,
    sm_scale, soft_cap,
    ALIGN: tl.constexpr, MASK: tl.constexpr, SHAPE: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, SIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Attend with one block of a sequence's rows of one KV head to all keys that they see. Padding rows get 0."""
    GROUP: tl.constexpr = SHAPE.GROUP
    PAGE_SIZE: tl.constexpr = SHAPE.PAGE_SIZE
    seq = tl.program_id(0) // blocks
    kv_head = tl.program_id(1)
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q  # start with the last rows, which see the most keys
    kv_len = tl.minimum(tl.maximum(tl.load(lengths_ptr + seq), 0), capacity)
    if ALIGN == "decode":
        tokens = 1
        live = 1
    else:
        tokens = num_tokens
        live = live_rows(kv_len, num_tokens, ALIGN)
    row = first_row + tl.arange(0, BLOCK_Q)
    mask = Mask(window)
    low, high = kv_len - live + first_row // GROUP, kv_len - live + (first_row + BLOCK_Q - 1) // GROUP
    first, last = key_range(low, high, kv_len, mask, MASK)
    last = tl.where(first_row < live * GROUP, last, first)
    inner, cap, outer = logit_scales(sm_scale, soft_cap, HAS_SOFT_CAP)
    visible = Visible(first, last, low, high, kv_len - live + row // GROUP, kv_len, kv_len - live, q_ptr)
    queries = Rows(row, live * GROUP, seq * tokens, kv_head)
    q = load_rows(QueryArray(q_ptr, q_token_stride, q_head_stride), queries, sm_scale < 0, SIGNED, SHAPE)
    k_ptr += kv_head.to(tl.int64) * k_head_stride
    v_ptr += kv_head.to(tl.int64) * v_head_stride
    k_scales_ptr += kv_head.to(tl.int64) * ks_head_stride
    v_scales_ptr += kv_head.to(tl.int64) * vs_head_stride
    table_ptr = page_indices_ptr + seq.to(tl.int64) * table_stride
    d = tl.arange(0, SHAPE.D_PAD)
    m_i = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, SHAPE.D_PAD], tl.float32)
    for block in range(first // BLOCK_KV * BLOCK_KV, last, BLOCK_KV):
        keys = block + tl.arange(0, BLOCK_KV)
        readable = (keys >= first) & (keys < last)
        page = tl.load(table_ptr + keys // PAGE_SIZE, mask=readable, other=-1)
        readable = readable & (page >= 0) & (page < num_pages)
        page = page.to(tl.int64)
        slot = (keys % PAGE_SIZE).to(tl.int64)
        stored = readable[:, None] & (d < SHAPE.D)[None, :]
        k = tl.load(k_ptr + (page * k_page_stride + slot * k_slot_stride)[:, None] + d[None, :], mask=stored, other=0)
        k_scale = tl.load(k_scales_ptr + page * ks_page_stride + slot * ks_slot_stride, mask=readable, other=0)
        logits = matmul(q, tl.trans(decode(k, SHAPE.CODES, q.dtype)), tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32))
        logits = logits * k_scale[None, :]
        if HAS_SOFT_CAP:
            logits = soft_capped(logits * inner, cap)
        logits = hide(logits, keys, readable, visible, mask, MASK)
        logits = tl.where((row < live * GROUP)[:, None], logits, float("-inf"))
        weights, alpha, m_i, l_i = online_softmax(logits, m_i, l_i, outer)
        v = tl.load(v_ptr + (page * v_page_stride + slot * v_slot_stride)[:, None] + d[None, :], mask=stored, other=0)
        v_scale = tl.load(v_scales_ptr + page * vs_page_stride + slot * vs_slot_stride, mask=readable, other=0)
        weights = weights * v_scale[None, :]
        rounded = narrow(weights, q.dtype)
        values = decode(v, SHAPE.CODES, q.dtype)
        acc = matmul(rounded, values, acc * alpha[:, None])
        if q.dtype == tl.bfloat16:  # add the rounding errors of the weights
            acc = matmul(lost_to_rounding(weights, rounded), values, acc)
    finished = Rows(row, tokens * GROUP, seq * tokens, kv_head)
    store_rows(Output(out_ptr, lse_ptr), (m_i, l_i, acc), finished, q_ptr, 1.0, False, SHAPE)


def heuristic(call: Any) -> Tile:
    return for_scales(call, ragged_paged_attention.heuristic(call.as_ragged()))


def invariant_tile(call: Any) -> Tile:
    return for_scales(call, ragged_paged_attention.invariant_tile(call.as_ragged()))


def for_scales(call: Any, tile: Tile) -> Tile:
    """The tile or, for a call with scales on an NVIDIA GPU, one that leaves registers for the scales."""
    if not call.quantized or not call.device.arch.startswith("sm_"):
        return tile
    keys = tile.split_block_kv if call.device.arch in WGMMA else min(tile.split_block_kv, 32)
    stages = min(tile.split_num_stages, 2)
    return dataclasses.replace(tile, split_block_kv=keys, split_num_warps=8, split_num_stages=stages)


def attend(call: Any, tile: Tile, launch: Any, lengths: Any, align: str) -> Any:
    """Enqueue a heads-first call's kernels; returns out. `align` is "decode" or the alignment of a prefill chunk."""
    if call.quantized:
        return attend_scaled(call, tile, launch, lengths, align)
    lengths = launch.packed(lengths)
    edges = cumulative(call, launch, lengths, align)
    ragged = call.as_ragged(kv_lens=lengths, cu_q_lens=edges)
    return ragged_paged_attention.run(ragged, tile, HeadsFirstStrides(launch))


def cumulative(call: Any, launch: Any, lengths: Any, align: str) -> Any:
    """The `cu_q_lens` of the equivalent ragged call, written by a kernel."""
    if align != "decode":
        sizes = {"num_tokens": call.num_tokens, "capacity": call.capacity}
        return launch(chunk_edges_kernel, (1,), (lengths,), [((2,), "int32")], num_warps=1, ALIGN=align, **sizes)[0]
    count = call.num_tokens + 1
    outputs = [((count,), "int32")]
    return launch(decode_edges_kernel, (cdiv(count, EDGES),), (lengths,), outputs, count=count, BLOCK=EDGES)[0]


def attend_scaled(call: Any, tile: Tile, launch: Any, lengths: Any, align: str) -> Any:
    """`attend` for pages with one scale per slot; it launches `scaled_kernel`."""
    decodes = align == "decode"
    (k_pages, v_pages), (k_scales, v_scales) = call.arrays, call.scales
    q, lengths, page_indices = map(launch.packed, (call.q, lengths, call.page_indices))
    window = None if decodes else window_of(call)
    rows = call.group * (1 if decodes else call.num_tokens)
    if decodes:
        sizes = Sizes(tile.split_block_q, tile.split_block_kv, tile.split_num_warps, tile.split_num_stages)
    else:  # the kernel masks every block, so blocks may be no larger than those of a masked loop
        sizes = Sizes(tile.block_q, min(tile.block_kv, tile.edge_kv), tile.num_warps, tile.num_stages)
    blocks = cdiv(rows, sizes.rows)
    axes, pages = ("head", "page", "slot"), {"k": k_pages, "v": v_pages, "ks": k_scales, "vs": v_scales}
    return launch(
        scaled_kernel,
        (blocks * (call.num_tokens if decodes else 1), call.num_kv_heads),
        (q, k_pages, v_pages, k_scales, v_scales, lengths, page_indices),
        results(call),
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        blocks=blocks,
        num_tokens=call.num_tokens,
        num_pages=call.num_pages,
        capacity=call.capacity,
        window=window or 0,
        table_stride=launch.strides(page_indices)[0],
        **stride_arguments(launch, ("token", "head"), q=q),
        **stride_arguments(launch, axes, **pages),
        sm_scale=call.scale,
        soft_cap=float(call.soft_cap or 1.0),
        ALIGN=align,
        MASK=MaskKind(CAUSAL=True, HAS_WINDOW=window is not None),
        SHAPE=shape_of(call, call.head_dim),
        HAS_SOFT_CAP=call.soft_cap is not None,
        SIGNED=call.scale < 0,
        BLOCK_Q=sizes.rows,
        BLOCK_KV=sizes.keys,
    )[0]
