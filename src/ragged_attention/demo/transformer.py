"""The layers that both of the demo's transformers share, on arrays of torch or jax, and full attention as a check."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ragged_attention import dispatch
from ragged_attention.calls import CALLS, Device
from ragged_attention.demo.engine import Batch, Limits
from ragged_attention.demo.model import NORM_EPSILON, STEP_TABLES, rope_frequencies
from ragged_attention.tools.samples import FakeArray

Weights = Mapping[str, Any]  # the arrays of `ragged_attention.demo.model`, each for all layers


@dataclasses.dataclass(frozen=True)
class Framework:
    """The modules of a framework. torch and jax use the same names for functions on arrays."""

    xp: Any  # torch or jax.numpy
    nn: Any  # torch.nn.functional or jax.nn
    operations: Any  # ragged_attention.torch or ragged_attention.jax
    placed: Callable[[np.ndarray, Any], Any]  # puts a NumPy array on the device of another array


class Transformer(abc.ABC):
    """One of the demo's two models, which differ only in their attention."""

    def __init__(self, framework: Framework) -> None:
        self.framework, self.xp = framework, framework.xp

    @abc.abstractmethod
    def heads(self, weights: Weights, layer: int, h: Any, positions: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values [..., T, heads, D] of a layer's input h [..., T, E], computed without a cache."""

    @abc.abstractmethod
    def cache(self, weights: Weights, limits: Limits) -> FakeArray:
        """The shape and dtype of a layer's cache, which is filled with zeros at first."""

    @abc.abstractmethod
    def served(
        self, weights: Weights, layer: int, h: Any, positions: Any, cache: Any, shared: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """The result of each head [T, heads, D] and the cache with a step's rows.

        `shared` holds the arguments that the write and the attention share: the tables and the backend.
        """

    @abc.abstractmethod
    def calls(self, weights: Weights, limits: Limits) -> dict[str, dict[str, Any]]:
        """The arguments of a step's calls without the tables, by operation: first the attention, then the write."""

    def backends(self, weights: Weights, limits: Limits, device: Device, backend: str | None) -> str:
        """The names of the backends that a step's calls will select, for the output."""
        empty = Batch.empty(limits)
        tables = {name: FakeArray(getattr(empty, name).shape, "int32") for name in STEP_TABLES}
        calls = self.calls(weights, limits).items()
        records = [CALLS[operation](**arguments, **tables, device=device) for operation, arguments in calls]
        attends, writes = (dispatch.choose(record, backend=backend).backend for record in records)
        return attends if attends == writes else f"{attends}, writes {writes}"

    def norm(self, x: Any, weight: Any) -> Any:
        return x / self.xp.sqrt(self.xp.square(x).mean(-1)[..., None] + NORM_EPSILON) * weight

    def rope(self, x: Any, positions: Any) -> Any:
        """Rotate the channel pairs (i, i + D/2) of [..., T, heads, D] by their angles."""
        half = x.shape[-1] // 2
        angles = (positions[..., None] * self.framework.placed(rope_frequencies(2 * half), x))[..., None, :]
        low, high, cos, sin = x[..., :half], x[..., half:], self.xp.cos(angles), self.xp.sin(angles)
        return self.xp.concatenate((low * cos - high * sin, high * cos + low * sin), -1)

    def forward(self, weights: Weights, tokens: Any, attended: Callable[[int, Any], Any]) -> Any:
        """Hidden states [..., T, E]. `attended(layer, h)` is the attention, in which tokens depend on one another."""
        x = weights["embed"][tokens]
        for layer in range(len(weights["q"])):
            attention = attended(layer, self.norm(x, weights["attention_norm"][layer]))
            x = x + self.xp.einsum("...hd,hde->...e", attention, weights["o"][layer])
            h = self.norm(x, weights["feed_norm"][layer])
            gate = self.framework.nn.silu(h @ weights["gate"][layer])
            x = x + (gate * (h @ weights["up"][layer])) @ weights["down"][layer]
        return self.norm(x, weights["last_norm"])

    def paged_logits(
        self, weights: Weights, caches: list[Any], arrays: Mapping[str, Any], backend: str | None
    ) -> tuple[Any, list[Any]]:
        """Logits of each sequence's last token [S, V], and the caches with a step's rows."""
        caches, shared = list(caches), {name: arrays[name] for name in STEP_TABLES} | {"backend": backend}

        def attended(layer: int, h: Any) -> Any:
            attention, caches[layer] = self.served(weights, layer, h, arrays["positions"], caches[layer], shared)
            return attention

        hidden = self.forward(weights, arrays["tokens"], attended)
        return hidden[arrays["last_rows"]] @ weights["embed"].T, caches

    def forward_by_heads(
        self, weights: Weights, tokens: Any, positions: Any, attend: Callable[[Any, Any, Any], Any]
    ) -> Any:
        """Hidden states [..., T, E], computed without a cache. `attend(q, k, v)` gets arrays [..., T, heads, D]."""
        return self.forward(weights, tokens, lambda layer, h: attend(*self.heads(weights, layer, h, positions)))

    def full_logits(self, weights: Weights, tokens: Any) -> Any:
        """Logits [N, T, V] of whole sequences [N, T], by attention over all tokens at once."""
        positions = self.framework.placed(np.arange(tokens.shape[1], dtype=np.int32), tokens)
        visible = positions[:, None] >= positions

        def attend(q: Any, k: Any, v: Any) -> Any:
            grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
            logits = self.xp.einsum("nqkgd,nskd->nkgqs", grouped, k) * q.shape[3] ** -0.5
            weights = self.framework.nn.softmax(self.xp.where(visible, logits, -np.inf), -1)
            return self.xp.einsum("nkgqs,nskd->nqkgd", weights, v).reshape(*q.shape[:3], -1)

        return self.forward_by_heads(weights, tokens, positions, attend) @ weights["embed"].T
