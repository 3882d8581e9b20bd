"""The demo's transformers in jax. A step is one jitted function, which is compiled once."""

import jax
import jax.numpy as jnp
import numpy as np

import ragged_attention.jax
from ragged_attention.demo.engine import Batch, Limits
from ragged_attention.demo.gqa import GroupedQueries
from ragged_attention.demo.mla import LatentAttention
from ragged_attention.demo.model import Weights
from ragged_attention.demo.transformer import Framework, Transformer
from ragged_attention.errors import InvalidInput
from ragged_attention.jax._launcher import device_facts
from ragged_attention.jax._lower import default_platform

JAX = Framework(jnp, jax.nn, ragged_attention.jax, lambda array, like: jnp.asarray(array))
TRANSFORMERS = {"gqa": GroupedQueries(JAX), "mla": LatentAttention(JAX)}


full_logits = jax.jit(Transformer.full_logits, static_argnames="self")
paged_logits = jax.jit(Transformer.paged_logits, static_argnames=("self", "backend"), donate_argnames="caches")


def device_named(name: str | None) -> str:
    """The requested platform, which the process uses from then on, or jax's default platform if `name` is None."""
    if name is None:
        return default_platform()
    before = jax.config.jax_platforms  # type: ignore[attr-defined]
    jax.config.update("jax_platforms", name)
    try:
        platform = default_platform()
        reason = f"jax runs on {platform} already in this process"
    except (RuntimeError, AssertionError) as error:
        platform, reason = "", str(error).partition("\n")[0] or "no such device found"
    if platform != name.replace("gpu", "cuda"):
        jax.config.update("jax_platforms", before)
        raise InvalidInput(f"expected device to be one that jax has here, got {name!r}: {reason}")
    return platform


class Model:
    """A transformer with its paged cache."""

    def __init__(
        self, kind: str, weights: Weights, limits: Limits, *, device: str = "cpu", backend: str | None = None
    ) -> None:
        self.platform = device
        self.backend = backend
        self.transformer = TRANSFORMERS[kind]
        self.weights = {name: jnp.asarray(value) for name, value in weights.items()}
        cache = self.transformer.cache(weights, limits)
        self.caches = [jnp.zeros(cache.shape, cache.dtype) for _ in weights["q"]]
        self.backends = self.transformer.backends(weights, limits, device_facts(device), backend)

    def step(self, batch: Batch) -> np.ndarray:
        with jax.default_matmul_precision("highest"):
            arrays = {name: jnp.asarray(value) for name, value in vars(batch).items()}
            logits, self.caches = paged_logits(self.transformer, self.weights, self.caches, arrays, self.backend)
        return np.asarray(logits)

    def full(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [N, T, V] of whole sequences [N, T], by attention without a cache."""
        with jax.default_matmul_precision("highest"):
            return np.asarray(full_logits(self.transformer, self.weights, jnp.asarray(tokens)))
