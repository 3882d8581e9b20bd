"""Ragged paged attention in plain torch operations.

The lengths are read on the host, so a call synchronises with its device. Sequences are processed one by one, a
block of queries and some KV heads at a time, to limit the working memory. As in `_varlen`, a block leaves out keys that
none of its queries sees, and query heads of a KV head are rows of one matrix. Everything is computed in float32: on
CPUs this costs little, and 16-bit weights would exceed the tests' error bound if few keys have most of the weight.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ragged_attention.calls import RaggedPagedAttention, expect_count
from ragged_attention.portable.torch_eager._cache import Keys, keys_of
from ragged_attention.portable.torch_eager._host import Ints, clamped_kv_lens, on_host, result_dtype, sequence_bounds
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._ranges import cover_of, hull, ranges_on_host, runs_of
from ragged_attention.portable.torch_eager._reader import Reader, Side
from ragged_attention.portable.torch_eager._selected import Selected, lists_on_host, of_heads, visible, visible_keys
from ragged_attention.portable.torch_eager._softmax import soft_capped, sum_of_seen
from ragged_attention.portable.torch_eager._varlen import biased, distance_of, hide, largest_logits, mask_of

MIN_BUDGET = 2 * 2**20  # bytes of working memory that every call may use
MAX_SCORES = 2 * 2**20  # bytes of scores that a CPU's cache holds
MIN_GAP = 64  # keys; smaller gaps between visible keys are computed too: this costs less than another product
FEATURES = frozenset({
    "num_seqs", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes", "relative_bias",
    "k_scale", "v_scale", "k_scale_pages", "v_scale_pages", "return_lse", "return_max_logits", "draft_mask",
    "key_ranges", "selected", "block_size", "out_dtype",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tunable sizes."""

    block_q: int  # maximum queries in a block
    block_kv: int  # keys converted to float32 at a time, rounded down to whole pages, but at least one page

    def __post_init__(self) -> None:
        expect_count("block_q", self.block_q, 1)
        expect_count("block_kv", self.block_kv, 1)


def heuristic(call: RaggedPagedAttention) -> Tile:
    """Blocks of about 256 query rows per KV head; chunks of K or V of 2 MiB as float32, or of 1 MiB if converted."""
    width = call.num_kv_heads * max(call.head_dim, call.v_head_dim)
    floats = MIN_BUDGET // 4 if call.cache_dtype == "float32" else MIN_BUDGET // 8
    return Tile(block_q=min(max(256 // call.group, 16), 128), block_kv=max(floats // width, 16))


class Block(NamedTuple):
    """Consecutive queries of a sequence, ranges that include all keys that these queries see, and masks."""

    first: int  # rows [first, last) of q
    last: int
    runs: list[tuple[int, int]]  # ranges [low, high) of keys, ascending, as indices into Keys.positions
    right: torch.Tensor | None  # bool [rows, n] over the last n keys: True if the row does not see the key
    left: torch.Tensor | None  # bool [rows, n] over the first n keys: True if the row does not see the key
    fully_masked: torch.Tensor | None  # bool [K or 1, rows]: True if the row sees no key, for a KV head or for all
    unseen: torch.Tensor | None  # bool [K or 1, keys]: True if no row sees the key
    distance: torch.Tensor | None  # [rows, keys], the key's position minus the query's; see `distance_of`
    # bool [K or 1, rows, keys]: True if the row does not see the key; replaces `right` and `left`
    hidden: torch.Tensor | None = None

    @property
    def num_keys(self) -> int:
        return sum(high - low for low, high in self.runs)

    def chunks(self, reader: Reader) -> Iterator[tuple[int, int, int]]:
        """Yield (the number of keys in earlier parts, start, stop) for each part [start, stop) of keys to `read`."""
        before = 0
        for run in self.runs:
            for start, stop in reader.chunks(*run):
                yield before, start, stop
                before += stop - start


class Attention:
    """One call: its arguments, prepared for the blocks, and its results."""

    def __init__(self, call: Any, tile: Tile, sides: tuple[Side, Side] | None = None) -> None:
        """`sides` are K and V, if they are not those of the call's pages."""
        self.call, self.tile = call, tile
        self.k, self.v = sides_of(call) if sides is None else sides
        self.num_kv_heads, self.group = call.num_kv_heads, call.group
        device = call.q.device
        self.query_factor = self._per_head(call.k_scale) * call.scale
        self.out_factor = None if call.v_scale is None else self._per_head(call.v_scale)
        self.sinks = None if call.sinks is None else call.sinks.view(call.num_kv_heads, 1, call.group)
        self.out = call.q.new_zeros(call.out_shape, dtype=result_dtype(call))
        self.lse = None
        if call.return_lse:
            self.lse = torch.full(call.q.shape[:2], -torch.inf, dtype=torch.float32, device=device)
        self.max_logits = None
        if call.return_max_logits:
            self.max_logits = torch.full((call.num_q_heads,), -torch.inf, dtype=torch.float32, device=device)

    def _per_head(self, scale: Any) -> torch.Tensor:
        """A scale (None, a number, [] or [K]) as float32 [K, 1, 1, 1]."""
        scale = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=self.call.q.device)
        return scale.reshape(-1).expand(self.call.num_kv_heads)[:, None, None, None]

    def run(self) -> None:
        call = self.call
        bounds = sequence_bounds(call)
        kv_lens = clamped_kv_lens(call, len(bounds))
        used, ranges, lists = -(-max(kv_lens, default=0) // call.page_size), ranges_on_host(call), lists_on_host(call)
        tables = call.page_indices[:, :used]
        host_tables = on_host(tables)
        for seq, ((start, stop), kv_len) in enumerate(zip(bounds, kv_lens, strict=True)):
            if start == stop or kv_len == 0:
                continue
            low, high = 0, kv_len
            if ranges is not None:
                low, high = hull(ranges[start:stop], kv_len)
            elif call.sliding_window is not None:
                low = max(kv_len - (stop - start) - call.sliding_window + 1, 0)
            keys = keys_of(tables, host_tables[seq], seq, low, high, call)
            blocks = self.blocks if ranges is None else functools.partial(self._blocks_by_ranges, ranges)
            if lists is not None:
                blocks = functools.partial(self._blocks_by_lists, lists, ranges)
            self.sequence(list(blocks(start, stop, kv_len, keys)), keys)

    def blocks(self, start: int, stop: int, kv_len: int, keys: Keys) -> Iterator[Block]:
        """The blocks of the sequence that has query rows [start, stop); a block without keys is left out."""
        call, position, first_new = self.call, keys.positions, kv_len - (stop - start)
        causal = call.causal and call.draft_mask is None
        if causal:
            start = max(start, stop - kv_len)  # earlier queries precede the first position
        for first in range(start, stop, self.tile.block_q):
            last = min(first + self.tile.block_q, stop)
            query = kv_len - stop + np.arange(first, last)
            low, high, right, left = 0, keys.count, None, None
            if causal:
                common, high = np.searchsorted(position, (query[0], query[-1]), side="right").tolist()
                right = mask_of(position[None, common:high] > query[:, None], call)
            if call.sliding_window is not None:
                edge = query - call.sliding_window
                low, common = np.searchsorted(position, (edge[0], edge[-1]), side="right").tolist()
                left = mask_of(position[None, low : min(common, high)] <= edge[:, None], call)
            fully_masked, unseen = None if keys.whole else self._fully_masked(position, query), None
            if call.draft_mask is not None:
                new = position[max(np.searchsorted(position, first_new), low) :]
                right = self._not_drafted(call.draft_mask[first:last], new - first_new)
                fully_masked = self._fully_masked(position[position < first_new], query)
                hidden = right
                if call.sliding_window is not None:
                    outside = new[None] <= query[:, None] - call.sliding_window
                    hidden = right | torch.from_numpy(outside).to(call.q.device)
                fully_masked &= hidden.all(1)
                unseen = torch.nn.functional.pad(hidden.all(0), (high - low - len(new), 0))[None]
                right = right if len(new) else None  # None: no new token lies on a valid page
            if low < high:
                distance = distance_of(position[low:high], query, call)
                yield Block(first, last, [(low, high)], right, left, fully_masked, unseen, distance)

    def _blocks_by_ranges(self, ranges: Ints, start: int, stop: int, kv_len: int, keys: Keys) -> Iterator[Block]:
        """`blocks` of queries that see `ranges` [T, R, 2] of positions."""
        call = self.call
        for first in range(start, stop, self.tile.block_q):
            last = min(first + self.tile.block_q, stop)
            cover = cover_of(np.searchsorted(keys.positions, ranges[first:last]), keys.count, MIN_GAP - 1)
            if cover is None:
                continue
            left, right = cover.hidden(0, cover.whole[0]), cover.hidden(cover.whole[1], len(cover.keys))
            distance = distance_of(keys.positions[cover.keys], kv_len - stop + np.arange(first, last), call)
            masks = ~cover.seen[None], cover.blind[None]
            unseen, blind = (mask_of(mask, call) if mask.any() else None for mask in masks)
            yield Block(first, last, cover.runs, mask_of(right, call), mask_of(left, call), blind, unseen, distance)

    def _blocks_by_lists(
        self, lists: Selected, ranges: Ints | None, start: int, stop: int, kv_len: int, keys: Keys
    ) -> Iterator[Block]:  # fmt: skip
        """`blocks` of queries whose lists name blocks of positions."""
        for first in range(start, stop, self.tile.block_q):
            rows = slice(first, min(first + self.tile.block_q, stop))
            query = kv_len - stop + np.arange(rows.start, rows.stop)
            seen = self._seen(rows, query, kv_len - (stop - start), keys.positions, ranges)
            listed = visible_keys(seen & lists.named(rows, keys.positions), self.call.q.device, MIN_GAP - 1)
            if listed is not None:
                distance = distance_of(keys.positions[listed.keys], query, self.call)
                runs, masks = runs_of(listed.keys), (listed.blind, listed.unseen)
                yield Block(rows.start, rows.stop, runs, None, None, *masks, distance, listed.hidden)

    def _seen(
        self, rows: slice, query: Ints, first_new: int, position: Ints, ranges: Ints | None
    ) -> np.ndarray:  # fmt: skip
        """Whether rows, at positions `query`, see keys at `position` under all masks except lists, [rows, keys]."""
        call = self.call
        if call.draft_mask is None:
            return visible(call, query, position, None if ranges is None else ranges[rows])
        new, drafted = position - first_new, on_host(call.draft_mask[rows])
        drafted = np.pad(drafted, ((0, 0), (0, 1)))  # tokens beyond the mask are hidden
        seen = (new < 0) | drafted[:, new.clip(0, drafted.shape[1] - 1)]
        if call.sliding_window is not None:
            seen &= position > query[:, None] - call.sliding_window
        return seen

    def _fully_masked(self, position: Ints, query: Ints) -> torch.Tensor:
        """A mask [1, rows] of the queries, at positions `query`, that see none of the keys at positions `position`.

        Without a draft mask, only invalid pages cause this within a block.
        """
        call = self.call
        causal = call.causal and call.draft_mask is None
        seen = np.searchsorted(position, query, side="right") if causal else np.full(query.shape, len(position))
        if call.sliding_window is not None:
            seen = seen - np.searchsorted(position, query - call.sliding_window, side="right")
        return torch.from_numpy(seen <= 0).to(call.q.device)[None]

    def _not_drafted(self, mask: torch.Tensor, new: Ints) -> torch.Tensor:
        """Bool [rows, n]: True if a draft mask [rows, W] hides the new token whose index is `new` [n]."""
        columns = torch.from_numpy(new).to(mask.device).clamp(max=mask.shape[1])
        return ~torch.nn.functional.pad(mask, (0, 1))[:, columns]  # tokens beyond the mask are hidden

    def sequence(self, blocks: list[Block], keys: Keys) -> None:
        if not blocks:
            return
        step, resident = self._heads_at_once(blocks, keys)
        for head in range(0, self.num_kv_heads, step):
            heads = slice(head, min(head + step, self.num_kv_heads))
            k, v = (Reader(side.of_heads(heads), keys, self.tile.block_kv, resident) for side in (self.k, self.v))
            for block in blocks:
                self.block(block, heads, k, v)

    def _heads_at_once(self, blocks: list[Block], keys: Keys) -> tuple[int, bool]:
        """The number of KV heads to compute together, and whether their K and V stay in float32 between blocks.

        The working memory is limited to the size of the sequence's K and V in the cache, or MIN_BUDGET if that is more.
        """
        call, rows = self.call, self.group * max(block.last - block.first for block in blocks)
        width, itemsize = call.head_dim + call.v_head_dim, max(side.pages.element_size() for side in (self.k, self.v))
        budget = max(self.num_kv_heads * keys.count * (self.k.head_bytes + self.v.head_bytes), MIN_BUDGET)
        scores = 4 * self.group * max((block.last - block.first) * block.num_keys for block in blocks)
        chunk = min(keys.count, self.tile.block_kv) * max(call.head_dim, call.v_head_dim)
        needed = 2 * scores + 4 * rows * width
        converted = 4 * keys.count * width + (chunk * itemsize if itemsize < 4 else 0)
        resident = len(blocks) > 1 and needed + converted <= budget
        needed += converted if resident else chunk * (4 + itemsize if itemsize < 4 else 4)
        return min(max(min(budget // needed, MAX_SCORES // scores), 1), self.num_kv_heads), resident

    def block(self, block: Block, heads: slice, k: Reader, v: Reader) -> None:
        """Compute the results of one block for some KV heads."""
        call, group = self.call, self.group
        rows, count = block.last - block.first, heads.stop - heads.start
        q_heads = slice(heads.start * group, heads.stop * group)
        q = call.q[block.first : block.last, q_heads].unflatten(1, (count, group)).transpose(0, 1)
        scores = self._scores(q, self.query_factor[heads], block, heads, k)
        weights, lse = self._weights(scores, block, heads)
        out = self._mix(weights, scores, block, heads, v).view(count, rows, group, -1)
        if self.sinks is not None:
            out *= torch.sigmoid(lse - self.sinks[heads]).unsqueeze(-1)
        if self.out_factor is not None:
            out *= self.out_factor[heads]
        if block.fully_masked is not None:
            out.masked_fill_(of_heads(block.fully_masked, heads)[..., None, None], 0.0)
        self.out[block.first : block.last, q_heads].view(rows, count, group, -1).copy_(out.transpose(0, 1))
        if self.lse is not None:
            self.lse[block.first : block.last, q_heads].view(rows, count, group).copy_(lse.transpose(0, 1))

    def _scores(
        self, q: torch.Tensor, factor: torch.Tensor, block: Block, heads: slice, k: Reader
    ) -> torch.Tensor:  # fmt: skip
        """Logits [heads, rows * group, keys] of queries [heads, rows, group, D], -inf where hidden."""
        q = q.new_empty(q.shape, dtype=torch.float32).copy_(q).mul_(factor).flatten(1, 2)
        chunks = list(block.chunks(k))
        if len(chunks) == 1:
            scores = torch.bmm(q, k.read(*chunks[0][1:]).transpose(1, 2))
        else:
            scores = q.new_empty(*q.shape[:2], block.num_keys)
            for before, start, stop in chunks:
                scores[..., before : before + stop - start] = torch.bmm(q, k.read(start, stop).transpose(1, 2))
        if self.max_logits is not None:
            largest = largest_logits(scores, block, block.fully_masked, heads, self.group)
            some = self.max_logits[heads.start * self.group : heads.stop * self.group]
            torch.maximum(some, largest, out=some)
        rows = slice(block.first, block.last)
        scores = biased(soft_capped(scores, self.call.soft_cap), self.call, block.distance, heads, rows)
        return hide(scores, block, heads, self.group)

    def _weights(self, scores: torch.Tensor, block: Block, heads: slice) -> tuple[torch.Tensor, Any]:
        """The softmax over the keys and, if needed, the log-sum-exp [heads, rows, group]."""
        weights = torch.softmax(scores, -1)
        if self.lse is None and self.sinks is None:
            return weights, None
        # The largest weight is exp(m_i - lse), so two cheap reductions replace another pass of exponentials.
        lse = scores.amax(-1) - torch.log(weights.amax(-1))
        lse = lse.view(scores.shape[0], block.last - block.first, self.group)
        if block.fully_masked is not None:
            lse.masked_fill_(of_heads(block.fully_masked, heads)[..., None], -torch.inf)
        return weights, lse

    def _mix(
        self, weights: torch.Tensor, scores: torch.Tensor, block: Block, heads: slice, v: Reader
    ) -> torch.Tensor:  # fmt: skip
        """The weighted sum of the values, float32 [heads, rows * group, D_v]."""
        out = None
        for before, start, stop in block.chunks(v):
            keys = slice(before, before + stop - start)
            # The values have no name here, so that they are freed before the next chunk is read.
            if v.form.scaled:
                seen = scores[..., keys] != -torch.inf
                part = sum_of_seen(weights[..., keys], self._values(block, heads, v, before, start, stop), seen)
                out = part if out is None else out.add_(part)
            elif out is None:
                out = torch.bmm(weights[..., keys], self._values(block, heads, v, before, start, stop))
            else:
                out.baddbmm_(weights[..., keys], self._values(block, heads, v, before, start, stop))
        assert out is not None
        return out

    def _values(self, block: Block, heads: slice, v: Reader, before: int, start: int, stop: int) -> torch.Tensor:
        """The values of keys [start, stop), with 0 for a key that no row sees: a weight of 0 would not remove a NaN."""
        values = v.read(start, stop)
        if block.unseen is None:
            return values
        unseen = of_heads(block.unseen, heads)[:, before : before + stop - start]
        return values.masked_fill(unseen[..., None], 0.0) if unseen.any() else values


def sides_of(call: Any) -> tuple[Side, Side]:
    """K and V of a call's pages."""
    pages = call.kv_pages
    k_pages, v_pages = (pages[:, :, 0::2], pages[:, :, 1::2]) if call.combined else pages
    k_scales, v_scales = call.scale_pages
    return Side(k_pages, k_scales, call.k_format), Side(v_pages, v_scales, call.v_format)


def run(call: RaggedPagedAttention, tile: Tile, launch: Any) -> Any:
    attention = Attention(call, tile)
    attention.run()
    return call.requested(out=attention.out, lse=attention.lse, max_logits=attention.max_logits)
