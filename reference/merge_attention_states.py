"""Merges attention results over disjoint ranges of keys through their log-sum-exps."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import Float64, widened
from ragged_attention.reference._softmax import share_of_keys

FEATURES = frozenset({"sinks", "out_dtype"})


def merge_attention_states(
    outs: ArrayLike, lses: ArrayLike, *, sinks: ArrayLike | None = None, out_dtype: str | None = None
) -> tuple[Float64, Float64]:
    """Out [T, H, D_v] and lse [T, H], merged from N partial results `outs` [N, T, H, D_v] with `lses` [N, T, H].

    A partial result whose lse is -inf has weight 0, whatever its out holds; if all are -inf, out is 0 and lse is -inf.
    Sinks take their share of the merged softmax. The caller casts to `out_dtype`.
    """
    del out_dtype
    outs, lses = widened(outs), widened(lses)
    m_i = lses.max(axis=0)
    has_keys = m_i != -np.inf
    weights = np.exp(lses - np.where(has_keys, m_i, 0.0))
    l_i = np.where(has_keys, weights.sum(axis=0), 1.0)
    parts = np.where(weights[..., None] > 0, outs, 0.0)
    with np.errstate(divide="ignore"):
        lse = np.where(has_keys, m_i + np.log(l_i), -np.inf)
    out = (weights[..., None] * parts).sum(axis=0) / l_i[..., None]
    return out * share_of_keys(lse, sinks)[..., None], lse


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(merge_attention_states, call, call.results())
