"""Latent attention: decoding a quantised cache in advance, for lists that name each of its rows many times.

Decoded rows are bfloat16 (see `decoded_format`). The attention kernel loads them as operands without conversion.
"""

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._latent.operands import decoded_format, decoded_width, operands
from ragged_attention.kernels_triton._latent.plan import Keys
from ragged_attention.kernels_triton._latent.rows import Rows, group_scale, key_columns, places_of, rest_columns
from ragged_attention.kernels_triton._tiles import cdiv

BLOCK_T = 16  # rows per program


@triton.jit
def decode_kernel(
    cache_ptr, out_ptr, page_stride, slot_stride, num_slots, FORMAT: tl.constexpr, DECODED: tl.constexpr,
    OPERANDS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Decode BLOCK_T slots of a cache into rows of WIDTH elements in the format DECODED."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = slot < num_slots
    offset = (slot % FORMAT.PAGE_SIZE).to(tl.int32)
    pages = cache_ptr + slot // FORMAT.PAGE_SIZE * page_stride * FORMAT.PAGE_UNIT
    values_at, scales_at = places_of(pages, offset, slot_stride, FORMAT)
    rows = Rows(values_at, scales_at, live)
    targets = out_ptr + slot * WIDTH
    column = tl.arange(0, OPERANDS.WIDTH)
    for group in tl.static_range(OPERANDS.GROUPS):
        keys = narrow(key_columns(rows, group * OPERANDS.WIDTH, FORMAT, OPERANDS).to(tl.float32), tl.bfloat16)
        tl.store(targets[:, None] + group * OPERANDS.WIDTH + column[None, :], keys, mask=live[:, None])
        if FORMAT.FOLDED:
            scales = (targets + DECODED.SCALES_AT + 2 * group).to(tl.pointer_type(tl.float32))
            tl.store(scales, group_scale(rows, group), mask=live)
    if OPERANDS.REST > 0:
        column = tl.arange(0, OPERANDS.REST_PAD)
        rest = targets[:, None] + DECODED.ROTARY_AT + column[None, :]
        tl.store(rest, rest_columns(rows, FORMAT, OPERANDS), mask=live[:, None] & (column < OPERANDS.REST)[None, :])


def decoded(keys: Keys, call: Any, launch: Any) -> Keys:
    """Enqueue the decoding of a cache; returns `keys` with the packed decoded rows in place of the cache."""
    num_slots, width = keys.cache.shape[0] * keys.page_size, decoded_width(keys.form)
    addresses = keys.addresses(launch)
    (rows,) = launch(
        decode_kernel,
        (cdiv(addresses["num_slots"], BLOCK_T),),
        (keys.cache,),
        [((num_slots, 1, width), "bfloat16")],
        num_warps=4,
        num_stages=1,
        **{name: addresses[name] for name in ("page_stride", "slot_stride", "num_slots")},
        FORMAT=keys.row_format(call.device.arch, launch),
        DECODED=decoded_format(keys.form, page_unit=1),
        OPERANDS=operands(call, BLOCK_T),
        WIDTH=width,
        BLOCK_T=BLOCK_T,
    )
    return dataclasses.replace(keys, cache=rows, page_size=1, decoded=True)
