"""Quantises a latent cache in plain torch operations, without synchronising with the device."""

from typing import Any

import torch

from ragged_attention.calls import QuantizeMlaCache
from ragged_attention.portable.torch_eager._latents import chunks, fields_of, parts_of, quantized

FEATURES = frozenset({"power_of_two_scales", "cache_layout"})


def run(call: QuantizeMlaCache, tile: Any, launch: Any) -> torch.Tensor:
    layout = call.kv_format
    cache = torch.empty(call.out_shape, dtype=torch.uint8, device=call.kv.device)
    fields = fields_of(parts_of(cache, layout), layout)
    for chunk in chunks(call.kv):
        stored = quantized(call.kv[:, :, 0][chunk], layout, call.power_of_two_scales)
        for field, new in zip(fields, stored, strict=True):
            field[chunk] = new
    return cache
