"""Quantises a latent cache; `_kv_layout.quantize_rows` has the arithmetic."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.calls.cache_formats import laid_out
from ragged_attention.reference._kv_layout import Bytes, planes, quantize_rows

FEATURES = frozenset({"power_of_two_scales", "cache_layout"})


def quantize_mla_cache(
    kv: ArrayLike, format: str, power_of_two_scales: bool = True, cache_layout: str | None = None
) -> Bytes:
    """The bytes [P, G, 1, token_bytes] of rows [P, G, 1, d_qk]."""
    rows, layout = np.asarray(kv)[:, :, 0], laid_out(format, cache_layout)
    cache = np.zeros((*rows.shape[:2], 1, layout.token_bytes), np.uint8)
    for plane, stored in zip(planes(cache, layout), quantize_rows(rows, layout, power_of_two_scales), strict=True):
        plane[...] = stored
    return cache


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(quantize_mla_cache, call, call.results())
