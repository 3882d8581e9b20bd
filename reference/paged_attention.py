"""Paged decode over heads-first pages, as JAX users know it: one query per sequence.

It is ragged paged attention over the pages [K, P, G, D] turned to [P, G, K, D].
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import Float64, decode, widened
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention

FEATURES = frozenset({"sm_scale", "soft_cap"})
BATCH_INVARIANT = True


def values_of(pages: Any, cache_dtype: str | None = None) -> Float64:
    """Heads-first pages [K, P, G, D], or a pair of those and their scales [K, P, G, 1], as values [P, G, K, D]."""
    weight, scales = pages if isinstance(pages, tuple | list) else (pages, 1.0)
    with np.errstate(invalid="ignore"):  # what no query sees may be zero times infinity
        return np.moveaxis(decode(weight, cache_dtype) * widened(scales), 0, 2)


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
    """Each q [S, H, D] sees the first `lengths` keys of its sequence; out [S, H, D] is 0 where there are none.

    `cache_dtype` names the format of pages given as the bits of 8-bit floats.
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
