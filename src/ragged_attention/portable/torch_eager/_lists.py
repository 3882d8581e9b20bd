"""Attention of query tokens that each have their own list of slots, for sparse prefill and sparse decode."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ragged_attention.calls import CacheFormat
from ragged_attention.portable.torch_eager._latents import Rows
from ragged_attention.portable.torch_eager._softmax import Softmax


@dataclasses.dataclass(frozen=True, slots=True)
class Lists:
    """A list of cache slots for each of T tokens."""

    rows: Rows | None  # None if the cache has no slot
    indices: torch.Tensor  # i32 [T, N]
    lens: torch.Tensor | None  # i32 [T], the number of leading entries that count; None if all count
    last_slot: int

    def selected(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots i64 [B, n] that some tokens list, and a mask [B, n] of entries that select nothing.

        Such an entry is replaced by a valid slot of its list, because a row that is not selected may hold NaN. If the
        list selects nothing, its entries become arbitrary slots, and the caller must drop the rows read from them.
        """
        indices = self.indices[tokens]
        hidden = (indices < 0) | (indices > self.last_slot)
        if self.lens is not None:
            hidden |= torch.arange(indices.shape[1], device=indices.device) >= self.lens[tokens, None]
        if indices.device.type == "cpu":  # cut unused columns; on other devices the search would synchronise
            last = int((~hidden).any(0).nonzero().max()) + 1 if not hidden.all() else 0
            indices, hidden = indices[:, :last], hidden[:, :last]
        if indices.shape[1] == 0:
            return indices, hidden
        valid = indices.gather(1, hidden.to(torch.uint8).argmin(1, keepdim=True))  # arbitrary if none is valid
        slots = torch.where(hidden, valid.where((valid >= 0) & (valid <= self.last_slot), 0), indices)
        return slots.to(torch.int64), hidden


def attend(
    q: torch.Tensor, lists: Sequence[Lists], scale: float, sinks: torch.Tensor | None, block_kv: int,
    results: Sequence[torch.Tensor], soft_cap: float | None = None,
) -> None:  # fmt: skip
    """Attention of q [T, R, d_qk], written to `results`: out [T, R, d_v], max_logits [T, R] and lse [T, R]."""
    step = max(block_kv // max(each.indices.shape[1] for each in lists), 1)
    for first in range(0, q.shape[0], step):
        tokens = slice(first, first + step)
        softmax = Softmax(q[tokens], scale, results[0].shape[-1], soft_cap)
        for each in lists:
            if each.rows is None:
                continue
            slots, hidden = each.selected(tokens)
            keys = max(block_kv // len(slots), 1)
            for low in range(0, slots.shape[1], keys):
                block = slots[:, low : low + keys]
                softmax.add(each.rows.at(block.reshape(-1)).view(*block.shape, -1), hidden[:, None, low : low + keys])
        for result, values in zip(results, softmax.finish(sinks), strict=True):
            result[tokens] = values


def lists_of(cache: Any, layout: CacheFormat, indices: torch.Tensor, lens: torch.Tensor | None) -> Lists:
    """The `Lists` of slots `indices` [T, N] of a cache [P, G, 1, ...]."""
    num_slots = cache.shape[0] * cache.shape[1]
    last_slot = min(num_slots - 1, torch.iinfo(torch.int32).max)  # fits the int32 of `indices`
    return Lists(Rows(cache, layout) if num_slots else None, indices, lens, last_slot)


def lists_by_head(call: Any) -> Iterator[tuple[int, slice, Lists]]:
    """For each KV head of a sparse prefill or its gradient: the head, its query heads and its lists."""
    cache = call.kv.unsqueeze(1) if call.kv.dim() == 3 else call.kv
    for head in range(call.num_kv_heads):
        lists = lists_of(cache[:, :, head : head + 1], call.kv_format, call.indices[:, head], call.topk_lens)
        yield head, slice(head * call.group, (head + 1) * call.group), lists
