"""Partial attention results over disjoint ranges of keys, merged through their log-sum-exps."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import Float64
from ragged_attention.reference._no_tuning import Tile as Tile
from ragged_attention.reference._no_tuning import heuristic as heuristic
from ragged_attention.reference._no_tuning import why_not as why_not

FEATURES: frozenset[str] = frozenset()


def merge_attention_states(outs: ArrayLike, lses: ArrayLike) -> tuple[Float64, Float64]:
    """Parts `outs` [N, T, H, D_v] with `lses` [N, T, H] into out [T, H, D_v] and lse [T, H].

    A part whose lse is -inf weighs nothing, whatever its out holds; where all are, out is 0 and lse -inf.
    """
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    m_i = lses.max(axis=0)
    some = m_i != -np.inf
    weights = np.exp(lses - np.where(some, m_i, 0.0))
    l_i = np.where(some, weights.sum(axis=0), 1.0)
    parts = np.where(weights[..., None] > 0, outs, 0.0)
    with np.errstate(divide="ignore"):
        lse = np.where(some, m_i + np.log(l_i), -np.inf)
    return (weights[..., None] * parts).sum(axis=0) / l_i[..., None], lse


def run(call: Any, tile: Tile, launch: Any) -> Any:
    del tile
    outputs = [(call.outs.shape[1:], call.outs.dtype), (call.lses.shape[1:], "float32")]
    return launch.on_host(merge_attention_states, call, outputs)
