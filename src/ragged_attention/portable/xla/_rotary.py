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
    x: jax.Array, weight: jax.Array | None, call: Any, tables: tuple[jax.Array, jax.Array], start: int = 0
) -> jax.Array:
    """Rows [T, heads, D], normalised if they have weights, rotated from column `start` on, and rounded once.

    `tables` are the `angles` of the call. The first len(`weight`) columns are normalised.
    """
    values = x.astype(jnp.float32)
    if weight is not None:
        normed = values[..., : len(weight)]
        factor = lax.rsqrt(jnp.mean(normed * normed, axis=-1, keepdims=True) + jnp.float32(call.eps))
        normed = normed * factor * weight.astype(jnp.float32)
        values = jnp.concatenate([normed, values[..., len(weight) :]], axis=-1)
    stop = start + 2 * call.half
    before, columns, after = values[..., :start], values[..., start:stop], values[..., stop:]
    pairs = (call.half, 2) if call.interleaved else (2, call.half)
    axis = -1 if call.interleaved else -2
    columns = columns.reshape(*columns.shape[:-1], *pairs)
    first, second = (lax.index_in_dim(columns, index, axis, keepdims=False) for index in (0, 1))
    cos, sin = (table[:, None] for table in tables)
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=axis)
    rotated = rotated.reshape(*rotated.shape[:-2], 2 * call.half)
    # Without the barrier, XLA may store the value that is not rounded yet.
    return lax.optimization_barrier(jnp.concatenate([before, rotated, after], axis=-1).astype(x.dtype))
