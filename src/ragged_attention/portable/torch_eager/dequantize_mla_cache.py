"""Dequantises a latent cache in plain torch operations, without synchronising with the device."""

from typing import Any

import torch

from ragged_attention.calls import DequantizeMlaCache
from ragged_attention.portable.torch_eager._latents import chunks, dequantized, parts_of

FEATURES = frozenset({"format", "dtype", "cache_layout"})


def run(call: DequantizeMlaCache, tile: Any, launch: Any) -> torch.Tensor:
    layout = call.kv_format
    rows = torch.empty(call.out_shape, dtype=getattr(torch, call.dtype), device=call.cache.device)
    parts = parts_of(call.cache, layout)
    for chunk in chunks(call.cache):
        rows[:, :, 0][chunk] = dequantized([part[chunk] for part in parts], layout)
    return rows
