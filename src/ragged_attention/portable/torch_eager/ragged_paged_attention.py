"""Ragged paged attention with plain torch operations, on any device torch has.

The lengths are read on the host, so a call waits for its device. Sequence by sequence, and for as many KV heads at a
time as keep the working memory small, blocks of queries meet the keys that some query of the block sees: hidden keys
are cut away rather than masked, and only the columns at the edge of the causal range and of the window need a mask.
The query heads of one KV head are rows of one matrix, so K and V are never repeated. Everything is computed in
float32, 16-bit inputs included: on CPUs this costs little, and 16-bit probabilities would miss the error bound where
few keys share the weight.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ragged_attention.calls import RaggedPagedAttention, expect_count
from ragged_attention.portable.torch_eager._cache import Keys, Reader, keys_of
from ragged_attention.portable.torch_eager._host import Ints, held_kv_lens, on_host, result_dtype, sequence_bounds
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._softmax import soft_capped
from ragged_attention.portable.torch_eager._varlen import hide, mask_of

SMALL = 2 * 2**20  # bytes of working memory that are always allowed
SCORES = 2 * 2**20  # bytes of scores that stay in a CPU's cache
FEATURES = frozenset({
    "num_seqs", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "k_scale", "v_scale", "return_lse",
    "draft_mask", "out_dtype",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tile:
    """What may be tuned.

    Args:
        block_q: queries of a sequence taken at a time.
        block_kv: keys converted to float32 at a time, rounded down to whole pages but at least one.
    """

    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        expect_count("block_q", self.block_q, 1)
        expect_count("block_kv", self.block_kv, 1)


def heuristic(call: RaggedPagedAttention) -> Tile:
    """Matrices of 256 query rows, and pieces of 2 MiB, or of half as much where they are converted."""
    width = call.num_kv_heads * max(call.head_dim, call.v_head_dim)
    piece = SMALL // 4 if call.cache_dtype == "float32" else SMALL // 8
    return Tile(block_q=min(max(256 // call.group, 16), 128), block_kv=max(piece // width, 16))


class Block(NamedTuple):
    """Some queries of a sequence, the keys that at least one of them sees, and what to mask among those."""

    first: int  # query rows of the batch
    last: int
    low: int  # keys, as indices into Keys.positions
    high: int
    right: torch.Tensor | None  # [rows, columns] at the right edge that are hidden: later than the query
    left: torch.Tensor | None  # [rows, columns] at the left edge that are hidden: outside the window
    fully_masked: torch.Tensor | None  # [rows] that see no key at all
    unseen: torch.Tensor | None  # [high - low], which of the keys a draft mask hides from every row


class Attention:
    """One call: its arguments in the form that the blocks need, and its results."""

    def __init__(self, call: Any, tile: Tile) -> None:
        self.call, self.tile = call, tile
        self.num_kv_heads, self.group = call.num_kv_heads, call.group
        device = call.q.device
        pages = call.kv_pages
        self.k_pages, self.v_pages = (pages[:, :, 0::2], pages[:, :, 1::2]) if call.combined else pages
        self.query_factor = self._per_head(call.k_scale) * call.scale
        self.out_factor = None if call.v_scale is None else self._per_head(call.v_scale)
        self.sinks = None if call.sinks is None else call.sinks.view(call.num_kv_heads, 1, call.group)
        self.out = call.q.new_zeros(call.out_shape, dtype=result_dtype(call))
        self.lse = None
        if call.return_lse:
            self.lse = torch.full(call.q.shape[:2], -torch.inf, dtype=torch.float32, device=device)

    def _per_head(self, scale: Any) -> torch.Tensor:
        """A scale in any of its forms as float32 [K, 1, 1, 1]."""
        scale = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=self.call.q.device)
        return scale.reshape(-1).expand(self.call.num_kv_heads)[:, None, None, None]

    def run(self) -> None:
        call = self.call
        bounds = sequence_bounds(call)
        kv_lens = held_kv_lens(call, len(bounds))
        used = -(-max(kv_lens, default=0) // call.page_size)
        tables = call.page_indices[:, :used]
        host_tables = on_host(tables)
        for seq, ((start, stop), kv_len) in enumerate(zip(bounds, kv_lens, strict=True)):
            if start == stop or kv_len == 0:
                continue
            low = 0 if call.sliding_window is None else max(kv_len - (stop - start) - call.sliding_window + 1, 0)
            keys = keys_of(tables, host_tables[seq], seq, low, kv_len, call)
            self.sequence(list(self.blocks(start, stop, kv_len, keys)), keys)

    def blocks(self, start: int, stop: int, kv_len: int, keys: Keys) -> Iterator[Block]:
        """The blocks of one sequence's queries [start, stop) that see any key."""
        call, position, first_new = self.call, keys.positions, kv_len - (stop - start)
        causal = call.causal and call.draft_mask is None
        if causal:
            start = max(start, stop - kv_len)  # earlier queries stand before the first position
        for first in range(start, stop, self.tile.block_q):
            last = min(first + self.tile.block_q, stop)
            own = kv_len - stop + np.arange(first, last)
            low, high, right, left = 0, keys.count, None, None
            if causal:
                common, high = np.searchsorted(position, (own[0], own[-1]), side="right").tolist()
                right = mask_of(position[None, common:high] > own[:, None], call)
            if call.sliding_window is not None:
                edge = own - call.sliding_window
                low, common = np.searchsorted(position, (edge[0], edge[-1]), side="right").tolist()
                left = mask_of(position[None, low : min(common, high)] <= edge[:, None], call)
            fully_masked, unseen = None if keys.whole else self._fully_masked(position, own), None
            if call.draft_mask is not None:
                new = position[max(np.searchsorted(position, first_new), low) :]
                right = self._not_drafted(call.draft_mask[first:last], new - first_new)
                fully_masked = self._fully_masked(position[position < first_new], own)
                hidden = right | self._outside_the_window(new, own)
                fully_masked &= hidden.all(1)
                unseen = torch.nn.functional.pad(hidden.all(0), (high - low - len(new), 0))
                right = right if len(new) else None  # the new tokens' pages are missing
            if low < high:
                yield Block(first, last, low, high, right, left, fully_masked, unseen)

    def _fully_masked(self, position: Ints, own: Ints) -> torch.Tensor:
        """Which queries see no key; in a block that sees some keys, only missing pages make such queries."""
        call = self.call
        causal = call.causal and call.draft_mask is None
        seen = np.searchsorted(position, own, side="right") if causal else np.full(own.shape, len(position))
        if call.sliding_window is not None:
            seen = seen - np.searchsorted(position, own - call.sliding_window, side="right")
        return torch.from_numpy(seen <= 0).to(call.q.device)

    def _not_drafted(self, mask: torch.Tensor, new: Ints) -> torch.Tensor:
        """Which new tokens [columns], by their numbers, the rows of a draft mask [rows, W] hide."""
        columns = torch.from_numpy(new).to(mask.device).clamp(max=mask.shape[1])
        return ~torch.nn.functional.pad(mask, (0, 1))[:, columns]  # what lies beyond the mask is hidden

    def _outside_the_window(self, position: Ints, own: Ints) -> torch.Tensor:
        """Which keys the window hides, [rows, columns]."""
        window = self.call.sliding_window
        hidden = position[None] <= own[:, None] - window if window is not None else np.zeros((1, 1), bool)
        return torch.from_numpy(hidden).to(self.call.q.device)

    def sequence(self, blocks: list[Block], keys: Keys) -> None:
        if not blocks:
            return
        step, resident = self._heads_at_once(blocks, keys)
        for head in range(0, self.num_kv_heads, step):
            heads = slice(head, min(head + step, self.num_kv_heads))
            k, v = (self.reader(pages, heads, keys, resident) for pages in (self.k_pages, self.v_pages))
            for block in blocks:
                self.block(block, heads, k, v)

    def reader(self, pages: torch.Tensor, heads: slice, keys: Keys, resident: bool) -> Reader:
        """What reads K or V of some KV heads."""
        return Reader(pages[:, :, heads], keys, self.tile.block_kv, resident)

    def _heads_at_once(self, blocks: list[Block], keys: Keys) -> tuple[int, bool]:
        """How many KV heads to take together, and whether their keys and values stay in float32 between blocks.

        The working memory is limited to what this sequence's keys and values take in the cache.
        """
        call, rows = self.call, self.group * max(block.last - block.first for block in blocks)
        width, itemsize = call.head_dim + call.v_head_dim, self.k_pages.element_size()
        budget = max(self.num_kv_heads * keys.count * width * itemsize, SMALL)
        scores = 4 * self.group * max((block.last - block.first) * (block.high - block.low) for block in blocks)
        piece = min(keys.count, self.tile.block_kv) * max(call.head_dim, call.v_head_dim)
        needed = 2 * scores + 4 * rows * width
        converted = 4 * keys.count * width + (piece * itemsize if itemsize < 4 else 0)
        resident = len(blocks) > 1 and needed + converted <= budget
        needed += converted if resident else piece * (4 + itemsize if itemsize < 4 else 4)
        most = min(budget // needed, SCORES // scores)
        return min(max(most, 1), self.num_kv_heads), resident

    def block(self, block: Block, heads: slice, k: Reader, v: Reader) -> None:
        """Attention of one block's queries over the keys it sees, for some KV heads."""
        call, group = self.call, self.group
        rows, count = block.last - block.first, heads.stop - heads.start
        q_heads = slice(heads.start * group, heads.stop * group)
        q = call.q[block.first : block.last, q_heads].unflatten(1, (count, group)).transpose(0, 1)
        weights, lse = self._weights(self._scores(q, self.query_factor[heads], block, k), block)
        out = self._mix(weights, block, v).view(count, rows, group, -1)
        if self.sinks is not None:
            out *= torch.sigmoid(lse - self.sinks[heads]).unsqueeze(-1)
        if self.out_factor is not None:
            out *= self.out_factor[heads]
        if block.fully_masked is not None:
            out.masked_fill_(block.fully_masked[:, None, None], 0.0)
        self.out[block.first : block.last, q_heads].view(rows, count, group, -1).copy_(out.transpose(0, 1))
        if self.lse is not None:
            self.lse[block.first : block.last, q_heads].view(rows, count, group).copy_(lse.transpose(0, 1))

    def _scores(self, given: torch.Tensor, factor: torch.Tensor, block: Block, k: Reader) -> torch.Tensor:
        """Logits [heads, rows * group, keys], -inf where hidden, for queries [heads, rows, group, D]."""
        low, high = block.low, block.high
        q = given.new_empty(given.shape, dtype=torch.float32).copy_(given).mul_(factor).flatten(1, 2)
        pieces = k.pieces(low, high)
        if len(pieces) == 1:
            scores = torch.bmm(q, k.read(low, high).transpose(1, 2))
        else:
            scores = q.new_empty(*q.shape[:2], high - low)
            for start, stop in pieces:
                scores[..., start - low : stop - low] = torch.bmm(q, k.read(start, stop).transpose(1, 2))
        if self.call.soft_cap is not None:
            # Not by dividing the queries by the cap: with a tiny one their products would be infinity minus infinity.
            scores = soft_capped(scores, self.call.soft_cap)
        return hide(scores, block, self.group)

    def _weights(self, scores: torch.Tensor, block: Block) -> tuple[torch.Tensor, Any]:
        """Softmax over the keys and, if needed, its log-sum-exp [heads, rows, group]."""
        weights = torch.softmax(scores, -1)
        if self.lse is None and self.sinks is None:
            return weights, None
        # The largest logit has the weight exp(m_i - lse): two cheap reductions instead of a pass of exponentials.
        lse = scores.amax(-1) - torch.log(weights.amax(-1))
        lse = lse.view(scores.shape[0], block.last - block.first, self.group)
        if block.fully_masked is not None:
            lse.masked_fill_(block.fully_masked[:, None], -torch.inf)
        return weights, lse

    def _mix(self, weights: torch.Tensor, block: Block, v: Reader) -> torch.Tensor:
        """The weighted sum of the values, float32 [heads, rows * group, D_v]."""
        out = None
        for start, stop in v.pieces(block.low, block.high):
            part = weights[..., start - block.low : stop - block.low]
            # No reference to a piece's values remains while the next is read.
            if out is None:
                out = torch.bmm(part, self._values(block, v, start, stop))
            else:
                out.baddbmm_(part, self._values(block, v, start, stop))
        assert out is not None
        return out

    def _values(self, block: Block, v: Reader, start: int, stop: int) -> torch.Tensor:
        """The values of some of a block's keys, 0 where no row sees them: a weight of 0 does not hide a NaN."""
        values = v.read(start, stop)
        if block.unseen is None or not (unseen := block.unseen[start - block.low : stop - block.low]).any():
            return values
        return values.masked_fill(unseen[:, None], 0.0)


def run(call: RaggedPagedAttention, tile: Tile, launch: Any) -> Any:
    attention = Attention(call, tile)
    attention.run()
    return (attention.out, attention.lse) if call.return_lse else attention.out
