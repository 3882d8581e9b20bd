"""Latent attention: a quantised cache decoded once, for lists that name each of its rows many times.

A decoded row is of bfloat16, and what the attention loads of it is an operand. `fp8_v32`: the 512 codes, exact, the
four scales as they are, of two elements each, and the rotary columns. The other formats: the 512 columns, exact.
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import name_in_layout
from ragged_attention.kernels_triton._formats import e4m3_format, narrow
from ragged_attention.kernels_triton._latent.plan import Keys, decoded_width
from ragged_attention.kernels_triton._latent.rows import (
    Columns,
    Found,
    Layout,
    group_scale,
    key_columns,
    rotary_columns,
)
from ragged_attention.kernels_triton._tiles import cdiv

BLOCK_T = 16  # rows of a program


@triton.jit
def decode_kernel(
    cache_ptr, out_ptr, page_stride, slot_stride, num_slots, FORMAT: tl.constexpr, CODES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_UNIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """BLOCK_T slots of a cache as rows of WIDTH elements, whether a list names them or not."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = slot < num_slots
    offset = (slot % PAGE_SIZE).to(tl.int32)
    pages = cache_ptr + slot // PAGE_SIZE * page_stride * PAGE_UNIT
    found = Found(pages, pages + offset.to(tl.int64) * slot_stride, offset, there)
    rows = out_ptr + slot * WIDTH
    column = tl.arange(0, 128)
    for group in tl.static_range(4):
        keys = key_columns(
            found, 128 * group, Layout(FORMAT, CODES, PAGE_SIZE, PAGE_UNIT), Columns(4, 128, 512, 0, 0, 1, 1),
            tl.float16 if FORMAT == "fp8_v32" else tl.bfloat16,  # what is multiplied there is exact, interpreted too
        )  # fmt: skip
        keys = narrow(keys.to(tl.float32), tl.bfloat16)
        tl.store(rows[:, None] + 128 * group + column[None, :], keys, mask=there[:, None])
        if FORMAT == "fp8_v32":
            scale = group_scale(found.rows, there, group)
            tl.store((rows + 512 + 2 * group).to(tl.pointer_type(tl.float32)), scale, mask=there)
    if FORMAT == "fp8_v32":
        target = (rows + 520).to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, 64)[None, :]
        tl.store(target, rotary_columns(found.rows, there, 528), mask=there[:, None])


def decoded(keys: Keys, call: Any, launch: Any) -> Keys:
    """Enqueue the decoding of a cache; returns the same lists into packed rows."""
    num_slots, width = keys.cache.shape[0] * keys.page_size, decoded_width(call)
    where = keys.addresses(launch)
    (rows,) = launch(
        decode_kernel,
        (cdiv(where["num_slots"], BLOCK_T),),
        (keys.cache,),
        [((num_slots, 1, width), "bfloat16")],
        num_warps=4,
        num_stages=1,
        **{name: where[name] for name in ("page_stride", "slot_stride", "num_slots", "PAGE_UNIT")},
        FORMAT=name_in_layout(call.layout),
        CODES=e4m3_format(call.device.arch),
        PAGE_SIZE=keys.page_size,
        WIDTH=width,
        BLOCK_T=BLOCK_T,
    )
    return dataclasses.replace(keys, cache=rows, page_size=1)
