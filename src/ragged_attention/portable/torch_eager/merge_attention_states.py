"""Merges attention results over disjoint ranges of keys, in plain torch operations."""

from typing import Any

import torch

from ragged_attention.calls import MergeAttentionStates

FEATURES = frozenset({"sinks", "out_dtype"})


def run(call: MergeAttentionStates, tile: Any, launch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged out and lse. The loop converts only one partial result at a time to float32."""
    m_i = call.lses.amax(dim=0)
    has_keys = m_i != -torch.inf
    base = torch.where(has_keys, m_i, 0.0)
    out = torch.zeros(call.outs.shape[1:], dtype=torch.float32, device=call.outs.device)
    l_i = torch.zeros_like(base)
    for part, lse in zip(call.outs, call.lses, strict=True):
        weight = torch.exp(lse - base)
        l_i += weight
        out += torch.where(weight[..., None] > 0, part, 0.0) * weight[..., None]
    l_i = torch.where(has_keys, l_i, 1.0)
    lse = torch.where(has_keys, base + torch.log(l_i), -torch.inf)
    if call.sinks is not None:
        l_i = l_i + torch.where(has_keys, torch.exp(call.sinks - base), 0.0)
    dtype = call.outs.dtype if call.out_dtype is None else getattr(torch, call.out_dtype)
    return out.div_(l_i[..., None]).to(dtype), lse
