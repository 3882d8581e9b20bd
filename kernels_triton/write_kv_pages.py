"""Writing this step's K and V into the pages, in Triton: one program for some tokens of one KV head."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportAssignmentType=false

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.calls import WriteKvPages
from ragged_attention.kernels_triton._formats import (
    array_heads,
    cache_format,
    cache_views,
    divided,
    encode,
    load_scale,
    scale_arguments,
)
from ragged_attention.kernels_triton._sequences import VARYING, count_sequences, query_edge
from ragged_attention.kernels_triton._tiles import cdiv, expect_power_of_two, launchable, next_power_of_2

FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned."""

    block_t: int = 16  # tokens of a program
    num_warps: int = 4

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_t=(1, 256), num_warps=(1, 16))


def why_not(call: WriteKvPages) -> str | None:
    return launchable(call, write_kernel)


def heuristic(call: WriteKvPages) -> Tile:
    """About four thousand elements per program."""
    width = next_power_of_2(max(call.head_dim, call.v_head_dim))
    return Tile(block_t=max(1, min(4096 // width, next_power_of_2(call.num_tokens), 64)))


class NewRows(NamedTuple):
    """This step's K or V, [tokens, heads, width], and their scale, as `load_scale` takes it."""

    ptr: tl.tensor
    token_stride: tl.tensor
    head_stride: tl.tensor
    scale_ptr: tl.tensor
    scale_factor: tl.tensor
    SCALE_STRIDE: tl.constexpr


class Pages(NamedTuple):
    """The pages of K or of V, of one KV head."""

    ptr: tl.tensor
    page_stride: tl.tensor
    slot_stride: tl.tensor


@triton.jit
def slots_from_tables(token, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs, num_tokens, num_pages, capacity,
                      table_stride, search_steps, PAGE_SIZE: tl.constexpr):  # fmt: skip
    """Each token's slot, -1 for one that belongs to no sequence or no page."""
    low = tl.zeros_like(token)
    high = low + num_seqs + 1
    for _ in range(search_steps):
        middle = (low + high) // 2
        found = (query_edge(cu_q_lens_ptr, middle, num_tokens) <= token) & (high - low > 1)
        high = tl.where(found | (high - low <= 1), high, middle)
        low = tl.where(found, middle, low)
    live = (low < num_seqs) & (token < num_tokens)
    seq = tl.where(live, low, 0)
    start = query_edge(cu_q_lens_ptr, tl.where(live, seq, 0), num_tokens)
    stop = query_edge(cu_q_lens_ptr, tl.where(live, seq + 1, 0), num_tokens)
    kv_len = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + seq, mask=live, other=0), 0), capacity)
    position = kv_len - (stop - token)
    live = live & (token >= start) & (token < stop) & (position >= 0)
    entry = page_indices_ptr + seq.to(tl.int64) * table_stride + position // PAGE_SIZE
    page = tl.load(entry, mask=live, other=-1)
    live = live & (page >= 0) & (page < num_pages)
    return tl.where(live, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, -1)


@triton.jit
def write_rows(new, pages, token, kv_head, slot, live, FORMAT: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr,
               D_PAD: tl.constexpr):  # fmt: skip
    """Rows of K or of V of one KV head, scaled and encoded, to their slots."""
    d = tl.arange(0, D_PAD)
    mask = live[:, None] & (d < D)[None, :]
    source = new.ptr + token.to(tl.int64) * new.token_stride + kv_head * new.head_stride
    numbers = tl.load(source[:, None] + d[None, :], mask=mask, other=0).to(tl.float32)
    scale = load_scale(new.scale_ptr, kv_head, new.scale_factor, new.SCALE_STRIDE)
    numbers = divided(numbers, scale)
    target = pages.ptr + slot // PAGE_SIZE * pages.page_stride + slot % PAGE_SIZE * pages.slot_stride
    stored = encode(numbers, FORMAT, pages.ptr.dtype.element_ty)
    tl.store(target[:, None] + d[None, :], stored, mask=mask)


@triton.jit(do_not_specialize=VARYING)
def write_kernel(
    k_ptr, v_ptr, slots_ptr, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs_ptr, k_scale_ptr, v_scale_ptr,
    given_pages_ptr, given_v_pages_ptr, k_pages_ptr, v_pages_ptr,
    num_tokens, max_num_seqs, num_pages, capacity, table_stride, search_steps, slots_stride,
    k_token_stride, k_new_head_stride, v_token_stride, v_new_head_stride,
    k_page_stride, k_slot_stride, k_head_stride, v_page_stride, v_slot_stride, v_head_stride,
    k_scale_factor, v_scale_factor,
    K_SCALE_STRIDE: tl.constexpr, V_SCALE_STRIDE: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_NUM_SEQS: tl.constexpr,
    FORMAT: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Some tokens of one KV head. Where K and V are interleaved in one array, `v_pages_ptr` is None."""
    COMBINED: tl.constexpr = v_pages_ptr is None
    if COMBINED:
        v_pages_ptr = k_pages_ptr
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    kv_head = tl.program_id(1).to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + token.to(tl.int64) * slots_stride, mask=token < num_tokens, other=-1).to(tl.int64)
    else:
        num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
        slot = slots_from_tables(token, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs, num_tokens, num_pages,
                                 capacity, table_stride, search_steps, PAGE_SIZE)  # fmt: skip
    live = (slot >= 0) & (slot // PAGE_SIZE < num_pages) & (token < num_tokens)
    slot = tl.where(live, slot, 0)
    k_head, v_head = array_heads(kv_head, COMBINED)
    write_rows(
        NewRows(k_ptr, k_token_stride, k_new_head_stride, k_scale_ptr, k_scale_factor, K_SCALE_STRIDE),
        Pages(k_pages_ptr + k_head * k_head_stride, k_page_stride, k_slot_stride),
        token, kv_head, slot, live, FORMAT, PAGE_SIZE, D, D_PAD,
    )  # fmt: skip
    write_rows(
        NewRows(v_ptr, v_token_stride, v_new_head_stride, v_scale_ptr, v_scale_factor, V_SCALE_STRIDE),
        Pages(v_pages_ptr + v_head * v_head_stride, v_page_stride, v_slot_stride),
        token, kv_head, slot, live, FORMAT, PAGE_SIZE, DV, DV_PAD,
    )  # fmt: skip


def run(call: WriteKvPages, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns the page arrays."""
    k, v = launch.packed(call.k), launch.packed(call.v)
    k_pages, v_pages, strides = cache_views(call, launch)
    # What comes as it is stored goes through float32 as the integers that its bits are, and keeps them.
    scales = (None, None) if call.copies else (call.k_scale, call.v_scale)
    k_scale, k_arguments = scale_arguments("k_scale", scales[0], k, launch)
    v_scale, v_arguments = scale_arguments("v_scale", scales[1], k, launch)
    by_slot = call.slot_mapping is not None
    if by_slot:
        slots = page_indices = kv_lens = cu_q_lens = call.slot_mapping
        max_num_seqs, capacity = 0, 0
    else:
        page_indices, kv_lens, cu_q_lens = map(launch.packed, (call.page_indices, call.kv_lens, call.cu_q_lens))
        slots = kv_lens
        max_num_seqs = kv_lens.shape[0]
        capacity = call.capacity
    inputs = [k, v, slots, page_indices, kv_lens, cu_q_lens, kv_lens if call.num_seqs is None else call.num_seqs]
    pages = launch(
        write_kernel,
        (cdiv(call.num_tokens, tile.block_t), call.num_kv_heads),
        (*inputs, k_scale, v_scale, k_pages, k if call.combined else v_pages),
        [],
        inplace=(9,) if call.combined else (9, 10),
        **({"v_pages_ptr": None} if call.combined else {}),
        num_warps=tile.num_warps,
        num_stages=1,
        num_tokens=call.num_tokens,
        max_num_seqs=max_num_seqs,
        num_pages=call.num_pages,
        capacity=capacity,
        table_stride=launch.strides(page_indices)[0],
        slots_stride=launch.strides(slots)[0],
        **dict(zip(("k_token_stride", "k_new_head_stride"), launch.strides(k), strict=False)),
        **dict(zip(("v_token_stride", "v_new_head_stride"), launch.strides(v), strict=False)),
        **strides,
        **k_arguments,
        **v_arguments,
        HAS_SLOTS=by_slot,
        HAS_NUM_SEQS=call.num_seqs is not None,
        FORMAT="plain" if call.copies else cache_format(call),
        PAGE_SIZE=call.page_size,
        D=call.head_dim,
        D_PAD=next_power_of_2(call.head_dim),
        DV=call.v_head_dim,
        DV_PAD=next_power_of_2(call.v_head_dim),
        search_steps=(max_num_seqs + 1).bit_length() + 1,
        BLOCK_T=tile.block_t,
    )
    return pages
