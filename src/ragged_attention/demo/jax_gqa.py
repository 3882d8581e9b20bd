"""Grouped queries over pages of keys and values, in jax."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import Device, RaggedPagedAttention, WriteKvPages
from ragged_attention.demo.engine import Limits
from ragged_attention.demo.jax_layers import Arrays, rope
from ragged_attention.jax import ragged_paged_attention, write_kv_pages


def heads(weights: Arrays, layer: int, h: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = (jnp.einsum("...e,ehd->...hd", h, weights[name][layer]) for name in "qkv")
    return rope(q, positions), rope(k, positions), v


def cache(weights: Arrays, limits: Limits) -> jax.Array:
    _, _, num_kv_heads, head_dim = weights["k"].shape
    return jnp.zeros((limits.num_pages, limits.page_size, 2 * num_kv_heads, head_dim))


def served(
    weights: Arrays,
    layer: int,
    h: jax.Array,
    positions: jax.Array,
    cache: jax.Array,
    tables: dict[str, Any],
    backend: str | None,
) -> tuple[jax.Array, jax.Array]:
    q, k, v = heads(weights, layer, h, positions)
    written = write_kv_pages(k, v, cache, **tables, backend=backend)
    assert not isinstance(written, tuple)
    out = ragged_paged_attention(q, written, **tables, backend=backend)
    assert not isinstance(out, tuple)
    return out, written


def calls(
    weights: Arrays, limits: Limits, tables: dict[str, Any], device: Device
) -> tuple[RaggedPagedAttention, WriteKvPages]:
    q, k = (jnp.zeros((limits.max_tokens, *weights[name].shape[2:])) for name in "qk")
    pages = cache(weights, limits)
    return (
        RaggedPagedAttention(q=q, kv_pages=pages, **tables, device=device),
        WriteKvPages(k=k, v=k, kv_pages=pages, **tables, device=device),
    )
