"""Reads the keys or values of one sequence from the pages as float32, a chunk of positions at a time."""

from typing import NamedTuple

import torch

from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.portable.torch_eager._cache import Keys
from ragged_attention.portable.torch_eager._scaled_rows import values_of


class Side(NamedTuple):
    """K or V of a cache: pages [P, G, K, W], perhaps scale pages [P, G, K, n], and their format."""

    pages: torch.Tensor
    scales: torch.Tensor | None
    form: KvFormat

    def of_heads(self, heads: slice) -> "Side":
        scales = None if self.scales is None else self.scales[:, :, heads]
        return self._replace(pages=self.pages[:, :, heads], scales=scales)

    @property
    def head_bytes(self) -> int:
        """Bytes of a position's row of one KV head, with its scales."""
        arrays = [self.pages] if self.scales is None else [self.pages, self.scales]
        return sum(array.shape[3] * array.element_size() for array in arrays)


class Stored:
    """The elements of an array [P, G, ...] at the positions of a sequence."""

    def __init__(self, array: torch.Tensor, keys: Keys) -> None:
        self.array, self.keys, self.page_size = array, keys, array.shape[1]
        flat = array.stride(0) == self.page_size * array.stride(1)
        self.flat = array.view(-1, *array.shape[2:]) if flat else None

    def read(self, low: int, high: int) -> torch.Tensor:
        """The elements of keys [low, high), [high - low, ...]; a view if they are contiguous, else a copy."""
        size = self.page_size
        low, high = low + self.keys.first, high + self.keys.first
        first, last = low // size, -(-high // size)
        ids = self.keys.page_ids[first:last]
        if len(ids) == 1:
            return self.array[int(ids[0])][low - first * size : high - first * size]
        if self.flat is not None and (ids[1:] == ids[:-1] + 1).all():
            start = int(ids[0]) * size + low - first * size
            return self.flat[start : start + high - low]
        gathered = self.array.index_select(0, self.keys.pages[first:last])
        return gathered.flatten(0, 1)[low - first * size : high - first * size]


class Reader:
    """Reads K or V of some KV heads."""

    def __init__(self, side: Side, keys: Keys, chunk: int, resident: bool) -> None:
        """If `resident`, all keys are converted now."""
        self.form, self.keys = side.form, keys
        self.codes = Stored(side.pages, keys)
        scales = side.scales
        if scales is not None and scales.itemsize == 1:  # not all operations take 8-bit floats
            scales = scales.view(torch.uint8)
        self.scales = None if scales is None else Stored(scales, keys)
        self.chunk = max(chunk // self.codes.page_size, 1) * self.codes.page_size
        self.converted = self._convert_all() if resident else None

    def chunks(self, low: int, high: int) -> list[tuple[int, int]]:
        """Ranges that cover keys [low, high), cut at page boundaries, each small enough for one `read`."""
        if self.converted is not None:
            return [(low, high)]
        first = self.keys.first
        edges = range((low + first) // self.chunk * self.chunk, high + first, self.chunk)
        return [(max(edge - first, low), min(edge - first + self.chunk, high)) for edge in edges]

    def read(self, low: int, high: int) -> torch.Tensor:
        """Keys [low, high) as float32 [heads, high - low, D]."""
        values = self._values(low, high) if self.converted is None else self.converted[low:high]
        return values.transpose(0, 1)

    def _values(self, low: int, high: int) -> torch.Tensor:
        scales = None if self.scales is None else self.scales.read(low, high)
        return values_of(self.codes.read(low, high), scales, self.form)

    def _convert_all(self) -> torch.Tensor:
        count, pages = self.keys.count, self.codes.array
        if pages.dtype == torch.float32 or count <= self.chunk:
            return self._values(0, count)
        width = pages.shape[3] * self.form.columns_per_element
        converted = torch.empty((count, pages.shape[2], width), dtype=torch.float32, device=pages.device)
        for low in range(0, count, self.chunk):
            high = min(low + self.chunk, count)
            stored = self.codes.read(low, high)
            converted[low:high] = self._values(low, high) if stored.itemsize == 1 else stored
        return converted
