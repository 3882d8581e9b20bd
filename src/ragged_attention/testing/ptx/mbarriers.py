"""mbarrier objects, whose phases complete when the expected threads have arrived and the expected bytes have come.

Copies that end at an mbarrier land when a thread waits for the phase in which they count. The oldest copy lands first.
Until then, their bytes are not in shared memory. A thread that sees a phase complete knows of the accesses of
the threads that arrived, and of the copies that landed. It learns of initialisation and invalidation only by barriers.

The emulator is lenient: a thread that waits for a phase knows of everything that is complete by then. For a parity
other than 0 and 1, which the ISA does not define, the lowest bit counts: Triton's warp-specialised loops write -1 for
1.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.clocks import NOTHING, Knowledge, joined
from ragged_attention.testing.ptx.errors import Hazard
from ragged_attention.testing.ptx.lanes import WARP, Indices, Lanes, Mask
from ragged_attention.testing.ptx.shared import Shared

SIZE, MOST, LARGEST = 8, (1 << 20) - 1, (1 << 20) - 1  # the object's bytes; the most arrivals and bytes per phase


@dataclasses.dataclass(eq=False)
class Mbarrier:
    """One mbarrier: `pending` of `expected` arrivals and `bytes` bytes are still to come in phase number `phase`.

    `agent` is the column of its copies in the clocks. `flight` has, for each copy, the function that lands it and its
    line. `maker` is the warp that initialised it, `made` that warp's clock then, and `used` has each warp's clock at
    its last use of it. `coming` is the knowledge of the warps that arrived in this phase, and `done` that of
    the warps that arrived in earlier phases.
    """

    cta: int
    place: int
    agent: int
    expected: int
    maker: int
    made: int
    used: NDArray[np.int64]
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    coming: Knowledge = NOTHING
    done: Knowledge = NOTHING
    flight: list[tuple[Callable[[], None], int | None]] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return f"the mbarrier at shared byte {self.place}"


class Mbarriers:
    """The mbarriers of some CTAs, by their index in `shared.bytes`."""

    def __init__(self, lanes: Lanes, shared: Shared) -> None:
        self.lanes, self.shared = lanes, shared
        self.clocks = shared.clocks
        self.objects: dict[int, Mbarrier] = {}

    # ---- lookup

    def each(self, address: Any, offset: int, mask: Mask, line: int) -> Iterator[tuple[int, Indices]]:
        """Yield, for each mbarrier that lanes name, its place and these lanes."""
        lanes = self.lanes.active(mask)
        if lanes.size:
            places = self.shared.place(lanes, address, offset, SIZE, line)
            yield from ((place, lanes[places == place]) for place in np.unique(places).tolist())

    def find(self, place: int, lanes: Indices, line: int) -> Mbarrier:
        """The object at a place. Records that lanes use it, and raises Fault if there is none."""
        mbarrier = self.objects.get(place)
        if mbarrier is None:
            raise self.lanes.fault(line, lanes[0], f"no mbarrier at shared byte {place % self.shared.stride}")
        warps = np.unique(self.lanes.warp[lanes])
        if (early := self.clocks.seen[self.lanes.warp[lanes], mbarrier.maker] < mbarrier.made).any():
            text = "uses an mbarrier that another warp initialised, no barrier between"
            self.lanes.say(line, lanes[early][0], text, str(mbarrier))
        mbarrier.used[warps % self.lanes.warps] = self.clocks.now[warps]
        return mbarrier

    def at(self, lane: int, address: Any, offset: int, line: int) -> Mbarrier:
        """The object that one lane names."""
        lanes = np.array([lane])
        return self.find(int(self.shared.place(lanes, address, offset, SIZE, line)[0]), lanes, line)

    def _cells(self, place: int) -> NDArray[np.int64]:
        return np.arange(place // self.shared.cell, (place + SIZE - 1) // self.shared.cell + 1)

    # ---- beginning and end

    def init(self, address: Any, offset: int, count: Any, mask: Mask, line: int) -> None:
        """Execute mbarrier.init: create an object in phase 0, which expects `count` arrivals per phase."""
        counts, shared = self.lanes.spread(count), self.shared
        for place, lanes in self.each(address, offset, mask, line):
            lane, expected = lanes[:1], int(counts[lanes[0]])
            if not 1 <= expected <= MOST or (counts[lanes] != expected).any():
                raise self.lanes.fault(line, lane[0], f"an mbarrier for {expected} arrivals")
            if place in self.objects:
                text, before = "initialises an mbarrier that was not invalidated", str(self.objects[place])
                self.lanes.say(line, lane[0], text, before, Hazard)
            shared.opaque[self._cells(place)] = False
            shared.write(lane, np.array([place]), np.full((1, SIZE), 0xFF, np.uint8), line)
            shared.opaque[self._cells(place)], shared.watched = True, True
            warp = int(self.lanes.warp[lane[0]])
            self.objects[place] = Mbarrier(
                int(self.lanes.cta[lane[0]]), place % shared.stride, self.clocks.agent(place % shared.stride), expected,
                warp % self.lanes.warps, int(self.clocks.now[warp]), np.zeros(self.lanes.warps, np.int64), expected,
            )  # fmt: skip

    def invalidate(self, address: Any, offset: int, mask: Mask, line: int) -> None:
        """Execute mbarrier.inval. The memory of the object may hold other data again."""
        for place, lanes in self.each(address, offset, mask, line):
            mbarrier = self.find(place, lanes, line)
            known = self.clocks.seen[self.lanes.warp[lanes[0]], : self.lanes.warps]
            if (mbarrier.used > known).any():
                self.lanes.say(line, lanes[0], "invalidates an mbarrier that another warp uses, no barrier between")
            if mbarrier.flight:
                self.lanes.say(line, lanes[0], "invalidates an mbarrier that a copy in flight ends at", str(mbarrier))
                self._land(mbarrier, lambda: False)
            del self.objects[place]
            self.shared.opaque[self._cells(place)] = False

    # ---- phases

    def _complete(self, mbarrier: Mbarrier) -> None:
        """Go on to the next phase if this one lacks nothing."""
        if mbarrier.pending == 0 and mbarrier.bytes == 0:
            mbarrier.phase, mbarrier.pending = mbarrier.phase + 1, mbarrier.expected
            mbarrier.done, mbarrier.coming = joined(mbarrier.done, mbarrier.coming), NOTHING
            self.lanes.changes += 1

    def expect(self, mbarrier: Mbarrier, count: int, line: int, lane: int | None = None) -> None:
        """Expect `count` more bytes in this phase, or fewer if `count` is negative."""
        mbarrier.bytes += count
        if abs(mbarrier.bytes) > LARGEST:
            text = f"{mbarrier} has {mbarrier.bytes} bytes to come, more than it can count"
            raise self.lanes.fault(line, lane, text)

    def expect_bytes(self, address: Any, offset: int, count: Any, sign: int, mask: Mask, line: int) -> None:
        """Execute mbarrier.expect_tx or, with a negative sign, complete_tx."""
        counts = self.lanes.spread(count)
        for place, lanes in self.each(address, offset, mask, line):
            mbarrier = self.find(place, lanes, line)
            for lane in lanes.tolist():
                self.expect(mbarrier, sign * int(counts[lane]), line, lane)
            self._complete(mbarrier)

    def arrive(
        self,
        state: Any,
        address: Any,
        offset: int,
        count: Any,
        expected: Any,
        release: bool,
        mask: Mask,
        line: int,
    ) -> None:
        """Execute mbarrier.arrive with `count` arrivals per thread.

        If `expected` is not None, each thread first expects that many bytes. `state` is a register for the phase, or
        None.
        """
        counts = self.lanes.spread(count)
        awaited = None if expected is None else self.lanes.spread(expected)
        for place, lanes in self.each(address, offset, mask, line):
            mbarrier = self.find(place, lanes, line)
            told = {warp: self.clocks.tell(warp) for warp in np.unique(self.lanes.warp[lanes]).tolist() if release}
            for lane in lanes.tolist():
                if awaited is not None:
                    self.expect(mbarrier, int(awaited[lane]), line, lane)
                if state is not None:
                    state[lane] = mbarrier.phase
                if (warp := lane // WARP) in told:
                    mbarrier.coming = joined(mbarrier.coming, told[warp])
                self._count(mbarrier, int(counts[lane]), line, lane)

    def _count(self, mbarrier: Mbarrier, count: int, line: int, lane: int) -> None:
        if not 1 <= count <= mbarrier.pending:
            text = f"{count} arrive at {mbarrier}, which expects {mbarrier.pending} more in this phase"
            raise self.lanes.fault(line, lane, text)
        mbarrier.pending -= count
        self._complete(mbarrier)

    # ---- copies

    def start(self, mbarrier: Mbarrier, land: Callable[[int], None], count: int, line: int) -> None:
        """Start a copy of `count` bytes. `land(clock)` delivers them, as a write by the agent at this clock."""

        def come() -> None:
            clock = self.clocks.tick(mbarrier.cta, mbarrier.agent)
            land(clock)
            seen = np.zeros(mbarrier.agent + 1, np.int64)
            seen[mbarrier.agent] = clock
            mbarrier.coming = joined(mbarrier.coming, Knowledge(seen, np.zeros_like(seen), {}))
            self.expect(mbarrier, -count, line)
            self._complete(mbarrier)

        mbarrier.flight.append((come, line))

    def arrive_later(
        self,
        mbarrier: Mbarrier,
        land: Callable[[Indices], None],
        told: Knowledge,
        lanes: Indices,
        counted: bool,
        line: int,
    ) -> None:
        """Let each of `lanes` arrive once `land` has delivered its copies.

        If not `counted`, the phase expects these arrivals in addition. Lanes that the phase no longer needs arrive in
        the next phase.
        """
        mbarrier.pending += 0 if counted else len(lanes)

        def come(lanes: Indices = lanes) -> None:
            first = lanes if mbarrier.bytes else lanes[: mbarrier.pending]
            land(first)
            mbarrier.coming = joined(mbarrier.coming, told)
            for lane in first.tolist():
                self._count(mbarrier, 1, line, lane)
            if (rest := lanes[len(first) :]).size:
                mbarrier.flight.insert(0, (lambda: come(rest), None))

        mbarrier.flight.append((come, None))  # no line: `Copies` reports copies that nobody waits for

    @staticmethod
    def _land(mbarrier: Mbarrier, enough: Callable[[], bool]) -> None:
        """Land copies, the oldest first, until `enough()` is true."""
        while mbarrier.flight and not enough():
            mbarrier.flight.pop(0)[0]()

    def wait(self, out: Any, address: Any, offset: int, phase: Any, parity: bool, mask: Mask, line: int) -> None:
        """mbarrier.try_wait and test_wait: whether a phase, named by its parity or its state, is complete."""
        phases = self.lanes.spread(np.asarray(phase) & 1 if parity else phase)
        for place, lanes in self.each(address, offset, mask, line):
            mbarrier = self.find(place, lanes, line)
            for number in np.unique(phases[lanes]).tolist():
                these = lanes[phases[lanes] == number]

                def complete(mbarrier: Mbarrier = mbarrier, number: int = number) -> bool:
                    return mbarrier.phase % 2 != number if parity else mbarrier.phase != number

                self._land(mbarrier, complete)
                out[these] = complete()
                self.lanes.waits(these, not complete())
                if complete():
                    self.clocks.learn(np.unique(self.lanes.warp[these]), mbarrier.done)

    def open(self) -> str:
        """What mbarriers lack, for the message of a deadlock."""
        lacking = [
            f"{one} of CTA {self.lanes.number[one.cta * self.lanes.threads]} lacks {one.pending} arrivals and "
            f"{one.bytes} bytes"
            for one in self.objects.values()
            if one.pending != one.expected or one.bytes
        ]
        return "; ".join(lacking[:4])

    def end(self) -> None:
        """Report the copies that nobody waited for when the kernel ends."""
        for mbarrier in self.objects.values():
            for line in (line for _, line in mbarrier.flight if line is not None):
                text = "the kernel ends before this copy was waited for"
                self.lanes.say(line, None, text, str(mbarrier), Hazard)
