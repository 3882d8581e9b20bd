"""Attention over heads-first pages [K, P, G, D], computed as ragged paged attention over views [P, G, K, D]."""

from typing import Any

import torch

from ragged_attention.calls import HeadsFirstCall, RaggedPagedAttention
from ragged_attention.portable.torch_eager import ragged_paged_attention
from ragged_attention.portable.torch_eager._reader import Side
from ragged_attention.portable.torch_eager.ragged_paged_attention import Attention, Tile


def heuristic(call: HeadsFirstCall) -> Tile:
    return ragged_paged_attention.heuristic(call.as_ragged())


def attend(call: HeadsFirstCall, tile: Tile, **indices: Any) -> torch.Tensor:
    """The result of a heads-first call; `indices` are index arrays of the equivalent ragged call."""
    kv_pages = tuple(pages.movedim(0, 2) for pages in call.arrays)
    values = call.as_ragged(kv_pages=kv_pages, **indices).arguments()
    sides = None
    if call.quantized:
        k_scales, v_scales = (scales.movedim(0, 2) for scales in call.scales)
        sides = Side(kv_pages[0], k_scales, call.row_format), Side(kv_pages[1], v_scales, call.row_format)
    attention = Attention(RaggedPagedAttention.unchecked(**values, device=call.device), tile, sides)
    attention.run()
    return attention.out
