"""JAX's paged decode: ragged paged attention with one query per sequence over heads-first pages [K, P, G, D]."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import Float64, decode, widened
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention

FEATURES = frozenset({"sm_scale", "soft_cap"})
BATCH_INVARIANT = True


def values_of(pages: Any, cache_dtype: str | None = None) -> Float64:
    """The values [P, G, K, D] of heads-first pages [K, P, G, D], or of a pair of pages and scales [K, P, G, 1]."""
    stored, scales = pages if isinstance(pages, tuple | list) else (pages, 1.0)
    with np.errstate(invalid="ignore"):  # an unused slot may hold zero with an infinite scale
        return np.moveaxis(decode(stored, cache_dtype) * widened(scales), 0, 2)


def paged_attention(
    q: ArrayLike,
    k_pages: Any,
    v_pages: Any,
    lengths: ArrayLike,
    page_indices: ArrayLike,
    *,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    cache_dtype: str | None = None,
) -> Float64:
    """Out [S, H, D] of queries q [S, H, D], each of which sees the first `lengths` keys of its sequence.

    `cache_dtype` names the format of pages that hold 8-bit floats as bits.
    """
    return ragged_paged_attention(
        q,
        (values_of(k_pages, cache_dtype), values_of(v_pages, cache_dtype)),
        lengths,
        page_indices,
        np.arange(len(np.asarray(q)) + 1),
        sm_scale=sm_scale,
        soft_cap=soft_cap,
    )


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(paged_attention, call, call.results(), cache_dtype=call.cache_dtype)
