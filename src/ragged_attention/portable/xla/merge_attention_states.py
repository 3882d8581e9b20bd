"""Merges attention results over disjoint ranges of keys, in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import MergeAttentionStates
from ragged_attention.portable.xla._framework import why_not as why_not

FEATURES = frozenset({"sinks", "out_dtype"})


def run(call: MergeAttentionStates, tile: Any, launch: Any) -> tuple[jax.Array, jax.Array]:
    m_i = call.lses.max(axis=0)
    has_keys = m_i != -jnp.inf
    weights = jnp.exp(call.lses - jnp.where(has_keys, m_i, 0.0))
    l_i = jnp.where(has_keys, weights.sum(axis=0), 1.0)
    weights = weights[..., None]
    parts = jnp.where(weights > 0, call.outs.astype(jnp.float32), 0.0)  # a weight of 0 does not remove a NaN
    lse = jnp.where(has_keys, m_i + jnp.log(l_i), -jnp.inf)
    if call.sinks is not None:
        l_i += jnp.where(has_keys, jnp.exp(call.sinks - m_i), 0.0)
    out = (weights * parts).sum(axis=0) / l_i[..., None]
    return out.astype(call.out_dtype or call.outs.dtype), lse
