"""Packed sequences cut into blocks of queries with the keys that some query of the block sees.

Hidden keys are cut away rather than masked, so that only the columns at the edges of the causal range and of the
window need a mask, and so that no key and no query of a block is idle. The query heads of one KV head are
rows of one matrix, so keys and values are never repeated.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ragged_attention.calls import expect_count
from ragged_attention.portable.torch_eager._host import bounds_of


@dataclasses.dataclass(frozen=True)
class Tile:
    """What may be tuned.

    Args:
        block_q: queries of a sequence taken at a time, if their logits are not too many.
    """

    block_q: int

    def __post_init__(self) -> None:
        expect_count("block_q", self.block_q, 1)


def heuristic(call: Any) -> Tile:
    """Matrices of 256 query rows."""
    return Tile(block_q=min(max(256 // call.group, 16), 128))


class Block(NamedTuple):
    """Some queries of a sequence, all that they see of its keys, and what to mask among those."""

    rows: slice  # of q
    keys: slice  # of the sequence's keys
    right: torch.Tensor | None  # [rows, columns] at the right edge that are hidden: later than the query
    left: torch.Tensor | None  # [rows, columns] at the left edge that are hidden: outside the window


class Sequence(NamedTuple):
    """The keys of one sequence, as rows of k and v, its blocks, and the KV heads taken at a time."""

    keys: slice
    blocks: list[Block]
    heads: list[slice]


def sequences(call: Any, tile: Tile) -> Iterator[Sequence]:
    """The sequences of a call in which some query sees some key."""
    queries, keys = bounds_of(call.cu_q_lens, call.num_q_tokens), bounds_of(call.cu_kv_lens, call.num_kv_tokens)
    # Logits that stay in a CPU's cache, and as many as keep other devices busy.
    budget = (2**19 if call.device.platform == "cpu" else 2**24) // call.group
    for (start, stop), (kv_start, kv_stop) in zip(queries, keys, strict=True):
        kv_len = kv_stop - kv_start
        block_q = min(tile.block_q, max(4 * budget // max(kv_len, 1), 8))
        blocks = list(_blocks(call, start, stop, kv_len, block_q))
        if not blocks:
            continue
        widest = max((block.rows.stop - block.rows.start) * (block.keys.stop - block.keys.start) for block in blocks)
        step = max(budget // widest, 1)
        heads = [slice(head, min(head + step, call.num_kv_heads)) for head in range(0, call.num_kv_heads, step)]
        yield Sequence(slice(kv_start, kv_stop), blocks, heads)


def _blocks(call: Any, start: int, stop: int, kv_len: int, block_q: int) -> Iterator[Block]:
    if kv_len == 0:
        return
    if call.causal:
        start = max(start, stop - kv_len)  # earlier queries stand before the first key
    for first in range(start, stop, block_q):
        last = min(first + block_q, stop)
        own = kv_len - stop + np.arange(first, last)[:, None]
        low, high, right, left = 0, kv_len, None, None
        if call.causal:
            high = int(own[-1, 0]) + 1
            right = mask_of(np.arange(own[0, 0] + 1, high) > own, call)
        if call.sliding_window is not None:
            edge = own - min(call.sliding_window, kv_len)
            low = max(int(edge[0, 0]) + 1, 0)
            left = mask_of(np.arange(low, min(int(edge[-1, 0]) + 1, high)) <= edge, call)
        yield Block(slice(first, last), slice(low, high), right, left)


def mask_of(hidden: np.ndarray, call: Any) -> torch.Tensor | None:
    """A mask on the call's device, None if it has no columns."""
    return torch.from_numpy(hidden).to(call.q.device) if hidden.size else None


def by_kv_head(rows: torch.Tensor, heads: slice, group: int) -> torch.Tensor:
    """Of rows [n, H, ...] those of some KV heads as [heads, n * group, ...]."""
    count = heads.stop - heads.start
    found = rows[:, heads.start * group : heads.stop * group].unflatten(1, (count, group))
    return found.transpose(0, 1).flatten(1, 2)


def by_token(rows: torch.Tensor, group: int) -> torch.Tensor:
    """The inverse of `by_kv_head`: [n, heads * group, ...]."""
    return rows.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)


def hide(scores: torch.Tensor, block: Any, group: int) -> torch.Tensor:
    """Scores [heads, rows * group, keys] of a block, -inf where a query does not see a key; in place."""
    by_row = scores.unflatten(1, (-1, group))
    if block.right is not None:
        by_row[..., -block.right.shape[1] :].masked_fill_(block.right[:, None], -torch.inf)
    if block.left is not None:
        by_row[..., : block.left.shape[1]].masked_fill_(block.left[:, None], -torch.inf)
    return scores
