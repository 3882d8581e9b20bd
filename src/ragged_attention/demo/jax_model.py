"""The demo's transformer in jax: one jitted function per step, compiled once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragged_attention.demo.engine import Batch, Limits
from ragged_attention.demo.model import NORM_EPSILON, STEP_TABLES, Weights, chosen_backends, rope_frequencies
from ragged_attention.errors import InvalidInput
from ragged_attention.jax import ragged_paged_attention, write_kv_pages
from ragged_attention.jax._launcher import device_facts
from ragged_attention.jax._lower import default_platform

Arrays = dict[str, jax.Array]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + NORM_EPSILON) * weight


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turn the channel pairs (i, i + D/2) of [..., T, heads, D] by their angles."""
    angles = (positions[..., None] * rope_frequencies(x.shape[-1]))[..., None, :]
    low, high = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def forward(weights: Arrays, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
    """Hidden states [..., T, E]; `attend(layer, q, k, v)` is everything that is not token by token."""
    x = weights["embed"][tokens]
    for layer in range(len(weights["q"])):
        h = norm(x, weights["attention_norm"][layer])
        q, k, v = (jnp.einsum("...e,ehd->...hd", h, weights[name][layer]) for name in "qkv")
        attended = attend(layer, rope(q, positions), rope(k, positions), v)
        x = x + jnp.einsum("...hd,hde->...e", attended, weights["o"][layer])
        h = norm(x, weights["feed_norm"][layer])
        x = x + (jax.nn.silu(h @ weights["gate"][layer]) * (h @ weights["up"][layer])) @ weights["down"][layer]
    return norm(x, weights["last_norm"])


def full_attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of whole sequences [N, T, heads, D], with no cache."""
    del layer
    k, v = (jnp.repeat(heads, q.shape[2] // heads.shape[2], axis=2) for heads in (k, v))
    logits = jnp.einsum("nqhd,nkhd->nhqk", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1), v)


@jax.jit
def full_logits(weights: Arrays, tokens: jax.Array) -> jax.Array:
    """Logits [N, T, V] of whole sequences [N, T]."""
    return forward(weights, tokens, jnp.arange(tokens.shape[1]), full_attention) @ weights["embed"].T


@functools.partial(jax.jit, static_argnames="backend", donate_argnames="kv_pages")
def paged_logits(
    weights: Arrays, kv_pages: list[jax.Array], arrays: Arrays, backend: str | None
) -> tuple[jax.Array, list[jax.Array]]:
    """Logits of each sequence's last token [S, V], and the pages with this step's keys and values."""
    tables: dict[str, Any] = {name: arrays[name] for name in STEP_TABLES}
    kv_pages = list(kv_pages)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        written = write_kv_pages(k, v, kv_pages[layer], **tables, backend=backend)
        assert not isinstance(written, tuple)
        kv_pages[layer] = written
        out = ragged_paged_attention(q, written, **tables, backend=backend)
        assert not isinstance(out, tuple)
        return out

    hidden = forward(weights, arrays["tokens"], arrays["positions"], attend)
    return hidden[arrays["last_rows"]] @ weights["embed"].T, kv_pages


def device_named(name: str | None) -> str:
    """The requested platform, made that of this process, or the best one here."""
    if name is None:
        return default_platform()
    before = jax.config.jax_platforms  # type: ignore[attr-defined]
    jax.config.update("jax_platforms", name)
    try:
        found = default_platform()
        reason = f"jax runs on {found} already in this process"
    except (RuntimeError, AssertionError) as error:
        found, reason = "", str(error).partition("\n")[0] or "no such device found"
    if found != name.replace("gpu", "cuda"):
        jax.config.update("jax_platforms", before)
        raise InvalidInput(f"expected device to be one that jax has here, got {name!r}: {reason}")
    return found


class Model:
    """The transformer with its paged cache, and once more without one."""

    def __init__(self, weights: Weights, limits: Limits, *, device: str = "cpu", backend: str | None = None) -> None:
        self.platform = device
        self.backend = backend
        self.weights = {name: jnp.asarray(value) for name, value in weights.items()}
        layers, _, num_kv_heads, head_dim = weights["k"].shape
        shape = (limits.num_pages, limits.page_size, 2 * num_kv_heads, head_dim)
        self.kv_pages = [jnp.zeros(shape) for _ in range(layers)]
        empty = self._on_device(Batch.empty(limits))
        q, k = (jnp.zeros((limits.max_tokens, *weights[name].shape[2:])) for name in "qk")
        tables = {name: empty[name] for name in STEP_TABLES}
        self.backends = chosen_backends(q, k, self.kv_pages[0], tables, device_facts(device), backend)

    def step(self, batch: Batch) -> np.ndarray:
        with jax.default_matmul_precision("highest"):
            arrays = self._on_device(batch)
            logits, self.kv_pages = paged_logits(self.weights, self.kv_pages, arrays, self.backend)
        return np.asarray(logits)

    def full(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [N, T, V] by plain attention over whole sequences [N, T]."""
        with jax.default_matmul_precision("highest"):
            return np.asarray(full_logits(self.weights, jnp.asarray(tokens)))

    def _on_device(self, batch: Batch) -> Arrays:
        names = ("tokens", "positions", "last_rows", *STEP_TABLES)
        return {name: jnp.asarray(getattr(batch, name)) for name in names}
