"""The softmax of one head: its logits, the weighted mean of values, and attention sinks."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._kv_layout import Float64, widened


def logits_of(q: Float64, k: Float64, scale: float, soft_cap: float | None) -> Float64:
    """Logits [n, m] of queries [n, D] and keys [m, D]."""
    with np.errstate(invalid="ignore"):  # queries and keys may hold infinities
        logits = q @ k.T * scale
        return logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)


def softmax(logits: Float64, values: Float64) -> tuple[Float64, Float64, Float64]:
    """Out [n, D_v], the largest logit [n] and the log-sum-exp [n] of logits [n, m] over values [m, D_v].

    A hidden key has the logit -inf, and adds nothing to its row, even if its value is NaN. For a row without visible
    keys, out is 0 and the other results are -inf.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        m_i = logits.max(axis=1, initial=-np.inf)
        has_keys = m_i != -np.inf
        weights = np.exp(logits - np.where(has_keys, m_i, 0.0)[:, None])
        l_i = weights.sum(axis=1)
        lse = np.where(has_keys, m_i + np.log(l_i), -np.inf)
        return weighted_sum(weights, values, logits != -np.inf) / np.where(has_keys, l_i, 1.0)[:, None], m_i, lse


def weighted_sum(weights: Float64, values: Float64, seen: NDArray[np.bool_]) -> Float64:
    """The sums [n, D_v] of values [m, D_v] times weights [n, m], over the keys that each row sees."""
    finite = np.isfinite(values).all(axis=1)
    sums = weights[:, finite] @ values[finite]
    for key in np.flatnonzero(~finite):
        rows = seen[:, key]
        sums[rows] += weights[rows, key, None] * values[key]
    return sums


def sink_of_each(sinks: ArrayLike | None, num_q_heads: int) -> Float64:
    """The sink of each query head, -inf if there are no sinks."""
    return np.full(num_q_heads, -np.inf) if sinks is None else widened(sinks)


def slope_of_each(alibi_slopes: ArrayLike | None, num_q_heads: int) -> Float64:
    """The ALiBi slope of each query head, 0 if there are no slopes."""
    return np.zeros(num_q_heads) if alibi_slopes is None else widened(alibi_slopes)


def share_of_keys(lse: Float64, sinks: ArrayLike | None) -> Float64:
    """The keys' share of the softmax: sigmoid(lse - sink), or 1 without sinks; `sinks` broadcasts against `lse`."""
    if sinks is None:
        return np.ones(lse.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        share = 1 / (1 + np.exp(widened(sinks) - lse))
    return np.where(lse == -np.inf, 0.0, share)
