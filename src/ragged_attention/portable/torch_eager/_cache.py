"""Keys and values of one sequence, from the pages to float32, a chunk of positions at a time."""

import dataclasses
from typing import Any

import numpy as np
import torch

from ragged_attention.portable.torch_eager._host import Ints


def to_float32(stored: torch.Tensor) -> torch.Tensor:
    """Elements of any cache dtype in float32, exactly; the tensor itself if it is float32 already."""
    if stored.dtype == torch.float8_e5m2:  # the upper half of a float16
        return (stored.view(torch.int8).to(torch.int16) << 8).view(torch.float16).to(torch.float32)
    if stored.dtype == torch.float8_e4m3fn:
        return e4m3_to_float32(stored.view(torch.int8))
    return stored.to(torch.float32)


def e4m3_to_float32(bits: torch.Tensor) -> torch.Tensor:
    """The values of float8_e4m3fn codes, which come as int8, exactly.

    One exponent bit fewer than float16 and the bias 8 less: shifted to float16's fields the value is 2**-8 of the true
    one. The int8 detour extends the sign, of which the copy next to the exponent is then cleared.
    """
    shifted = bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    values = shifted.view(torch.float16).to(torch.float32).mul_(256.0)
    # On a CPU looking for a NaN costs a tenth of what filling does; other devices would have to wait for it.
    if bits.device.type != "cpu" or (bits.numel() and int((bits | -0x80).amax()) == -1):
        values.masked_fill_((bits & 0x7F) == 0x7F, torch.nan)
    return values


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """The positions of a sequence that some query sees, in ascending order and without those on invalid pages."""

    pages: torch.Tensor  # i32 [n], ids of the pages they lie on
    page_ids: Ints  # the same on the host
    first: int  # offset of the first of them in its page
    positions: Ints  # i64 [count]
    whole: bool  # whether no page is missing, so that positions are consecutive

    @property
    def count(self) -> int:
        return len(self.positions)


def keys_of(tables: torch.Tensor, host_row: Ints, seq: int, low: int, high: int, call: Any) -> Keys:
    """The keys at positions [low, high) of sequence `seq`, whose row of page ids is `host_row`."""
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
    """One side of the cache, K or V, for some of the KV heads."""

    def __init__(self, pages: torch.Tensor, keys: Keys, chunk: int, resident: bool) -> None:
        """`pages` is [P, G, heads, D]; `chunk` positions are converted at a time, or all at once if `resident`."""
        self.pages, self.keys = pages, keys
        self.page_size = pages.shape[1]
        self.flat = pages.view(-1, *pages.shape[2:]) if pages.stride(0) == self.page_size * pages.stride(1) else None
        self.chunk = max(chunk // self.page_size, 1) * self.page_size
        self.converted = self._convert_all() if resident else None

    def pieces(self, low: int, high: int) -> list[tuple[int, int]]:
        """Keys [low, high) cut into what one `read` should take: whole pages, about a chunk of them."""
        if self.converted is not None:
            return [(low, high)]
        first = self.keys.first
        edges = range((low + first) // self.chunk * self.chunk, high + first, self.chunk)
        return [(max(edge - first, low), min(edge - first + self.chunk, high)) for edge in edges]

    def read(self, low: int, high: int) -> torch.Tensor:
        """Keys [low, high) as float32 [heads, high - low, D]."""
        if self.converted is not None:
            return self.converted[low:high].transpose(0, 1)
        return to_float32(self._stored(low, high)).transpose(0, 1)

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
        """Keys [low, high) as stored, [high - low, heads, D]: a view where they lie in one run, else gathered."""
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
