"""The lightning indexer over lists of packed keys, in plain torch operations: a few tokens and entries at a time."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ragged_attention.portable.torch_eager._cache import to_float32
from ragged_attention.portable.torch_eager._indexer import Keys, relu
from ragged_attention.portable.torch_eager._latents import Tile
from ragged_attention.portable.torch_eager._lists import Lists


class Entries(NamedTuple):
    """Some entries of some tokens' lists, with their keys.

    A hidden entry names no key; it has the key of another entry instead. If a token's list names no key, its queries
    and the keys of its entries are 0, because they may hold NaN.
    """

    tokens: slice
    columns: slice
    slots: torch.Tensor  # i64 [B, n]
    hidden: torch.Tensor  # bool [B, n]
    q: torch.Tensor  # f32 [B, H, D]
    keys: torch.Tensor  # f32 [B, n, D]
    scales: torch.Tensor | None  # f32 [B, n]

    def products(self) -> torch.Tensor:
        """q . key, float32 [B, H, n]."""
        return torch.bmm(self.q, self.keys.transpose(1, 2))


def entries_of(call: Any, tile: Tile) -> Iterator[Entries]:
    """The entries of a call's lists, at most `block_kv` at a time."""
    num_keys = call.keys.shape[0]
    if not num_keys or not call.columns:
        return
    keys, last_slot = Keys(call), min(num_keys - 1, torch.iinfo(torch.int32).max)
    lens = getattr(call, "topk_lens", None)
    lists, step = Lists(None, call.indices, lens, last_slot), max(tile.block_kv // call.columns, 1)
    for first in range(0, call.num_tokens, step):
        tokens = slice(first, first + step)
        slots, hidden = lists.selected(tokens)
        empty = hidden.all(1)[:, None, None]
        q = to_float32(call.q[tokens]).masked_fill(empty, 0.0)
        count = max(tile.block_kv // len(slots), 1)
        for low in range(0, slots.shape[1], count):
            columns = slice(low, min(low + count, slots.shape[1]))
            some = slots[:, columns]
            rows, scales = keys.at_slots(some.reshape(-1))
            rows = rows.view(*some.shape, -1).masked_fill(empty, 0.0)
            scales = None if scales is None else scales.view(some.shape)
            yield Entries(tokens, columns, some, hidden[:, columns], q, rows, scales)


def write_logits(call: Any, tile: Tile, logits: torch.Tensor) -> None:
    """Write the logits of the keys that tokens list; other logits are left as they are."""
    for entries in entries_of(call, tile):
        weights = call.weights[entries.tokens].unsqueeze(1)
        sums = torch.bmm(weights, relu(entries.products())).squeeze(1)
        if entries.scales is not None:
            sums.mul_(entries.scales)
        logits[entries.tokens, entries.columns] = sums.masked_fill_(entries.hidden, -torch.inf)
