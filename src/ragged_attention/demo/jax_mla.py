"""Multi-head latent attention over pages of 8-bit latents, in jax; `torch_mla.py` says how."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import Device, RaggedMlaAttention, WriteMlaCache
from ragged_attention.demo.engine import Limits
from ragged_attention.demo.jax_layers import Arrays, norm, rope
from ragged_attention.demo.model import LARGEST_CODE
from ragged_attention.jax import ragged_mla_attention, write_mla_cache


def latent_rows(weights: Arrays, layer: int, h: jax.Array, positions: jax.Array) -> jax.Array:
    """What the cache is to hold of each token [..., T, C + R]: its latent, and the rotary key of all heads."""
    latent, key = _split_row(weights, h @ weights["latent"][layer])
    turned = rope(key[..., None, :], positions)[..., 0, :]
    return jnp.concatenate((norm(latent, weights["latent_norm"][layer]), turned), axis=-1)


def queries(weights: Arrays, layer: int, h: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two parts of each head's query, for what the latent tells and for the rotary key."""
    q = jnp.einsum("...e,ehd->...hd", h, weights["q"][layer])
    told, turned = jnp.split(q, (weights["k"].shape[-1],), axis=-1)
    return told, rope(turned, positions)


def heads(weights: Arrays, layer: int, h: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = rounded(latent_rows(weights, layer, h, positions), weights["kv_scale"][layer])
    latent, key = _split_row(weights, rows)
    k, v = (jnp.einsum("...c,chn->...hn", latent, weights[name][layer]) for name in "kv")
    shared = jnp.broadcast_to(key[..., None, :], (*k.shape[:-1], key.shape[-1]))
    q = jnp.concatenate(queries(weights, layer, h, positions), axis=-1)
    return q, jnp.concatenate((k, shared), axis=-1), v


def rounded(rows: jax.Array, kv_scale: jax.Array) -> jax.Array:
    """Rows as an 8-bit cache gives them back."""
    codes = (rows / kv_scale).clip(-LARGEST_CODE, LARGEST_CODE).astype(jnp.float8_e4m3fn)
    return codes.astype(rows.dtype) * kv_scale


def cache(weights: Arrays, limits: Limits) -> jax.Array:
    return jnp.zeros((limits.num_pages, limits.page_size, 1, weights["latent"].shape[-1]), jnp.float8_e4m3fn)


def served(
    weights: Arrays,
    layer: int,
    h: jax.Array,
    positions: jax.Array,
    cache: jax.Array,
    tables: dict[str, Any],
    backend: str | None,
) -> tuple[jax.Array, jax.Array]:
    kv_scale = weights["kv_scale"][layer]
    rows = latent_rows(weights, layer, h, positions)
    told, turned = queries(weights, layer, h, positions)
    absorbed = jnp.einsum("thn,chn->thc", told, weights["k"][layer])
    written = write_mla_cache(rows, cache, **tables, kv_scale=kv_scale, backend=backend)
    found = ragged_mla_attention(
        jnp.concatenate((absorbed, turned), axis=-1), written, **tables, d_v=absorbed.shape[-1],
        sm_scale=weights["q"].shape[-1] ** -0.5, kv_scale=kv_scale, backend=backend,
    )  # fmt: skip
    assert not isinstance(found, tuple)
    return jnp.einsum("thc,chn->thn", found, weights["v"][layer]), written


def calls(
    weights: Arrays, limits: Limits, tables: dict[str, Any], device: Device
) -> tuple[RaggedMlaAttention, WriteMlaCache]:
    q = jnp.zeros((limits.max_tokens, weights["q"].shape[2], weights["latent"].shape[-1]))
    rows, kv_scale = cache(weights, limits), weights["kv_scale"][0]
    return (
        RaggedMlaAttention(q=q, kv_cache=rows, **tables, d_v=weights["k"].shape[1], kv_scale=kv_scale, device=device),
        WriteMlaCache(kv=q[:, :1], cache=rows, **tables, kv_scale=kv_scale, device=device),
    )


def _split_row(weights: Arrays, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The latent of C numbers and the rotary key of R."""
    latent, key = jnp.split(row, (weights["k"].shape[1],), axis=-1)
    return latent, key
