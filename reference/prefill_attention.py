"""Chunked prefill over heads-first pages, as EasyDeL users know it: one chunk of one sequence's queries, causally."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import Float64
from ragged_attention.reference.paged_attention import values_of
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention

FEATURES = frozenset({"sm_scale", "soft_cap", "sliding_window", "align"})
BATCH_INVARIANT = True


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
    cache_dtype: str | None = None,
) -> Float64:
    """The chunk q [T, H, D] that contains position `length - 1`; rows past that are 0.

    Row r stands at `(length - 1) // T * T + r`, or at `length - T + r` with `align="end"`. A length beyond what
    the table holds counts as that. `cache_dtype` names the format of pages given as the bits of 8-bit floats.
    """
    q, page_indices = np.asarray(q), np.asarray(page_indices)[None]
    pages = (values_of(k_pages, cache_dtype), values_of(v_pages, cache_dtype))
    held = int(np.clip(np.asarray(length).reshape(()), 0, page_indices.shape[1] * pages[0].shape[1]))
    live = len(q) if align == "end" else rows_of_the_last_chunk(held, len(q))
    return ragged_paged_attention(
        q, pages, np.array([held]), page_indices, np.array([0, live]),
        sm_scale=sm_scale, soft_cap=soft_cap, sliding_window=sliding_window,
    )  # fmt: skip


def rows_of_the_last_chunk(length: int, chunk: int) -> int:
    """How many of `length` positions the last of their chunks holds."""
    return (length - 1) % chunk + 1 if length > 0 and chunk > 0 else 0


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(prefill_attention, call, call.results(), cache_dtype=call.cache_dtype)
