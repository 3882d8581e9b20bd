"""The threads of some CTAs, as lanes of the same arrays, so that Python costs time per instruction, not per thread."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.errors import Diverged, Fault, Hazard, Race, Reporter

Mask = Any  # which lanes take part: bools [lanes], or True for all
Indices = NDArray[np.int64]
WARP = 32


class Lanes:
    """The thread that each lane stands for.

    By lane: `cta` is the CTA's index among these CTAs and `number` its number in the grid; `warp` is the warp's index
    among all warps of these CTAs and `local` its index in its CTA. `waiting` marks lanes whose last check showed
    that they must still wait or, where `sure` is false, that they may have to wait. `changes` counts changes that may
    end a wait.
    """

    def __init__(
        self, ctas: Sequence[tuple[int, int, int]], grid: tuple[int, int, int], threads: int, reporter: Reporter
    ) -> None:
        self.reporter = reporter
        self.threads, self.ctas, self.warps = threads, len(ctas), threads // WARP
        self.count = threads * len(ctas)
        self.every = np.arange(self.count)
        self.cta = np.repeat(np.arange(len(ctas)), threads)
        self.number = np.repeat(np.array([(z * grid[1] + y) * grid[0] + x for x, y, z in ctas]), threads)
        self.warp = self.every // WARP
        self.local = self.warp % self.warps
        self.waiting, self.sure = np.zeros(self.count, bool), np.zeros(self.count, bool)
        self.changes = 0
        thread = np.tile(np.arange(threads, dtype=np.uint32), len(ctas))
        self.specials = {"%tid.x": thread, "%laneid": thread % WARP, "%warpid": thread // WARP}
        for axis, letter in enumerate("xyz"):
            self.specials.setdefault(f"%tid.{letter}", np.zeros(self.count, np.uint32))
            self.specials[f"%ctaid.{letter}"] = np.repeat(np.array([c[axis] for c in ctas], np.uint32), threads)
            self.specials[f"%nctaid.{letter}"] = np.full(self.count, grid[axis], np.uint32)
            self.specials[f"%ntid.{letter}"] = np.full(self.count, threads if axis == 0 else 1, np.uint32)

    def waits(self, lanes: Indices, still: Any, sure: bool = True) -> None:
        """Record which lanes still wait or, if not `sure`, may be waiting."""
        self.waiting[lanes], self.sure[lanes] = still, sure

    def active(self, mask: Mask) -> Indices:
        """The lanes that take part."""
        return self.every if mask is True else np.flatnonzero(mask)

    def marked(self, mask: Mask) -> NDArray[np.bool_]:
        """The lanes that take part, as bools [lanes]."""
        return np.ones(self.count, bool) if mask is True else mask

    def spread(self, value: Any) -> NDArray[Any]:
        """An operand, which may be one number for all lanes, as an array [lanes]."""
        return np.broadcast_to(value, self.count)

    def whole_warps(self, mask: Mask, line: int) -> Indices:
        """The warps that execute an aligned instruction. Raises Diverged if only part of a warp executes it."""
        if mask is True:
            return np.arange(self.ctas * self.warps)
        table = mask.reshape(-1, WARP)
        some, every = table.any(1), table.all(1)
        if (part := table & (some != every)[:, None]).any():
            lane = int(np.flatnonzero(part)[0])
            raise self.fault(line, lane, "part of a warp executes an aligned instruction", Diverged)
        return np.flatnonzero(every)

    def describe(self, lane: int) -> str:
        return f"CTA {self.number[lane]} thread {lane % self.threads}"

    def say(self, line: int, lane: int | None, text: str, details: str = "", kind: type[Hazard] = Race) -> None:
        """Report a hazard of a lane at a line of the PTX; `lane` is None if no single thread caused it."""
        self.reporter.say(line, text, details, None if lane is None else self.describe(int(lane)), kind)

    def fault(self, line: int, lane: int | None, text: str, kind: type[Fault] = Fault) -> Fault:
        """The fault to raise for a lane at a line of the PTX."""
        return self.reporter.fault(line, text, None if lane is None else self.describe(int(lane)), kind)
