"""Partial attention results over disjoint ranges of keys, merged with plain torch operations."""

from typing import Any

import torch

from ragged_attention.portable._no_tuning import Tile as Tile
from ragged_attention.portable._no_tuning import heuristic as heuristic
from ragged_attention.portable.torch_eager._host import framework_is_torch

FEATURES: frozenset[str] = frozenset()


def why_not(call: Any) -> str | None:
    return framework_is_torch(call)


def run(call: Any, tile: Tile, launch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Part by part, so that no more than one part is held in float32."""
    del tile, launch
    highest = call.lses.amax(dim=0)
    some = highest != -torch.inf
    base = torch.where(some, highest, 0.0)
    out = torch.zeros(call.outs.shape[1:], dtype=torch.float32, device=call.outs.device)
    total = torch.zeros_like(base)
    for part, lse in zip(call.outs, call.lses, strict=True):
        weight = torch.exp(lse - base)
        total += weight
        out += torch.where(weight[..., None] > 0, part, 0.0) * weight[..., None]
    total = torch.where(some, total, 1.0)
    lse = torch.where(some, base + torch.log(total), -torch.inf)
    return out.div_(total[..., None]).to(call.outs.dtype), lse
