"""Attention over packed sequences, without a cache."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._kv_layout import Float64, sequence_bounds, widened
from ragged_attention.reference._softmax import sink_of_each, slope_of_each
from ragged_attention.reference.ragged_paged_attention import (
    attend,
    bias_of,
    column_at_own,
    largest_logit,
    of_head,
    rows_of,
    seen_by_heads,
    table_of,
    visible,
)

FEATURES = frozenset({
    "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes",
    "relative_bias", "key_ranges", "selected", "block_size", "return_max_logits", "deterministic",
})  # fmt: skip
BATCH_INVARIANT = True


def sequences(
    cu_q_lens: ArrayLike, cu_kv_lens: ArrayLike, num_q_tokens: int, num_kv_tokens: int,
    causal: bool, sliding_window: int | None, key_ranges: ArrayLike | None = None,
    selected: ArrayLike | None = None, block_size: int | None = None,
) -> Iterator[tuple[slice, slice, NDArray[np.bool_]]]:  # fmt: skip
    """Each sequence's rows of q, its rows of k, and a mask [K or 1, q_len, kv_len] of the keys that each query sees."""
    queries = sequence_bounds(cu_q_lens, None, num_q_tokens)
    keys = sequence_bounds(cu_kv_lens, None, num_kv_tokens)
    for (q_start, q_stop), (kv_start, kv_stop) in zip(queries, keys, strict=True):
        rows, kv_len = slice(q_start, q_stop), kv_stop - kv_start
        ranges = rows_of(key_ranges, rows)
        seen = visible(q_stop - q_start, kv_len, np.ones(kv_len, bool), causal, sliding_window, ranges=ranges)
        yield rows, slice(kv_start, kv_stop), seen_by_heads(seen, rows_of(selected, rows), block_size)


def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_q_lens: ArrayLike,
    cu_kv_lens: ArrayLike,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    sm_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None,
    key_ranges: ArrayLike | None = None,
    selected: ArrayLike | None = None,
    block_size: int | None = None,
    return_max_logits: bool = False,
    deterministic: bool = False,
) -> tuple[Float64, ...]:
    """Out [T_q, H, D_v], lse [T_q, H] and on request max_logits [H] in float64; arguments are the operation's."""
    del max_q_len, max_kv_len, deterministic  # they do not change the result
    q, k, v = (widened(array) for array in (q, k, v))
    num_q_tokens, num_q_heads, head_dim = q.shape
    num_kv_tokens, num_kv_heads, _ = k.shape
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    out = np.zeros((num_q_tokens, num_q_heads, v.shape[2]))
    lse, max_logits = np.full((num_q_tokens, num_q_heads), -np.inf), np.full(num_q_heads, -np.inf)
    sinks, slopes = sink_of_each(sinks, num_q_heads), slope_of_each(alibi_slopes, num_q_heads)
    at_own = column_at_own(relative_bias, causal)
    tokens, masks = (num_q_tokens, num_kv_tokens), (causal, sliding_window, key_ranges, selected, block_size)
    for rows, keys, seen in sequences(cu_q_lens, cu_kv_lens, *tokens, *masks):
        lens = seen.shape[1], seen.shape[2]
        for head in range(num_q_heads):
            kv_head = head // (num_q_heads // num_kv_heads)
            out[rows, head], lse[rows, head] = attend(
                q[rows, head], k[keys, kv_head], v[keys, kv_head], of_head(seen, kv_head), scale, soft_cap, sinks[head],
                bias_of(*lens, slopes[head], table_of(relative_bias, head, rows), at_own),
            )  # fmt: skip
            largest = largest_logit(q[rows, head], k[keys, kv_head], of_head(seen, kv_head), scale)
            max_logits[head] = np.maximum(max_logits[head], largest)
    return (out, lse, max_logits) if return_max_logits else (out, lse)


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(varlen_attention, call, call.results())
