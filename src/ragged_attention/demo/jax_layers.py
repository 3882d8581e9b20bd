"""What both of the demo's transformers are made of in jax, and full attention as their judge."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ragged_attention.calls import Call, Device
from ragged_attention.demo.engine import Limits
from ragged_attention.demo.model import NORM_EPSILON, rope_frequencies

Arrays = dict[str, jax.Array]


class Attention(Protocol):
    """The module of a kind of attention: what the layers of the two models differ in."""

    def heads(
        self, weights: Arrays, layer: int, h: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values [..., T, heads, D] of a layer's input h [..., T, E], as if there were no cache."""
        ...

    def cache(self, weights: Arrays, limits: Limits) -> jax.Array:
        """The empty cache of one layer."""
        ...

    def served(
        self,
        weights: Arrays,
        layer: int,
        h: jax.Array,
        positions: jax.Array,
        cache: jax.Array,
        tables: dict[str, Any],
        backend: str | None,
    ) -> tuple[jax.Array, jax.Array]:
        """What each head found [T, heads, D], and the cache with the step's rows, over which it attended."""
        ...

    def calls(self, weights: Arrays, limits: Limits, tables: dict[str, Any], device: Device) -> tuple[Call, Call]:
        """The attention and the write of a step."""
        ...


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + NORM_EPSILON) * weight


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turn the channel pairs (i, i + D/2) of [..., T, heads, D] by their angles."""
    angles = (positions[..., None] * rope_frequencies(x.shape[-1]))[..., None, :]
    low, high = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def forward(weights: Arrays, tokens: jax.Array, attended: Callable[[int, jax.Array], jax.Array]) -> jax.Array:
    """Hidden states [..., T, E]; `attended(layer, h)` is everything that is not token by token."""
    x = weights["embed"][tokens]
    for layer in range(len(weights["q"])):
        found = attended(layer, norm(x, weights["attention_norm"][layer]))
        x = x + jnp.einsum("...hd,hde->...e", found, weights["o"][layer])
        h = norm(x, weights["feed_norm"][layer])
        x = x + (jax.nn.silu(h @ weights["gate"][layer]) * (h @ weights["up"][layer])) @ weights["down"][layer]
    return norm(x, weights["last_norm"])


def full_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of whole sequences [N, T, heads, D]."""
    k, v = (jnp.repeat(heads, q.shape[2] // heads.shape[2], axis=2) for heads in (k, v))
    logits = jnp.einsum("nqhd,nkhd->nhqk", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1), v)


def full_logits(attention: Attention, weights: Arrays, tokens: jax.Array) -> jax.Array:
    """Logits [N, T, V] of whole sequences [N, T]."""
    positions = jnp.arange(tokens.shape[1])
    hidden = forward(weights, tokens, lambda layer, h: full_attention(*attention.heads(weights, layer, h, positions)))
    return hidden @ weights["embed"].T
