"""Multi-head latent attention over pages of 8-bit latents, in torch.

A head's key is made from the latent by `k`, its value by `v`. Served, neither is made: since q . (c k) = (q k^T) . c,
the queries go to the latents' space, attend there, and what they find goes through `v` afterwards. So all heads read
the same cached row.
"""

from typing import Any

import torch

from ragged_attention.calls import Device, RaggedMlaAttention, WriteMlaCache
from ragged_attention.demo.engine import Limits
from ragged_attention.demo.model import LARGEST_CODE
from ragged_attention.demo.torch_layers import Tensor, Tensors, norm, rope
from ragged_attention.torch import ragged_mla_attention, write_mla_cache


def latent_rows(weights: Tensors, layer: int, h: Tensor, positions: Tensor) -> Tensor:
    """What the cache is to hold of each token [..., T, C + R]: its latent, and the rotary key of all heads."""
    latent, key = _split_row(weights, h @ weights["latent"][layer])
    turned = rope(key[..., None, :], positions)[..., 0, :]
    return torch.cat((norm(latent, weights["latent_norm"][layer]), turned), dim=-1)


def queries(weights: Tensors, layer: int, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of each head's query, for what the latent tells and for the rotary key."""
    q = torch.einsum("...e,ehd->...hd", h, weights["q"][layer])
    told, turned = q.tensor_split((weights["k"].shape[-1],), dim=-1)
    return told, rope(turned, positions)


def heads(weights: Tensors, layer: int, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = latent_rows(weights, layer, h, positions)
    if "kv_scale" in weights:  # which training finds last
        rows = rounded(rows, weights["kv_scale"][layer])
    latent, key = _split_row(weights, rows)
    k, v = (torch.einsum("...c,chn->...hn", latent, weights[name][layer]) for name in "kv")
    shared = key[..., None, :].expand(*k.shape[:-1], -1)
    return torch.cat(queries(weights, layer, h, positions), dim=-1), torch.cat((k, shared), dim=-1), v


def rounded(rows: Tensor, kv_scale: Tensor) -> Tensor:
    """Rows as an 8-bit cache gives them back."""
    codes = (rows / kv_scale).clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.float8_e4m3fn)
    return codes.to(rows.dtype) * kv_scale


def cache(weights: Tensors, limits: Limits) -> Tensor:
    shape = (limits.num_pages, limits.page_size, 1, weights["latent"].shape[-1])
    return torch.zeros(shape, dtype=torch.float8_e4m3fn, device=weights["latent"].device)


def served(
    weights: Tensors,
    layer: int,
    h: Tensor,
    positions: Tensor,
    cache: Tensor,
    tables: dict[str, Any],
    backend: str | None,
) -> Tensor:
    kv_scale = weights["kv_scale"][layer]
    told, turned = queries(weights, layer, h, positions)
    absorbed = torch.einsum("thn,chn->thc", told, weights["k"][layer])
    write_mla_cache(latent_rows(weights, layer, h, positions), cache, **tables, kv_scale=kv_scale, backend=backend)
    found = ragged_mla_attention(
        torch.cat((absorbed, turned), dim=-1), cache, **tables, d_v=absorbed.shape[-1],
        sm_scale=weights["q"].shape[-1] ** -0.5, kv_scale=kv_scale, backend=backend,
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return torch.einsum("thc,chn->thn", found, weights["v"][layer])


def calls(
    weights: Tensors, limits: Limits, tables: dict[str, Any], device: Device
) -> tuple[RaggedMlaAttention, WriteMlaCache]:
    d_v, width = weights["k"].shape[1], weights["latent"].shape[-1]
    q = weights["q"].new_zeros(limits.max_tokens, weights["q"].shape[2], width)
    rows, kv_scale = cache(weights, limits), weights["kv_scale"][0]
    return (
        RaggedMlaAttention(q=q, kv_cache=rows, **tables, d_v=d_v, kv_scale=kv_scale, device=device),
        WriteMlaCache(kv=q[:, :1], cache=rows, **tables, kv_scale=kv_scale, device=device),
    )


def _split_row(weights: Tensors, row: Tensor) -> tuple[Tensor, Tensor]:
    """The latent of C numbers and the rotary key of R."""
    latent, key = row.tensor_split((weights["k"].shape[1],), dim=-1)
    return latent, key
