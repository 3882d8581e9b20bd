"""Converts token positions to slots of the cache in plain torch operations, without synchronising with the device."""

from typing import Any

import torch

from ragged_attention.calls import PageIndicesToSlots


def run(call: PageIndicesToSlots, tile: Any, launch: Any) -> torch.Tensor:
    tables, page_size = call.page_indices, call.page_size
    positions = call.positions.to(torch.int64).contiguous()  # so that the result is contiguous
    if positions.numel() == 0 or tables.shape[1] == 0:
        return torch.full_like(positions, -1, dtype=torch.int32)
    page = positions.flatten(1) if positions.dim() > 1 else positions[:, None]
    page = page.div(page_size, rounding_mode="floor").clamp_(0, tables.shape[1] - 1)
    base = tables.gather(1, page).view(positions.shape).to(torch.int64)
    slots = base * page_size + positions % page_size
    valid = (positions >= 0) & (positions < tables.shape[1] * page_size) & (base >= 0) & (slots < 2**31)
    return torch.where(valid, slots, -1).to(torch.int32)
