"""Reads the keys and values of one sequence from the pages as float32, a chunk of positions at a time."""

import dataclasses
from typing import Any

import numpy as np
import torch

from ragged_attention.portable.torch_eager._host import Ints


def to_float32(stored: torch.Tensor) -> torch.Tensor:
    """Elements of any cache dtype in float32, exactly; the tensor itself if it is float32 already."""
    if stored.dtype == torch.float8_e5m2:  # its bits are the upper half of a float16
        return (stored.view(torch.int8).to(torch.int16) << 8).view(torch.float16).to(torch.float32)
    if stored.dtype == torch.float8_e4m3fn:
        return e4m3_to_float32(stored.view(torch.int8))
    if stored.dtype == torch.float8_e4m3fnuz:
        return e4m3fnuz_to_float32(stored.view(torch.int8))
    return stored.to(torch.float32)


def e4m3_to_float32(bits: torch.Tensor) -> torch.Tensor:
    """The exact values of float8_e4m3fn codes, which are given as int8. The exponent bias is 7."""
    values = shifted_to_float16(bits).to(torch.float32).mul_(256.0)
    # On a CPU, `masked_fill_` takes over ten times as long as a search for NaN. Elsewhere, a search would synchronise.
    if bits.device.type != "cpu" or (bits.numel() and int((bits | -0x80).amax()) == -1):
        values.masked_fill_((bits & 0x7F) == 0x7F, torch.nan)
    return values


def e4m3fnuz_to_float32(bits: torch.Tensor) -> torch.Tensor:
    """The exact values of float8_e4m3fnuz codes, which are given as int8.

    The exponent bias is 8, one more than in float8_e4m3fn. The only NaN has the code of -0.
    """
    values = shifted_to_float16(bits).to(torch.float32).mul_(128.0)
    # Search for NaN first, as for float8_e4m3fn. The least of all signed codes is NaN.
    if bits.device.type != "cpu" or (bits.numel() and int(bits.amin()) == -0x80):
        values.masked_fill_(bits == -0x80, torch.nan)
    return values


def shifted_to_float16(bits: torch.Tensor) -> torch.Tensor:
    """8-bit floats with 4 exponent bits, given as int8, as float16 with the same exponent and mantissa bits.

    float16 has one exponent bit more and a bias of 15, so a value is divided by 2 ** (15 - bias). Sign extension also
    copies the sign to bit 14, which is cleared.
    """
    return bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16)


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """The positions that a sequence's queries may see, ascending; positions on invalid pages are left out."""

    pages: torch.Tensor  # i32 [n], the ids of the pages that hold the positions
    page_ids: Ints  # `pages` on the host
    first: int  # the first position's offset in its page
    positions: Ints  # i64 [count]
    whole: bool  # True if all pages are valid, so that the positions are consecutive

    @property
    def count(self) -> int:
        return len(self.positions)


def keys_of(tables: torch.Tensor, host_row: Ints, seq: int, low: int, high: int, call: Any) -> Keys:
    """The keys at positions [low, high) of sequence `seq`; `host_row` is `tables[seq]` on the host."""
    size = call.page_size
    page = np.arange(low // size, -(-high // size))
    ids = host_row[page[0] : page[-1] + 1] if len(page) else host_row[:0]
    pages = tables[seq, low // size : low // size + len(page)]
    valid = (ids >= 0) & (ids < call.num_pages)
    if valid.all():
        return Keys(pages, ids, low % size, np.arange(low, high), True)
    page, ids = page[valid], ids[valid]
    pages = torch.from_numpy(ids.astype(np.int32)).to(tables.device)
    positions = (page[:, None] * size + np.arange(size)).reshape(-1)
    first = int(np.searchsorted(positions, low))
    return Keys(pages, ids, first, positions[first : np.searchsorted(positions, high)], False)


class Reader:
    """Reads K or V, or the scales of either, of some KV heads."""

    def __init__(
        self, pages: torch.Tensor, scales: torch.Tensor | None, keys: Keys, chunk: int, resident: bool
    ) -> None:
        """`pages` is [P, G, heads, D], `scales` is [P, G, heads, 1]. If `resident`, all keys are converted now."""
        self.pages, self.keys = pages, keys
        self.page_size = pages.shape[1]
        self.flat = pages.view(-1, *pages.shape[2:]) if pages.stride(0) == self.page_size * pages.stride(1) else None
        self.chunk = max(chunk // self.page_size, 1) * self.page_size
        self.scales = None if scales is None else Reader(scales, None, keys, chunk, resident)
        self.converted = self._convert_all() if resident else None

    def chunks(self, low: int, high: int) -> list[tuple[int, int]]:
        """Ranges that cover keys [low, high), cut at page boundaries, each small enough for one `read`."""
        if self.converted is not None:
            return [(low, high)]
        first = self.keys.first
        edges = range((low + first) // self.chunk * self.chunk, high + first, self.chunk)
        return [(max(edge - first, low), min(edge - first + self.chunk, high)) for edge in edges]

    def read(self, low: int, high: int) -> torch.Tensor:
        """Keys [low, high) as float32 [heads, high - low, D], times their scales if there are any."""
        if self.converted is not None:
            values = self.converted[low:high].transpose(0, 1)
        else:
            values = to_float32(self._stored(low, high)).transpose(0, 1)
        return values if self.scales is None else values * self.scales.read(low, high)

    def _convert_all(self) -> torch.Tensor:
        count = self.keys.count
        if self.pages.dtype == torch.float32 or count <= self.chunk:
            return to_float32(self._stored(0, count))
        converted = torch.empty((count, *self.pages.shape[2:]), dtype=torch.float32, device=self.pages.device)
        for low in range(0, count, self.chunk):
            stored = self._stored(low, min(low + self.chunk, count))
            converted[low : low + self.chunk] = to_float32(stored) if stored.itemsize == 1 else stored
        return converted

    def _stored(self, low: int, high: int) -> torch.Tensor:
        """Keys [low, high) as stored, [high - low, heads, D]; a view if they are contiguous, else a copy."""
        size = self.page_size
        low, high = low + self.keys.first, high + self.keys.first
        first, last = low // size, -(-high // size)
        ids = self.keys.page_ids[first:last]
        if len(ids) == 1:
            return self.pages[int(ids[0])][low - first * size : high - first * size]
        if self.flat is not None and (ids[1:] == ids[:-1] + 1).all():
            start = int(ids[0]) * size + low - first * size
            return self.flat[start : start + high - low]
        gathered = self.pages.index_select(0, self.keys.pages[first:last])
        return gathered.flatten(0, 1)[low - first * size : high - first * size]
