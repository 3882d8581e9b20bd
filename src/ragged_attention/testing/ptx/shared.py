"""Shared memory and its shadow: which warps wrote and read each cell, and at which of their clocks.

Barriers join what the warps know of each other's clocks (`clocks`). So an access that no barrier orders after another
warp's access is reported in whichever order the two warps happened to run. A cell is as small as the kernel's narrowest
access, at most 4 bytes.

The emulator is lenient: threads of one warp count as ordered. A write of the value that is already there is not
reported as a write after a write. Of several atomic operations on one place, only the last counts for warps that read
it. A proxy fence covers all writes that its warp knows of, whichever warp made them, and barriers pass it on. So the
fence may come before the barrier, in the warps that write, or after the barrier, in the warps that then multiply.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.clocks import Clocks
from ragged_attention.testing.ptx.errors import Hazard, Misaligned, OutOfBounds, Race, Uninitialised
from ragged_attention.testing.ptx.lanes import WARP, Indices, Lanes, Mask
from ragged_attention.testing.ptx.memory import columns, deal, in_turn, kind_of_loss
from ragged_attention.testing.ptx.operands import SHARED_BASE

Cells = NDArray[np.int64]


class Shared:
    """The shared memory of some CTAs, `size` bytes each.

    For each cell, `written` is whether it was written. `written_by`, `written_at` and `written_line` are the warp or
    agent of the CTA that wrote it last, the clock of this write, and its line of the PTX. `read_at` has each warp's
    clock at its last read. `pending` is whether an asynchronous copy to the cell was not waited for. `reading` and
    `storing` count the wgmma, and the bulk copies to global memory, that are in flight and read the cell. `opaque` is
    whether it is part of an mbarrier, and `atomic` whether its last write was an atomic operation.
    """

    def __init__(self, lanes: Lanes, size: int, text: str) -> None:
        self.lanes, self.size = lanes, size
        self.clocks = Clocks(lanes)
        self.stride = -(-max(size, 1) // 1024) * 1024
        self.bytes = np.full(self.stride * lanes.ctas, 0xFF, np.uint8)
        self.cell = min([4, *(int(bits) // 8 for bits in re.findall(r"(?:ld|st)\.shared\S*\.[busf](\d+)", text))])
        cells = self.bytes.size // self.cell
        self.written_by = np.zeros(cells, np.int16)
        self.written_at = np.zeros(cells, np.int32)
        self.written_line = np.zeros(cells, np.int32)
        self.written = np.zeros(cells, bool)
        self.read_at = np.zeros((cells, lanes.warps), np.int32)
        self.pending = np.zeros(cells, bool)
        self.reading, self.storing = np.zeros(cells, np.int16), np.zeros(cells, np.int16)
        self.opaque, self.atomic = np.zeros(cells, bool), np.zeros(cells, bool)
        self.watched = False  # whether any cell was ever `storing` or `opaque`

    # ---- places

    def place(self, lanes: Indices, address: Any, offset: int, size: int, line: int) -> Indices:
        """The indices [lanes] at which accesses of `size` bytes begin; the accesses must be inside and aligned."""
        base = np.zeros(len(lanes), np.int64) if address is None else address[lanes].astype(np.int64)
        index = base + (offset - SHARED_BASE)
        outside = (index < 0) | (index + size > self.size)
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            where = f"bytes {index[at]} to {index[at] + size} of {self.size}"
            raise self.lanes.fault(line, lanes[at], f"an access outside shared memory: {where}", OutOfBounds)
        if (wrong := np.flatnonzero(index % size)).size:
            text = f"an access of {size} bytes unaligned in shared memory"
            raise self.lanes.fault(line, lanes[int(wrong[0])], text, Misaligned)
        return index + self.lanes.cta[lanes] * self.stride

    def cells(self, index: Indices, size: int) -> Cells:
        """The cells [lanes, n] of accesses."""
        return (index // self.cell)[:, None] + np.arange(max(size // self.cell, 1))

    # ---- the shadow

    def hazard(
        self, line: int, lanes: Indices, cells: Cells, bad: NDArray[np.bool_], text: str, kind: type[Hazard] = Race
    ) -> None:
        """Report the bad cells that lanes access: cells are [lanes, n], or [n] if one lane accesses all of them."""
        if bad.any():
            lane = lanes[np.argwhere(bad)[0, 0] if bad.ndim == 2 else 0]
            where = int(cells[bad][0])
            byte, before = where * self.cell % self.stride, int(self.written_line[where])
            written = f"last written at line {before}; " if before else ""
            self.lanes.say(line, lane, text, f"shared byte {byte}, {written}{int(bad.sum())} of {bad.size} cells", kind)

    def note_read(self, cells: Cells, lanes: Indices, line: int) -> None:
        """Check and record plain reads of cells [lanes, n]."""
        warp, local = self.lanes.warp[lanes][:, None], self.lanes.local[lanes][:, None]
        if self.watched:
            self.hazard(line, lanes, cells, self.opaque[cells], "reads an mbarrier as if it were data")
        self.hazard(line, lanes, cells, self.pending[cells], "reads shared memory before a copy to it was waited for")
        unordered: Any = self.written_at[cells] > self.clocks.seen[warp, self.written_by[cells]]
        self.hazard(line, lanes, cells, unordered, "reads what another warp wrote, no barrier between")
        self.hazard(line, lanes, cells, ~self.written[cells], "reads shared memory that nobody wrote", Uninitialised)
        self.read_at[cells, local] = self.clocks.now[warp]

    def note_write(self, cells: Cells, lanes: Indices, line: int, same: NDArray[np.bool_]) -> None:
        """Check writes, plain or asynchronous, to cells [lanes, n]; `same` marks those that have the value already."""
        warp = self.lanes.warp[lanes]
        self.hazard(line, lanes, cells, self.reading[cells] > 0, "writes what a wgmma in flight reads")
        if self.watched:
            self.hazard(line, lanes, cells, self.storing[cells] > 0, "writes what a bulk copy in flight reads")
            self.hazard(line, lanes, cells, self.opaque[cells], "writes over an mbarrier that was not invalidated")
        unordered: Any = (self.read_at[cells] > self.clocks.seen[warp][:, None, : self.lanes.warps]).any(-1)
        self.hazard(line, lanes, cells, unordered, "overwrites what another warp read, no barrier between")
        unordered = self.written_at[cells] > self.clocks.seen[warp[:, None], self.written_by[cells]]
        self.hazard(line, lanes, cells, unordered & ~same, "overwrites what another warp wrote, no barrier between")

    def mark_written(self, cells: Cells, lanes: Indices, line: int, clocks: Any = None, by: Any = None) -> None:
        """Record writes of lanes, at the clocks [lanes] or, by default, at the current clocks of their warps.

        `by` [lanes] has the agents that wrote in place of the lanes' warps, or -1 if the warp itself wrote.
        """
        clocks = self.clocks.now[self.lanes.warp[lanes]] if clocks is None else clocks
        local = self.lanes.local[lanes]
        self.written_by[cells] = (local if by is None else np.where(by < 0, local, by))[:, None]
        self.written_at[cells] = clocks[:, None]
        self.written_line[cells] = line
        self.written[cells], self.atomic[cells] = True, False

    def same(self, bytes_there: NDArray[np.uint8], data: NDArray[np.uint8], cells: Cells) -> Any:
        """Whether bytes [lanes, n] are equal, for each cell."""
        return (bytes_there == data).reshape(*cells.shape, -1).all(-1)

    def note_asynchronous(self, cells: Cells, warps: Sequence[int], line: int, who: str) -> None:
        """Check a read of cells [n] by an asynchronous operation that warps started; `who` is its name in reports."""
        lanes = np.array([min(warps) * WARP])
        self.hazard(line, lanes, cells, self.pending[cells], f"a {who} reads before a copy was waited for")
        self.hazard(line, lanes, cells, ~self.written[cells], f"a {who} reads what nobody wrote", Uninitialised)
        writer, when = self.written_by[cells], self.written_at[cells]
        for warp in warps:
            lanes = np.array([warp * WARP])
            unordered: Any = when > self.clocks.seen[warp, writer]
            self.hazard(line, lanes, cells, unordered, f"a {who} reads what another warp wrote, no barrier between")
            unfenced: Any = when > self.clocks.fenced[warp, writer]
            self.hazard(line, lanes, cells, unfenced, f"a {who} reads what was written without a proxy fence after it")

    # ---- instructions

    def read(self, lanes: Indices, index: Indices, size: int, line: int) -> NDArray[np.uint8]:
        """The bytes [lanes, size] at `index`."""
        self.note_read(self.cells(index, size), lanes, line)
        return self.bytes.reshape(-1, size)[index // size]

    def write(self, lanes: Indices, index: Indices, data: NDArray[np.uint8], line: int) -> None:
        """Write bytes [lanes, n] at `index`."""
        size = data.shape[1]
        cells, rows, table = self.cells(index, size), index // size, self.bytes.reshape(-1, size)
        self.hazard(line, lanes, cells, self.pending[cells], "writes shared memory before a copy to it was waited for")
        self.note_write(cells, lanes, line, self.same(table[rows], data, cells))
        self.mark_written(cells, lanes, line)
        table[rows] = data
        if (lost := (table[rows] != data).any(-1)).any():
            text, kind = (
                "two threads write different values to one place of shared memory",
                kind_of_loss(table[rows], data),
            )
            self.lanes.say(line, lanes[lost][0], text, kind=kind)

    def load(self, registers: Sequence[Any], address: Any, offset: int, dtype: str, mask: Mask, line: int) -> None:
        """ld.shared: the registers get consecutive elements of `dtype`."""
        lanes = self.lanes.active(mask)
        if not lanes.size:
            return
        size = int(dtype[1:]) * len(registers)
        elements = self.read(lanes, self.place(lanes, address, offset, size, line), size, line).view(dtype)
        deal(elements, registers, lanes)

    def store(self, values: Sequence[Any], address: Any, offset: int, size: int, mask: Mask, line: int) -> None:
        """st.shared: consecutive elements of `size` bytes."""
        lanes = self.lanes.active(mask)
        if lanes.size:
            data = columns(values, self.lanes, lanes)
            self.write(lanes, self.place(lanes, address, offset, data.shape[1], line), data, line)

    def change(
        self,
        operation: str,
        kind: str,
        size: int,
        results: Sequence[Any],
        address: Any,
        offset: int,
        values: Sequence[Sequence[Any]],
        mask: Mask,
        line: int,
    ) -> None:
        """Execute atom.shared or red.shared. The arguments are as in `GlobalAccess.atomic`, for one element."""
        lanes = self.lanes.active(mask)
        if not lanes.size:
            return
        index = self.place(lanes, address, offset, size, line)
        cells, warp = self.cells(index, size), self.lanes.warp[lanes]
        self.hazard(line, lanes, cells, self.pending[cells], "changes shared memory before a copy to it was waited for")
        self.hazard(line, lanes, cells, ~self.written[cells], "changes shared memory that nobody wrote", Uninitialised)
        plain = ~self.atomic[cells]
        unordered: Any = self.written_at[cells] > self.clocks.seen[warp[:, None], self.written_by[cells]]
        self.hazard(line, lanes, cells, unordered & plain, "changes what another warp wrote, no barrier between")
        self.note_write(cells, lanes, line, np.ones(cells.shape, bool))
        operands = [self.lanes.spread(row[0])[lanes] for row in values]
        before, changed = in_turn(self.bytes, index // size, operation, kind, size, operands)
        self.lanes.changes += bool(changed.any())
        if operation == "cas":
            self.lanes.waits(lanes, (before != operands[0]) & ~changed)
        if results and results[0] is not None:
            results[0][lanes] = before
        self.mark_written(cells, lanes, line)
        self.atomic[cells] = True

    def fence(self, mask: Mask) -> None:
        """Execute fence.proxy.async."""
        self.clocks.fence(np.unique(self.lanes.warp[self.lanes.active(mask)]))
