"""The gradient of attention over packed sequences."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._kv_layout import Float64, widened
from ragged_attention.reference._softmax import share_of_keys, slope_of_each
from ragged_attention.reference.ragged_paged_attention import bias_of, column_at_own, columns_of, of_head, table_of
from ragged_attention.reference.varlen_attention import sequences

FEATURES = frozenset({
    "d_lse", "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes",
    "relative_bias", "key_ranges", "selected", "block_size", "return_d_relative_bias", "deterministic",
})  # fmt: skip


def attend_backward(
    d_out: Float64, q: Float64, k: Float64, v: Float64, seen: NDArray[np.bool_], lse: Float64,
    share: Float64, delta: Float64, d_lse: Float64, scale: float, soft_cap: float | None,
    bias: Float64 | float = 0.0,
) -> tuple[Float64, Float64, Float64, Float64]:  # fmt: skip
    """One head: the gradients dq, dk, dv and d_bias of rows q [n, D] over k [m, D] and v [m, D_v].

    `lse`, `share`, `delta` and `d_lse` are [n]; `share` is the keys' share of a row's softmax, `delta` is out . d_out.
    `bias` [n, m] is added to the logits.
    """
    dq, dk, dv, d_bias = (np.zeros(shape) for shape in (q.shape, k.shape, v.shape, seen.shape))
    rows, keys = seen.any(axis=1), seen.any(axis=0)  # other rows and keys may hold NaN, so they are left out
    d_out, q, k, v, bias = d_out[rows], q[rows], k[keys], v[keys], np.broadcast_to(bias, seen.shape)[rows][:, keys]
    seen = seen[rows][:, keys]
    lse, share, delta, d_lse = (term[rows, None] for term in (lse, share, delta, d_lse))
    with np.errstate(invalid="ignore", over="ignore"):
        logits = q @ k.T * scale
        slope = scale * np.ones_like(logits)
        if soft_cap is not None:
            slope = scale * (1 - np.tanh(logits / soft_cap) ** 2)
            logits = soft_cap * np.tanh(logits / soft_cap)
        weights = np.exp(np.where(seen, logits + bias, -np.inf) - lse)
        d_logits = np.where(seen, weights * (share * (d_out @ v.T - delta) + d_lse), 0.0)
        d_products = np.where(seen, slope * d_logits, 0.0)
        dq[rows], dk[keys], dv[keys] = d_products @ k, d_products.T @ q, (share * weights).T @ d_out
        d_bias[np.ix_(rows, keys)] = d_logits
    return dq, dk, dv, d_bias


def add_to_table(d_table: Float64, d_bias: Float64, at_own: int) -> None:
    """Add the gradient `d_bias` [n, m] of a head's bias, for one sequence, to the gradient of its table.

    `d_table` is [B], or [n, B] if each query has its own table.
    """
    q_len, kv_len = d_bias.shape
    columns = columns_of(q_len, kv_len, d_table.shape[-1], at_own)
    for column in range(d_table.shape[-1]):
        of_rows = np.where(columns == column, d_bias, 0.0).sum(axis=1)
        d_table[..., column] += of_rows if d_table.ndim == 2 else of_rows.sum()


def row_terms(
    d_out: ArrayLike, out: ArrayLike, lse: ArrayLike, d_lse: ArrayLike | None, sinks: ArrayLike | None
) -> tuple[Float64, Float64, Float64, Float64 | None]:
    """Share, delta and d_lse of each row and head [T, H], 0 where lse is -inf; and d_sinks [H], if there are sinks."""
    lse = widened(lse)
    has_keys = lse != -np.inf
    share = np.where(has_keys, share_of_keys(lse, sinks), 0.0)
    delta = (widened(out) * np.where(has_keys[..., None], widened(d_out), 0.0)).sum(axis=-1)
    d_lse = np.where(has_keys, 0.0 if d_lse is None else widened(d_lse), 0.0)
    d_sinks = None if sinks is None else np.where(has_keys, (share - 1) * delta, 0.0).sum(axis=0)
    return share, delta, d_lse, d_sinks


def varlen_attention_backward(
    d_out: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    cu_q_lens: ArrayLike,
    cu_kv_lens: ArrayLike,
    d_lse: ArrayLike | None = None,
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
    return_d_relative_bias: bool = False,
    deterministic: bool = False,
) -> tuple[Float64, Float64, Float64, Float64 | None, Float64 | None]:
    """dq, dk, dv, d_sinks and d_relative_bias, shaped like the arguments, in float64.

    The formulas are in this folder's `README.md`.
    """
    del max_q_len, max_kv_len, deterministic  # they do not change the result
    q, k, v, d_out = (widened(array) for array in (q, k, v, d_out))
    lse = widened(lse)
    num_q_tokens, num_q_heads, head_dim = q.shape
    num_kv_tokens, num_kv_heads, _ = k.shape
    scale, slopes = head_dim**-0.5 if sm_scale is None else sm_scale, slope_of_each(alibi_slopes, num_q_heads)
    share, delta, d_lse, d_sinks = row_terms(d_out, out, lse, d_lse, sinks)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    at_own = column_at_own(relative_bias, causal)
    d_relative_bias = None
    if relative_bias is not None and return_d_relative_bias:
        d_relative_bias = np.zeros(np.shape(relative_bias))
    tokens, masks = (num_q_tokens, num_kv_tokens), (causal, sliding_window, key_ranges, selected, block_size)
    for rows, keys, seen in sequences(cu_q_lens, cu_kv_lens, *tokens, *masks):
        lens = seen.shape[1], seen.shape[2]
        for head in range(num_q_heads):
            kv_head = head // (num_q_heads // num_kv_heads)
            dq[rows, head], more_dk, more_dv, d_bias = attend_backward(
                d_out[rows, head], q[rows, head], k[keys, kv_head], v[keys, kv_head], of_head(seen, kv_head),
                lse[rows, head], share[rows, head], delta[rows, head], d_lse[rows, head], scale, soft_cap,
                bias_of(*lens, slopes[head], table_of(relative_bias, head, rows), at_own),
            )  # fmt: skip
            dk[keys, kv_head] += more_dk
            dv[keys, kv_head] += more_dv
            if d_relative_bias is not None:
                is_shared = d_relative_bias.ndim == 2
                add_to_table(d_relative_bias[head] if is_shared else d_relative_bias[rows, head], d_bias, at_own)
    return dq, dk, dv, d_sinks, d_relative_bias


def run_gradient(function: Callable[..., Any], call: Any, launch: Any) -> Any:
    """The gradients of a call; an empty array replaces each None, which `function` returns for an absent gradient."""

    def gradients(**arguments: Any) -> tuple[Float64, ...]:
        return tuple(np.zeros(0) if array is None else array for array in function(**arguments))

    return launch.on_host(gradients, call, call.results())


def run(call: Any, tile: Any, launch: Any) -> Any:
    return run_gradient(varlen_attention_backward, call, launch)
