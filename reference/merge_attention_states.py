"""Partial attention results over disjoint ranges of keys, merged through their log-sum-exps."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import Float64, widened
from ragged_attention.reference._softmax import left_by_sinks

FEATURES = frozenset({"sinks", "out_dtype"})


def merge_attention_states(
    outs: ArrayLike, lses: ArrayLike, *, sinks: ArrayLike | None = None, out_dtype: str | None = None
) -> tuple[Float64, Float64]:
    """Parts `outs` [N, T, H, D_v] with `lses` [N, T, H] into out [T, H, D_v] and lse [T, H].

    A part whose lse is -inf weighs nothing, whatever its out holds; where all are, out is 0 and lse -inf. A head's
    sink takes its share of the merged softmax. `out_dtype` is what the result is rounded to, elsewhere.
    """
    del out_dtype
    outs, lses = widened(outs), widened(lses)
    m_i = lses.max(axis=0)
    some = m_i != -np.inf
    weights = np.exp(lses - np.where(some, m_i, 0.0))
    l_i = np.where(some, weights.sum(axis=0), 1.0)
    parts = np.where(weights[..., None] > 0, outs, 0.0)
    with np.errstate(divide="ignore"):
        lse = np.where(some, m_i + np.log(l_i), -np.inf)
    out = (weights[..., None] * parts).sum(axis=0) / l_i[..., None]
    return out * left_by_sinks(lse, sinks)[..., None], lse


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(merge_attention_states, call, call.results())
