"""Query tokens that each attend to their own list of slots: both sparse operations."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ragged_attention.calls import CacheFormat
from ragged_attention.portable.torch_eager._latents import Rows
from ragged_attention.portable.torch_eager._softmax import Softmax


@dataclasses.dataclass(frozen=True, slots=True)
class Lists:
    """Slots of one cache for each of T tokens."""

    rows: Rows | None  # None where the cache has no slot at all
    indices: torch.Tensor  # i32 [T, N]
    lens: torch.Tensor | None  # i32 [T]; None: all of them count
    last_slot: int

    def of(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """For some tokens the slots i64 [B, n] and which of them select nothing.

        The latter are replaced by a slot that the same list does select, so that what is read instead is neither
        outside the cache nor a row that nobody selected, whose NaN a weight of 0 would not undo. A list that selects
        nothing at all gets slot 0, and what is read there is dropped.
        """
        indices = self.indices[tokens]
        hidden = (indices < 0) | (indices > self.last_slot)
        if self.lens is not None:
            hidden |= torch.arange(indices.shape[1], device=indices.device) >= self.lens[tokens, None]
        if indices.device.type == "cpu":  # lists are seldom full, and on a CPU looking at them waits for nothing
            last = int((~hidden).any(0).nonzero().max()) + 1 if not hidden.all() else 0
            indices, hidden = indices[:, :last], hidden[:, :last]
        if indices.shape[1] == 0:
            return indices, hidden
        some = indices.gather(1, hidden.to(torch.uint8).argmin(1, keepdim=True))
        slots = torch.where(hidden, some.where((some >= 0) & (some <= self.last_slot), 0), indices)
        return slots.to(torch.int64), hidden


def attend(
    q: torch.Tensor, lists: Sequence[Lists], scale: float, sinks: torch.Tensor | None, block_kv: int,
    results: Sequence[torch.Tensor], soft_cap: float | None = None,
) -> None:  # fmt: skip
    """Attention of q [T, R, d_qk] into results: out [T, R, d_v], max_logits [T, R], log-sum-exp [T, R]."""
    step = max(block_kv // max(each.indices.shape[1] for each in lists), 1)
    for first in range(0, q.shape[0], step):
        tokens = slice(first, first + step)
        softmax = Softmax(q[tokens], scale, results[0].shape[-1], soft_cap)
        for each in lists:
            if each.rows is not None:
                _add(softmax, each.rows, *each.of(tokens), block_kv)
        for result, found in zip(results, softmax.finish(sinks), strict=True):
            result[tokens] = found


def _add(softmax: Softmax, rows: Rows, slots: torch.Tensor, hidden: torch.Tensor, block_kv: int) -> None:
    num_tokens, count = slots.shape
    keys = max(block_kv // max(num_tokens, 1), 1)
    for low in range(0, count, keys):
        piece = slots[:, low : low + keys]
        found = rows.at(piece.reshape(-1)).view(*piece.shape, -1)
        softmax.add(found, hidden[:, None, low : low + keys])


def lists_of(cache: Any, layout: CacheFormat, indices: torch.Tensor, lens: torch.Tensor | None) -> Lists:
    """Lists [T, N] into a cache [P, G, 1, ...]."""
    num_slots = cache.shape[0] * cache.shape[1]
    last_slot = min(num_slots - 1, torch.iinfo(torch.int32).max)  # what an index can be compared with
    return Lists(Rows(cache, layout) if num_slots else None, indices, lens, last_slot)
