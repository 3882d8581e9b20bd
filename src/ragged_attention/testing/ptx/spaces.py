"""Local memory, the parameters of a kernel, and memory by generic addresses."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.errors import Misaligned, OutOfBounds, Uninitialised
from ragged_attention.testing.ptx.lanes import Indices, Lanes, Mask
from ragged_attention.testing.ptx.memory import GlobalAccess, columns, deal
from ragged_attention.testing.ptx.operands import LOCAL_BASE, LOCAL_WINDOW, PARAM_BASE, PARAM_WINDOW


def expect_inside(lanes: Lanes, at: Indices, index: Indices, size: int, end: int, line: int, what: str) -> None:
    """Raise unless all accesses of `size` bytes at `index` are aligned and within the first `end` bytes.

    `at` are the lanes that make the accesses.
    """
    if (wrong := np.flatnonzero((index < 0) | (index + size > end))).size:
        raise lanes.fault(line, at[int(wrong[0])], f"an access of {size} bytes outside {what}", OutOfBounds)
    if (wrong := np.flatnonzero(index % size)).size:
        raise lanes.fault(line, at[int(wrong[0])], f"an access of {size} bytes unaligned in {what}", Misaligned)


class Local:
    """The local memory of each thread, `size` bytes."""

    def __init__(self, lanes: Lanes, size: int) -> None:
        self.lanes = lanes
        self.bytes = np.full((lanes.count, size), 0xFF, np.uint8)
        self.written = np.zeros((lanes.count, size), bool)

    def _places(self, lanes: Indices, address: Any, offset: int, size: int, line: int) -> tuple[Any, Any]:
        """The rows and columns of accesses [lanes, size], which must be inside and aligned."""
        base = np.zeros(len(lanes), np.int64) if address is None else address[lanes].astype(np.int64)
        index = base + offset - LOCAL_BASE
        expect_inside(self.lanes, lanes, index, size, self.bytes.shape[1], line, "local memory")
        return lanes[:, None], index[:, None] + np.arange(size)

    def load(self, registers: Sequence[Any], address: Any, offset: int, dtype: str, mask: Mask, line: int) -> None:
        """ld.local: the registers get consecutive elements of `dtype`."""
        lanes = self.lanes.active(mask)
        places = self._places(lanes, address, offset, int(dtype[1:]) * len(registers), line)
        if (empty := ~self.written[places].all(1)).any():
            text = "reads local memory that its thread did not write"
            self.lanes.say(line, lanes[empty][0], text, kind=Uninitialised)
        elements = self.bytes[places].view(dtype)
        deal(elements, registers, lanes)

    def store(self, values: Sequence[Any], address: Any, offset: int, size: int, mask: Mask, line: int) -> None:
        """st.local: consecutive elements of `size` bytes."""
        lanes = self.lanes.active(mask)
        if lanes.size:
            data = columns(values, self.lanes, lanes)
            places = self._places(lanes, address, offset, data.shape[1], line)
            self.bytes[places], self.written[places] = data, True


class Parameters:
    """The parameters of a kernel, read through addresses in the parameter space."""

    def __init__(self, lanes: Lanes, data: NDArray[np.uint8]) -> None:
        self.lanes, self.data = lanes, data

    def load(self, registers: Sequence[Any], address: Any, offset: int, dtype: str, mask: Mask, line: int) -> None:
        """ld.param: the registers get consecutive elements of `dtype`."""
        lanes = self.lanes.active(mask)
        size = int(dtype[1:]) * len(registers)
        base = np.zeros(len(lanes), np.int64) if address is None else address[lanes].astype(np.int64)
        index = base + offset - PARAM_BASE
        expect_inside(self.lanes, lanes, index, size, self.data.size, line, "parameters")
        elements = self.data[index[:, None] + np.arange(size)].view(dtype)
        deal(elements, registers, lanes)


class Generic:
    """Memory at generic addresses: local memory in its window, and global memory."""

    def __init__(self, lanes: Lanes, memory: GlobalAccess, local: Local) -> None:
        self.lanes, self.memory, self.local = lanes, memory, local

    def _spaces(self, address: Any, mask: Mask) -> Iterator[tuple[GlobalAccess | Local, Any, NDArray[np.bool_]]]:
        """The spaces of the lanes' addresses, each with the addresses in it and a mask of its lanes."""
        active, is_local = self.lanes.marked(mask), (address >= LOCAL_WINDOW) & (address < PARAM_WINDOW)
        if (here := active & is_local).any():
            yield self.local, np.where(is_local, address - np.uint64(LOCAL_WINDOW), np.uint64(0)), here
        if (here := active & ~is_local).any():
            yield self.memory, address, here

    def load(self, registers: Sequence[Any], address: Any, offset: int, dtype: str, mask: Mask, line: int) -> None:
        """ld: the registers get consecutive elements of `dtype`."""
        for space, within, lanes in self._spaces(address, mask):
            space.load(registers, within, offset, dtype, lanes, line)

    def store(self, values: Sequence[Any], address: Any, offset: int, size: int, mask: Mask, line: int) -> None:
        """st: consecutive elements of `size` bytes."""
        for space, within, lanes in self._spaces(address, mask):
            space.store(values, within, offset, size, lanes, line)
