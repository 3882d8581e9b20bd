"""The norm of a head and the rotary embedding, in float32."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def angles(call: Any) -> tuple[jax.Array, jax.Array]:
    """The cosines and sines of each token, float32 [T, R/2]; positions outside the table are clamped to it."""
    rows = jnp.clip(call.positions, 0, call.num_positions - 1)
    start = call.sin_offset
    cos, sin = call.cos[rows, : call.half], call.sin[rows, start : start + call.half]
    return cos.astype(jnp.float32), sin.astype(jnp.float32)


def prepared(
    x: jax.Array, weight: jax.Array | None, eps: float, cos: jax.Array, sin: jax.Array, interleaved: bool
) -> jax.Array:
    """Rows [T, heads, D], normalised if they have weights, rotated and rounded once."""
    values = x.astype(jnp.float32)
    if weight is not None:
        mean = jnp.mean(values * values, axis=-1, keepdims=True)
        values = values * lax.rsqrt(mean + jnp.float32(eps)) * weight.astype(jnp.float32)
    half = cos.shape[-1]
    columns, others = values[..., : 2 * half], values[..., 2 * half :]
    pairs = (*columns.shape[:-1], half, 2) if interleaved else (*columns.shape[:-1], 2, half)
    axis = -1 if interleaved else -2
    first, second = (jnp.take(columns.reshape(pairs), index, axis=axis) for index in (0, 1))
    cos, sin = cos[:, None], sin[:, None]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=axis).reshape(columns.shape)
    # The reduction must be the same for q and k, and what is stored must be the rounded value.
    return lax.reduce_precision(jnp.concatenate([turned, others], axis=-1), *_bits(x.dtype)).astype(x.dtype)


def _bits(dtype: Any) -> tuple[int, int]:
    facts = jnp.finfo(dtype)
    return facts.nexp, facts.nmant
