"""Writes this step's latent rows to the pages of the cache, in place, in plain torch operations."""

from typing import Any

import torch

from ragged_attention.calls import WriteMlaCache
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._latents import CHUNK, fields_of, parts_of, quantized
from ragged_attention.portable.torch_eager.write_kv_pages import last_writers, slots_of, stored

FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "kv_scale", "rope_scale", "d_v",
    "power_of_two_scales", "cache_format", "cache_layout",
})  # fmt: skip


def stored_rows(rows: torch.Tensor, call: Any) -> torch.Tensor:
    """Rows [n, K, D] as a plain cache stores them; 8-bit floats are returned as bits."""
    if call.rope_scale is None:
        return stored(rows, call.kv_scale, call.cache.dtype)
    parts, scales = rows.tensor_split((call.rope_start,), dim=-1), (call.kv_scale, call.rope_scale)
    return torch.cat([stored(part, scale, call.cache.dtype) for part, scale in zip(parts, scales, strict=True)], dim=-1)


def write(call: Any, kv: torch.Tensor) -> torch.Tensor:
    """Write rows to the cache of a call, at the tokens' slots; returns the cache."""
    cache, layout = call.cache, call.kv_format
    if not layout.quantized:
        fields = (cache.view(torch.uint8) if cache.itemsize == 1 else cache,)
    else:
        fields = fields_of(parts_of(cache, layout), layout)
    slots, tokens = last_writers(slots_of(call), call.num_slots)
    for some, rows in zip(slots.split(CHUNK), tokens.split(CHUNK), strict=True):
        new = kv[rows]
        if not layout.quantized:
            encoded = (stored_rows(new, call),)
        else:
            encoded = quantized(new[:, 0], layout, call.power_of_two_scales)
        for field, values in zip(fields, encoded, strict=True):
            field[some // call.page_size, some % call.page_size] = values.view(field.dtype)
    return cache


def run(call: WriteMlaCache, tile: Any, launch: Any) -> torch.Tensor:
    return write(call, call.kv)
