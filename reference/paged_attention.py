"""Paged decode and chunked prefill over heads-first pages, as JAX and EasyDeL users know them.

Both are ragged paged attention over the pages [K, P, G, D] turned to [P, G, K, D].
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference.kv_layout import Float64
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention


def values_of(pages: Any) -> Float64:
    """Heads-first pages [K, P, G, D], or a pair of those and their scales [K, P, G, 1], as values [P, G, K, D]."""
    weight, scales = pages if isinstance(pages, tuple | list) else (pages, 1.0)
    return np.moveaxis(np.asarray(weight, np.float64) * np.asarray(scales, np.float64), 0, 2)


def paged_attention(
    q: ArrayLike,
    k_pages: Any,
    v_pages: Any,
    lengths: ArrayLike,
    page_indices: ArrayLike,
    *,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
) -> Float64:
    """One query a sequence: q [b, H, D] sees the first `lengths` keys; out [b, H, D] is 0 where that is none."""
    cu_q_lens = np.arange(len(np.asarray(q)) + 1)
    return ragged_paged_attention(
        q,
        (values_of(k_pages), values_of(v_pages)),
        lengths,
        page_indices,
        cu_q_lens,
        sm_scale=sm_scale,
        soft_cap=soft_cap,
    )


def prefill_attention(
    q: ArrayLike,
    k_pages: Any,
    v_pages: Any,
    length: ArrayLike,
    page_indices: ArrayLike,
    *,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    align: str = "chunk",
) -> Float64:
    """The chunk q [chunk, H, D] of one sequence that contains position `length - 1`, causally; rows past it are 0.

    Row r stands at `((length - 1) // chunk) * chunk + r`, or at `length - chunk + r` with `align="end"`.
    """
    q, page_indices = np.asarray(q), np.asarray(page_indices)[None]
    length, chunk = int(np.asarray(length).reshape(())), len(q)
    live = chunk if align == "end" else (length - 1) % chunk + 1 if length > 0 else 0
    pages = (values_of(k_pages), values_of(v_pages))
    return ragged_paged_attention(
        q, pages, np.array([length]), page_indices, np.array([0, live]),
        sm_scale=sm_scale, soft_cap=soft_cap, sliding_window=sliding_window,
    )  # fmt: skip
