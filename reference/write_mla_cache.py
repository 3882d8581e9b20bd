"""Writes this step's latent rows, quantised if the cache is, to its pages."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._kv_layout import divisors, encode, latent_format, planes, quantize_rows, widened
from ragged_attention.reference.write_kv_pages import slots_from_tables

FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "kv_scale", "rope_scale", "d_v",
    "power_of_two_scales", "cache_format", "cache_layout",
})  # fmt: skip


def write_mla_cache(
    kv: ArrayLike,
    cache: ArrayLike,
    slot_mapping: ArrayLike | None = None,
    *,
    page_indices: Any = None,
    kv_lens: Any = None,
    cu_q_lens: Any = None,
    num_seqs: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    rope_scale: ArrayLike | None = None,
    d_v: int | None = None,
    power_of_two_scales: bool = True,
    cache_format: str | None = None,
    cache_layout: str | None = None,
    code_dtype: str | None = None,
) -> NDArray[Any]:
    """The new cache, with rows `kv` [T, K, d_qk] at their slots.

    Tokens with a slot outside [0, P * G) are skipped. If two tokens have the same slot, the later token wins. A plain
    cache stores `kv / kv_scale`, computed in float32, but `kv / rope_scale` in the columns from `d_v` on. `code_dtype`
    names the cache's dtype if that has 8 bits.
    """
    cache = np.array(cache, order="C")
    num_pages, page_size, num_kv_heads, _ = cache.shape
    if slot_mapping is None:
        num_tokens = len(np.asarray(kv))
        slots = slots_from_tables(page_indices, kv_lens, cu_q_lens, num_seqs, num_tokens, num_pages, page_size)
    else:
        slots = np.asarray(slot_mapping)
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    page, offset = np.divmod(slots[valid], page_size)
    rows = np.asarray(kv)[valid]
    layout = None if code_dtype is not None else latent_format(cache, cache_format, cache_layout)
    if layout is None:
        divisor = np.repeat(divisors(kv_scale, num_kv_heads)[:, None], rows.shape[-1], axis=1)
        if rope_scale is not None:
            divisor[:, d_v:] = divisors(rope_scale, num_kv_heads)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):  # division by 0 gives infinity or NaN
            scaled = widened(rows, np.float32) / divisor
        cache[page, offset] = encode(scaled, code_dtype)
    else:
        stored = quantize_rows(rows[:, 0], layout, power_of_two_scales)
        for plane, new in zip(planes(cache, layout), stored, strict=True):
            plane[page, offset] = new
    return cache


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(write_mla_cache, call, "cache", code_dtype=call.kv_format.code_dtype)
