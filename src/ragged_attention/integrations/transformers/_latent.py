"""Latent attention without keys and values of each head.

A module's `expand_kv` makes these of the cached latents. Here it hands the latents on, and the attention multiplies
the projection to keys into the queries, and what comes out by that to values.
"""

from typing import Any

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers._calls import note
from ragged_attention.integrations.transformers._indexer import index
from ragged_attention.integrations.transformers._layout import (
    is_left_padding,
    is_padding,
    packed_edges,
    pages_of,
    whole_mask,
)
from ragged_attention.torch import mla_decode, sparse_mla_prefill

NEEDED = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_heads")
QUERIES = 256  # at a time where each lists its keys
ALIGNMENT = 16  # of the columns of latents


class Absorbed:
    """What an attention class becomes a subclass of."""

    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [B, 1, L, ...] with their rotary parts behind them, and as values the latents."""
        return torch.cat((kv_nope, k_rot), -1), kv_nope


def is_absorbed(module: torch.nn.Module) -> bool:
    return isinstance(module, Absorbed)


def absorb(model: Any, name: str) -> Any:
    found = 0
    for module in model.modules():
        if is_absorbed(module) or not all(hasattr(module, attribute) for attribute in NEEDED):
            continue
        kind = type(module)
        module.__class__ = type(f"Absorbed{kind.__name__}", (Absorbed, kind), {})
        found += 1
    if not found and not any(map(is_absorbed, model.modules())):
        raise Unsupported(f"expected a model with latent attention, got {type(model).__name__}")
    index(model)
    model.set_attn_implementation(name)
    return model


def attend(
    module: Any,
    query: torch.Tensor,
    latents: torch.Tensor,
    mask: torch.Tensor | None,
    sm_scale: float,
    dropout: float,
    others: dict[str, Any],
    cache: Any,
) -> torch.Tensor:
    """Attention of an absorbed module: queries [B, H, L_q, D], latents [B, 1, L_k, L + R]; returns [B, L_q, H, D_v]."""
    if cache is not None or dropout:
        what = "continuous batching" if cache is not None else "dropout"
        raise Unsupported(f"expected absorbed latent attention without {what}, got {type(module).__name__} with it")
    width, nope = module.kv_lora_rank, module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(module.num_heads, nope + module.v_head_dim, width)
    q = torch.einsum("bhqn,hnl->bqhl", query[..., :nope], weight[:, :nope])
    q = torch.cat((q, query[..., nope:].transpose(1, 2)), -1)
    padding = -latents.shape[-1] % ALIGNMENT, -width % ALIGNMENT
    if padding[0]:
        q, latents = (torch.nn.functional.pad(tensor, (0, padding[0])) for tensor in (q, latents))
    d_v = width + padding[1]
    gradient = torch.is_grad_enabled() and (q.requires_grad or latents.requires_grad)
    pages = None
    if not gradient and others.get("indices") is None and _sees_all_before(q, latents, mask, others):
        pages = pages_of(latents, latents, mask)
    if pages is not None:
        note(module, "mla_decode")
        out, _ = mla_decode(q, pages[0], pages[3], pages[2], d_v=d_v, sm_scale=sm_scale, causal=True)
    else:
        note(module, "sparse_mla_prefill")
        out = _by_lists(q, latents, mask, others, d_v, sm_scale)
    return torch.einsum("bqhl,hvl->bqhv", out[..., :width], weight[:, nope:])


def _sees_all_before(q: torch.Tensor, latents: torch.Tensor, mask: torch.Tensor | None, others: dict[str, Any]) -> bool:
    """Whether each query sees the keys up to its own place, the last of which is the last one shown."""
    if not is_padding(mask):
        return False
    (rows, q_len), length = q.shape[:2], latents.shape[2]
    if q_len == 1:
        return True
    if torch.compiler.is_compiling() or packed_edges(rows, q_len, length, others) is not None:
        return False
    return is_left_padding(mask)


def _by_lists(
    q: torch.Tensor, latents: torch.Tensor, mask: torch.Tensor | None, others: dict[str, Any], d_v: int, sm_scale: float
) -> torch.Tensor:
    """Each query with the list of its keys, some queries at a time, so that lists of all keys stay small."""
    (rows, q_len), length = q.shape[:2], latents.shape[2]
    mask = packed_edges(rows, q_len, length, others) if mask is None else mask
    flat, first = latents.flatten(0, 2)[:, None], torch.arange(rows, device=q.device)[:, None, None] * length
    parts = []
    for start in range(0, q_len, QUERIES):
        queries = slice(start, start + QUERIES)
        shown = whole_mask(mask, rows, q_len, length, causal=True, queries=queries, device=q.device)[:, 0].expand(
            rows, -1, -1
        )
        lists = _lists(shown if shown.dtype == torch.bool else shown == 0, queries, others.get("indices"))
        lists = torch.where(lists < 0, -1, lists + first).int().flatten(0, 1)[:, None]
        out, _, _ = sparse_mla_prefill(q[:, queries].flatten(0, 1), flat, lists, d_v=d_v, sm_scale=sm_scale)
        parts.append(out.unflatten(0, (rows, -1)))
    return torch.cat(parts, 1)


def _lists(shown: torch.Tensor, queries: slice, indices: torch.Tensor | None) -> torch.Tensor:
    """The keys [B, queries, N] that some queries see, and that `indices` [B, L_q, N] choose if given; -1 for none."""
    length = shown.shape[2]
    if indices is None:
        return torch.where(shown, torch.arange(length, device=shown.device), -1)
    indices = indices[:, queries].long()
    return torch.where(shown.gather(-1, indices.clamp(0, length - 1)) & (indices >= 0), indices, -1)
