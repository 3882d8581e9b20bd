"""Quantises indexer keys in plain torch operations, without synchronising with the device."""

from typing import Any

import torch

from ragged_attention.calls import QuantizeIndexerKeys
from ragged_attention.portable.torch_eager._latents import CHUNK, quantized_groups

FEATURES = frozenset({"power_of_two"})


def run(call: QuantizeIndexerKeys, tile: Any, launch: Any) -> list[torch.Tensor]:
    k: Any = call.k
    codes = torch.empty(k.shape, dtype=torch.uint8, device=k.device)
    scales = torch.empty(k.shape[:1], dtype=torch.float32, device=k.device)
    for first in range(0, len(k), CHUNK):
        rows = slice(first, first + CHUNK)
        codes[rows], scales[rows] = quantized_groups(k[rows].to(torch.float32), call.power_of_two)
    return [codes.view(torch.float8_e4m3fn), scales]
