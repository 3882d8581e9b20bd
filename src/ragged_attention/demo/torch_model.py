"""The demo's transformer in torch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ragged_attention.demo.engine import Batch, Limits
from ragged_attention.demo.model import NORM_EPSILON, STEP_TABLES, Weights, chosen_backends, rope_frequencies
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import ragged_paged_attention, write_kv_pages
from ragged_attention.torch._launcher import device_facts

Tensor = torch.Tensor
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPSILON) * weight


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Turn the channel pairs (i, i + D/2) of [..., T, heads, D] by their angles."""
    frequencies = torch.from_numpy(rope_frequencies(x.shape[-1])).to(x.device)
    angles = (positions[..., None] * frequencies)[..., None, :]
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)


def forward(weights: dict[str, Tensor], tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """Hidden states [..., T, E]; `attend(layer, q, k, v)` is everything that is not token by token."""
    x = weights["embed"][tokens]
    for layer in range(len(weights["q"])):
        h = norm(x, weights["attention_norm"][layer])
        q, k, v = (torch.einsum("...e,ehd->...hd", h, weights[name][layer]) for name in "qkv")
        attended = attend(layer, rope(q, positions), rope(k, positions), v)
        x = x + torch.einsum("...hd,hde->...e", attended, weights["o"][layer])
        h = norm(x, weights["feed_norm"][layer])
        x = x + (F.silu(h @ weights["gate"][layer]) * (h @ weights["up"][layer])) @ weights["down"][layer]
    return norm(x, weights["last_norm"])


def full_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of whole sequences [N, T, heads, D], with no cache."""
    del layer
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (logits.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def full_logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [N, T, V] of whole sequences [N, T]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return forward(weights, tokens, positions, full_attention) @ weights["embed"].T


def device_named(name: str | None) -> str:
    """The requested device, or the best one here."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return str(torch.zeros(1, device=name).device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInput(f"expected device to be one that torch has here, got {name!r}: {reason}") from None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """On a CPU the work of a step is so small that several threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Model:
    """The transformer with its paged cache, and once more without one."""

    def __init__(self, weights: Weights, limits: Limits, *, device: str = "cpu", backend: str | None = None) -> None:
        self.platform = device
        self.device = torch.device(device)
        self.backend = backend
        self.weights = {name: torch.from_numpy(value).to(self.device) for name, value in weights.items()}
        layers, _, num_kv_heads, head_dim = weights["k"].shape
        shape = (limits.num_pages, limits.page_size, 2 * num_kv_heads, head_dim)
        self.kv_pages = [torch.zeros(shape, device=self.device) for _ in range(layers)]
        empty = self._on_device(Batch.empty(limits))
        q, k = (torch.zeros(limits.max_tokens, *weights[name].shape[2:], device=self.device) for name in "qk")
        tables = {name: empty[name] for name in STEP_TABLES}
        self.backends = chosen_backends(q, k, self.kv_pages[0], tables, device_facts(q.device), backend)

    @torch.no_grad()
    @one_thread()
    def step(self, batch: Batch) -> np.ndarray:
        arrays = self._on_device(batch)
        tables: dict[str, Any] = {name: arrays[name] for name in STEP_TABLES}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv_pages = self.kv_pages[layer]
            write_kv_pages(k, v, kv_pages, **tables, backend=self.backend)
            out = ragged_paged_attention(q, kv_pages, **tables, backend=self.backend)
            assert isinstance(out, Tensor)
            return out

        hidden = forward(self.weights, arrays["tokens"], arrays["positions"], attend)
        return (hidden[arrays["last_rows"]] @ self.weights["embed"].T).cpu().numpy()

    @torch.no_grad()
    def full(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [N, T, V] by plain attention over whole sequences [N, T]."""
        return full_logits(self.weights, torch.from_numpy(tokens).to(self.device)).cpu().numpy()

    def _on_device(self, batch: Batch) -> dict[str, Tensor]:
        names = ("tokens", "positions", "last_rows", *STEP_TABLES)
        return {name: torch.from_numpy(getattr(batch, name)).to(self.device) for name in names}
