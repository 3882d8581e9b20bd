"""The norm of a head and the rotary embedding, in float32."""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._tiles import next_power_of_2


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rotary(Constants):
    """The rotated columns of a row."""

    D: int  # the width of a row
    D_PAD: int  # D, rounded up to a power of two
    HALF: int  # the number of rotated pairs
    INTERLEAVED: bool  # whether a pair is adjacent columns, instead of columns i and i + HALF
    COS_STRIDE: int  # of the tables' rows; tables belong to a model, so their strides are constants
    SIN_STRIDE: int
    SIN_OFFSET: int  # the column of the first sine in its table


class Angles(NamedTuple):
    """The tables of cosines and sines."""

    cos_ptr: tl.tensor
    sin_ptr: tl.tensor
    num_positions: tl.tensor


class Heads(NamedTuple):
    """One head of the tokens [tokens, D], and the weights of its norm."""

    ptr: tl.tensor
    token_stride: tl.tensor
    weight_ptr: tl.tensor
    eps: tl.tensor


@triton.jit
def prepared(heads, angles, positions, token, mask, ROTARY: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """One head of a block of tokens as float32, normalised if it has weights, and rotated.

    Each column is loaded together with its partner, for a permutation of columns in registers costs more. Positions
    outside the table are clamped to it.
    """
    HALF: tl.constexpr = ROTARY.HALF
    d = tl.arange(0, ROTARY.D_PAD)
    turns = d < 2 * HALF
    if ROTARY.INTERLEAVED:
        partner = d ^ 1
        pair = d // 2
        is_first = d % 2 == 0
    else:
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        pair = tl.where(d < HALF, d, d - HALF)
        is_first = d < HALF
    rows = heads.ptr + token.to(tl.int64) * heads.token_stride
    x = tl.load(rows[:, None] + d[None, :], mask=mask[:, None] & (d < ROTARY.D)[None, :], other=0).to(tl.float32)
    mask_turns = mask[:, None] & turns[None, :]
    y = tl.load(rows[:, None] + partner[None, :], mask=mask_turns, other=0).to(tl.float32)
    if HAS_WEIGHT:
        factor = tl.rsqrt(tl.sum(x * x, 1) / ROTARY.D + heads.eps)[:, None]
        x *= factor * tl.load(heads.weight_ptr + d, mask=d < ROTARY.D, other=0).to(tl.float32)[None, :]
        y *= factor * tl.load(heads.weight_ptr + partner, mask=turns, other=0).to(tl.float32)[None, :]
    position = tl.minimum(tl.maximum(positions.to(tl.int64), 0), angles.num_positions - 1)
    cos_at = angles.cos_ptr + position[:, None] * ROTARY.COS_STRIDE + pair[None, :]
    sin_at = angles.sin_ptr + position[:, None] * ROTARY.SIN_STRIDE + ROTARY.SIN_OFFSET + pair[None, :]
    cos = tl.load(cos_at, mask=mask_turns, other=0).to(tl.float32)
    sin = tl.load(sin_at, mask=mask_turns, other=0).to(tl.float32)
    turned = x * cos + y * tl.where(is_first[None, :], -sin, sin)
    return tl.where(turns[None, :], turned, x)


def rotary_of(call: Any, width: int, cos: Any, sin: Any, launch: Any) -> Rotary:
    """The constants of a call for rows of `width` columns and packed tables."""
    return Rotary(
        D=width,
        D_PAD=next_power_of_2(width),
        HALF=call.half,
        INTERLEAVED=call.interleaved,
        COS_STRIDE=launch.strides(cos)[0],
        SIN_STRIDE=launch.strides(sin)[0],
        SIN_OFFSET=call.sin_offset,
    )
