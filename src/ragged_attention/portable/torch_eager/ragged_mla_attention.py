"""Ragged attention over a paged latent cache in plain torch operations.

The lengths and the page tables are read on the host, so a call synchronises with its device. Sequences are processed
one by one, in blocks of about QUERY_ROWS query rows per KV head. The keys that any query of a block sees are gathered
and converted to float32, `block_kv` at a time; values are the keys' first columns.
"""

from typing import Any

import numpy as np
import torch

from ragged_attention.calls import RaggedMlaAttention
from ragged_attention.portable.torch_eager._cache import Keys, keys_of
from ragged_attention.portable.torch_eager._host import Ints, clamped_kv_lens, on_host, result_dtype, sequence_bounds
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._latents import Rows
from ragged_attention.portable.torch_eager._latents import Tile as Tile
from ragged_attention.portable.torch_eager._latents import heuristic as heuristic
from ragged_attention.portable.torch_eager._ranges import Cover, cover_between, cover_of, hull, ranges_on_host
from ragged_attention.portable.torch_eager._softmax import Softmax

QUERY_ROWS = 1024  # (token, query head) rows in a block, per KV head
FEATURES = frozenset({
    "num_seqs", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "kv_scale", "rope_scale",
    "return_lse", "return_max_logits", "key_ranges", "cache_format", "cache_layout", "out_dtype",
})  # fmt: skip


def run(call: RaggedMlaAttention, tile: Tile, launch: Any) -> Any:
    attention = Attention(call, tile, call.q, (call.kv_scale, call.rope_scale), ranges_on_host(call))
    attention.run(sequence_bounds(call))
    return call.requested(out=attention.out, lse=attention.lse, max_logits=attention.max_logits)


class Attention:
    """One call, of this operation or of dense `mla_decode`, and its results out [T, H, d_v] and lse [T, H]."""

    def __init__(
        self, call: Any, tile: Tile, q: torch.Tensor, scales: tuple[Any, Any] = (None, None),
        ranges: Ints | None = None,
    ) -> None:  # fmt: skip
        """`q` is [T, H, d_qk], `scales` are `kv_scale` and `rope_scale`, and `ranges` are `key_ranges` on the host."""
        self.call, self.tile, self.q, self.ranges = call, tile, q, ranges
        self.num_kv_heads, self.group = call.num_kv_heads, call.group
        self.scale, self.factor = call.scale, None
        kv_scale, rope_scale = (
            None if scale is None else torch.as_tensor(scale, dtype=torch.float32, device=q.device).reshape(())
            for scale in scales
        )
        if kv_scale is not None:
            self.factor = kv_scale
            self.scale = self.factor * call.scale
        if rope_scale is not None:
            columns = torch.arange(call.d_qk, device=q.device)
            self.scale = torch.where(columns < call.d_v, self.scale, rope_scale * call.scale)
        self.sinks = None if call.sinks is None else call.sinks.view(self.num_kv_heads, 1, self.group)
        self.out = q.new_zeros((*q.shape[:2], call.d_v), dtype=result_dtype(call))
        self.lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        self.max_logits = None
        if call.return_max_logits:
            self.max_logits = torch.full(q.shape[1:2], -torch.inf, dtype=torch.float32, device=q.device)

    def run(self, bounds: list[tuple[int, int]]) -> None:
        """Compute the results of all sequences; `bounds` has the query rows [start, stop) of each."""
        call = self.call
        if not call.num_slots:
            return
        rows, kv_lens = Rows(call.kv_cache, call.kv_format), clamped_kv_lens(call, len(bounds))
        tables = call.page_indices[:, : -(-max(kv_lens, default=0) // call.page_size)]
        host_tables = on_host(tables)
        for seq, ((start, stop), kv_len) in enumerate(zip(bounds, kv_lens, strict=True)):
            if start < stop and kv_len > 0:
                low, high = 0, kv_len
                if self.ranges is not None:
                    low, high = hull(self.ranges[start:stop], kv_len)
                elif call.sliding_window is not None:
                    low = max(kv_len - (stop - start) - call.sliding_window + 1, 0)
                keys = keys_of(tables, host_tables[seq], seq, low, high, call)
                self._sequence(rows, keys, start, stop, kv_len)

    def _sequence(self, rows: Rows, keys: Keys, start: int, stop: int, kv_len: int) -> None:
        call = self.call
        window = call.sliding_window
        positions, slots = keys.positions, _slots(keys, call)
        causal = call.causal and self.ranges is None
        if causal:
            start = max(start, stop - kv_len)  # earlier queries precede the first position
        step = max(QUERY_ROWS // self.group, 1)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            if self.ranges is not None:
                cover = cover_of(np.searchsorted(positions, self.ranges[first:last]), len(positions))
                if cover is not None:
                    self._queries(rows, first, slots[torch.from_numpy(cover.keys).to(slots.device)], cover)
            else:
                query = kv_len - stop + np.arange(first, last)
                lows, highs = np.zeros_like(query), np.full_like(query, len(positions))
                if window is not None:
                    lows = np.searchsorted(positions, query - window, side="right")
                if causal:
                    highs = np.searchsorted(positions, query, side="right")
                self._queries(rows, first, slots[lows[0] : highs[-1]], cover_between(lows, highs))

    def _queries(self, rows: Rows, first: int, slots: torch.Tensor, cover: Cover) -> None:
        """Compute the rows from `first` on; `cover` says which of the keys in `slots` each row sees."""
        call, count, heads = self.call, len(cover.blind), (self.num_kv_heads, self.group)
        queries = slice(first, first + count)
        q = self.q[queries].unflatten(1, heads).transpose(0, 1)
        keeps_largest = self.max_logits is not None
        softmax = Softmax(q.flatten(1, 2), self.scale, call.d_v, call.soft_cap, keeps_largest=keeps_largest)
        for low in range(0, len(slots), self.tile.block_kv):
            high, hidden = min(low + self.tile.block_kv, len(slots)), None
            if low < cover.whole[0] or high > cover.whole[1]:
                by_token = torch.from_numpy(cover.hidden(low, high))
                hidden = by_token.to(slots.device).repeat_interleave(self.group, 0)
            softmax.add(rows.at(slots[low:high]).transpose(0, 1), hidden)
        sinks = None if self.sinks is None else self.sinks.expand(-1, count, -1).flatten(1, 2)
        out, _, lse = softmax.finish(sinks)
        if self.max_logits is not None and softmax.largest is not None:
            largest = softmax.largest.unflatten(1, (count, self.group)).amax(1).flatten()
            self.max_logits = torch.maximum(self.max_logits, largest)
        if self.factor is not None:
            out.mul_(self.factor)
        for whole, part in ((self.out, out), (self.lse, lse)):
            whole[queries].unflatten(1, heads).copy_(part.unflatten(1, (count, self.group)).transpose(0, 1))


def _slots(keys: Keys, call: Any) -> torch.Tensor:
    """The slots of the keys."""
    slots = keys.page_ids.astype(np.int64)[:, None] * call.page_size + np.arange(call.page_size)
    return torch.from_numpy(slots.reshape(-1)[keys.first : keys.first + keys.count]).to(call.q.device)
