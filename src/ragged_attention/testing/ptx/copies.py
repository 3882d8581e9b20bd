"""Asynchronous operations in groups, and the first kind of them: copies from global to shared memory (cp.async).

A copy reads global memory when it is issued, and its bytes arrive at the wait that waits for it; until then they are
0xFF, which is NaN in every float format. So a change of its source in between is not noticed.
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
    """Something asynchronous in flight: the lanes that issued it, and in which of its groups each did."""

    lanes: Indices
    groups: NDArray[np.int64]
    line: int

    def split(self, chosen: NDArray[np.bool_]) -> Self:
        """The part of some of its lanes."""
        return dataclasses.replace(self, lanes=self.lanes[chosen], groups=self.groups[chosen])


Kind = TypeVar("Kind", bound=Operation)


class Queue(Generic[Kind]):
    """Operations in flight, in the order in which they were issued; a lane's are committed in groups."""

    what = "operation"

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.flight: list[Kind] = []
        self.committed = np.zeros(lanes.count, np.int64)

    def arrive(self, operation: Kind) -> None:
        """What happens when an operation has been waited for by all the lanes that it names."""
        raise NotImplementedError

    def commit(self, mask: Mask, line: int) -> None:
        """End a group."""
        self.committed[self.lanes.active(mask)] += 1

    def wait(self, left: int, mask: Mask, line: int) -> None:
        """Until at most `left` groups of a lane are in flight."""
        active = self.lanes.marked(mask)
        self._land([active[o.lanes] & (o.groups < self.committed[o.lanes] - left) for o in self.flight])

    def wait_all(self, mask: Mask, line: int) -> None:
        """For all operations, in a group or not."""
        active = self.lanes.marked(mask)
        self._land([active[operation.lanes] for operation in self.flight])

    def _land(self, done: list[NDArray[np.bool_]]) -> None:
        flight, self.flight = self.flight, []
        landing: list[Kind] = []
        for operation, chosen in zip(flight, done, strict=True):
            if chosen.any():
                landing.append(operation if chosen.all() else operation.split(chosen))
            if not chosen.all():
                self.flight.append(operation.split(~chosen) if chosen.any() else operation)
        for operation in landing:
            self.arrive(operation)

    def end(self) -> None:
        """The kernel is over."""
        for operation in self.flight:
            text = f"the kernel ends before this {self.what} was waited for"
            self.lanes.say(operation.line, operation.lanes[0], text, kind=Hazard)


@dataclasses.dataclass
class Copy(Operation):
    """Bytes [lanes, n] on their way to `places` of shared memory, which lie in `cells`.

    `told` are the clocks at which the lanes' warps said that they would arrive at an mbarrier, 0 where they did not;
    `agent` and `clock` who then brings the bytes, and when by its own clock.
    """

    places: NDArray[np.int64]
    cells: Cells
    data: NDArray[np.uint8]
    told: NDArray[np.int64]
    agent: NDArray[np.int64]
    clock: NDArray[np.int64]

    def split(self, chosen: NDArray[np.bool_]) -> Self:
        names = ("lanes", "groups", "places", "cells", "data", "told", "agent", "clock")
        return dataclasses.replace(self, **{name: getattr(self, name)[chosen] for name in names})


class Copies(Queue[Copy]):
    """cp.async of 4, 8 or 16 bytes a thread."""

    what = "copy"

    def __init__(self, lanes: Lanes, shared: Shared, memory: GlobalAccess) -> None:
        super().__init__(lanes)
        self.shared, self.memory = shared, memory
        self.brought: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by warp: the last clock of each agent
        self.by_agents = False  # whether it is these that bring what lands

    def start(
        self,
        target: Any,
        target_offset: int,
        source: Any,
        source_offset: int,
        size: int,
        given: Any,
        mask: Mask,
        line: int,
    ) -> None:
        """cp.async; of `size` bytes only the first `given` are read, if not None, and the rest are zeros."""
        lanes = self.lanes.active(mask)
        if not lanes.size:
            return
        index = self.shared.place(lanes, target, target_offset, size, line)
        count = np.full(len(lanes), size) if given is None else self.lanes.spread(given)[lanes].astype(np.int64)
        if (count > size).any():
            raise self.lanes.fault(line, lanes[count.argmax()], f"a copy of {count.max()} bytes to {size}")
        data = np.zeros((len(lanes), size), np.uint8)
        for length in np.unique(count[count > 0]):
            some = count == length
            data[some, :length] = self._source(lanes[some], source, source_offset, size, int(length), line)
        cells = self.shared.cells(index, size)
        places = index[:, None] + np.arange(size)
        self._check(lanes, cells, places, data, line)
        self.shared.bytes[places] = 0xFF
        self.shared.pending[cells] = True
        told, agent, clock = np.zeros((3, len(lanes)), np.int64)
        self.flight.append(Copy(lanes, self.committed[lanes], line, places, cells, data, told, agent, clock))

    def _source(self, lanes: Indices, source: Any, offset: int, size: int, length: int, line: int) -> NDArray[np.uint8]:
        """The first `length` bytes from an address aligned to `size`, by accesses of a power of two."""
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
        """Report a target that is in use; twice the same bytes to one place are no fault."""
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
        own = np.where(told > 0, told, now)
        clocks = np.where(told > 0, operation.clock, now) if self.by_agents else own
        agents = np.where(told > 0, operation.agent, -1) if self.by_agents else None
        self.shared.mark_written(operation.cells, operation.lanes, operation.line, clocks, agents)

    def wait(self, left: int, mask: Mask, line: int) -> None:
        super().wait(left, mask, line)
        self._know(mask)

    def wait_all(self, mask: Mask, line: int) -> None:
        super().wait_all(mask, line)
        self._know(mask)

    def _know(self, mask: Mask) -> None:
        """Warps that wait know of their copies, whichever agent made them."""
        for warp in np.unique(self.lanes.warp[self.lanes.active(mask)]).tolist() if self.brought else ():
            for agent, clock in self.brought[warp].items():
                seen = self.shared.clocks.seen
                seen[warp, agent] = max(seen[warp, agent], clock)

    def _told(self, warp: int, agent: int, clock: int) -> Knowledge:
        """The knowledge of a warp that arrives once its copies have landed; an agent brings them at a clock."""
        self.brought[warp][agent] = clock
        told = self.shared.clocks.tell(warp)
        for other, when in self.brought[warp].items():
            told.seen[other] = max(told.seen[other], when)
        return told

    def arrive_at(self, mbarriers: Mbarriers, address: Any, offset: int, counted: bool, mask: Mask, line: int) -> None:
        """cp.async.mbarrier.arrive: each thread arrives when its copies so far have; `counted`: as was expected."""
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
                before = [(one.told > 0) & (one.told <= now[self.lanes.warp[one.lanes]]) for one in self.flight]
                self.by_agents = True
                self._land([np.isin(one.lanes, lanes) & these for one, these in zip(self.flight, before, strict=True)])
                self.by_agents = False

            mbarriers.arrive_later(mbarriers.find(place, lanes, line), land, told, lanes, counted, line)
