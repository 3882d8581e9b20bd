"""Cuts packed sequences into blocks; a block is some queries and the keys that any of them sees.

A block leaves out the keys that none of its queries sees, and queries that see no key. Only keys that some but not all
of its queries see need a mask, such as those at the edges of the causal range and of the window. The query heads of a
KV head are rows of one matrix, so keys and values are never repeated.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ragged_attention.calls import expect_count
from ragged_attention.portable.torch_eager._host import Ints, bounds_of
from ragged_attention.portable.torch_eager._ranges import Cover, cover_of, ranges_on_host
from ragged_attention.portable.torch_eager._selected import (
    Selected,
    VisibleKeys,
    lists_on_host,
    of_heads,
    visible,
    visible_keys,
)

MIN_GAP = 64  # keys; smaller gaps between listed keys are computed too, because leaving keys out costs a copy


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tunable size."""

    block_q: int  # maximum queries in a block; blocks with many keys have fewer, to limit the memory for logits

    def __post_init__(self) -> None:
        expect_count("block_q", self.block_q, 1)


def heuristic(call: Any) -> Tile:
    """Blocks of about 256 query rows per KV head, with the number of queries clamped to 16 to 128."""
    return Tile(block_q=min(max(256 // call.group, 16), 128))


class Block(NamedTuple):
    """Consecutive queries of a sequence, the keys that any of them sees, and the masks of those keys."""

    rows: slice  # the rows of q
    keys: slice | torch.Tensor  # the keys, as ascending indices within the sequence; a tensor if some are left out
    right: torch.Tensor | None  # bool mask [rows, n] over the block's last n keys: True if the row does not see the key
    left: torch.Tensor | None  # such a mask over the first n keys
    # bool [K or 1, rows]: whether a row sees no key, for a KV head or for all; the other masks hide nothing from it
    blind: torch.Tensor | None
    distance: torch.Tensor | None  # [rows, keys], the key's position minus the query's; None if no bias needs it
    # bool [K or 1, rows, keys]: whether a row does not see a key; replaces `right` and `left`
    hidden: torch.Tensor | None = None
    unseen: torch.Tensor | None = None  # bool [K or 1, keys]: whether no row sees a key, for a KV head or for all

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start if isinstance(self.keys, slice) else len(self.keys)

    def read(self, array: torch.Tensor, heads: slice) -> torch.Tensor:
        """The block's keys of an array [heads, keys, ...]; keys that no row sees are set to 0, as they may hold NaN."""
        some = array[:, self.keys]
        return some if self.unseen is None else some.masked_fill(of_heads(self.unseen, heads)[..., None], 0.0)

    def blind_rows(self, heads: slice, group: int) -> torch.Tensor:
        """Bool [heads or 1, rows * group, 1]: whether a query head sees no key."""
        assert self.blind is not None
        return of_heads(self.blind, heads).repeat_interleave(group, 1)[..., None]


class Heads(NamedTuple):
    """Some KV heads of one sequence, which are computed together."""

    keys: slice  # the sequence's rows of k and v
    heads: slice
    q_heads: slice
    blocks: list[Block]


def heads_of(call: Any, tile: Tile) -> Iterator[Heads]:
    """Yield the KV heads, some at a time, of every sequence in which any query sees a key."""
    queries, keys = bounds_of(call.cu_q_lens, call.num_q_tokens), bounds_of(call.cu_kv_lens, call.num_kv_tokens)
    # How many logits to compute at a time, counted for one query head of each group. On a CPU, the cache must hold the
    # logits of all query heads of the groups. Other devices need more logits to be busy.
    budget = (2**19 if call.device.platform == "cpu" else 2**24) // call.group
    ranges, lists = ranges_on_host(call), lists_on_host(call)
    for (start, stop), (kv_start, kv_stop) in zip(queries, keys, strict=True):
        kv_len = kv_stop - kv_start
        block_q = min(tile.block_q, max(4 * budget // max(kv_len, 1), 8))
        blocks = list(_blocks(call, start, stop, kv_len, block_q, ranges, lists))
        if not blocks:
            continue
        widest = max((block.rows.stop - block.rows.start) * block.num_keys for block in blocks)
        step = max(budget // widest, 1)
        for head in range(0, call.num_kv_heads, step):
            last = min(head + step, call.num_kv_heads)
            q_heads = slice(head * call.group, last * call.group)
            yield Heads(slice(kv_start, kv_stop), slice(head, last), q_heads, blocks)


def _blocks(
    call: Any, start: int, stop: int, kv_len: int, block_q: int, ranges: Ints | None, lists: Selected | None
) -> Iterator[Block]:  # fmt: skip
    if kv_len == 0:
        return
    if lists is not None:
        keys = np.arange(kv_len)
        for first in range(start, stop, block_q):
            rows = slice(first, min(first + block_q, stop))
            position = kv_len - stop + np.arange(rows.start, rows.stop)
            seen = visible(call, position, keys, None if ranges is None else ranges[rows])
            if (listed := visible_keys(seen & lists.named(rows, keys), call.q.device, MIN_GAP - 1)) is not None:
                yield _listed(call, rows, listed, position)
        return
    if ranges is not None:
        for first in range(start, stop, block_q):
            rows = slice(first, min(first + block_q, stop))
            if (cover := cover_of(ranges[rows], kv_len)) is not None:
                yield _covered(call, rows, cover, kv_len - stop + np.arange(rows.start, rows.stop))
        return
    if call.causal:
        start = max(start, stop - kv_len)  # earlier queries precede the first key
    for first in range(start, stop, block_q):
        last = min(first + block_q, stop)
        position = kv_len - stop + np.arange(first, last)[:, None]
        low, high, right, left = 0, kv_len, None, None
        if call.causal:
            high = int(position[-1, 0]) + 1
            right = mask_of(np.arange(position[0, 0] + 1, high) > position, call)
        if call.sliding_window is not None:
            edge = position - min(call.sliding_window, kv_len)
            low = max(int(edge[0, 0]) + 1, 0)
            left = mask_of(np.arange(low, min(int(edge[-1, 0]) + 1, high)) <= edge, call)
        distance = distance_of(np.arange(low, high), position[:, 0], call)
        yield Block(slice(first, last), slice(low, high), right, left, None, distance)


def _listed(call: Any, rows: slice, listed: VisibleKeys, position: Ints) -> Block:
    """The `Block` of rows at positions `position`, whose lists name blocks of keys."""
    hidden = listed.hidden
    if hidden is not None and listed.blind is not None:  # hide nothing from blind rows: a softmax over no key is NaN
        hidden = hidden & ~listed.blind[..., None]
    distance = distance_of(listed.keys, position, call)
    return Block(rows, _compact(listed.keys, call), None, None, listed.blind, distance, hidden, listed.unseen)


def _compact(keys: Ints, call: Any) -> slice | torch.Tensor:
    """Ascending keys, as a slice if they are consecutive."""
    first, stop = int(keys[0]), int(keys[-1]) + 1
    return slice(first, stop) if stop - first == len(keys) else torch.from_numpy(keys).to(call.q.device)


def _covered(call: Any, rows: slice, cover: Cover, position: Ints) -> Block:
    """The `Block` of rows at positions `position`, which see ranges of keys."""
    keys = _compact(cover.keys, call)
    left, right = cover.hidden(0, cover.whole[0]), cover.hidden(cover.whole[1], len(cover.keys))
    blind = None
    if cover.blind.any():  # hide nothing from blind rows: a softmax over no key is NaN
        right[cover.blind] = False
        blind = torch.from_numpy(cover.blind[None]).to(call.q.device)
    return Block(rows, keys, mask_of(right, call), mask_of(left, call), blind, distance_of(cover.keys, position, call))


def mask_of(hidden: np.ndarray, call: Any) -> torch.Tensor | None:
    """A mask on the call's device, or None if it has no columns."""
    return torch.from_numpy(hidden).to(call.q.device) if hidden.size else None


def distance_of(keys: np.ndarray, queries: np.ndarray, call: Any) -> torch.Tensor | None:
    """The position of each key minus that of each query, i64 [queries, keys]; None if no bias needs it."""
    if call.alibi_slopes is None and call.relative_bias is None:
        return None
    return torch.from_numpy(keys[None] - queries[:, None]).to(call.q.device, torch.int64)


def by_kv_head(rows: torch.Tensor, heads: slice, group: int) -> torch.Tensor:
    """The rows [n, H, ...] of some KV heads' query heads, as [heads, n * group, ...]."""
    some = rows[:, heads.start * group : heads.stop * group]
    return some.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)


def by_token(rows: torch.Tensor, group: int) -> torch.Tensor:
    """The inverse of `by_kv_head`: rows [n, heads * group, ...]."""
    return rows.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)


def biased(
    scores: torch.Tensor, call: Any, distance: torch.Tensor | None, heads: slice, rows: slice
) -> torch.Tensor:  # fmt: skip
    """The scores [heads, rows * group, keys] of some KV heads and rows of q, with all biases added in place."""
    if distance is None:
        return scores
    by_row = scores.unflatten(1, (-1, call.group))  # [heads, rows, group, keys]
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.view(call.num_kv_heads, 1, call.group, 1)[heads]
        by_row.addcmul_(slopes, distance[:, None].to(slopes.dtype))
    if call.relative_bias is not None:
        table = call.relative_bias.unflatten(-2, (call.num_kv_heads, call.group))[..., heads, :, :]
        table = table[rows] if table.ndim == 4 else table.expand(len(distance), *table.shape)
        columns = (call.bias_at_own - distance).clamp_(0, table.shape[-1] - 1)
        bias = table.gather(3, columns[:, None, None].expand(-1, *table.shape[1:3], -1))
        by_row.add_(bias.transpose(0, 1))
    return scores


def add_to_tables(d_bias: torch.Tensor, d_scores: torch.Tensor, call: Any, block: Block, heads: slice) -> None:
    """Add the gradients of a block's logits [heads, rows * group, keys] to `d_bias`, those of `relative_bias`.

    Between the first and the last column, a row has at most one key in each column, so its gradient is gathered, not
    scattered, and the order of sums is fixed. The first and the last column have any number of keys.
    """
    assert block.distance is not None
    by_row, last = d_scores.unflatten(1, (-1, call.group)), d_bias.shape[-1] - 1
    columns = (call.bias_at_own - block.distance).clamp_(0, last)  # [rows, keys]; they ascend by rows, descend by keys
    low, high = int(columns[0, -1]), int(columns[-1, 0])
    num_keys, some = columns.shape[1], torch.arange(low, high + 1, device=columns.device)
    keys = call.bias_at_own - block.distance[:, :1] - some  # [rows, columns], the index of the key with that column
    if not isinstance(block.keys, slice):  # keys that are left out have no column
        places = keys.new_full((int(block.keys[-1] - block.keys[0]) + 1,), -1)
        places[block.keys - block.keys[0]] = torch.arange(num_keys, device=keys.device)
        keys = torch.where((keys >= 0) & (keys < len(places)), places[keys.clamp(0, len(places) - 1)], -1)
    hidden = (keys < 0) | (keys >= num_keys) | (some == 0) | (some == last)
    index = keys.clamp_(0, num_keys - 1)[:, None].expand(-1, call.group, -1)
    sums = by_row.gather(3, index.expand(len(by_row), -1, -1, -1)).masked_fill_(hidden[:, None], 0.0)
    for end in {0, last} & {low, high}:
        sums[..., end - low] = by_row.mul((columns == end)[:, None]).sum(-1)
    tables = d_bias.unflatten(-2, (call.num_kv_heads, call.group))[..., heads, :, low : high + 1]
    if d_bias.ndim == 3:
        tables[block.rows] += sums.transpose(0, 1)
    else:
        tables += sums.sum(1)


def hide(scores: torch.Tensor, block: Any, heads: slice, group: int) -> torch.Tensor:
    """Set the scores [heads, rows * group, keys] of a block to -inf where a query does not see a key, in place."""
    by_row = scores.unflatten(1, (-1, group))
    if block.hidden is not None:
        by_row.masked_fill_(of_heads(block.hidden, heads)[:, :, None], -torch.inf)
    if block.right is not None:
        by_row[..., -block.right.shape[1] :].masked_fill_(block.right[:, None], -torch.inf)
    if block.left is not None:
        by_row[..., : block.left.shape[1]].masked_fill_(block.left[:, None], -torch.inf)
    return scores


def largest_logits(
    logits: torch.Tensor, block: Any, blind: torch.Tensor | None, heads: slice, group: int
) -> torch.Tensor:  # fmt: skip
    """The largest logit that is visible to each query head, [heads * group], of logits [heads, rows * group, keys].

    `blind` is a mask [K or 1, rows] of rows that see no key. The block's other masks may hide nothing from such rows.
    """
    by_row = hide(logits.detach().clone(), block, heads, group).unflatten(1, (-1, group))
    if blind is not None:
        by_row.masked_fill_(of_heads(blind, heads)[..., None, None], -torch.inf)
    return by_row.amax((1, 3)).flatten()
