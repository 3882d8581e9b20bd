"""Converts token positions to slots of the cache in plain torch operations, without synchronising with the device."""

from typing import Any

import torch

from ragged_attention.calls import PageIndicesToSlots

FEATURES = frozenset({"cu_q_lens", "num_seqs"})


def sequences_of_rows(call: PageIndicesToSlots) -> torch.Tensor:
    """The sequence of each row of the positions, i64 [T]; -1 for a row of no live sequence."""
    row = torch.arange(call.num_tokens, device=call.positions.device)
    if call.cu_q_lens is None:
        return row
    max_num_seqs = call.page_indices.shape[0]
    live = max_num_seqs if call.num_seqs is None else call.num_seqs.reshape(()).clamp(0, max_num_seqs)
    edges = call.cu_q_lens.clamp(0, call.num_tokens).to(torch.int64)
    is_live = torch.arange(max_num_seqs, device=row.device) < live
    stops = torch.where(is_live, edges[1:], call.num_tokens + 1)  # ascending, whatever follows the live edges
    seq = torch.searchsorted(stops, row, right=True).clamp_(max=max_num_seqs - 1)
    valid = is_live[seq] & (edges[seq] <= row) & (row < edges[seq + 1])
    return torch.where(valid, seq, -1)


def run(call: PageIndicesToSlots, tile: Any, launch: Any) -> torch.Tensor:
    tables, page_size = call.page_indices, call.page_size
    positions = call.positions.to(torch.int64).contiguous()  # so that the result is contiguous
    if 0 in (positions.numel(), *tables.shape):
        return torch.full_like(positions, -1, dtype=torch.int32)
    seq = sequences_of_rows(call).view(-1, *(1,) * (positions.dim() - 1))
    page = positions.div(page_size, rounding_mode="floor").clamp_(0, tables.shape[1] - 1)
    base = tables[seq.clamp(min=0), page].to(torch.int64)
    slots = base * page_size + positions % page_size
    listed = (seq >= 0) & (positions >= 0) & (positions < tables.shape[1] * page_size)
    return torch.where(listed & (base >= 0) & (slots < 2**31), slots, -1).to(torch.int32)
