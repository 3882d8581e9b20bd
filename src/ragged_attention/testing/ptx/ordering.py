"""Who touched each byte of global memory, and which CTAs' accesses are ordered by atomic operations.

An access is ordered after another CTA's if a release after the one and an acquire before the other meet at one place;
within each CTA barriers pass on what is known. A fence before a relaxed operation makes it a release, one behind it an
acquire. Counted only in kernels that release or acquire anything.

Lenient: a place keeps what was ever released there, whoever overwrote it since.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.clocks import Abroad, Clocks, merge
from ragged_attention.testing.ptx.lanes import WARP, Indices, Lanes

SEVERAL = -1  # instead of a CTA's number + 1
ORDERING = re.compile(r"\b(?:(?:atom|red|ld|st)\.\S*(?:acquire|release|acq_rel)|fence\.(?:acq_rel|sc)\.|membar\.)")


class Shadow:
    """By byte: the CTA, as its number + 1, that touched it; where order counts, its warp and that warp's clock."""

    def __init__(self, size: int) -> None:
        self.cta = np.zeros(size, np.int32)
        self.warp = np.zeros(0, np.int16)
        self.clock = np.zeros(0, np.int32)

    def count_order(self) -> None:
        if not self.warp.size:
            self.warp, self.clock = np.zeros(self.cta.size, np.int16), np.zeros(self.cta.size, np.int32)


class Order:
    """What some CTAs know of others; `released` outlives them: by place, what whoever acquires there learns.

    By warp, `fenced` is what it knew at its last fence, and `met` what it found at places since, but did not acquire.
    """

    def __init__(self, lanes: Lanes, clocks: Clocks, released: dict[int, Abroad] | None) -> None:
        self.lanes, self.clocks, self.released = lanes, clocks, released
        self.fenced: dict[int, Abroad] = {}
        self.met: dict[int, Abroad] = {}

    def me(self, lanes: Indices) -> NDArray[Any]:
        """The CTAs of lanes [lanes, 1], as shadows have them."""
        return (self.lanes.number[lanes] + 1)[:, None]

    def others(self, shadow: Shadow, rows: Indices, size: int, lanes: Indices) -> NDArray[np.bool_]:
        """[lanes, size]: the bytes that another CTA touched, without an order."""
        touched = shadow.cta.reshape(-1, size)[rows]
        others = (touched != 0) & (touched != self.me(lanes))
        if self.released is not None and others.any():
            lane, byte = np.nonzero(others)
            place = rows[lane] * size + byte
            others[lane, byte] = ~self._ordered(shadow, place, self.lanes.warp[lanes[lane]])
        return others

    def _ordered(self, shadow: Shadow, place: Indices, warps: Indices) -> NDArray[np.bool_]:
        """[places]: which accesses that a shadow tells of the warps know of."""
        ctas, ordered = shadow.cta[place] - 1, np.zeros(len(place), bool)
        for warp, cta in set(zip(warps.tolist(), ctas.tolist(), strict=True)):
            clocks = self.clocks.abroad[warp].get(cta)
            if clocks is not None:
                these = (warps == warp) & (ctas == cta)
                ordered[these] = shadow.clock[place[these]] <= clocks[shadow.warp[place[these]]]
        return ordered

    def mark(self, shadow: Shadow, rows: Indices, size: int, lanes: Indices) -> None:
        """Note that lanes touch bytes, some perhaps at once."""
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
        """What a warp knows of CTAs, of its own too."""
        told = self.clocks.tell(warp)
        return merge({int(self.lanes.number[warp * WARP]): told.seen[: self.lanes.warps]}, [told.abroad])

    def synchronise(self, acquires: bool, releases: bool, places: Indices, lanes: Indices) -> None:
        """Atomic operations at places, one lane after the other."""
        if self.released is None:
            return
        for place, warp in dict.fromkeys(zip(places.tolist(), self.lanes.warp[lanes].tolist(), strict=True)):
            there = self.released.setdefault(place, {})
            merge(self.clocks.abroad[warp] if acquires else self.met.setdefault(warp, {}), [there])
            merge(there, [self._tell(warp) if releases else self.fenced.get(warp, {})])

    def fence(self, lanes: Indices) -> None:
        """fence.acq_rel and fence.sc, of other CTAs too."""
        for warp in np.unique(self.lanes.warp[lanes]).tolist() if self.released is not None else ():
            merge(self.clocks.abroad[warp], [self.met.pop(warp, {})])
            self.fenced[warp] = self._tell(warp)
