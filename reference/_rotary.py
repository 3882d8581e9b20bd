"""The norm of a head and the rotary embedding, in float64."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import Float64, bfloat16_bits, bfloat16_values, widened


def normalized(x: ArrayLike, weight: ArrayLike | None, eps: float) -> Float64:
    """Rows [..., D] divided by their root mean square and multiplied by the weights; unchanged without weights."""
    x = widened(x)
    if weight is None:
        return x
    with np.errstate(all="ignore"):  # rows of padding may hold anything
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * widened(weight)


def rotated(x: ArrayLike, positions: ArrayLike, cos_sin: Any, interleaved: bool) -> Float64:
    """Rows [T, heads, D], with each pair of their first R columns rotated by the angles of the token's position."""
    x = widened(x).copy()
    cos, sin = map(widened, cos_sin if isinstance(cos_sin, tuple | list) else np.split(np.asarray(cos_sin), 2, axis=1))
    rows = np.clip(np.asarray(positions), 0, len(cos) - 1)
    cos, sin = cos[rows][:, None], sin[rows][:, None]
    half = cos.shape[-1]
    columns = x[..., : 2 * half]
    first, second = (columns[..., 0::2], columns[..., 1::2]) if interleaved else np.split(columns, 2, axis=-1)
    with np.errstate(all="ignore"):
        new_first, new_second = first * cos - second * sin, second * cos + first * sin
    first[...], second[...] = new_first, new_second
    return x


def rounded(x: Float64, dtype: str) -> Float64:
    """`x` rounded to a float dtype, as float64."""
    if dtype == "bfloat16":
        return widened(bfloat16_values(bfloat16_bits(x.astype(np.float32))))
    with np.errstate(over="ignore"):
        return widened(x.astype(dtype))
