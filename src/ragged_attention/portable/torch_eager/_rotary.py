"""The norm of a head and the rotary embedding, in float32."""

from typing import Any

import torch


def angles(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines of each token, float32 [T, R/2]; positions outside the table are clamped to it."""
    rows = call.positions.clamp(0, call.num_positions - 1)
    start = call.sin_offset
    return call.cos[:, : call.half][rows].float(), call.sin[:, start : start + call.half][rows].float()


def prepared(
    x: torch.Tensor, weight: torch.Tensor | None, call: Any, tables: tuple[torch.Tensor, torch.Tensor], start: int = 0
) -> torch.Tensor:
    """Rows [T, heads, D], normalised if they have weights, rotated from column `start` on, and rounded once.

    `tables` are the `angles` of the call. The first len(`weight`) columns are normalised.
    """
    values = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if weight is not None:
        normed = values[..., : len(weight)]
        normed *= torch.rsqrt(normed.square().mean(-1, keepdim=True) + call.eps)
        normed *= weight.to(torch.float32)
    columns = values[..., start : start + 2 * call.half]
    first, second = (columns[..., 0::2], columns[..., 1::2]) if call.interleaved else columns.chunk(2, -1)
    cos, sin = (table.unsqueeze(1) for table in tables)
    new = first * cos - second * sin, second * cos + first * sin
    first.copy_(new[0])
    second.copy_(new[1])
    return values.to(x.dtype)
