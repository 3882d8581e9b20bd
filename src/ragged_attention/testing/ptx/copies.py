"""Queues of asynchronous operations in groups, and one such queue: copies from global to shared memory (cp.async).

A copy reads global memory when it is issued, so a later change of its source is not noticed. Its bytes arrive when a
wait covers it; until then the target holds 0xFF, which is NaN in every float format.
"""

import dataclasses
from collections import defaultdict
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.clocks import NOTHING, Knowledge, joined
from ragged_attention.testing.ptx.errors import Hazard, Misaligned
from ragged_attention.testing.ptx.lanes import Indices, Lanes, Mask
from ragged_attention.testing.ptx.mbarriers import Mbarriers
from ragged_attention.testing.ptx.memory import GlobalAccess
from ragged_attention.testing.ptx.shared import Cells, Shared


@dataclasses.dataclass
class Operation:
    """An asynchronous operation in flight: the lanes that issued it, and for each lane the number of its group."""

    lanes: Indices
    groups: NDArray[np.int64]
    line: int

    def split(self, selected: NDArray[np.bool_]) -> Self:
        """The part of the operation that belongs to the selected lanes."""
        return dataclasses.replace(self, lanes=self.lanes[selected], groups=self.groups[selected])


Kind = TypeVar("Kind", bound=Operation)


class Queue(Generic[Kind]):
    """Operations in flight, in the order in which they were issued. Each lane commits its operations in groups."""

    what = "operation"

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.flight: list[Kind] = []
        self.committed = np.zeros(lanes.count, np.int64)

    def arrive(self, operation: Kind) -> None:
        """Complete an operation, for which all of its lanes have waited."""
        raise NotImplementedError

    def commit(self, mask: Mask, line: int) -> None:
        """End a group."""
        self.committed[self.lanes.active(mask)] += 1

    def wait(self, left: int, mask: Mask, line: int) -> None:
        """Complete operations until at most `left` groups of each lane are in flight."""
        active = self.lanes.marked(mask)
        self._land([active[o.lanes] & (o.groups < self.committed[o.lanes] - left) for o in self.flight])

    def wait_all(self, mask: Mask, line: int) -> None:
        """Complete all operations of the lanes, in a group or not."""
        active = self.lanes.marked(mask)
        self._land([active[operation.lanes] for operation in self.flight])

    def _land(self, done: list[NDArray[np.bool_]]) -> None:
        flight, self.flight = self.flight, []
        landing: list[Kind] = []
        for operation, selected in zip(flight, done, strict=True):
            if selected.any():
                landing.append(operation if selected.all() else operation.split(selected))
            if not selected.all():
                self.flight.append(operation.split(~selected) if selected.any() else operation)
        for operation in landing:
            self.arrive(operation)

    def end(self) -> None:
        """Report the operations that are still in flight when the kernel ends."""
        for operation in self.flight:
            text = f"the kernel ends before this {self.what} was waited for"
            self.lanes.say(operation.line, operation.lanes[0], text, kind=Hazard)


@dataclasses.dataclass
class Copy(Operation):
    """A copy of the bytes `data` [lanes, n] to `places` of shared memory, which lie in `cells`.

    `told` [lanes] are the clocks at which the lanes' warps executed cp.async.mbarrier.arrive for this copy, or 0 if
    they did not. `agent` and `clock` are the agent that then delivers the bytes, and its own clock at that time.
    """

    places: NDArray[np.int64]
    cells: Cells
    data: NDArray[np.uint8]
    told: NDArray[np.int64]
    agent: NDArray[np.int64]
    clock: NDArray[np.int64]

    def split(self, selected: NDArray[np.bool_]) -> Self:
        names = ("lanes", "groups", "places", "cells", "data", "told", "agent", "clock")
        return dataclasses.replace(self, **{name: getattr(self, name)[selected] for name in names})


class Copies(Queue[Copy]):
    """The copies that cp.async makes, of 4, 8 or 16 bytes per thread."""

    what = "copy"

    def __init__(self, lanes: Lanes, shared: Shared, memory: GlobalAccess) -> None:
        super().__init__(lanes)
        self.shared, self.memory = shared, memory
        # By warp: for each agent that delivers its copies, the agent's last clock.
        self.brought: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self.by_agents = False  # whether agents deliver the copies that land now

    def start(
        self,
        target: Any,
        target_offset: int,
        source: Any,
        source_offset: int,
        size: int,
        source_size: Any,
        mask: Mask,
        line: int,
    ) -> None:
        """Execute cp.async of `size` bytes. If given, only `source_size` bytes are read; the rest are 0."""
        lanes = self.lanes.active(mask)
        if not lanes.size:
            return
        index = self.shared.place(lanes, target, target_offset, size, line)
        if source_size is None:
            count = np.full(len(lanes), size)
        else:
            count = self.lanes.spread(source_size)[lanes].astype(np.int64)
        if (count > size).any():
            raise self.lanes.fault(line, lanes[count.argmax()], f"a copy of {count.max()} bytes to {size}")
        data = np.zeros((len(lanes), size), np.uint8)
        for length in np.unique(count[count > 0]):
            selected = count == length
            data[selected, :length] = self._source(lanes[selected], source, source_offset, size, int(length), line)
        cells = self.shared.cells(index, size)
        places = index[:, None] + np.arange(size)
        self._check(lanes, cells, places, data, line)
        self.shared.bytes[places] = 0xFF
        self.shared.pending[cells] = True
        told, agent, clock = np.zeros((3, len(lanes)), np.int64)
        self.flight.append(Copy(lanes, self.committed[lanes], line, places, cells, data, told, agent, clock))

    def _source(self, lanes: Indices, source: Any, offset: int, size: int, length: int, line: int) -> NDArray[np.uint8]:
        """The first `length` bytes from an address aligned to `size`, by accesses whose size is a power of two."""
        unit = length & -length
        base = self.memory.place(lanes, source, offset, unit, line, "copy")
        if (wrong := np.flatnonzero(base % size)).size:
            where = self.memory.memory.name_of(int(base[wrong[0]]))
            raise self.lanes.fault(line, lanes[int(wrong[0])], f"copy of {size} bytes unaligned: {where}", Misaligned)
        parts = []
        for begin in range(0, length, unit):
            index = self.memory.place(lanes, source, offset + begin, unit, line, "copy")
            parts.append(self.memory.read(lanes, index, unit, line))
        return np.concatenate(parts, axis=1)

    def _check(
        self, lanes: Indices, cells: Cells, places: NDArray[np.int64], data: NDArray[np.uint8], line: int
    ) -> None:
        """Report a target that is in use. Copying the same bytes to one place twice is allowed."""
        shared, pending = self.shared, self.shared.pending[cells]
        same = np.zeros(cells.shape, bool)
        if pending.any():
            coming = np.full(shared.bytes.size, 0xFF, np.uint8)
            for other in self.flight:
                coming[other.places] = other.data
            same = pending & shared.same(coming[places], data, cells)
            shared.hazard(line, lanes, cells, pending & ~same, "copies to where another copy is in flight")
        shared.note_write(cells, lanes, line, same)

    def arrive(self, operation: Copy) -> None:
        self.shared.bytes[operation.places] = operation.data
        if (lost := (self.shared.bytes[operation.places] != operation.data).any(-1)).any():
            text = "two threads copy different values to one place of shared memory"
            self.lanes.say(operation.line, operation.lanes[lost][0], text)
        self.shared.pending[operation.cells] = False
        now, told = self.shared.clocks.now[self.lanes.warp[operation.lanes]], operation.told
        clocks = np.where(told > 0, operation.clock if self.by_agents else told, now)
        agents = np.where(told > 0, operation.agent, -1) if self.by_agents else None
        self.shared.mark_written(operation.cells, operation.lanes, operation.line, clocks, agents)

    def wait(self, left: int, mask: Mask, line: int) -> None:
        super().wait(left, mask, line)
        self._know(mask)

    def wait_all(self, mask: Mask, line: int) -> None:
        super().wait_all(mask, line)
        self._know(mask)

    def _know(self, mask: Mask) -> None:
        """Let warps that wait know of their copies, whichever agent delivered them."""
        for warp in np.unique(self.lanes.warp[self.lanes.active(mask)]).tolist() if self.brought else ():
            for agent, clock in self.brought[warp].items():
                seen = self.shared.clocks.seen
                seen[warp, agent] = max(seen[warp, agent], clock)

    def _told(self, warp: int, agent: int, clock: int) -> Knowledge:
        """What a warp knows once its copies have landed: `agent` delivers them at `clock`."""
        self.brought[warp][agent] = clock
        told = self.shared.clocks.tell(warp)
        for other, when in self.brought[warp].items():
            told.seen[other] = max(told.seen[other], when)
        return told

    def arrive_at(self, mbarriers: Mbarriers, address: Any, offset: int, counted: bool, mask: Mask, line: int) -> None:
        """cp.async.mbarrier.arrive: each thread arrives when its copies so far have landed.

        `counted` is whether the arrivals that the mbarrier expects already include these arrivals (.noinc).
        """
        clocks = self.shared.clocks
        for place, lanes in mbarriers.each(address, offset, mask, line):
            now, told = clocks.now.copy(), NOTHING
            agent = clocks.agent(place % self.shared.stride, generic=True)
            clock = clocks.tick(int(self.lanes.cta[lanes[0]]), agent)
            for warp in np.unique(self.lanes.warp[lanes]).tolist():
                told = joined(told, self._told(warp, agent, clock))
            for one in self.flight:
                new = np.isin(one.lanes, lanes) & (one.told == 0)
                one.told[new], one.agent[new], one.clock[new] = now[self.lanes.warp[one.lanes[new]]], agent, clock

            def land(lanes: Indices, now: NDArray[np.int64] = now) -> None:
                earlier = [(one.told > 0) & (one.told <= now[self.lanes.warp[one.lanes]]) for one in self.flight]
                self.by_agents = True
                self._land([np.isin(one.lanes, lanes) & these for one, these in zip(self.flight, earlier, strict=True)])
                self.by_agents = False

            mbarriers.arrive_later(mbarriers.find(place, lanes, line), land, told, lanes, counted, line)
