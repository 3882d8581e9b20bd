"""Online softmax over blocks of keys, and the per-row terms of its gradient."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.jax_shared.axes import cond, fori_loop
from ragged_attention.jax_shared.logits import soft_capped


def wide(dtype: Any) -> Any:
    """The compute dtype: float64 for float64 inputs, else float32."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def dot(letters: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(letters, left, right, preferred_element_type=wide(left.dtype), precision="highest")


def larger_or_nan(a: jax.Array, b: jax.Array) -> jax.Array:
    """The larger of two numbers, or NaN if either is NaN, which XLA's own maximum may hide on CPUs."""
    return jnp.where(jnp.isnan(a) | jnp.isnan(b), jnp.nan, jnp.maximum(a, b))


def largest_or_nan(numbers: jax.Array, axis: int) -> jax.Array:
    """The largest number along an axis, or NaN if one of them is NaN (see `larger_or_nan`)."""
    return jnp.where(jnp.isnan(numbers).any(axis=axis), jnp.nan, numbers.max(axis=axis))


class Softmax(NamedTuple):
    """The state of an online softmax for query rows [..., R], in the compute dtype."""

    m_i: jax.Array  # [..., R], the largest logit
    l_i: jax.Array  # [..., R], the sum of the weights exp(logit - m_i)
    acc: jax.Array  # [..., R, d_v], the weighted sum of the values
    largest: jax.Array | None = None  # [..., R], the largest logit before the soft cap and biases, on request

    @classmethod
    def empty(cls, *rows: int, d_v: int, dtype: Any = jnp.float32, keeps_largest: bool = False) -> "Softmax":
        zeros, nothing = functools.partial(jnp.zeros, dtype=dtype), jnp.full(rows, -jnp.inf, dtype)
        return cls(nothing, zeros(rows), zeros((*rows, d_v)), nothing if keeps_largest else None)

    def extended(
        self, q: jax.Array, keys: jax.Array, seen: jax.Array, scale: float, soft_cap: float | None
    ) -> "Softmax":
        """The state after adding `keys` [..., N, D], whose first columns are values; `seen` is a mask [..., R, N]."""
        logits = logits_of(dot("...rd,...nd->...rn", q, keys), scale, soft_cap)
        logits = jnp.where(seen, logits, -jnp.inf)
        return self.updated(logits, keys[..., : self.acc.shape[-1]].astype(logits.dtype))

    def updated(self, logits: jax.Array, values: jax.Array, *, any_hidden: bool = False) -> "Softmax":
        """The state after adding keys with logits [..., R, N], -inf where hidden, and values [..., N, d_v].

        With `any_hidden`, values may be NaN or infinite even if some rows do not see them.
        """
        m_i = jnp.maximum(self.m_i, logits.max(axis=-1))
        base = jnp.where(m_i == -jnp.inf, 0.0, m_i)
        weights, alpha = jnp.exp(logits - base[..., None]), jnp.exp(self.m_i - base)
        if any_hidden:
            added = sum_of_seen(weights, values, logits != -jnp.inf)
        else:
            added = dot("...rn,...nd->...rd", weights, values)
        acc = alpha[..., None] * self.acc + added
        return Softmax(m_i, alpha * self.l_i + weights.sum(axis=-1), acc, self.largest)

    def with_largest(self, products: jax.Array, scale: jax.Array | float, seen: jax.Array) -> "Softmax":
        """The state after its `largest`, if kept, is raised to the visible logits `scale * products` [..., R, N]."""
        if self.largest is None:
            return self
        logits = jnp.where(seen, logits_of(products, scale, None), -jnp.inf)
        return self._replace(largest=larger_or_nan(self.largest, largest_or_nan(logits, axis=-1)))

    def finished(self, sinks: jax.Array | None, v_scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Out [..., R, d_v] and lse [..., R] in the state's dtype; `sinks` and `v_scale` broadcast against [..., R]."""
        has_keys = self.m_i != -jnp.inf
        lse = jnp.where(has_keys, self.m_i + jnp.log(self.l_i), -jnp.inf)
        factor = jnp.where(has_keys, 1.0 / jnp.where(has_keys, self.l_i, 1.0), 0.0)
        if sinks is not None:
            factor *= jnp.where(has_keys, jax.nn.sigmoid(lse - sinks), 0.0)
        if v_scale is not None:
            factor *= v_scale
        return self.acc * factor[..., None], lse


def sum_of_seen(weights: jax.Array, values: jax.Array, seen: jax.Array) -> jax.Array:
    """The sums [..., R, d_v] of values [..., N, d_v] times weights [..., R, N], over the keys that each row sees.

    The weight of a hidden key must be 0, but its value may be NaN or infinite, and still adds nothing.
    """
    finite = jnp.isfinite(values).all(axis=-1)
    sums = dot("...rn,...nd->...rd", weights, jnp.where(finite[..., None], values, 0))

    def with_others() -> jax.Array:
        def add(key: jax.Array, sums: jax.Array) -> jax.Array:
            weight, sees = (lax.dynamic_index_in_dim(each, key, -1) for each in (weights, seen))
            adds = sees & ~lax.dynamic_index_in_dim(finite, key, -1)[..., None]
            return sums + jnp.where(adds, weight * lax.dynamic_index_in_dim(values, key, -2), 0)

        return fori_loop(0, values.shape[-2], add, sums)

    return cond(~finite.all(), with_others, sums)


class RowTerms(NamedTuple):
    """The per-row terms of the gradient."""

    lse: jax.Array  # [..., R]; +inf for a row that contributes nothing, so that its weights are 0
    d_out: jax.Array  # [..., R, d_v], times the keys' share of the softmax (1 - the sink's weight)
    offset: jax.Array  # [..., R], added to d_out . v to give d_logit / weight
    d_sinks: jax.Array  # [..., R]

    @classmethod
    def of(
        cls, d_out: jax.Array, out: jax.Array, lse: jax.Array, d_lse: jax.Array | None, sinks: jax.Array | None,
        live: jax.Array,
    ) -> "RowTerms":  # fmt: skip
        """Only `live` [..., R] rows contribute; others may hold NaN. `sinks` broadcasts against `lse`."""
        d_out = jnp.where(live[..., None], d_out, 0)
        delta = jnp.where(live, (out * d_out).sum(axis=-1), 0)
        offset, d_sinks = -delta, jnp.zeros_like(delta)
        if sinks is not None:
            share = jnp.where(live, jax.nn.sigmoid(lse - sinks), 0)
            d_sinks = jnp.where(live, jax.nn.sigmoid(sinks - lse), 0) * -delta
            d_out, offset = d_out * share[..., None], offset * share
        if d_lse is not None:
            offset += jnp.where(live, d_lse, 0)
        return cls(jnp.where(live, lse, jnp.inf), d_out, offset, d_sinks)

    def weights(self, logits: jax.Array) -> jax.Array:
        """The softmax weights of logits [..., R, N], which are -inf where hidden."""
        return jnp.exp(logits - self.lse[..., None])

    def d_logits(self, weights: jax.Array, values: jax.Array) -> jax.Array:
        """The gradient with respect to the logits, given their weights [..., R, N] and values [..., N, d_v]."""
        return weights * (dot("...rd,...nd->...rn", self.d_out, values) + self.offset[..., None])


def logits_of(products: jax.Array, scale: Any, soft_cap: float | None) -> jax.Array:
    """The logits of products q . k; `scale` broadcasts against them."""
    logits = products * scale
    return logits if soft_cap is None else soft_capped(logits, soft_cap)


def biased(
    logits: jax.Array, call: Any, slopes: jax.Array | None, table: jax.Array | None, distance: jax.Array
) -> jax.Array:
    """Logits [K, R, N] with the biases of their `distance` [R, N], a key's position minus the query's.

    `slopes` are [K, R], and `table` is [K, R, B], the rows of `relative_bias`.
    """
    if slopes is not None:
        logits = logits + slopes[..., None] * distance.astype(logits.dtype)
    if table is not None:
        columns = jnp.clip(call.bias_at_own - distance, 0, table.shape[-1] - 1)
        logits = logits + jnp.take_along_axis(table, columns[None], axis=-1)
    return logits
