"""Softmax over keys that come a block at a time, and the mixture of their values."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision="highest")


class Softmax(NamedTuple):
    """Of some rows of queries: the largest logit, the sum of the weights relative to it, and their mixture."""

    highest: jax.Array  # f32 [..., R]
    total: jax.Array  # f32 [..., R]
    mixture: jax.Array  # f32 [..., R, d_v]

    @classmethod
    def of_no_keys(cls, *rows: int, d_v: int) -> "Softmax":
        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        return cls(jnp.full(rows, -jnp.inf, jnp.float32), zeros(rows), zeros((*rows, d_v)))

    def extended(self, q: jax.Array, keys: jax.Array, seen: jax.Array, scale: float) -> "Softmax":
        """With the keys [..., N, D], whose first columns are their values, as far as they are `seen` [..., R, N]."""
        logits = jnp.where(seen, dot("...rd,...nd->...rn", q, keys) * jnp.float32(scale), -jnp.inf)
        highest = jnp.maximum(self.highest, logits.max(axis=-1))
        base = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights, kept = jnp.exp(logits - base[..., None]), jnp.exp(self.highest - base)
        values = keys[..., : self.mixture.shape[-1]].astype(jnp.float32)
        mixture = kept[..., None] * self.mixture + dot("...rn,...nd->...rd", weights, values)
        return Softmax(highest, kept * self.total + weights.sum(axis=-1), mixture)

    def finished(self, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Out [..., R, d_v] and lse [..., R], both float32, with each row's sink."""
        some = self.highest != -jnp.inf
        lse = jnp.where(some, self.highest + jnp.log(self.total), -jnp.inf)
        factor = jnp.where(some, 1.0 / jnp.where(some, self.total, 1.0), 0.0)
        if sinks is not None:
            factor *= jnp.where(some, jax.nn.sigmoid(lse - sinks), 0.0)
        return self.mixture * factor[..., None], lse
