"""Ragged attention over a paged latent cache: one row per position is K for all heads, and its first columns are V."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import latent_rows, per_head, sequence_bounds, true_queries
from ragged_attention.reference._softmax import sink_of_each
from ragged_attention.reference.mla_decode import dense_slots
from ragged_attention.reference.ragged_paged_attention import attend, largest_logit, rows_of, visible

FEATURES = frozenset({
    "num_seqs", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "kv_scale", "rope_scale",
    "return_lse", "return_max_logits", "key_ranges", "cache_format", "cache_layout", "out_dtype",
})  # fmt: skip
BATCH_INVARIANT = True


def ragged_mla_attention(
    q: ArrayLike,
    kv_cache: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    num_seqs: ArrayLike | None = None,
    *,
    max_q_len: int | None = None,
    d_v: int = 512,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    q_scale: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    rope_scale: ArrayLike | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    new_kv: None = None,
    key_ranges: ArrayLike | None = None,
    cache_format: str | None = None,
    cache_layout: str | None = None,
    out_dtype: str | None = None,
    code_dtype: str | None = None,
    q_dtype: str | None = None,
) -> Any:
    """Out [T, H, d_v] in float64, and lse [T, H] and max_logits [H] on request; arguments are the operation's.

    `new_kv` is written by `write_mla_cache` before this is called. `code_dtype` names the dtype of a plain 8-bit cache.
    `q_dtype` names the dtype to which queries are rounded if `q_scale` is an array.
    """
    del max_q_len, out_dtype  # they do not change the result
    assert new_kv is None
    kv_cache, page_indices = np.asarray(kv_cache), np.asarray(page_indices)
    num_pages, page_size = kv_cache.shape[:2]
    num_tokens, num_q_heads, d_qk = np.shape(q)
    q, scale = true_queries(q, q_scale, d_qk**-0.5 if sm_scale is None else sm_scale, q_dtype)
    factors = np.repeat(per_head(kv_scale, 1), d_qk)
    if rope_scale is not None:
        factors[d_v:] = per_head(rope_scale, 1)
    out = np.zeros((num_tokens, num_q_heads, d_v))
    lse, max_logits = np.full((num_tokens, num_q_heads), -np.inf), np.full(num_q_heads, -np.inf)
    sinks = sink_of_each(sinks, num_q_heads)
    for seq, (start, stop) in enumerate(sequence_bounds(cu_q_lens, num_seqs, num_tokens)):
        kv_len = int(np.clip(np.asarray(kv_lens)[seq], 0, page_indices.shape[1] * page_size))
        positions, slots = dense_slots(page_indices[seq], kv_len, num_pages, page_size)
        if start == stop or not len(slots):
            continue
        rows = np.zeros((kv_len, d_qk))
        with np.errstate(invalid="ignore"):  # infinity times a scale of 0 is NaN
            rows[positions] = latent_rows(kv_cache, slots, cache_format, cache_layout, code_dtype)[:, 0] * factors
        valid = np.isin(np.arange(kv_len), positions)
        ranges = rows_of(key_ranges, slice(start, stop))
        seen = visible(stop - start, kv_len, valid, causal, sliding_window, ranges=ranges)
        for head in range(num_q_heads):
            out[start:stop, head], lse[start:stop, head] = attend(
                q[start:stop, head], rows, rows[:, :d_v], seen, scale, soft_cap, sinks[head]
            )
            largest = largest_logit(q[start:stop, head], rows, seen, scale)
            max_logits[head] = np.maximum(max_logits[head], largest)
    results = (out, *[lse] * return_lse, *[max_logits] * return_max_logits)
    return results if len(results) > 1 else out


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(ragged_mla_attention, call, call.results(), code_dtype=call.kv_format.code_dtype)
