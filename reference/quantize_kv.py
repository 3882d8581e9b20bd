"""Quantises rows of K or V; `_scaled_rows.quantized` has the arithmetic."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.calls.cache_formats import named_format
from ragged_attention.reference._kv_layout import divisors, widened
from ragged_attention.reference._scaled_rows import quantized

FEATURES = frozenset({"scale", "zero", "scales_dtype"})


def quantize_kv(
    x: ArrayLike,
    format: str,
    scale: ArrayLike | None = None,
    zero: str | None = None,
    scales_dtype: str | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The codes [..., K, W] of rows [..., K, D], and their scales: [..., K] if a row has one, else [..., K, n]."""
    x, form = widened(x, np.float32), named_format(format, zero, scales_dtype)
    rows = x[None] if x.ndim == 1 else x
    codes, scales = quantized(rows, divisors(scale, rows.shape[-2]), form)
    has_one_scale = not form.group and scales.shape[-1] == 1
    scales = scales.reshape(x.shape[:-1] if has_one_scale else (*x.shape[:-1], scales.shape[-1]))
    return codes.reshape(*x.shape[:-1], codes.shape[-1]), scales


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(quantize_kv, call, call.results())
