"""What both of the demo's transformers are made of in torch, and full attention as their judge."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ragged_attention.calls import Call, Device
from ragged_attention.demo.engine import Limits
from ragged_attention.demo.model import NORM_EPSILON, rope_frequencies

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(Protocol):
    """The module of a kind of attention: what the layers of the two models differ in."""

    def heads(self, weights: Tensors, layer: int, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., T, heads, D] of a layer's input h [..., T, E], as if there were no cache."""
        ...

    def cache(self, weights: Tensors, limits: Limits) -> Tensor:
        """The empty cache of one layer."""
        ...

    def served(
        self,
        weights: Tensors,
        layer: int,
        h: Tensor,
        positions: Tensor,
        cache: Tensor,
        tables: dict[str, Any],
        backend: str | None,
    ) -> Tensor:
        """Write a step's rows into the cache, attend over it, and return what each head found [T, heads, D]."""
        ...

    def calls(self, weights: Tensors, limits: Limits, tables: dict[str, Any], device: Device) -> tuple[Call, Call]:
        """The attention and the write of a step."""
        ...


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPSILON) * weight


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Turn the channel pairs (i, i + D/2) of [..., T, heads, D] by their angles."""
    frequencies = torch.from_numpy(rope_frequencies(x.shape[-1])).to(x.device)
    angles = (positions[..., None] * frequencies)[..., None, :]
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)


def forward(weights: Tensors, tokens: Tensor, attended: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Hidden states [..., T, E]; `attended(layer, h)` is everything that is not token by token."""
    x = weights["embed"][tokens]
    for layer in range(len(weights["q"])):
        found = attended(layer, norm(x, weights["attention_norm"][layer]))
        x = x + torch.einsum("...hd,hde->...e", found, weights["o"][layer])
        h = norm(x, weights["feed_norm"][layer])
        x = x + (F.silu(h @ weights["gate"][layer]) * (h @ weights["up"][layer])) @ weights["down"][layer]
    return norm(x, weights["last_norm"])


def forward_by_heads(
    attention: Attention, weights: Tensors, tokens: Tensor, positions: Tensor, attend: Attend
) -> Tensor:
    """Hidden states [..., T, E] with no cache; `attend(q, k, v)` gets queries, keys and values [..., T, heads, D]."""
    return forward(weights, tokens, lambda layer, h: attend(*attention.heads(weights, layer, h, positions)))


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of whole sequences [N, T, heads, D]."""
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (logits.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def full_logits(attention: Attention, weights: Tensors, tokens: Tensor) -> Tensor:
    """Logits [N, T, V] of whole sequences [N, T]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return forward_by_heads(attention, weights, tokens, positions, full_attention) @ weights["embed"].T
