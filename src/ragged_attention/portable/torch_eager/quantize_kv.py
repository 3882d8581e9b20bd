"""Quantises rows of K or V in plain torch operations, without synchronising with the device."""

from typing import Any

import torch

from ragged_attention.calls import QuantizeKv
from ragged_attention.portable.torch_eager._latents import CHUNK
from ragged_attention.portable.torch_eager._scaled_rows import quantized
from ragged_attention.portable.torch_eager.write_kv_pages import divisors

FEATURES = frozenset({"scale", "zero", "scales_dtype"})


def run(call: QuantizeKv, tile: Any, launch: Any) -> list[torch.Tensor]:
    x, form = call.x, call.kv_format
    scale = None if call.scale is None else divisors(call.scale, x.device)
    rows = x.reshape(call.num_tokens, call.num_kv_heads, x.shape[-1])
    parts = zip(*(quantized(some, scale, form) for some in rows.split(CHUNK)), strict=True)
    return [
        torch.cat(part).view(getattr(torch, result.dtype)).reshape(result.shape)
        for part, result in zip(parts, call.results(), strict=True)
    ]
