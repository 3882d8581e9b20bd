"""The lightning indexer in plain torch operations: its logits, for blocks of tokens, and the top-k selection.

Ranges and lengths are read on the host; page tables stay on the device. Keys are gathered and converted to float32 a
tile at a time, and each tile is multiplied with a few tokens at a time, which bounds the memory for the products of
all heads. A tile that none of these tokens sees is skipped.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ragged_attention.calls.indexer import SCALE_BYTES
from ragged_attention.portable.torch_eager._cache import e4m3_to_float32, to_float32
from ragged_attention.portable.torch_eager._host import Ints, on_host, sequence_bounds
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._latents import Tile, Windows

LOGITS = 2**22  # maximum logits of a block of several tokens; top-k needs all logits of a token at once
LEAST = 0x7F800000 ^ -1  # the `ordered` number of -inf
FEATURES = frozenset({
    "key_scale", "starts", "stops", "relative", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "ratio",
})  # fmt: skip


def heuristic(call: Any) -> Tile:
    """Tiles of 64 to 2048 keys; if possible, the products of 8 tokens with a tile stay within `max_products`."""
    return Tile(block_kv=min(max(max_products(call) // (8 * call.num_heads), 64), 2048))


def max_products(call: Any) -> int:
    """The maximum number of products q . key in memory; on a CPU, about what its cache holds."""
    return 2**20 if call.device.platform == "cpu" else 2**24


class Block(NamedTuple):
    """Consecutive tokens: of one sequence if the keys are paged, else with similar key ranges. No range is empty."""

    first: int
    last: int  # one past the last token
    starts: Ints  # i64 [last - first]; a token sees columns [start, stop), except those on invalid pages
    stops: Ints
    seq: int = 0  # the sequence whose pages hold the keys; 0 for packed keys
    shift: int = 0  # the index of the packed key in column 0

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
        """All columns from the first to the last that any token sees."""
        return np.arange(self.low, self.high)


def blocks_of(call: Any) -> Iterator[Block]:
    """The blocks of a call, which leave out tokens whose key range is empty."""
    if call.keys.shape[0] and call.columns:
        yield from _paged_blocks(call) if call.paged else _packed_blocks(call)


def _paged_blocks(call: Any) -> Iterator[Block]:
    kv_lens = np.clip(on_host(call.kv_lens).astype(np.int64), 0, call.token_capacity)
    for seq, (start, stop) in enumerate(sequence_bounds(call)):
        stops = np.maximum(kv_lens[seq] - (stop - np.arange(start, stop)) + 1, 0) // call.ratio
        blind = int(np.searchsorted(stops, 0, side="right"))  # the number of leading tokens that see no key
        step = max(LOGITS // max(int(stops[-1]), 1), 1) if blind < len(stops) else 1
        for first in range(start + blind, stop, step):
            some = stops[first - start : first - start + step]
            yield Block(first, first + len(some), np.zeros_like(some), some, seq=seq)


def _packed_blocks(call: Any) -> Iterator[Block]:
    """Group tokens whose key ranges nearly coincide. Relative calls need equal starts within a group."""
    num_keys = call.keys.shape[0]
    starts, stops = (np.clip(on_host(edges).astype(np.int64), 0, num_keys) for edges in (call.starts, call.stops))
    if call.relative:
        stops = np.minimum(stops, starts + min(call.columns, num_keys))
    pairs = list(zip(starts.tolist(), stops.tolist(), strict=True))
    first = 0
    while first < len(pairs):
        (low, high), last = pairs[first], first + 1
        widest = high - low
        while widest > 0 and last < len(pairs):
            start, stop = pairs[last]
            low_of_all, high_of_all = min(low, start), max(high, stop)
            width = high_of_all - low_of_all
            similar = start == low if call.relative else 2 * width <= 3 * max(widest, stop - start)
            if start >= stop or not similar or (last + 1 - first) * width > LOGITS:
                break
            low, high, widest, last = low_of_all, high_of_all, max(widest, stop - start), last + 1
        if widest > 0:
            shift = low if call.relative else 0
            yield Block(first, last, starts[first:last] - shift, stops[first:last] - shift, shift=shift)
        first = last


def planes_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte views of the values, [P, G, D], and of the scales, [P, G, 4], of a cache of bytes, [P, G, 1, D + 4]."""
    num_pages, page_size, _, row = cache.shape
    head_dim, page_stride, start = row - SCALE_BYTES, cache.stride(0), cache.storage_offset()
    values = cache.as_strided((num_pages, page_size, head_dim), (page_stride, head_dim, 1), start)
    shape, first = (num_pages, page_size, SCALE_BYTES), start + page_size * head_dim
    return values, cache.as_strided(shape, (page_stride, SCALE_BYTES, 1), first)


class Keys:
    """Gathers keys and scales of a call, and converts only what it gathers."""

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
        """Float32 keys [n, D] in columns [n], their scales [n] or None, and a mask [n] as in `_slots`."""
        slots, valid = self._slots(block, columns)
        return *self.at_slots(slots), valid

    def at_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Float32 keys [n, D] at slots [n], or rows of packed keys, and their scales [n] or None."""
        values = self.values.at(slots)
        values = e4m3_to_float32(values) if self.codes else to_float32(values)
        scales = None if self.scales is None else self.scales.at(slots)
        if scales is not None and self.call.bytes:
            scales = scales.view(torch.float32)[:, 0]
        return values, scales

    def _slots(self, block: Block, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The slots of columns, with page 0 for invalid pages, and a mask of those on valid pages (None if packed)."""
        if not self.call.paged:
            return columns + block.shift, None
        page_size = self.call.page_size
        page = self.call.page_indices[block.seq].index_select(0, columns // page_size).to(torch.int64)
        valid = (page >= 0) & (page < self.call.keys.shape[0])
        return torch.where(valid, page, 0) * page_size + columns % page_size, valid


def logits_of(call: Any, tile: Tile, keys: Keys, block: Block, columns: Ints) -> torch.Tensor:
    """The logits [tokens, n] of a block in ascending columns [n], -inf where a token does not see the key."""
    device = call.q.device
    count = block.last - block.first
    logits = torch.full((count, len(columns)), -torch.inf, dtype=torch.float32, device=device)
    starts, stops = (torch.from_numpy(edge).to(device)[:, None] for edge in (block.starts, block.stops))
    step = max(max_products(call) // (call.num_heads * tile.block_kv), 1)
    for low in range(0, len(columns), tile.block_kv):
        tile_columns = columns[low : low + tile.block_kv]
        column = torch.from_numpy(tile_columns).to(device)
        values, scales, valid = keys.at(block, column)
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            if tile_columns[-1] < block.starts[rows].min() or tile_columns[0] >= block.stops[rows].max():
                continue
            tile_logits = _weighted_sums(call, slice(block.first + rows.start, block.first + rows.stop), values)
            if scales is not None:
                tile_logits.mul_(scales)
            hidden = (column < starts[rows]) | (column >= stops[rows])
            if valid is not None:
                hidden |= ~valid
            logits[rows, low : low + len(column)] = tile_logits.masked_fill_(hidden, -torch.inf)
    return logits


def rows_of(call: Any, tile: Tile, block: Block) -> Iterator[tuple[slice, slice]]:
    """Yield the rows to compute at a time: (rows of the block, the same rows as tokens of the call)."""
    step = max(max_products(call) // (call.num_heads * tile.block_kv), 1)
    for first in range(0, block.last - block.first, step):
        last = min(first + step, block.last - block.first)
        yield slice(first, last), slice(block.first + first, block.first + last)


def tiles_of(
    call: Any, tile: Tile, keys: Keys, block: Block, rows: slice
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
    """Yield tiles of packed keys: (columns, keys [n, D], their scales, a mask [rows, n] of keys a row does not see).

    Keys that no row sees, which may hold NaN, are 0.
    """
    device = call.q.device
    starts, stops = (torch.from_numpy(edge[rows]).to(device)[:, None] for edge in (block.starts, block.stops))
    low, high = int(block.starts[rows].min()), int(block.stops[rows].max())
    for left in range(low, high, tile.block_kv):
        columns = slice(left, min(left + tile.block_kv, high))
        column = torch.arange(columns.start, columns.stop, device=device)
        hidden = (column < starts) | (column >= stops)
        values, scales, _ = keys.at(block, column)
        yield columns, values.masked_fill_(hidden.all(0)[:, None], 0.0), scales, hidden


def _weighted_sums(call: Any, tokens: slice, keys: torch.Tensor) -> torch.Tensor:
    """The sum over heads h of weight[h] * relu(q[h] . key), float32 [tokens, n]."""
    q = to_float32(call.q[tokens])
    products = torch.mm(q.flatten(0, 1), keys.t())
    relu(products)
    return torch.bmm(call.weights[tokens].unsqueeze(1), products.unflatten(0, q.shape[:2])).squeeze(1)


def relu(products: torch.Tensor) -> torch.Tensor:
    """The products, with negative ones replaced by 0 in place. NaN stays NaN."""
    return torch.maximum(products, products.new_zeros(()), out=products)


def largest(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """The columns i32 [R, top_k] of the largest logits [R, n], ascending and padded with -1."""
    return best_of(ordered(logits), top_k)


def best_of(order: torch.Tensor, top_k: int) -> torch.Tensor:
    """The columns i32 [R, top_k] of the largest `ordered` numbers [R, n], ascending and padded with -1.

    Each number is packed with its column into one integer, so that no two integers of a row are equal: of equal
    numbers, the one in the larger column wins.
    """
    count, columns = min(top_k, order.shape[1]), order.shape[1]
    selected = torch.full((order.shape[0], top_k), -1, dtype=torch.int32, device=order.device)
    if count == 0:
        return selected
    keys = (order.to(torch.int64) << 32) | torch.arange(columns, device=order.device)
    best = torch.topk(keys, count, sorted=False).values
    # A number for -inf is not selected: its column is replaced by `columns`, which sorts last.
    column = torch.where(best >> 32 > LEAST, best & 0xFFFFFFFF, columns).to(torch.int32).sort().values
    selected[:, :count] = column.masked_fill_(column == columns, -1)
    return selected


def ordered(values: torch.Tensor) -> torch.Tensor:
    """Int32 numbers in the order of the float32 values. NaN counts as -inf, whose number is LEAST."""
    bits = (values.masked_fill(values.isnan(), -torch.inf) + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
