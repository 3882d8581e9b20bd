"""The norm of a head and the rotary embedding, in float32."""

from typing import Any

import torch


def angles(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines of each token, float32 [T, R/2]; positions outside the table are clamped to it."""
    rows = call.positions.clamp(0, call.num_positions - 1)
    start = call.sin_offset
    return call.cos[:, : call.half][rows].float(), call.sin[:, start : start + call.half][rows].float()


def prepared(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rows [T, heads, D], normalised if they have weights, rotated and rounded once."""
    values = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if weight is not None:
        values *= torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        values *= weight.to(torch.float32)
    columns = values[..., : 2 * cos.shape[-1]]
    first, second = (columns[..., 0::2], columns[..., 1::2]) if interleaved else columns.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    new = first * cos - second * sin, second * cos + first * sin
    first.copy_(new[0])
    second.copy_(new[1])
    return values.to(x.dtype)
