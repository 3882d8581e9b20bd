"""Writing latent rows into a plain or quantised cache, in Triton. `quantize_mla_cache` runs the same kernel.

A program writes a part of a block of rows: in a plain cache one KV head, in a quantised cache one group of columns that
share a scale, or the rotary columns. Quantised rows are stored byte by byte, because padding between pages can give
32-bit scales and 16-bit values any alignment. If the strides are multiples of the word size, the compiler merges the
byte stores.
"""

from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import CacheFormat, WriteMlaCache
from ragged_attention.kernels_triton._formats import (
    divided,
    e4m3_values,
    encode,
    encode_float4,
    encode_float8,
    load_scale,
    narrow,
    scale_arguments,
)
from ragged_attention.kernels_triton._latent.operands import row_format
from ragged_attention.kernels_triton._latent.rows import places_of
from ragged_attention.kernels_triton._sequences import VARYING, PageTable, count_sequences
from ragged_attention.kernels_triton._splits import Batch
from ragged_attention.kernels_triton._tiles import cdiv, launchable, next_power_of_2
from ragged_attention.kernels_triton.write_kv_pages import Tile as Tile
from ragged_attention.kernels_triton.write_kv_pages import place_arguments, slots_from_tables

FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "kv_scale", "rope_scale", "d_v",
    "power_of_two_scales", "cache_format", "cache_layout",
})  # fmt: skip


def why_not(call: WriteMlaCache) -> str | None:
    return launchable(call, write_rows_kernel)


def heuristic(call: WriteMlaCache) -> Tile:
    """About two thousand elements per program."""
    return tile_for(call.kv_format, call.kv.shape[0], call.kv.shape[2])


def tile_for(form: CacheFormat, num_tokens: int, width: int) -> Tile:
    """The tile for `num_tokens` rows of `width` columns."""
    columns = form.group or next_power_of_2(width)
    return Tile(block_t=max(1, min(2048 // columns, next_power_of_2(num_tokens))))


@triton.jit
def store_bytes(target, values, mask, COUNT: tl.constexpr):
    """Store unsigned integers [T, C] of COUNT bytes each to the addresses `target` [T], which need no alignment."""
    rows: tl.constexpr = values.shape[0]
    columns: tl.constexpr = values.shape[1] * COUNT
    byte = tl.arange(0, COUNT)
    split = (values[:, :, None].to(tl.uint32) >> (byte * 8)[None, None, :]) & 0xFF
    split = tl.reshape(split, [rows, columns]).to(tl.uint8).to(target.dtype.element_ty, bitcast=True)
    tl.store(target[:, None] + tl.arange(0, columns)[None, :], split, mask=mask[:, None])


@triton.jit
def group_scales(values, POWERS: tl.constexpr):
    """The scale of each row of float32 values: its largest magnitude divided by 448, but at least 1e-4.

    If POWERS, scales are rounded up to powers of two. A row with a NaN has the scale NaN. Any other row with an
    infinity has the scale infinity.
    """
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as an integer, NaN is the largest
    largest = tl.max(magnitude, 1)
    finite = largest < 0x7F800000
    scale = tl.div_rn(
        tl.where(finite, largest, 0).to(tl.float32, bitcast=True), tl.full(largest.shape, 448.0, tl.float32)
    )
    bits = tl.maximum(scale, 1e-4).to(tl.int32, bitcast=True)
    if POWERS:
        bits = (bits + 0x7FFFFF) & 0x7F800000
    bits = tl.where(finite, bits, tl.where(largest > 0x7F800000, 0x7FC00000, 0x7F800000))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def write_group(values, target, scale_target, live, POWERS: tl.constexpr, E8M0: tl.constexpr):
    """Quantise one group of columns to e4m3, and store it with its scales, which are e8m0 or float32."""
    values = values.to(tl.float32)
    scale = group_scales(values, POWERS)
    scaled = tl.div_rn(values, scale[:, None] + tl.zeros_like(values))
    code = encode_float8(scaled, 3, 7, 0x7E)
    code = tl.where(scaled == scaled, code, 0x7F).to(tl.uint8)  # one code for NaNs: their sign is not portable
    store_bytes(target, code, live, 1)
    bits = scale.to(tl.uint32, bitcast=True)
    if E8M0:
        store_bytes(scale_target, (bits >> 23)[:, None], live, 1)
    else:
        store_bytes(scale_target, bits[:, None], live, 4)


@triton.jit
def write_group_of_4_bits(values, target, scale_target, live):
    """Store a group of columns as e2m1. A row's e4m3 scale is its largest magnitude / 6, or NaN if it has a NaN."""
    values = values.to(tl.float32)
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # as an integer, NaN is the largest
    nan = largest > 0x7F800000
    scale = tl.where(nan, 0, largest).to(tl.float32, bitcast=True)
    scale = tl.div_rn(scale, tl.full(largest.shape, 6.0, tl.float32))
    stored = encode_float8(tl.minimum(tl.maximum(scale, 0.001953125), 448.0), 3, 7, 0x7E)
    scaled = tl.div_rn(values, e4m3_values(stored)[:, None] + tl.zeros_like(values))
    code = tl.where(nan[:, None], 0, encode_float4(scaled))
    low, high = tl.split(tl.reshape(code, [code.shape[0], code.shape[1] // 2, 2]))
    store_bytes(target, low | (high << 4), live, 1)
    store_bytes(scale_target, tl.where(nan, 0x7F, stored)[:, None], live, 1)


@triton.jit
def write_rotary(values, target, live):
    """Store the rotary columns as bfloat16."""
    if values.dtype != tl.bfloat16:
        values = narrow(values.to(tl.float32), tl.bfloat16)
    store_bytes(target, values.to(tl.uint16, bitcast=True), live, 2)


@triton.jit
def scale_of_columns(scale, rope_scale, ROPE_START: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """The scale of each of WIDTH columns: `rope_scale` from ROPE_START on, else `scale`. A single scale is a number."""
    if ROPE_START < WIDTH:
        scale = tl.where((tl.arange(0, WIDTH_PAD) < ROPE_START)[None, :], scale, rope_scale)
    return scale


@triton.jit
def write_plain(values, target, live, scale, SCALED: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows unchanged or, if SCALED, divided by a scale and encoded. `values` has padding after WIDTH columns."""
    columns = tl.arange(0, values.shape[1])
    mask = live[:, None] & (columns < WIDTH)[None, :]
    if SCALED:
        values = encode(divided(values.to(tl.float32), scale), CODES, target.dtype.element_ty)
    tl.store(target[:, None] + columns[None, :], values, mask=mask)


@triton.jit
def load_columns(source, live, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """COUNT columns of the rows at `source` [T], padded with zeros; rows that are not `live` are 0."""
    columns = tl.arange(0, PADDED)
    return tl.load(source[:, None] + columns[None, :], mask=live[:, None] & (columns < COUNT)[None, :], other=0)


@triton.jit
def store_group(values, target, scales, part, live, POWERS: tl.constexpr, FORMAT: tl.constexpr):
    """Quantise and store group `part` of rows at `target` [T], and its scales at `scales` [T]."""
    column = part * FORMAT.GROUP
    scale_bytes: tl.constexpr = 4 if FORMAT.SCALES == "float32" else 1
    scale = scales + part * scale_bytes
    if FORMAT.CODES == "e2m1":
        write_group_of_4_bits(values, target + column // 2, scale, live)
    else:
        write_group(values, target + column, scale, live, POWERS, scale_bytes == 1)


@triton.jit
def store_rotary(values, target, scales, live, FORMAT: tl.constexpr):
    """Store the rotary columns of rows at `target` [T], and clear the byte that pads the scales, if there is one."""
    scale_bytes: tl.constexpr = 4 if FORMAT.SCALES == "float32" else 1
    padded: tl.constexpr = FORMAT.VALUES // FORMAT.GROUP * scale_bytes < FORMAT.SCALES_STEP
    write_rotary(values, target + FORMAT.ROTARY_AT, live)
    if padded:
        zeros = tl.zeros([live.shape[0], 1], tl.uint8)
        store_bytes(scales + FORMAT.VALUES // FORMAT.GROUP, zeros, live, 1)


@triton.jit(do_not_specialize=VARYING)
def write_rows_kernel(
    kv_ptr, slots_ptr, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs_ptr, kv_scale_ptr,
    rope_scale_ptr, given_cache_ptr, cache_ptr,
    num_tokens, num_slots, max_num_seqs, capacity, table_stride, search_steps, slots_stride,
    kv_page_stride, kv_row_stride, kv_head_stride, page_stride, row_stride, head_stride, kv_scale_factor,
    rope_scale_factor, PLACES: tl.constexpr, HAS_NUM_SEQS: tl.constexpr, KV_SCALE_STRIDE: tl.constexpr,
    ROPE_SCALE_STRIDE: tl.constexpr, ROPE_START: tl.constexpr, SCALED: tl.constexpr, POWERS: tl.constexpr,
    KV_PAGE: tl.constexpr, FORMAT: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write rows of `kv`, which has KV_PAGE rows per page, to their slots in a cache of the format FORMAT.

    PLACES names the source of the slots: "slots" is a slot mapping, "tables" is the page table with the sequences'
    lengths, and with "rows" row i goes to slot i.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    slot = token
    if PLACES == "slots":
        slot = tl.load(slots_ptr + token * slots_stride, mask=token < num_tokens, other=-1).to(tl.int64)
    elif PLACES == "tables":
        num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
        batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
        table = PageTable(page_indices_ptr, table_stride, num_slots // FORMAT.PAGE_SIZE)
        slot = slots_from_tables(token.to(tl.int32), batch, table, search_steps, FORMAT.PAGE_SIZE)
    live = (slot >= 0) & (slot < num_slots) & (token < num_tokens)
    slot = tl.where(live, slot, 0)
    source = kv_ptr + token // KV_PAGE * kv_page_stride + token % KV_PAGE * kv_row_stride
    page = cache_ptr + slot // FORMAT.PAGE_SIZE * page_stride
    target, scales = places_of(page, slot % FORMAT.PAGE_SIZE, row_stride, FORMAT)
    if FORMAT.SCALES == "":
        source += part.to(tl.int64) * kv_head_stride
        scale = load_scale(kv_scale_ptr, part, kv_scale_factor, KV_SCALE_STRIDE)
        rope_scale = load_scale(rope_scale_ptr, part, rope_scale_factor, ROPE_SCALE_STRIDE)
        target += part.to(tl.int64) * head_stride
        scale = scale_of_columns(scale, rope_scale, ROPE_START, WIDTH, WIDTH_PAD)
        write_plain(load_columns(source, live, WIDTH, WIDTH_PAD), target, live, scale, SCALED, FORMAT.CODES, WIDTH)
    else:
        column = part * FORMAT.GROUP
        if column < FORMAT.VALUES:
            values = load_columns(source + column, live, FORMAT.GROUP, FORMAT.GROUP)
            store_group(values, target, scales, part, live, POWERS, FORMAT)
        elif FORMAT.ROTARY > 0:
            store_rotary(load_columns(source + FORMAT.VALUES, live, FORMAT.ROTARY, FORMAT.ROTARY), target, scales,
                         live, FORMAT)  # fmt: skip


def programs_per_row(form: CacheFormat, num_kv_heads: int) -> int:
    """Programs per row: one per group and one for any rotary columns, or one per KV head if the cache is plain."""
    return form.num_groups + (form.rotary > 0) if form.quantized else num_kv_heads


def is_scaled(call: Any) -> bool:
    """Whether rows of a plain cache are divided by a scale and encoded."""
    return call.kv_format.eight_bit or call.kv_scale is not None or call.rope_scale is not None


def constants(call: Any, num_slots: int, page_size: int, tile: Tile) -> dict[str, Any]:
    """The kernel arguments that writing and quantising share."""
    form, width = call.kv_format, call.kv.shape[-1]
    return {
        "num_warps": tile.num_warps,
        "num_stages": 1,
        "num_slots": num_slots,
        "POWERS": call.power_of_two_scales,
        "FORMAT": row_format(form, call.device.arch, page_size, page_unit=1),
        "WIDTH": width,
        "WIDTH_PAD": next_power_of_2(width),
        "BLOCK_T": tile.block_t,
    }


def run(call: WriteMlaCache, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns the cache."""
    kv, cache = launch.packed(call.kv), call.cache
    num_tokens, num_kv_heads, _ = kv.shape
    kv_scale, factor, stride = scale_arguments(call.kv_scale, kv, launch)
    rope_scale, rope_factor, rope_stride = scale_arguments(call.rope_scale, kv, launch)
    places, numbers = place_arguments(call, launch)
    (written,) = launch(
        write_rows_kernel,
        (cdiv(num_tokens, tile.block_t), programs_per_row(call.kv_format, num_kv_heads)),
        (kv, *places, kv_scale, rope_scale, cache),
        [],
        inplace=(8,),
        num_tokens=num_tokens,
        slots_stride=0 if call.slot_mapping is None else launch.strides(call.slot_mapping)[0],
        PLACES="tables" if call.slot_mapping is None else "slots",
        HAS_NUM_SEQS=call.num_seqs is not None,
        **numbers,
        kv_scale_factor=factor,
        rope_scale_factor=rope_factor,
        KV_SCALE_STRIDE=stride,
        ROPE_SCALE_STRIDE=rope_stride,
        ROPE_START=call.rope_start,
        kv_page_stride=launch.strides(kv)[0],
        kv_row_stride=0,
        kv_head_stride=launch.strides(kv)[1],
        **dict(zip(("page_stride", "row_stride", "head_stride"), launch.strides(cache), strict=False)),
        SCALED=is_scaled(call),
        KV_PAGE=1,
        **constants(call, call.num_slots, call.page_size, tile),
    )
    return written
