"""Dequantises rows of K or V in plain torch operations, without synchronising with the device."""

from typing import Any

import torch

from ragged_attention.calls import DequantizeKv
from ragged_attention.portable.torch_eager._latents import CHUNK
from ragged_attention.portable.torch_eager._scaled_rows import values_of

FEATURES = frozenset({"scales", "scale", "dtype"})


def run(call: DequantizeKv, tile: Any, launch: Any) -> torch.Tensor:
    (result,), form, rows = call.results(), call.kv_format, (call.num_tokens, call.num_kv_heads)
    codes: Any = call.codes
    values = torch.empty(result.shape, dtype=getattr(torch, result.dtype), device=codes.device)
    out = values.view(*rows, result.shape[-1])
    codes, scales = codes.reshape(*rows, codes.shape[-1]), call.scales_of_rows
    if scales is not None:
        scales = scales.reshape(*rows, scales.shape[-1])
    scale = None
    if call.scale is not None:
        scale = torch.as_tensor(call.scale, dtype=torch.float32, device=codes.device).reshape(-1, 1)
    for first in range(0, call.num_tokens, CHUNK):
        some = slice(first, first + CHUNK)
        found = values_of(codes[some], None if scales is None else scales[some], form)
        out[some] = found if scale is None else found * scale
    return values
