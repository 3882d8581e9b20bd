"""Attention over heads-first pages [K, P, G, D], as ragged paged attention over views of them, [P, G, K, D]."""

from typing import Any

import torch

from ragged_attention.calls import HeadsFirstCall, RaggedPagedAttention
from ragged_attention.portable.torch_eager import ragged_paged_attention
from ragged_attention.portable.torch_eager._cache import Keys, Reader
from ragged_attention.portable.torch_eager.ragged_paged_attention import Attention, Tile


class ScaledReader(Reader):
    """K or V whose stored values have one scale per slot and head."""

    def __init__(self, pages: torch.Tensor, scales: torch.Tensor, keys: Keys, chunk: int, resident: bool) -> None:
        """`pages` is [P, G, heads, D], `scales` [P, G, heads, 1]."""
        super().__init__(pages, keys, chunk, resident)
        self.scales = Reader(scales, keys, chunk, resident)

    def read(self, low: int, high: int) -> torch.Tensor:
        return super().read(low, high) * self.scales.read(low, high)


class ScaledAttention(Attention):
    """Attention over pages with such scales."""

    def __init__(self, call: RaggedPagedAttention, tile: Tile, scales: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(call, tile)
        self.scales_of = {id(self.k_pages): scales[0], id(self.v_pages): scales[1]}

    def reader(self, pages: torch.Tensor, heads: slice, keys: Keys, resident: bool) -> Reader:
        scales = self.scales_of[id(pages)]
        return ScaledReader(pages[:, :, heads], scales[:, :, heads], keys, self.tile.block_kv, resident)


def heuristic(call: HeadsFirstCall) -> Tile:
    return ragged_paged_attention.heuristic(call.as_ragged())


def attend(call: HeadsFirstCall, tile: Tile, **indices: Any) -> torch.Tensor:
    """Out of a heads-first call; `indices` are the index arrays it has as a ragged one."""
    turned = tuple(pages.movedim(0, 2) for pages in call.arrays)
    values = {name: getattr(call.as_ragged(**indices), name) for name in RaggedPagedAttention.argument_names()}
    ragged = RaggedPagedAttention.unchecked(**values | {"kv_pages": turned}, device=call.device)
    if call.quantized:
        k_scales, v_scales = (scales.movedim(0, 2) for scales in call.scales)
        attention = ScaledAttention(ragged, tile, (k_scales, v_scales))
    else:
        attention = Attention(ragged, tile)
    attention.run()
    return attention.out
