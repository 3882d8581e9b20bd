"""Partial attention results merged, on plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import MergeAttentionStates
from ragged_attention.portable.xla._framework import why_not as why_not

FEATURES = frozenset({"sinks", "out_dtype"})


def run(call: MergeAttentionStates, tile: Any, launch: Any) -> tuple[jax.Array, jax.Array]:
    m_i = call.lses.max(axis=0)
    some = m_i != -jnp.inf
    weights = jnp.exp(call.lses - jnp.where(some, m_i, 0.0))
    l_i = jnp.where(some, weights.sum(axis=0), 1.0)
    weights = weights[..., None]
    parts = jnp.where(weights > 0, call.outs.astype(jnp.float32), 0.0)  # a weight of 0 does not silence a NaN
    lse = jnp.where(some, m_i + jnp.log(l_i), -jnp.inf)
    if call.sinks is not None:
        l_i += jnp.where(some, jnp.exp(call.sinks - m_i), 0.0)
    out = (weights * parts).sum(axis=0) / l_i[..., None]
    return out.astype(call.out_dtype or call.outs.dtype), lse
