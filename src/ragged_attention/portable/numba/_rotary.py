"""The norm of a head and the rotary embedding of one row, in float32.

Rows are float32 in memory that is a whole number of vectors; the numbers past the last column are 0.
"""

import math
from typing import Any

import numpy as np

from ragged_attention.calls import dtype_name
from ragged_attention.portable.numba._formats import size_of, widen
from ragged_attention.portable.numba._vectors import (
    LANES,
    compiled,
    float_at,
    fma,
    int32_at,
    int_at,
    load,
    set_float,
    splat,
    store,
    total,
)

OPERANDS = ("positions", "cos", "sin")
NUMBERS = ("wide_positions", "num_positions", "half", "sin_offset", "interleaved", "eps")
STRIDES = {"cos": "position", "sin": "position"}


@compiled
def read_angles(call, token, cos, sin):
    """Read the cosines and sines of a token; a position outside the table is clamped to it."""
    position = int_at(call.positions, token) if call.wide_positions else int32_at(call.positions, token)
    position = min(max(position, 0), call.num_positions - 1)
    widen(call.cos_format, call.cos + size_of(call.cos_format) * position * call.cos_position_stride, cos, call.half)
    place = position * call.sin_position_stride + call.sin_offset
    widen(call.sin_format, call.sin + size_of(call.sin_format) * place, sin, call.half)


@compiled
def normalize(row, weight, count, eps):
    """Divide a row by its root mean square and multiply it by the weights."""
    squares = splat(np.float32(0))
    for index in range(0, count, LANES):
        value = load(row, index)
        squares = fma(value, value, squares)
    factor = splat(np.float32(1) / np.float32(math.sqrt(total(squares) / np.float32(count) + np.float32(eps))))
    for index in range(0, count, LANES):
        store(row, index, load(row, index) * factor * load(weight, index))


@compiled
def rotate(row, cos, sin, half, interleaved):
    """Rotate the first `2 * half` columns of a row."""
    whole = 0 if interleaved else half // LANES * LANES
    for index in range(0, whole, LANES):
        first, second = load(row, index), load(row, half + index)
        c, s = load(cos, index), load(sin, index)
        store(row, index, first * c - second * s)
        store(row, half + index, second * c + first * s)
    for index in range(whole, half):
        at, partner = (2 * index, 2 * index + 1) if interleaved else (index, half + index)
        first, second = float_at(row, at), float_at(row, partner)
        c, s = float_at(cos, index), float_at(sin, index)
        set_float(row, at, first * c - second * s)
        set_float(row, partner, second * c + first * s)


def numbers_of(call: Any) -> dict[str, int]:
    """The NUMBERS that are not properties of the call."""
    return {"wide_positions": dtype_name(call.positions) == "int64"}
