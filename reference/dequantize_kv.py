"""Dequantises rows of K or V; `_scaled_rows.values_of` has the arithmetic."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.reference._kv_layout import Float64, per_head
from ragged_attention.reference._scaled_rows import values_of

FEATURES = frozenset({"scales", "scale", "dtype"})


def dequantize_kv(
    codes: ArrayLike,
    scales: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    dtype: str = "float32",
    *,
    kv_format: KvFormat,
) -> Float64:
    """The values [..., K, D] of rows [..., K, W] in a format; the caller casts to `dtype`."""
    del dtype
    codes = np.asarray(codes)
    if scales is not None and np.ndim(scales) < codes.ndim:
        scales = np.asarray(scales)[..., None]
    values = values_of(codes, scales, kv_format)
    with np.errstate(invalid="ignore"):
        scaled = values * per_head(scale, codes.shape[-2] if codes.ndim > 1 else 1)[:, None]
    return scaled.reshape(values.shape)


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(dequantize_kv, call, call.results(), kv_format=call.kv_format)
