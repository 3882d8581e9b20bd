"""The RMS normalisation of a head and its rotary embedding, in float32."""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._tiles import next_power_of_2


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rotary(Constants):
    """Which columns of a row are normalised or rotated, and the layout of a model's cosine and sine tables."""

    WIDTH: int  # the number of columns of a row
    NORMED: int  # the number of normalised columns, from column 0 on; 0 without a norm
    NORMED_PAD: int  # NORMED, rounded up to a power of two
    START: int  # the first rotated column
    HALF: int  # the number of rotated pairs
    INTERLEAVED: bool  # whether a pair is adjacent columns, instead of columns i and i + HALF
    COS_STRIDE: int  # stride of a table's rows; a model's tables stay the same, so it is a constant
    SIN_STRIDE: int
    SIN_OFFSET: int  # the column of the first sine in its table


class Angles(NamedTuple):
    """The tables of cosines and sines, and the row of each token in them."""

    cos_ptr: tl.tensor
    sin_ptr: tl.tensor
    position: tl.tensor


class Norm(NamedTuple):
    """The weights of a norm, and `eps`, which is added to the mean of squares."""

    weight_ptr: tl.tensor
    eps: tl.tensor


@triton.jit
def positions_of(positions_ptr, token, is_token, stride, num_positions):
    """The row of each token in the tables; a position outside them is clamped."""
    position = tl.load(positions_ptr + token.to(tl.int64) * stride, mask=is_token, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(position, 0), num_positions - 1)


@triton.jit
def norm_factors(rows, mask, norm, ROTARY: tl.constexpr):
    """The factor of each row at `rows` [T]: 1 / its root mean square; 1 without a norm."""
    if ROTARY.NORMED == 0:
        factor = tl.full(rows.shape, 1.0, tl.float32)
    else:
        columns = tl.arange(0, ROTARY.NORMED_PAD)
        normed = mask[:, None] & (columns < ROTARY.NORMED)[None, :]
        x = tl.load(rows[:, None] + columns[None, :], mask=normed, other=0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 1) / ROTARY.NORMED + norm.eps)
    return factor


@triton.jit
def load_normalized(rows, columns, mask, norm, factor, ROTARY: tl.constexpr):
    """Columns of rows as float32, normalised; `mask` [T, C] says which elements to load."""
    x = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0).to(tl.float32)
    if ROTARY.NORMED > 0:
        normed = columns < ROTARY.NORMED
        weight = tl.load(norm.weight_ptr + columns, mask=normed & (columns >= 0), other=0).to(tl.float32)
        x = tl.where(normed[None, :], x * factor[:, None] * weight[None, :], x)
    return x


@triton.jit
def prepared(rows, columns, mask, norm, factor, angles, ROTARY: tl.constexpr):
    """Columns of the rows at `rows` [T], normalised by `factor`, rotated, and rounded once, to the dtype of the rows.

    Each column is loaded together with its partner, because a permutation of columns in registers costs more.
    """
    HALF: tl.constexpr = ROTARY.HALF
    place = columns - ROTARY.START
    turns = (place >= 0) & (place < 2 * HALF)
    if ROTARY.INTERLEAVED:
        partner = columns + 1 - 2 * (place & 1)
        pair = place // 2
        is_first = (place & 1) == 0
    else:
        is_first = place < HALF
        partner = tl.where(is_first, columns + HALF, columns - HALF)
        pair = tl.where(is_first, place, place - HALF)
    mask_turns = mask[:, None] & turns[None, :]
    x = load_normalized(rows, columns, mask[:, None] & (columns < ROTARY.WIDTH)[None, :], norm, factor, ROTARY)
    y = load_normalized(rows, partner, mask_turns, norm, factor, ROTARY)
    cos_at = angles.cos_ptr + angles.position[:, None] * ROTARY.COS_STRIDE + pair[None, :]
    sin_at = angles.sin_ptr + angles.position[:, None] * ROTARY.SIN_STRIDE + ROTARY.SIN_OFFSET + pair[None, :]
    cos = tl.load(cos_at, mask=mask_turns, other=0).to(tl.float32)
    sin = tl.load(sin_at, mask=mask_turns, other=0).to(tl.float32)
    turned = x * cos + y * tl.where(is_first[None, :], -sin, sin)
    return narrow(tl.where(turns[None, :], turned, x), rows.dtype.element_ty)


def rotary_of(call: Any, width: int, normed: int, start: int, tables: tuple[Any, Any], launch: Any) -> Rotary:
    """The constants of a call for rows of `width` columns and packed tables."""
    cos, sin = tables
    return Rotary(
        WIDTH=width,
        NORMED=normed,
        NORMED_PAD=next_power_of_2(max(normed, 1)),
        START=start,
        HALF=call.half,
        INTERLEAVED=call.interleaved,
        COS_STRIDE=launch.strides(cos)[0],
        SIN_STRIDE=launch.strides(sin)[0],
        SIN_OFFSET=call.sin_offset,
    )
