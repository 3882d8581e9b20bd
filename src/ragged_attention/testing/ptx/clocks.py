"""What the warps of a CTA know of each other's accesses to memory, kept as clocks.

A warp's clock ticks where it tells others what it did: at barriers, proxy fences, arrivals at an mbarrier and releases.
Barriers join what warps know. An agent is what writes shared memory in no warp's name: the copies that end at one
mbarrier, whose clock ticks with each of them.

What warps know of other CTAs goes through atomic operations that release and acquire, at one place of global memory.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.lanes import Indices, Lanes

ALWAYS = 1 << 60  # later than any clock
Abroad = dict[int, NDArray[np.int64]]  # by the number of a CTA: its warps' clocks


class Knowledge(NamedTuple):
    """What one knows: clocks of the warps and agents of a CTA, of writes that the asynchronous proxy sees, and CTAs."""

    seen: NDArray[np.int64]
    fenced: NDArray[np.int64]
    abroad: Abroad


class Clocks:
    """What each warp knows of the others of its CTA.

    `now` [warps]; `seen` [warps, warps of a CTA and agents]: all accesses up to this clock of the other are behind a
    barrier; `fenced`: the same, of writes that the asynchronous proxy sees; `abroad` of each warp: of other CTAs.
    """

    def __init__(self, lanes: Lanes) -> None:
        count = lanes.ctas * lanes.warps
        self.lanes = lanes
        self.now = np.ones(count, np.int64)
        self.seen = np.zeros((count, lanes.warps), np.int64)
        self.fenced = np.zeros((count, lanes.warps), np.int64)
        self.seen[np.arange(count), np.arange(count) % lanes.warps] = ALWAYS
        self.abroad: list[Abroad] = [{} for _ in range(count)]
        self._agents: dict[tuple[int, bool], int] = {}
        self._ticks: defaultdict[tuple[int, int], int] = defaultdict(int)

    def known(self, warps: Indices) -> NDArray[np.int64]:
        """What warps know, of themselves too: [warps, warps of a CTA and agents]."""
        known = self.seen[warps].copy()
        known[np.arange(len(warps)), warps % self.lanes.warps] = self.now[warps]
        return known

    # ---- agents

    def agent(self, place: int, *, generic: bool = False) -> int:
        """The column of the agent of an mbarrier, the same in each CTA.

        There are two: what bulk copies write needs no proxy fence, what `generic` ones do needs one like a thread's.
        """
        key = place, generic
        if key not in self._agents:
            self._agents[key] = self.seen.shape[1]
            self.seen = np.pad(self.seen, ((0, 0), (0, 1)))
            self.fenced = np.pad(self.fenced, ((0, 0), (0, 1)), constant_values=0 if generic else ALWAYS)
        return self._agents[key]

    def tick(self, cta: int, agent: int) -> int:
        """The next clock of a CTA's agent."""
        self._ticks[cta, agent] += 1
        return self._ticks[cta, agent]

    # ---- what is told

    def tell(self, warp: int) -> Knowledge:
        """What a warp knows, for others; what it does from now on is not in it."""
        told = Knowledge(self.known(np.array([warp]))[0], self.fenced[warp].copy(), dict(self.abroad[warp]))
        self.now[warp] += 1
        return told

    def learn(self, warps: Indices, told: Knowledge) -> None:
        """Warps know what was told, too."""
        for table, row in ((self.seen, told.seen), (self.fenced, told.fenced)):
            width = len(row)  # agents may have come since
            table[warps, :width] = np.maximum(table[warps, :width], row)
        if told.abroad:
            for warp in warps.tolist():
                merge(self.abroad[warp], [told.abroad])
        self.seen[warps, warps % self.lanes.warps] = ALWAYS

    def join(self, warps: Indices, told: Iterable[Knowledge] = ()) -> None:
        """A barrier of some warps of one CTA, at which others left word."""
        self.seen[warps] = self.known(warps).max(0)
        self.fenced[warps] = self.fenced[warps].max(0)
        if any(map(self.abroad.__getitem__, warps.tolist())):
            joint = merge({}, (self.abroad[warp] for warp in warps.tolist()))
            for warp in warps.tolist():
                self.abroad[warp] = dict(joint)
        self.seen[warps, warps % self.lanes.warps] = ALWAYS
        self.now[warps] += 1
        for one in told:
            self.learn(warps, one)

    def fence(self, warps: Indices) -> None:
        """A proxy fence."""
        self.fenced[warps] = np.maximum(self.fenced[warps], self.known(warps))
        self.now[warps] += 1


def merge(mine: Abroad, others: Iterable[Abroad]) -> Abroad:
    """Add to what is known of CTAs, in place."""
    for other in others:
        for cta, clocks in other.items():
            mine[cta] = np.maximum(mine[cta], clocks) if cta in mine else clocks
    return mine


def joined(mine: Knowledge, other: Knowledge) -> Knowledge:
    """What both know."""
    short, long = sorted((mine, other), key=lambda one: len(one.seen))
    width = len(short.seen)
    seen, fenced = long.seen.copy(), long.fenced.copy()
    seen[:width] = np.maximum(seen[:width], short.seen)
    fenced[:width] = np.maximum(fenced[:width], short.fenced)
    return Knowledge(seen, fenced, merge(dict(mine.abroad), [other.abroad]))


NOTHING = Knowledge(np.zeros(0, np.int64), np.zeros(0, np.int64), {})
