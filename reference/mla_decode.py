"""Attention of a few query tokens per sequence over a paged latent cache: over all keys, or over top-k lists."""

import itertools
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import Float64, latent_rows, widened
from ragged_attention.reference._softmax import share_of_keys
from ragged_attention.reference.merge_attention_states import merge_attention_states
from ragged_attention.reference.sparse_mla_prefill import attend_latent, selected

FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks",
    "topk_lens", "extra_kv_cache", "extra_indices", "extra_topk_lens", "schedule", "cache_format", "cache_layout",
    "out_dtype",
})  # fmt: skip
BATCH_INVARIANT = True


def attend_in_splits(
    q: Float64, rows: Float64, d_v: int, scale: float, soft_cap: float | None, num_splits: int
) -> tuple[Float64, Float64]:
    """Attention of q [h, d_qk] over `rows` [n, d_qk], cut into KV splits that are merged through their lse.

    Kernels do this if a batch has too few sequences to occupy the device. The result does not depend on `num_splits`;
    a split may be empty.
    """
    edges = np.arange(num_splits + 1) * len(rows) // num_splits
    ranges = [rows[start:stop] for start, stop in itertools.pairwise(edges)]
    outs, _, lses = zip(*(attend_latent(q, part, d_v, scale, soft_cap) for part in ranges), strict=True)
    out, lse = merge_attention_states(np.stack(outs)[:, None], np.stack(lses)[:, None])
    return out[0], lse[0]


def dense_slots(page_indices: Any, kv_len: Any, num_pages: int, page_size: int) -> tuple[Any, Any]:
    """The visible positions of one sequence and their slots; positions on a page outside [0, P) are not visible."""
    positions = np.arange(np.clip(kv_len, 0, len(page_indices) * page_size))
    pages = page_indices[positions // page_size].astype(np.int64)
    seen = (pages >= 0) & (pages < num_pages)
    return positions[seen], (pages * page_size + positions % page_size)[seen]


def list_lens(lens: ArrayLike | None, lists: Any) -> Any:
    """The number of entries of each list [S, Q, N] that count, as [S, Q]; `lens` is [S, Q], [S] or None (all count)."""
    if lens is None:
        return np.full(lists.shape[:2], lists.shape[2])
    lens = np.asarray(lens)
    return np.broadcast_to(lens if lens.ndim == 2 else lens[:, None], lists.shape[:2])


def mla_decode(
    q: ArrayLike,
    kv_cache: ArrayLike,
    page_indices: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    indices: ArrayLike | None = None,
    d_v: int = 512,
    sm_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    topk_lens: ArrayLike | None = None,
    extra_kv_cache: ArrayLike | None = None,
    extra_indices: ArrayLike | None = None,
    extra_topk_lens: ArrayLike | None = None,
    schedule: Any = None,
    cache_format: str | None = None,
    cache_layout: str | None = None,
    out_dtype: str | None = None,
    *,
    num_splits: int = 1,
) -> tuple[Float64, Float64]:
    """Out [S, Q, H, d_v] and lse [S, H, Q] in float64; the arguments are those of the operation.

    Neither `schedule` nor `num_splits`, the number of KV splits, changes the result.
    """
    del schedule, out_dtype
    q, kv_cache = widened(q), np.asarray(kv_cache)
    num_seqs, num_q_tokens, num_q_heads, d_qk = q.shape
    num_pages, page_size, num_kv_heads, _ = kv_cache.shape
    group = num_q_heads // num_kv_heads
    scale = d_qk**-0.5 if sm_scale is None else sm_scale
    out, lse = np.zeros((*q.shape[:3], d_v)), np.zeros(q.shape[:3])

    def attend(seq: int, token: int, rows: Float64) -> None:
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            out[seq, token, heads], lse[seq, token, heads] = attend_in_splits(
                q[seq, token, heads], rows[:, kv_head], d_v, scale, soft_cap, num_splits
            )

    if indices is None:
        page_indices, kv_lens = np.asarray(page_indices), np.asarray(kv_lens)
        for seq in range(num_seqs):
            positions, slots = dense_slots(page_indices[seq], kv_lens[seq], num_pages, page_size)
            rows = latent_rows(kv_cache, slots, cache_format, cache_layout)
            for token in range(num_q_tokens):
                later = num_q_tokens - 1 - token  # the number of this sequence's later queries
                end = min(int(kv_lens[seq]), page_indices.shape[1] * page_size)
                first = 0 if sliding_window is None else end - later - sliding_window
                stop = end - later if causal else end
                attend(seq, token, rows[slice(*np.searchsorted(positions, [first, stop]))])
    else:
        caches = [(kv_cache, np.asarray(indices), topk_lens)]
        if extra_indices is not None:
            caches.append((np.asarray(extra_kv_cache), np.asarray(extra_indices), extra_topk_lens))
        for seq, token in itertools.product(range(num_seqs), range(num_q_tokens)):
            selections = [
                (cache, selected(lists[seq, token], list_lens(lens, lists)[seq, token], len(cache) * cache.shape[1]))
                for cache, lists, lens in caches
            ]
            attend(
                seq, token, np.concatenate([latent_rows(*selection, None, cache_layout) for selection in selections])
            )
    return out * share_of_keys(lse, sinks)[..., None], np.swapaxes(lse, 1, 2)


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(mla_decode, call, call.results())
