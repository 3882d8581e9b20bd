"""Shared memory and its shadow: who wrote and read each cell, at which of its warp's clocks.

A warp's clock ticks at each barrier and proxy fence. Barriers join what the warps know of each other's clocks, so an
access that no barrier orders after another warp's is reported in whatever order the two happened to run. A cell is as
small as the kernel's narrowest access, at most 4 bytes.

Lenient: threads of one warp count as ordered; writing the value that is there already counts as no write after a
write. A proxy fence counts for all that its warp knows of, whoever wrote it, and barriers pass it on; so it may stand
before the barrier, in the writers, or after it, in the warps that go on to multiply.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.lanes import Indices, Lanes, Mask
from ragged_attention.testing.ptx.memory import columns
from ragged_attention.testing.ptx.operands import SHARED_BASE

Cells = NDArray[np.int64]
ALWAYS = 1 << 60  # later than any clock


class Clocks:
    """What each warp knows of the others of its CTA.

    `now` [warps]; `seen` [warps, warps of a CTA]: all accesses up to this clock of the other are behind a barrier;
    `fenced`: the same, of writes that the asynchronous proxy sees.
    """

    def __init__(self, lanes: Lanes) -> None:
        count = lanes.ctas * lanes.warps
        self.lanes = lanes
        self.now = np.ones(count, np.int64)
        self.seen = np.zeros((count, lanes.warps), np.int64)
        self.fenced = np.zeros((count, lanes.warps), np.int64)
        self.seen[np.arange(count), np.arange(count) % lanes.warps] = ALWAYS

    def known(self, warps: Indices) -> NDArray[np.int64]:
        """What warps know, of themselves too: [warps, warps of a CTA]."""
        known = self.seen[warps].copy()
        known[np.arange(len(warps)), warps % self.lanes.warps] = self.now[warps]
        return known

    def join(self, warps: Indices) -> None:
        """A barrier of some warps of one CTA."""
        self.seen[warps] = self.known(warps).max(0)
        self.fenced[warps] = self.fenced[warps].max(0)
        self.seen[warps, warps % self.lanes.warps] = ALWAYS
        self.now[warps] += 1

    def fence(self, warps: Indices) -> None:
        """A proxy fence."""
        self.fenced[warps] = np.maximum(self.fenced[warps], self.known(warps))
        self.now[warps] += 1


class Shared:
    """The shared memory of some CTAs, `size` bytes each.

    By cell: `written`, and by which warp of the CTA, at which clock and line of the PTX; `read_at` by warp; `pending`:
    an asynchronous copy to it was not waited for; `reading`: how many wgmma in flight read it.
    """

    def __init__(self, lanes: Lanes, size: int, text: str) -> None:
        self.lanes, self.reporter, self.size = lanes, lanes.reporter, size
        self.clocks = Clocks(lanes)
        self.stride = -(-max(size, 1) // 1024) * 1024
        self.bytes = np.full(self.stride * lanes.ctas, 0xFF, np.uint8)
        self.cell = min([4, *(int(bits) // 8 for bits in re.findall(r"(?:ld|st)\.shared\S*\.[busf](\d+)", text))])
        cells = self.bytes.size // self.cell
        self.written_by = np.zeros(cells, np.int8)
        self.written_at = np.zeros(cells, np.int32)
        self.written_line = np.zeros(cells, np.int32)
        self.written = np.zeros(cells, bool)
        self.read_at = np.zeros((cells, lanes.warps), np.int32)
        self.pending = np.zeros(cells, bool)
        self.reading = np.zeros(cells, np.int16)

    # ---- places

    def place(self, lanes: Indices, address: Any, offset: int, size: int, line: int) -> Indices:
        """Where [lanes] accesses of `size` bytes begin; they must be inside and aligned."""
        given = np.zeros(len(lanes), np.int64) if address is None else address[lanes].astype(np.int64)
        index = given + (offset - SHARED_BASE)
        outside = (index < 0) | (index + size > self.size)
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            where = f"bytes {index[at]} to {index[at] + size} of {self.size}, {self.lanes.describe(int(lanes[at]))}"
            raise self.reporter.fault(line, f"an access outside shared memory: {where}")
        if (index % size).any():
            raise self.reporter.fault(line, f"an access of {size} bytes unaligned in shared memory")
        return index + self.lanes.cta[lanes] * self.stride

    def cells(self, index: Indices, size: int) -> Cells:
        """The cells [lanes, n] of accesses."""
        return (index // self.cell)[:, None] + np.arange(max(size // self.cell, 1))

    # ---- what is noted

    def hazard(self, line: int, cells: Cells, bad: NDArray[np.bool_], text: str) -> None:
        """Report those of some cells that are bad."""
        if bad.any():
            where = int(cells[bad][0])
            byte, before = where * self.cell % self.stride, int(self.written_line[where])
            written = f"last written at line {before}; " if before else ""
            self.reporter.say(line, text, f"shared byte {byte}, {written}{int(bad.sum())} of {bad.size} cells")

    def note_read(self, cells: Cells, lanes: Indices, line: int) -> None:
        """Plain reads of cells [lanes, n]."""
        warp, local = self.lanes.warp[lanes][:, None], self.lanes.local[lanes][:, None]
        self.hazard(line, cells, self.pending[cells], "reads shared memory before a copy to it was waited for")
        unordered: Any = self.written_at[cells] > self.clocks.seen[warp, self.written_by[cells]]
        self.hazard(line, cells, unordered, "reads what another warp wrote, no barrier between")
        self.hazard(line, cells, ~self.written[cells], "reads shared memory that nobody wrote")
        self.read_at[cells, local] = self.clocks.now[warp]

    def note_write(self, cells: Cells, lanes: Indices, line: int, same: NDArray[np.bool_]) -> None:
        """Writes, plain or asynchronous, to cells [lanes, n]; `same`: which hold their value already."""
        warp = self.lanes.warp[lanes]
        self.hazard(line, cells, self.reading[cells] > 0, "writes what a wgmma in flight reads")
        unordered: Any = (self.read_at[cells] > self.clocks.seen[warp][:, None, :]).any(-1)
        self.hazard(line, cells, unordered, "overwrites what another warp read, no barrier between")
        unordered = self.written_at[cells] > self.clocks.seen[warp[:, None], self.written_by[cells]]
        self.hazard(line, cells, unordered & ~same, "overwrites what another warp wrote, no barrier between")

    def mark_written(self, cells: Cells, lanes: Indices, line: int) -> None:
        """The writes of lanes, which are visible to their warps from now on."""
        self.written_by[cells] = self.lanes.local[lanes][:, None]
        self.written_at[cells] = self.clocks.now[self.lanes.warp[lanes]][:, None]
        self.written_line[cells] = line
        self.written[cells] = True

    def same(self, bytes_there: NDArray[np.uint8], data: NDArray[np.uint8], cells: Cells) -> Any:
        """By cell, whether bytes [lanes, n] are equal."""
        return (bytes_there == data).reshape(*cells.shape, -1).all(-1)

    # ---- instructions

    def read(self, lanes: Indices, index: Indices, size: int, line: int) -> NDArray[np.uint8]:
        """Bytes [lanes, size]."""
        self.note_read(self.cells(index, size), lanes, line)
        return self.bytes.reshape(-1, size)[index // size]

    def write(self, lanes: Indices, index: Indices, data: NDArray[np.uint8], line: int) -> None:
        """Bytes [lanes, n] to where `index` says."""
        size = data.shape[1]
        cells, rows, table = self.cells(index, size), index // size, self.bytes.reshape(-1, size)
        self.hazard(line, cells, self.pending[cells], "writes shared memory before a copy to it was waited for")
        self.note_write(cells, lanes, line, self.same(table[rows], data, cells))
        self.mark_written(cells, lanes, line)
        table[rows] = data
        if (table[rows] != data).any():
            self.reporter.say(line, "two threads write different values to one place of shared memory")

    def load(self, registers: Sequence[Any], address: Any, offset: int, dtype: str, mask: Mask, line: int) -> None:
        """ld.shared: each register gets an element of `dtype`, one behind the other."""
        lanes = self.lanes.active(mask)
        if not lanes.size:
            return
        size = int(dtype[1:]) * len(registers)
        elements = self.read(lanes, self.place(lanes, address, offset, size, line), size, line).view(dtype)
        for number, register in enumerate(registers):
            if register is not None:
                register[lanes] = elements[:, number]

    def store(self, values: Sequence[Any], address: Any, offset: int, size: int, mask: Mask, line: int) -> None:
        """st.shared: elements of `size` bytes, one behind the other."""
        lanes = self.lanes.active(mask)
        if lanes.size:
            data = columns(values, self.lanes, lanes)
            self.write(lanes, self.place(lanes, address, offset, data.shape[1], line), data, line)

    def fence(self, mask: Mask) -> None:
        """fence.proxy.async."""
        self.clocks.fence(np.unique(self.lanes.warp[self.lanes.active(mask)]))
