"""The lightning indexer with plain torch operations: logits of tokens that see much the same keys, and the choice.

Ranges and lengths are read on the host, page tables stay on the device. Keys are gathered and converted to float32 a
piece at a time and meet a few tokens at a time, so that the products of all heads are never many; pieces that none of
these tokens sees are skipped.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ragged_attention.portable.torch_eager._cache import e4m3_to_float32, to_float32
from ragged_attention.portable.torch_eager._host import Ints, on_host, sequence_bounds
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._latents import Tile, Windows

SCALE_BYTES = 4  # of a key in a page of bytes
LOGITS = 2**22  # elements of one block's rows, which a choice needs together
FEATURES = frozenset({
    "key_scale", "starts", "stops", "relative", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "ratio",
})  # fmt: skip


def heuristic(call: Any) -> Tile:
    """As many keys as leave room for the products of some tokens."""
    return Tile(block_kv=min(max(_products(call) // (8 * call.num_heads), 64), 2048))


def _products(call: Any) -> int:
    """How many products q . key there may be at a time: about as many as stay in a CPU's cache."""
    return 2**20 if call.device.platform == "cpu" else 2**24


class Block(NamedTuple):
    """Consecutive tokens, each of which sees a key, and all of which see much the same ones."""

    first: int
    last: int
    starts: Ints  # i64 [last - first], the columns that each sees, unless their pages are missing
    stops: Ints
    seq: int = 0  # whose pages the keys lie in; packed keys have none
    shift: int = 0  # the packed key in column 0

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.last)

    @property
    def low(self) -> int:
        return int(self.starts.min())

    @property
    def high(self) -> int:
        return int(self.stops.max())

    def columns(self) -> Ints:
        """Those that some token sees."""
        return np.arange(self.low, self.high)


def blocks_of(call: Any) -> Iterator[Block]:
    """All tokens that see a key."""
    if call.keys.shape[0] and call.columns:
        yield from _paged_blocks(call) if call.paged else _packed_blocks(call)


def _paged_blocks(call: Any) -> Iterator[Block]:
    kv_lens = np.clip(on_host(call.kv_lens).astype(np.int64), 0, call.columns * call.ratio)
    for seq, (start, stop) in enumerate(sequence_bounds(call)):
        stops = np.maximum(kv_lens[seq] - (stop - np.arange(start, stop)) + 1, 0) // call.ratio
        blind = int(np.searchsorted(stops, 0, side="right"))  # tokens, the first ones
        step = max(LOGITS // max(int(stops[-1]), 1), 1) if blind < len(stops) else 1
        for first in range(start + blind, stop, step):
            own = stops[first - start : first - start + step]
            yield Block(first, first + len(own), np.zeros_like(own), own, seq=seq)


def _packed_blocks(call: Any) -> Iterator[Block]:
    """Tokens together whose ranges are nearly one; rows from their own start have to have the same."""
    edges = (np.clip(on_host(edge).astype(np.int64), 0, call.keys.shape[0]) for edge in (call.starts, call.stops))
    starts, stops = edges
    if call.relative:
        stops = np.minimum(stops, starts + min(call.columns, call.keys.shape[0]))
    pairs = list(zip(starts.tolist(), stops.tolist(), strict=True))
    first = 0
    while first < len(pairs):
        (low, high), last = pairs[first], first + 1
        widest = high - low
        while widest > 0 and last < len(pairs):
            start, stop = pairs[last]
            low_of_all, high_of_all = min(low, start), max(high, stop)
            width = high_of_all - low_of_all
            alike = start == low if call.relative else 2 * width <= 3 * max(widest, stop - start)
            if start >= stop or not alike or (last + 1 - first) * width > LOGITS:
                break
            low, high, widest, last = low_of_all, high_of_all, max(widest, stop - start), last + 1
        if widest > 0:
            shift = low if call.relative else 0
            yield Block(first, last, starts[first:last] - shift, stops[first:last] - shift, shift=shift)
        first = last


def planes_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of the values [P, G, D] and of the scales [P, G, 4] in pages of bytes; views."""
    num_pages, page_size, _, row = cache.shape
    head_dim, page_stride, start = row - SCALE_BYTES, cache.stride(0), cache.storage_offset()
    values = cache.as_strided((num_pages, page_size, head_dim), (page_stride, head_dim, 1), start)
    shape, first = (num_pages, page_size, SCALE_BYTES), start + page_size * head_dim
    return values, cache.as_strided(shape, (page_stride, SCALE_BYTES, 1), first)


class Keys:
    """The keys of a call, and their scales, converted only when they are read."""

    def __init__(self, call: Any) -> None:
        self.call = call
        values, scales = call.keys, call.key_scale
        if call.bytes:
            values, scales = planes_of(values)
        elif not call.paged:
            values, scales = values.unsqueeze(0), None if scales is None else scales.unsqueeze(0)
        self.codes = call.key_dtype == "float8_e4m3fn"
        self.values = Windows(values.view(torch.int8) if self.codes else values)
        self.scales = None if scales is None else Windows(scales)

    def at(self, block: Block, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Float32 keys [n, D] in columns i64 [n] of a block, their scales [n] and which of them exist; None: all."""
        slots, known = self._slots(block, columns)
        values = self.values.at(slots)
        values = e4m3_to_float32(values) if self.codes else to_float32(values)
        scales = None if self.scales is None else self.scales.at(slots)
        if scales is not None and self.call.bytes:
            scales = scales.view(torch.float32)[:, 0]
        return values, scales, known

    def _slots(self, block: Block, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where the keys lie; what would lie on no page is taken from the first one."""
        if not self.call.paged:
            return columns + block.shift, None
        page_size = self.call.page_size
        page = self.call.page_indices[block.seq].index_select(0, columns // page_size).to(torch.int64)
        known = (page >= 0) & (page < self.call.keys.shape[0])
        return torch.where(known, page, 0) * page_size + columns % page_size, known


def logits_of(call: Any, tile: Tile, keys: Keys, block: Block, columns: Ints) -> torch.Tensor:
    """Logits [tokens, n] of a block in ascending columns [n], -inf where a token does not see the key."""
    device = call.q.device
    count = block.last - block.first
    logits = torch.full((count, len(columns)), -torch.inf, dtype=torch.float32, device=device)
    starts, stops = (torch.from_numpy(edge).to(device)[:, None] for edge in (block.starts, block.stops))
    step = max(_products(call) // (call.num_heads * tile.block_kv), 1)
    for low in range(0, len(columns), tile.block_kv):
        some = columns[low : low + tile.block_kv]
        own = torch.from_numpy(some).to(device)
        values, scales, known = keys.at(block, own)
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            if some[-1] < block.starts[rows].min() or some[0] >= block.stops[rows].max():
                continue
            found = _weighted(call, slice(block.first + rows.start, block.first + rows.stop), values)
            if scales is not None:
                found.mul_(scales)
            hidden = (own < starts[rows]) | (own >= stops[rows])
            if known is not None:
                hidden |= ~known
            logits[rows, low : low + len(some)] = found.masked_fill_(hidden, -torch.inf)
    return logits


def _weighted(call: Any, tokens: slice, keys: torch.Tensor) -> torch.Tensor:
    """The weighted sum over the heads, float32 [tokens, n], of what is positive in the products."""
    q = to_float32(call.q[tokens])
    products = torch.mm(q.flatten(0, 1), keys.t())
    torch.maximum(products, products.new_zeros(()), out=products)  # which keeps NaN
    return torch.bmm(call.weights[tokens].unsqueeze(1), products.unflatten(0, q.shape[:2])).squeeze(1)


def largest(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """The columns i32 [R, top_k] of the largest logits [R, n] in ascending order, then -1.

    Logits and columns make one integer that is unique in its row, so that nothing depends on how ties are taken.
    """
    count, columns = min(top_k, logits.shape[1]), logits.shape[1]
    chosen = torch.full((logits.shape[0], top_k), -1, dtype=torch.int32, device=logits.device)
    if count == 0:
        return chosen
    order = _ordered(logits.masked_fill(logits.isnan(), -torch.inf) + 0.0)  # -0.0 + 0.0 is 0.0
    keys = (order.to(torch.int64) << 32) | torch.arange(columns, device=logits.device)
    best = torch.topk(keys, count, sorted=False).values
    least = _ordered(logits.new_full((), -torch.inf))
    # What is -inf goes behind all others.
    found = torch.where(best >> 32 > least, best & 0xFFFFFFFF, columns).to(torch.int32).sort().values
    chosen[:, :count] = found.masked_fill_(found == columns, -1)
    return chosen


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Int32 in the order of float32 values, none of which is NaN."""
    bits = values.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
