"""Vector clocks: what the warps of a CTA know of each other's accesses to memory.

A warp's clock ticks when the warp passes on what it knows: at barriers, proxy fences, arrivals at an mbarrier and
releases. A barrier gives each of its warps the knowledge of all of them. Copies that end at an mbarrier write shared
memory, but not on behalf of a warp. All copies that end at one mbarrier together are an agent, whose clock ticks with
each copy.

Warps learn of accesses by other CTAs through atomic operations that release and acquire at one place of global memory.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.lanes import Indices, Lanes

ALWAYS = 1 << 60  # later than any clock
Abroad = dict[int, NDArray[np.int64]]  # the clocks of the warps of other CTAs, by the number of the CTA


class Knowledge(NamedTuple):
    """The accesses that a warp knows of, as clocks.

    `seen` has, for each warp and agent of its CTA, the clock up to which the accesses are known. `fenced` has the clock
    up to which the writes are also visible to the asynchronous proxy. `abroad` has the clocks of warps of other CTAs.
    """

    seen: NDArray[np.int64]
    fenced: NDArray[np.int64]
    abroad: Abroad


class Clocks:
    """The clock of each warp, and what the warp knows of others.

    `now` [warps] has each warp's own clock. `seen` is [warps, warps of a CTA and agents]: all accesses of the other
    warp or agent up to this clock are ordered before this warp's next access. `fenced` has the same shape, and its
    clocks apply to the writes that the asynchronous proxy sees. `abroad` has, for each warp, what it knows of other
    CTAs.
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
        """What some warps know, including their own clocks: [warps, warps of a CTA and agents]."""
        known = self.seen[warps].copy()
        known[np.arange(len(warps)), warps % self.lanes.warps] = self.now[warps]
        return known

    # ---- agents

    def agent(self, place: int, *, generic: bool = False) -> int:
        """The column of an mbarrier's agent, which is the same in each CTA.

        An mbarrier has two agents. The writes of bulk copies need no proxy fence. The writes of `generic` copies
        (cp.async) need one, like those of threads.
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

    # ---- exchange of knowledge

    def tell(self, warp: int) -> Knowledge:
        """Return what a warp knows, to pass it on. The warp's clock ticks, so its later accesses are not included."""
        told = Knowledge(self.known(np.array([warp]))[0], self.fenced[warp].copy(), dict(self.abroad[warp]))
        self.now[warp] += 1
        return told

    def learn(self, warps: Indices, told: Knowledge) -> None:
        """Add the knowledge `told` to that of some warps."""
        for table, row in ((self.seen, told.seen), (self.fenced, told.fenced)):
            width = len(row)  # agents may have been added since `told` was created
            table[warps, :width] = np.maximum(table[warps, :width], row)
        if told.abroad:
            for warp in warps.tolist():
                merge(self.abroad[warp], [told.abroad])
        self.seen[warps, warps % self.lanes.warps] = ALWAYS

    def join(self, warps: Indices, told: Iterable[Knowledge] = ()) -> None:
        """Execute a barrier of some warps of one CTA. `told` is the knowledge of warps that arrived without waiting."""
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
        """Execute a proxy fence of some warps."""
        self.fenced[warps] = np.maximum(self.fenced[warps], self.known(warps))
        self.now[warps] += 1


def merge(mine: Abroad, others: Iterable[Abroad]) -> Abroad:
    """`mine`, after the knowledge of others was added to it in place."""
    for other in others:
        for cta, clocks in other.items():
            mine[cta] = np.maximum(mine[cta], clocks) if cta in mine else clocks
    return mine


def joined(mine: Knowledge, other: Knowledge) -> Knowledge:
    """The combined knowledge of two warps: for each entry, the later clock."""
    short, long = sorted((mine, other), key=lambda one: len(one.seen))
    width = len(short.seen)
    seen, fenced = long.seen.copy(), long.fenced.copy()
    seen[:width] = np.maximum(seen[:width], short.seen)
    fenced[:width] = np.maximum(fenced[:width], short.fenced)
    return Knowledge(seen, fenced, merge(dict(mine.abroad), [other.abroad]))


NOTHING = Knowledge(np.zeros(0, np.int64), np.zeros(0, np.int64), {})
