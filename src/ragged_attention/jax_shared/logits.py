"""The soft cap on logits and the sliding window, as every backend in jax computes them."""

from typing import Any

import jax
import jax.numpy as jnp


def soft_capped(logits: jax.Array, soft_cap: float) -> jax.Array:
    """`soft_cap` * tanh(logits / `soft_cap`) of float32 or float64 logits, for any cap that float32 can hold.

    XLA and TPUs flush subnormal numbers to 0. So a huge cap and the logits are divided by 32 before the quotient is
    taken. Logits whose quotient is so small that tanh does not change it are returned unchanged. The logits are clipped
    to 32 caps, where tanh is 1. The clip also keeps XLA from merging the factors into one, which could be 0 or
    infinite.
    """
    unit = 1.0 if soft_cap < 1 else 2.0**-5
    cap = soft_cap * unit
    x = jnp.clip(logits * unit, -32 * cap, 32 * cap) * (1 / cap)
    same = jnp.abs(x) < jnp.finfo(logits.dtype).eps ** 0.5 / 2
    return jnp.where(same, logits, soft_cap * jnp.tanh(x))


def window_of(call: Any, capacity: int) -> int | None:
    """The sliding window, or None if it covers all `capacity` positions, because such a window could overflow int32."""
    window = call.sliding_window
    return None if window is None or window >= capacity else int(window)
