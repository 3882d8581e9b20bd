"""The time of a loop iteration of one program that has a multiprocessor to itself, with instructions issued in order.

`sass.cycles` says how long units are busy, but does not include waits. The machine code shows the waits: each NVIDIA
instruction has control bits with the cycles until the next instruction may issue, the barrier (one of six) that its
result sets, the barrier that is set once its operands are read, and the barriers that it waits for. Copies to shared
memory form groups (LDGDEPBAR) on such a barrier, and `DEPBAR.LE SB0, n` waits until at most n groups are in flight. For
instructions without a fixed latency, this module assumes a latency. It issues a loop as a warp would, with all warps of
the program in step, until every iteration takes the same time.

The latencies are rounded from published measurements on Hopper. The caller gives the latency of memory: 1000 to 1500
cycles under load, about 700 without. The results are good for ratios between loops, not for absolute times.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.compiled import sass
from benchmarks.compiled.sass import Instruction

# Latencies in cycles. They begin when the unit has accepted an instruction, and end when its result is ready.
SHARED_LATENCY = 26
SPECIAL_LATENCY = 18
MATRIX_LATENCY = 30  # latency of HGMMA; that of HMMA is in the control bits
OTHER_LATENCY = 20
READ_LATENCY = 10  # cycles until operands are read
BARRIER = 22  # latency of a barrier for all warps of a program
L2_LATENCY = 300  # latency of loads of page numbers, slots and lengths
INDEX = {
    "LDGSTS": 4,
    "LDG": 8,
    "LD": 8,
}  # the most bytes per thread of a load that counts as a load of page numbers, slots or lengths
WARM_UP, MEASURED = 8, 8  # iterations
NO_BARRIER = 7


class Control(NamedTuple):
    """The decoded control bits of an instruction."""

    stall: int  # cycles until the next instruction may be issued
    sets: int | None  # the barrier that is set when the result is ready
    reads: int | None  # the barrier that is set when the operands are read
    waits: tuple[int, ...]  # the barriers that the instruction waits for


def control_of(bits: int) -> Control:
    """The decoded form of the 21 bits in `Instruction.control`."""
    sets, reads, waits = bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63
    return Control(
        max(bits & 15, 1),
        None if sets == NO_BARRIER else sets,
        None if reads == NO_BARRIER else reads,
        tuple(index for index in range(6) if waits >> index & 1),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One iteration of a loop."""

    cycles: float
    in_flight: int  # the most bytes in flight at a wait for memory
    least_wait: int | None  # copy groups still in flight after the strictest wait; None if no wait is for groups


@dataclasses.dataclass
class _Pending:
    """An operation that will set a barrier: when it is done, and the bytes that it loads."""

    done: float
    size: int = 0


class Program:
    """The state of one program's warps, which run in step."""

    def __init__(self, num_warps: int, memory: float) -> None:
        self.num_warps, self.memory = num_warps, memory
        self.now = 0.0
        self.free: dict[str, float] = {}  # unit -> time when it has accepted all instructions given to it
        self.barriers: list[list[_Pending]] = [[] for _ in range(6)]
        self.copies = _Pending(0.0)  # the group that is not closed yet
        self.products: list[float] = []  # the times when groups of HGMMAs are done
        self.in_flight, self.least_wait = 0, None

    def issue(self, line: Instruction, control: Control, unit: str, busy: float, latency: float) -> None:
        """Wait for the barriers of the instruction, occupy its unit, and advance the time."""
        for index in control.waits:
            self._wait(index)
        kind = line.name.partition(".")[0]
        if kind in ("DEPBAR", "WARPGROUP"):
            self._wait_for_groups(line)
        start = max(self.now, self.free.get(unit, 0.0)) if unit else self.now
        if unit:
            self.free[unit] = start + busy
        done, size = start + busy + latency, 0
        if kind in INDEX:
            size = keys_of(line) * self.num_warps
            done = start + (self.memory if size else min(L2_LATENCY, self.memory))
        if kind == "LDGSTS":
            self.copies.done = max(self.copies.done, done)
            self.copies.size += size
        elif kind == "LDGDEPBAR":
            last = self.barriers[control.sets or 0][-1:]
            self.barriers[control.sets or 0].append(
                _Pending(max([self.copies.done, *(group.done for group in last)]), self.copies.size)
            )
            self.copies = _Pending(0.0)
        elif control.sets is not None:
            self.barriers[control.sets].append(_Pending(done, size))
        if control.reads is not None:
            self.barriers[control.reads].append(_Pending(start + busy + READ_LATENCY))
        if kind in sass.WARPGROUPWISE and "gsb0" in line.operands:
            self.products.append(done)
        # A busy unit queues further instructions, except products and barriers.
        held = start if unit in ("products", "barrier") else self.now
        self.now = max(held + max(control.stall, self.num_warps / 4), done if unit == "barrier" else 0)

    def _wait(self, index: int, left: int = 0) -> None:
        """Wait until at most `left` operations of a barrier are in flight."""
        pending = self.barriers[index]
        number = max(len(pending) - left, 0)
        if any(operation.size for operation in pending[:number]):
            total = sum(operation.size for barrier in self.barriers for operation in barrier)
            self.in_flight = max(self.in_flight, total + self.copies.size)
        self.now = max([self.now, *(operation.done for operation in pending[:number])])
        del pending[:number]

    def _wait_for_groups(self, line: Instruction) -> None:
        """Wait for groups of copies (DEPBAR) or of HGMMAs (WARPGROUP.DEPBAR)."""
        if copies := re.match(r"SB(\d), (0x[0-9a-f]+)", line.operands):
            left = int(copies[2], 16)
            self.least_wait = left if self.least_wait is None else min(self.least_wait, left)
            self._wait(int(copies[1]), left)
        elif products := re.match(r"gsb0, (0x[0-9a-f]+)", line.operands):
            number = max(len(self.products) - int(products[1], 16), 0)
            self.now = max([self.now, *self.products[:number]])
            del self.products[:number]


def keys_of(line: Instruction) -> int:
    """The bytes of keys and values that a load fetches for a warp. It is 0 for loads of indices."""
    width = sass.load_width(line.name)
    return 32 * width if width > INDEX.get(line.name.partition(".")[0], width) else 0


def use(line: Instruction, num_warps: int) -> tuple[str, float, float]:
    """(unit, cycles for which the instructions of all warps occupy it, latency after these cycles).

    The unit is "" for an instruction that never waits for a unit.
    """
    kind, *modifiers = line.name.split(".")
    busy = sass.cycles([line], num_warps)
    if kind == "HMMA":
        return "products", busy["matrices"], 0.0
    if kind in sass.WARPGROUPWISE:
        return "HGMMA", max(busy["matrices"], busy["shared memory"]), MATRIX_LATENCY
    if kind in ("LDS", "LDSM", "STS", "STSM", "LDGSTS"):
        return "shared memory", busy["shared memory"], SHARED_LATENCY
    if kind in ("SHFL", "ATOMS", "LDG", "LD", "STG", "RED"):
        return "shared memory", float(num_warps), SHARED_LATENCY
    if kind in sass.SPECIALS:
        return "special functions", busy["special functions"], SPECIAL_LATENCY
    if kind == "BAR" and modifiers[:1] != ["ARV"]:
        return "barrier", 0.0, BARRIER
    return "", 0.0, OTHER_LATENCY


def turn(lines: Sequence[Instruction], num_warps: int, memory: float) -> Turn:
    """The steady state of an iteration. `memory` is the latency of memory in cycles."""
    program = Program(num_warps, memory)
    steps = [(line, control_of(line.control or 0), *use(line, num_warps)) for line in lines]
    times = []
    for number in range(WARM_UP + MEASURED):
        if number == WARM_UP:
            program.in_flight = 0
        times.append(program.now)
        for step in steps:
            program.issue(*step)
    return Turn((program.now - times[WARM_UP]) / MEASURED, program.in_flight, program.least_wait)


def copied(lines: Sequence[Instruction], num_warps: int) -> int:
    """The bytes of keys and values that a program loads per iteration."""
    return sum(map(keys_of, lines)) * num_warps
