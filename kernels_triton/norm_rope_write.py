"""One Triton kernel that normalises and rotates this step's queries and keys, and writes K and V.

A program has a block of tokens of one query head, or of one KV head, whose K and V it writes.
"""

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import NormRopeWrite
from ragged_attention.kernels_triton import write_kv_pages
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import array_heads, cache_views, scale_arguments
from ragged_attention.kernels_triton._rotary import (
    Angles,
    Norm,
    Rotary,
    norm_factors,
    positions_of,
    prepared,
    rotary_of,
)
from ragged_attention.kernels_triton._sequences import VARYING, PageTable, count_sequences
from ragged_attention.kernels_triton._splits import Batch
from ragged_attention.kernels_triton._stored import RowPages
from ragged_attention.kernels_triton._tiles import cdiv, launchable, next_power_of_2
from ragged_attention.kernels_triton.write_kv_pages import (
    Element,
    NewRows,
    elements_of,
    place_arguments,
    slots_from_tables,
    store_rows,
    tokens_with,
    write_rows,
)
from ragged_attention.kernels_triton.write_kv_pages import Tile as Tile

FEATURES = write_kv_pages.FEATURES - {"k_scale_pages", "v_scale_pages"}
FEATURES |= {"q_weight", "k_weight", "eps", "interleaved"}
ROTARY_VARYING = (*VARYING, "num_positions")


def why_not(call: NormRopeWrite) -> str | None:
    return launchable(call, norm_rope_kernel)


def heuristic(call: NormRopeWrite) -> Tile:
    """About a thousand elements per program, because each element is loaded together with its rotary partner."""
    width = next_power_of_2(max(call.head_dim, call.v_head_dim))
    return Tile(block_t=max(1, min(1024 // width, next_power_of_2(call.num_tokens), 64)))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Strides(Constants):
    """The strides of new rows [tokens, heads, D]. They follow from a model's sizes, so they are constants."""

    TOKEN: int
    HEAD: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Config(Constants):
    """The compile-time constants of a launch."""

    K: Element
    V: Element
    Q_ROTARY: Rotary
    K_ROTARY: Rotary
    Q_STRIDES: Strides
    K_STRIDES: Strides
    V_STRIDES: Strides
    NUM_Q_HEADS: int
    BLOCK_T: int  # tokens per program
    HAS_SLOTS: bool  # whether the call has a slot mapping; otherwise slots follow from the page table
    HAS_NUM_SEQS: bool


@triton.jit(do_not_specialize=ROTARY_VARYING)
def norm_rope_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    slots_ptr, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs_ptr, k_scale_ptr, v_scale_ptr,
    given_pages_ptr, given_v_pages_ptr, new_q_ptr, k_pages_ptr, v_pages_ptr,
    num_tokens, max_num_seqs, num_pages, capacity, table_stride, search_steps, slots_stride,
    positions_stride, num_positions, eps,
    k_page_stride, k_slot_stride, k_head_stride, v_page_stride, v_slot_stride, v_head_stride,
    k_scale_factor, v_scale_factor, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute the new queries of one head for a block of tokens, or write the K and V of one KV head.

    KV heads follow query heads in the grid. If K and V are interleaved in one array, `v_pages_ptr` is None.
    """
    COMBINED: tl.constexpr = v_pages_ptr is None
    if COMBINED:
        v_pages_ptr = k_pages_ptr
    PAGE_SIZE: tl.constexpr = CONFIG.K.PAGE_SIZE
    token = tl.program_id(0) * CONFIG.BLOCK_T + tl.arange(0, CONFIG.BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    is_token = token < num_tokens
    position = positions_of(positions_ptr, token, is_token, positions_stride, num_positions)
    angles = Angles(cos_ptr, sin_ptr, position)
    columns = tl.arange(0, CONFIG.K.D_PAD)
    if head < CONFIG.NUM_Q_HEADS:
        rows = q_ptr + token.to(tl.int64) * CONFIG.Q_STRIDES.TOKEN + head * CONFIG.Q_STRIDES.HEAD
        norm = Norm(q_weight_ptr, eps)
        factor = norm_factors(rows, is_token, norm, CONFIG.Q_ROTARY)
        x = prepared(rows, columns, is_token, norm, factor, angles, CONFIG.Q_ROTARY)
        target = new_q_ptr + (token.to(tl.int64) * CONFIG.NUM_Q_HEADS + head) * CONFIG.K.D
        tl.store(target[:, None] + columns[None, :], x, mask=is_token[:, None] & (columns < CONFIG.K.D)[None, :])
    else:
        kv_head = head - CONFIG.NUM_Q_HEADS
        if CONFIG.HAS_SLOTS:
            slot = tl.load(slots_ptr + token.to(tl.int64) * slots_stride, mask=is_token, other=-1).to(tl.int64)
        else:
            num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, CONFIG.HAS_NUM_SEQS)
            batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
            table = PageTable(page_indices_ptr, table_stride, num_pages)
            slot = slots_from_tables(token, batch, table, search_steps, PAGE_SIZE)
        tokens = tokens_with(slot, token, num_tokens, num_pages, PAGE_SIZE)
        k_head, v_head = array_heads(kv_head, COMBINED)
        rows = k_ptr + token.to(tl.int64) * CONFIG.K_STRIDES.TOKEN + kv_head * CONFIG.K_STRIDES.HEAD
        norm = Norm(k_weight_ptr, eps)
        factor = norm_factors(rows, tokens.live, norm, CONFIG.K_ROTARY)
        x = prepared(rows, columns, tokens.live, norm, factor, angles, CONFIG.K_ROTARY)
        store_rows(
            x.to(tl.float32),
            NewRows(k_ptr, CONFIG.K_STRIDES.TOKEN, CONFIG.K_STRIDES.HEAD, k_scale_ptr, k_scale_factor),
            RowPages(k_pages_ptr + k_head * k_head_stride, k_page_stride, k_slot_stride, k_pages_ptr),
            tokens, kv_head, CONFIG.K,
        )  # fmt: skip
        write_rows(
            NewRows(v_ptr, CONFIG.V_STRIDES.TOKEN, CONFIG.V_STRIDES.HEAD, v_scale_ptr, v_scale_factor),
            RowPages(v_pages_ptr + v_head * v_head_stride, v_page_stride, v_slot_stride, v_pages_ptr),
            tokens, kv_head, CONFIG.V,
        )  # fmt: skip


def run(call: NormRopeWrite, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns the queries and the page arrays."""
    q, k, v = map(launch.packed, (call.q, call.k, call.v))
    k_pages, v_pages, strides = cache_views(call, launch)
    scales = [scale_arguments(one, k, launch) for one in (call.k_scale, call.v_scale)]
    (k_scale, k_factor, k_stride), (v_scale, v_factor, v_stride) = scales
    places, numbers = place_arguments(call, launch)
    cos, sin = launch.packed(call.cos), launch.packed(call.sin)
    weights = [q if weight is None else launch.contiguous(weight) for weight in (call.q_weight, call.k_weight)]
    inputs = (q, k, v, call.positions, cos, sin, *weights, *places, k_scale, v_scale)
    first = len(inputs)

    def rotary(weight: Any) -> Rotary:
        return rotary_of(call, call.head_dim, 0 if weight is None else call.head_dim, 0, (cos, sin), launch)

    return launch(
        norm_rope_kernel,
        (cdiv(call.num_tokens, tile.block_t), call.num_q_heads + call.num_kv_heads),
        (*inputs, k_pages, k if call.combined else v_pages),
        [(call.q.shape, call.q.dtype)],
        inplace=(first,) if call.combined else (first, first + 1),
        **({"v_pages_ptr": None} if call.combined else {}),
        num_warps=tile.num_warps,
        num_stages=1,
        num_tokens=call.num_tokens,
        num_pages=call.num_pages,
        slots_stride=launch.strides(places[0])[0],
        **numbers,
        positions_stride=launch.strides(call.positions)[0],
        num_positions=call.num_positions,
        eps=float(call.eps),
        **strides,
        k_scale_factor=k_factor,
        v_scale_factor=v_factor,
        CONFIG=Config(
            **elements_of(call, (k_stride, v_stride), launch),
            Q_ROTARY=rotary(call.q_weight),
            K_ROTARY=rotary(call.k_weight),
            Q_STRIDES=Strides(*launch.strides(q)[:2]),
            K_STRIDES=Strides(*launch.strides(k)[:2]),
            V_STRIDES=Strides(*launch.strides(v)[:2]),
            NUM_Q_HEADS=call.num_q_heads,
            BLOCK_T=tile.block_t,
            HAS_SLOTS=call.slot_mapping is not None,
            HAS_NUM_SEQS=call.num_seqs is not None,
        ),
    )
