"""DeepSeek sparse attention, prefill: attention of each query token over its own list of latent rows."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import Float64, latent_rows, widened
from ragged_attention.reference._softmax import logits_of, share_of_keys, softmax

FEATURES = frozenset({
    "sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "cache_layout", "deterministic", "out_dtype",
})  # fmt: skip
BATCH_INVARIANT = True


def attend_latent(
    q: Float64, rows: Float64, d_v: int, scale: float, soft_cap: float | None = None
) -> tuple[Float64, Float64, Float64]:
    """Out [h, d_v], max_logits [h] and lse [h] of queries q [h, d_qk] that each see every row of `rows` [n, d_qk].

    A row is a key, and its first `d_v` columns are the value. Without rows, out is 0 and the other results are -inf.
    """
    return softmax(logits_of(q, rows, scale, soft_cap), rows[:, :d_v])


def selected(indices: ArrayLike, topk_len: ArrayLike, num_slots: int) -> Any:
    """The valid entries among the first `topk_len` of one list, in order and with repetitions."""
    indices = np.asarray(indices)
    indices = indices[: max(int(topk_len), 0)]  # type: ignore[arg-type]
    return indices[(indices >= 0) & (indices < num_slots)]


def sparse_mla_prefill(
    q: ArrayLike,
    kv: ArrayLike,
    indices: ArrayLike,
    sm_scale: float | None = None,
    d_v: int = 512,
    sinks: ArrayLike | None = None,
    topk_lens: ArrayLike | None = None,
    cache_format: str | None = None,
    cache_layout: str | None = None,
    deterministic: bool = False,
    out_dtype: str | None = None,
) -> tuple[Float64, Float64, Float64]:
    """Out [T, H, d_v], max_logits [T, H] and lse [T, H] in float64; the arguments are those of the operation."""
    del deterministic, out_dtype  # `deterministic` is for the gradient; the caller casts to `out_dtype`
    q, kv, indices = widened(q), np.asarray(kv), np.asarray(indices)
    pages = kv[:, None] if kv.ndim == 3 else kv  # packed rows are pages of one position
    num_tokens, num_q_heads, d_qk = q.shape
    num_kv_heads, topk = indices.shape[1:]
    num_slots, group = pages.shape[0] * pages.shape[1], num_q_heads // num_kv_heads
    lens = np.broadcast_to(topk if topk_lens is None else np.asarray(topk_lens), (num_tokens,))
    scale = d_qk**-0.5 if sm_scale is None else sm_scale
    out = np.zeros((num_tokens, num_q_heads, d_v))
    max_logits, lse = np.zeros((num_tokens, num_q_heads)), np.zeros((num_tokens, num_q_heads))
    for token in range(num_tokens):
        for kv_head in range(num_kv_heads):
            slots = selected(indices[token, kv_head], lens[token], num_slots)
            rows = latent_rows(pages, slots, cache_format, cache_layout)
            heads = slice(kv_head * group, (kv_head + 1) * group)
            out[token, heads], max_logits[token, heads], lse[token, heads] = attend_latent(
                q[token, heads], rows[:, kv_head], d_v, scale
            )
    return out * share_of_keys(lse, sinks)[..., None], max_logits, lse


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(sparse_mla_prefill, call, call.results())
