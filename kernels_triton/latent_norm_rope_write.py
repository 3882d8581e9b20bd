"""One Triton kernel that normalises, rotates and writes this step's latent rows, and rotates the queries.

A program has a block of tokens. It rotates one query head, or writes one part of the latent rows. Rows are divided into
parts as in `write_mla_cache`. Each part needs the norm of the whole row. Its program computes the norm again, from
columns that the first part's program has brought into the GPU's cache.
"""

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import LatentNormRopeWrite
from ragged_attention.kernels_triton import write_mla_cache
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import load_scale, scale_arguments
from ragged_attention.kernels_triton._latent.operands import row_format
from ragged_attention.kernels_triton._latent.rows import places_of
from ragged_attention.kernels_triton._rotary import (
    Angles,
    Norm,
    Rotary,
    norm_factors,
    positions_of,
    prepared,
    rotary_of,
)
from ragged_attention.kernels_triton._sequences import PageTable, count_sequences
from ragged_attention.kernels_triton._splits import Batch
from ragged_attention.kernels_triton._tiles import cdiv, launchable, next_power_of_2
from ragged_attention.kernels_triton.norm_rope_write import ROTARY_VARYING, Strides
from ragged_attention.kernels_triton.write_kv_pages import Tile as Tile
from ragged_attention.kernels_triton.write_kv_pages import place_arguments, slots_from_tables
from ragged_attention.kernels_triton.write_mla_cache import (
    is_scaled,
    programs_per_row,
    scale_of_columns,
    store_group,
    store_rotary,
    tile_for,
    write_plain,
)

FEATURES = write_mla_cache.FEATURES - {"d_v"} | {"kv_weight", "eps", "interleaved"}


def why_not(call: LatentNormRopeWrite) -> str | None:
    return launchable(call, latent_norm_rope_kernel)


def heuristic(call: LatentNormRopeWrite) -> Tile:
    return tile_for(call.kv_format, call.num_tokens, call.width)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Config(Constants):
    """The compile-time constants of a launch."""

    FORMAT: Any  # see `row_format`
    Q_ROTARY: Rotary
    KV_ROTARY: Rotary
    Q_STRIDES: Strides
    KV_STRIDES: Strides
    NUM_Q_HEADS: int
    WIDTH_PAD: int  # the number of columns of a row, rounded up to a power of two
    ROTARY_PAD: int  # the number of rotary columns, rounded up to a power of two
    KV_SCALE_STRIDE: int  # see `load_scale`
    ROPE_SCALE_STRIDE: int
    ROPE_START: int  # the first column that `rope_scale` divides
    SCALED: bool  # whether rows of a plain cache are divided by a scale and encoded
    POWERS: bool  # whether scales are rounded up to powers of two
    BLOCK_T: int  # tokens per program
    HAS_SLOTS: bool  # whether the call has a slot mapping; otherwise slots follow from the page table
    HAS_NUM_SEQS: bool


@triton.jit(do_not_specialize=ROTARY_VARYING)
def latent_norm_rope_kernel(
    q_ptr, kv_ptr, positions_ptr, cos_ptr, sin_ptr, kv_weight_ptr,
    slots_ptr, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs_ptr, kv_scale_ptr, rope_scale_ptr,
    given_cache_ptr, new_q_ptr, cache_ptr,
    num_tokens, num_slots, max_num_seqs, capacity, table_stride, search_steps, slots_stride,
    positions_stride, num_positions, eps, page_stride, row_stride, head_stride, kv_scale_factor,
    rope_scale_factor, CONFIG: tl.constexpr,
):  # fmt: skip
    """Rotate one query head of a block of tokens, or write one part of their rows. Parts follow heads in the grid."""
    FORMAT: tl.constexpr = CONFIG.FORMAT
    KV_ROTARY: tl.constexpr = CONFIG.KV_ROTARY
    token = tl.program_id(0).to(tl.int64) * CONFIG.BLOCK_T + tl.arange(0, CONFIG.BLOCK_T)
    program = tl.program_id(1)
    is_token = token < num_tokens
    position = positions_of(positions_ptr, token, is_token, positions_stride, num_positions)
    angles = Angles(cos_ptr, sin_ptr, position)
    norm = Norm(kv_weight_ptr, eps)
    if program < CONFIG.NUM_Q_HEADS:
        # A name must have one type in both branches, so the branches share no names.
        q_columns = tl.arange(0, CONFIG.ROTARY_PAD)
        width: tl.constexpr = CONFIG.Q_ROTARY.WIDTH
        q_rows = q_ptr + token * CONFIG.Q_STRIDES.TOKEN + program.to(tl.int64) * CONFIG.Q_STRIDES.HEAD
        q_factor = norm_factors(q_rows, is_token, norm, CONFIG.Q_ROTARY)
        new_q = prepared(q_rows, q_columns, is_token, norm, q_factor, angles, CONFIG.Q_ROTARY)
        q_target = new_q_ptr + (token * CONFIG.NUM_Q_HEADS + program) * width
        tl.store(q_target[:, None] + q_columns[None, :], new_q, mask=is_token[:, None] & (q_columns < width)[None, :])
    else:
        part = program - CONFIG.NUM_Q_HEADS
        if CONFIG.HAS_SLOTS:
            slot = tl.load(slots_ptr + token * slots_stride, mask=is_token, other=-1).to(tl.int64)
        else:
            num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, CONFIG.HAS_NUM_SEQS)
            batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
            table = PageTable(page_indices_ptr, table_stride, num_slots // FORMAT.PAGE_SIZE)
            slot = slots_from_tables(token.to(tl.int32), batch, table, search_steps, FORMAT.PAGE_SIZE)
        live = (slot >= 0) & (slot < num_slots) & is_token
        slot = tl.where(live, slot, 0)
        page = cache_ptr + slot // FORMAT.PAGE_SIZE * page_stride
        target, scales = places_of(page, slot % FORMAT.PAGE_SIZE, row_stride, FORMAT)
        rows = kv_ptr + token * CONFIG.KV_STRIDES.TOKEN
        if FORMAT.SCALES == "":
            rows += part.to(tl.int64) * CONFIG.KV_STRIDES.HEAD
            target += part.to(tl.int64) * head_stride
            factor = norm_factors(rows, live, norm, KV_ROTARY)
            x = prepared(rows, tl.arange(0, CONFIG.WIDTH_PAD), live, norm, factor, angles, KV_ROTARY)
            scale = load_scale(kv_scale_ptr, part, kv_scale_factor, CONFIG.KV_SCALE_STRIDE)
            rope_scale = load_scale(rope_scale_ptr, part, rope_scale_factor, CONFIG.ROPE_SCALE_STRIDE)
            scale = scale_of_columns(scale, rope_scale, CONFIG.ROPE_START, KV_ROTARY.WIDTH, CONFIG.WIDTH_PAD)
            write_plain(x, target, live, scale, CONFIG.SCALED, FORMAT.CODES, KV_ROTARY.WIDTH)
        else:
            factor = norm_factors(rows, live, norm, KV_ROTARY)
            if part * FORMAT.GROUP < FORMAT.VALUES:
                group_columns = part * FORMAT.GROUP + tl.arange(0, FORMAT.GROUP)
                group = prepared(rows, group_columns, live, norm, factor, angles, KV_ROTARY)
                store_group(group, target, scales, part, live, CONFIG.POWERS, FORMAT)
            elif FORMAT.ROTARY > 0:
                last_columns = FORMAT.VALUES + tl.arange(0, FORMAT.ROTARY)
                last = prepared(rows, last_columns, live, norm, factor, angles, KV_ROTARY)
                store_rotary(last, target, scales, live, FORMAT)


def run(call: LatentNormRopeWrite, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns the queries and the cache."""
    q, kv, cache = launch.packed(call.q), launch.packed(call.kv), call.cache
    tables = launch.packed(call.cos), launch.packed(call.sin)
    weight = kv if call.kv_weight is None else launch.contiguous(call.kv_weight)
    kv_scale, factor, stride = scale_arguments(call.kv_scale, kv, launch)
    rope_scale, rope_factor, rope_stride = scale_arguments(call.rope_scale, kv, launch)
    places, numbers = place_arguments(call, launch)
    rotary = 2 * call.half
    inputs = (q, kv, call.positions, *tables, weight, *places, kv_scale, rope_scale, cache)
    return launch(
        latent_norm_rope_kernel,
        (cdiv(call.num_tokens, tile.block_t), call.num_q_heads + programs_per_row(call.kv_format, call.num_kv_heads)),
        inputs,
        [(call.q.shape, call.q.dtype)],
        inplace=(len(inputs) - 1,),
        num_warps=tile.num_warps,
        num_stages=1,
        num_tokens=call.num_tokens,
        num_slots=call.num_slots,
        slots_stride=launch.strides(places[0])[0],
        **numbers,
        positions_stride=launch.strides(call.positions)[0],
        num_positions=call.num_positions,
        eps=float(call.eps),
        **dict(zip(("page_stride", "row_stride", "head_stride"), launch.strides(cache), strict=False)),
        kv_scale_factor=factor,
        rope_scale_factor=rope_factor,
        CONFIG=Config(
            FORMAT=row_format(call.kv_format, call.device.arch, call.page_size, page_unit=1),
            Q_ROTARY=rotary_of(call, rotary, 0, 0, tables, launch),
            KV_ROTARY=rotary_of(call, call.width, call.normalized, call.width - rotary, tables, launch),
            Q_STRIDES=Strides(*launch.strides(q)[:2]),
            KV_STRIDES=Strides(*launch.strides(kv)[:2]),
            NUM_Q_HEADS=call.num_q_heads,
            WIDTH_PAD=next_power_of_2(call.width),
            ROTARY_PAD=next_power_of_2(rotary),
            KV_SCALE_STRIDE=stride,
            ROPE_SCALE_STRIDE=rope_stride,
            ROPE_START=call.rope_start,
            SCALED=is_scaled(call),
            POWERS=call.power_of_two_scales,
            BLOCK_T=tile.block_t,
            HAS_SLOTS=call.slot_mapping is not None,
            HAS_NUM_SEQS=call.num_seqs is not None,
        ),
    )
