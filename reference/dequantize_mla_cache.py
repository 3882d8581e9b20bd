"""Dequantises a latent cache; `_kv_layout.dequantize_rows` has the arithmetic."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import Float64, latent_rows

FEATURES = frozenset({"format", "dtype", "cache_layout"})


def dequantize_mla_cache(
    cache: ArrayLike, format: str | None = None, dtype: str = "bfloat16", cache_layout: str | None = None
) -> Float64:
    """The rows [P, G, 1, d_qk] of bytes [P, G, 1, token_bytes], rounded to float32; the caller casts to `dtype`."""
    del dtype
    cache = np.asarray(cache)
    num_pages, page_size = cache.shape[:2]
    rows = latent_rows(cache, np.arange(num_pages * page_size), format, cache_layout)
    with np.errstate(over="ignore"):
        return rows.astype(np.float32).astype(np.float64).reshape(num_pages, page_size, 1, rows.shape[-1])


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(dequantize_mla_cache, call, call.results())
