"""Grouped queries over pages of keys and values, in torch."""

from typing import Any

import torch

from ragged_attention.calls import Device, RaggedPagedAttention, WriteKvPages
from ragged_attention.demo.engine import Limits
from ragged_attention.demo.torch_layers import Tensor, Tensors, rope
from ragged_attention.torch import ragged_paged_attention, write_kv_pages


def heads(weights: Tensors, layer: int, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.einsum("...e,ehd->...hd", h, weights[name][layer]) for name in "qkv")
    return rope(q, positions), rope(k, positions), v


def cache(weights: Tensors, limits: Limits) -> Tensor:
    _, _, num_kv_heads, head_dim = weights["k"].shape
    return weights["k"].new_zeros(limits.num_pages, limits.page_size, 2 * num_kv_heads, head_dim)


def served(
    weights: Tensors,
    layer: int,
    h: Tensor,
    positions: Tensor,
    cache: Tensor,
    tables: dict[str, Any],
    backend: str | None,
) -> Tensor:
    q, k, v = heads(weights, layer, h, positions)
    write_kv_pages(k, v, cache, **tables, backend=backend)
    out = ragged_paged_attention(q, cache, **tables, backend=backend)
    assert isinstance(out, Tensor)
    return out


def calls(
    weights: Tensors, limits: Limits, tables: dict[str, Any], device: Device
) -> tuple[RaggedPagedAttention, WriteKvPages]:
    q, k = (weights[name].new_zeros(limits.max_tokens, *weights[name].shape[2:]) for name in "qk")
    pages = cache(weights, limits)
    return (
        RaggedPagedAttention(q=q, kv_pages=pages, **tables, device=device),
        WriteKvPages(k=k, v=k, kv_pages=pages, **tables, device=device),
    )
