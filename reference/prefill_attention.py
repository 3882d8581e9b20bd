"""EasyDeL's chunked prefill over heads-first pages: causal attention of one chunk of a sequence."""

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
    """Out [T, H, D] of the chunk q [T, H, D] that contains position `length - 1`; rows after it are 0.

    Row r has position `(length - 1) // T * T + r`, or `length - T + r` with `align="end"`. The length is clamped to the
    number of positions in the table's pages. `cache_dtype` names the format of pages that hold 8-bit floats as bits.
    """
    q, page_indices = np.asarray(q), np.asarray(page_indices)[None]
    pages = (values_of(k_pages, cache_dtype), values_of(v_pages, cache_dtype))
    kv_len = int(np.clip(np.asarray(length).reshape(()), 0, page_indices.shape[1] * pages[0].shape[1]))
    live = len(q) if align == "end" else rows_of_the_last_chunk(kv_len, len(q))
    return ragged_paged_attention(
        q, pages, np.array([kv_len]), page_indices, np.array([0, live]),
        sm_scale=sm_scale, soft_cap=soft_cap, sliding_window=sliding_window,
    )  # fmt: skip


def rows_of_the_last_chunk(length: int, chunk: int) -> int:
    """The number of positions in the last chunk, if `length` positions are cut into chunks of `chunk`."""
    return (length - 1) % chunk + 1 if length > 0 and chunk > 0 else 0


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(prefill_attention, call, call.results(), cache_dtype=call.cache_dtype)
