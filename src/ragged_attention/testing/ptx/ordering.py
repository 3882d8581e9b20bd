"""Which CTA touched each byte of global memory, and how atomic operations order the accesses of CTAs.

An access of one CTA is ordered before an access of another if the first CTA then releases, and the second CTA acquires
at the same place before its access. Within each CTA, barriers pass on what is known. A fence before a relaxed operation
makes it a release, and a fence after it makes it an acquire. Order is tracked only in kernels that release or acquire
anything.

The emulator is lenient: a place keeps everything that was ever released there, even if it was overwritten since.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.clocks import Abroad, Clocks, merge
from ragged_attention.testing.ptx.lanes import WARP, Indices, Lanes

SEVERAL = -1  # in `Shadow.cta`: several CTAs touched the byte
ORDERING = re.compile(r"\b(?:(?:atom|red|ld|st)\.\S*(?:acquire|release|acq_rel)|fence\.(?:acq_rel|sc)\.|membar\.)")


class Shadow:
    """For each byte, 1 + the index of the CTA that touched it, or 0.

    If order is tracked, each byte also has the warp that touched it, and the clock of that warp.
    """

    def __init__(self, size: int) -> None:
        self.cta = np.zeros(size, np.int32)
        self.warp = np.zeros(0, np.int16)
        self.clock = np.zeros(0, np.int32)

    def count_order(self) -> None:
        if not self.warp.size:
            self.warp, self.clock = np.zeros(self.cta.size, np.int16), np.zeros(self.cta.size, np.int32)


class Order:
    """What some CTAs know of the accesses of others.

    `released` has, for each place, the knowledge that a warp gets by an acquire there. It outlives these CTAs. For each
    warp, `fenced` is its knowledge at its last fence, and `met` is the knowledge that it has found since then at places
    where it did not acquire.
    """

    def __init__(self, lanes: Lanes, clocks: Clocks, released: dict[int, Abroad] | None) -> None:
        self.lanes, self.clocks, self.released = lanes, clocks, released
        self.fenced: dict[int, Abroad] = {}
        self.met: dict[int, Abroad] = {}

    def me(self, lanes: Indices) -> NDArray[Any]:
        """1 + the index of each lane's CTA, [lanes, 1], as in shadows."""
        return (self.lanes.number[lanes] + 1)[:, None]

    def others(self, shadow: Shadow, rows: Indices, size: int, lanes: Indices) -> NDArray[np.bool_]:
        """Whether another CTA touched each byte without being ordered before the lane's access: bools [lanes, size]."""
        touched = shadow.cta.reshape(-1, size)[rows]
        others = (touched != 0) & (touched != self.me(lanes))
        if self.released is not None and others.any():
            lane, byte = np.nonzero(others)
            place = rows[lane] * size + byte
            others[lane, byte] = ~self._ordered(shadow, place, self.lanes.warp[lanes[lane]])
        return others

    def _ordered(self, shadow: Shadow, place: Indices, warps: Indices) -> NDArray[np.bool_]:
        """Whether each warp knows of the access that the shadow records at its place, as bools [places]."""
        ctas, ordered = shadow.cta[place] - 1, np.zeros(len(place), bool)
        for warp, cta in set(zip(warps.tolist(), ctas.tolist(), strict=True)):
            clocks = self.clocks.abroad[warp].get(cta)
            if clocks is not None:
                these = (warps == warp) & (ctas == cta)
                ordered[these] = shadow.clock[place[these]] <= clocks[shadow.warp[place[these]]]
        return ordered

    def mark(self, shadow: Shadow, rows: Indices, size: int, lanes: Indices) -> None:
        """Record that lanes touch bytes. Several lanes may touch the same bytes."""
        table = shadow.cta.reshape(-1, size)
        after = np.where(self.others(shadow, rows, size, lanes), SEVERAL, self.me(lanes))
        table[rows] = after
        lost = (table[rows] != after).any(1)
        if lost.any():
            table[rows[lost]] = SEVERAL
        if self.released is not None:
            shadow.warp.reshape(-1, size)[rows] = self.lanes.local[lanes][:, None]
            shadow.clock.reshape(-1, size)[rows] = self.clocks.now[self.lanes.warp[lanes]][:, None]

    def _tell(self, warp: int) -> Abroad:
        """What a warp knows of all CTAs, including its own."""
        told = self.clocks.tell(warp)
        return merge({int(self.lanes.number[warp * WARP]): told.seen[: self.lanes.warps]}, [told.abroad])

    def synchronise(self, acquires: bool, releases: bool, places: Indices, lanes: Indices) -> None:
        """Let lanes acquire and release at the places of their atomic operations, one lane after another."""
        if self.released is None:
            return
        for place, warp in dict.fromkeys(zip(places.tolist(), self.lanes.warp[lanes].tolist(), strict=True)):
            published = self.released.setdefault(place, {})
            merge(self.clocks.abroad[warp] if acquires else self.met.setdefault(warp, {}), [published])
            merge(published, [self._tell(warp) if releases else self.fenced.get(warp, {})])

    def fence(self, lanes: Indices) -> None:
        """Execute a fence that also orders accesses of other CTAs."""
        for warp in np.unique(self.lanes.warp[lanes]).tolist() if self.released is not None else ():
            merge(self.clocks.abroad[warp], [self.met.pop(warp, {})])
            self.fenced[warp] = self._tell(warp)
