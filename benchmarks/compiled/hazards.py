"""Finds three hazards in the machine code of a Hopper kernel.

Emulation runs the source of a kernel, so it cannot see errors and delays that the compiler adds. These hazards are:

- An instruction touches registers of a product in flight.
- A product is not ordered after the writes to its operands.
- A load waits for another load although both could be in flight together.
"""

import re
from collections.abc import Iterator, Sequence

from benchmarks.compiled import sass
from benchmarks.compiled.sass import Instruction
from benchmarks.compiled.scoreboard import control_of

WARPGROUP = 128  # threads that compute a product together
# Issue cycles after which the latency of a load counts as hidden: about the latency of L2, less the issue cycles of
# other warps.
EXPOSED = 200
HARMLESS = ("R2UR",)  # may read registers meanwhile: its operands form descriptors and are never accumulators


def found(code: Sequence[Instruction], most_serial: int = 0) -> list[str]:
    """The hazards of a kernel, one line each. In an iteration, `most_serial` loads may wait for an earlier load."""
    loads = max((serial_loads(loop) for loop in sass.working_loops(code)), default=0)
    wrong = [f"{line.name} at {line.address:#x} touches registers of a product in flight" for line in touching(code)]
    wrong += [
        f"{line.name} at {line.address:#x} is not ordered after writes to shared memory" for line in unordered(code)
    ]
    if loads > most_serial:
        wrong.append(f"{loads} loads of an iteration wait for the previous one, but should be in flight together")
    return wrong


# ---- matrix products in flight


def touching(code: Sequence[Instruction]) -> Iterator[Instruction]:
    """The instructions that touch a product's registers between the product and its wait, ordered by address.

    Branches are not followed, since the wait for a product is in the same basic block as the product.
    """
    groups: list[set[int]] = []
    begun: set[int] = set()
    for line in code:
        kind = line.name.partition(".")[0]
        if kind == "HGMMA":
            begun |= _product_registers(line)
            if "gsb0" in line.operands:
                groups.append(begun)
                begun = set()
        elif (
            wait := re.match(r"gsb0, (0x[0-9a-f]+)", line.operands)
            if line.name.startswith("WARPGROUP.DEPBAR")
            else None
        ):
            del groups[: max(len(groups) - int(wait[1], 16), 0)]
        elif kind in ("EXIT", "RET"):
            groups, begun = [], set()
        elif kind not in HARMLESS and registers_of(line) & begun.union(*groups):
            yield line


def _product_registers(line: Instruction) -> set[int]:
    """The registers of an HGMMA: its accumulator, and its left operand if that is in registers."""
    m, n, _ = map(int, line.name.split(".")[1].split("x"))
    first, second = (part.strip() for part in line.operands.split(",")[:2])
    used = _run(first, m * n // WARPGROUP)
    return used | _run(second, 4) if re.fullmatch(r"R\d+", second) else used


def _run(register: str, count: int) -> set[int]:
    first = int(re.sub(r"\D", "", register))
    return set(range(first, first + count))


def registers_of(line: Instruction) -> set[int]:
    """The general registers that an instruction reads or writes, as far as its name and modifiers tell."""
    used: set[int] = set()
    for position, part in enumerate(line.operands.split(",")):
        for match in re.finditer(r"(?<![\w])R(\d+)(\.64)?", part):
            wide = 1
            if "[" not in part:
                wide = 4 if ".128" in line.name else 2 if ".64" in line.name or line.name.startswith("CS2R") else 1
            if ("WIDE" in line.name and position in (0, 3)) or match[2]:
                wide = 2
            used |= set(range(int(match[1]), int(match[1]) + wide))
    return used


def unordered(code: Sequence[Instruction]) -> Iterator[Instruction]:
    """The first product of each group that has no WARPGROUP.ARRIVE between it and the previous group."""
    arrived = False
    for line in code:
        if line.name == "WARPGROUP.ARRIVE":
            arrived = True
        elif line.name.startswith("HGMMA"):
            if not arrived:
                yield line
            arrived = "gsb0" not in line.operands  # gsb0 closes the group
        elif line.name.startswith(("EXIT", "RET")):
            arrived = False


# ---- loads


def serial_loads(loop: Sequence[Instruction]) -> int:
    """The number of global loads of an iteration that are issued only after a wait for an earlier load.

    Two kinds of waits are not counted. The load may have been issued long before, at least EXPOSED issue cycles earlier
    or in the previous iteration. Or the producer has waited for its readers since the load, so it is ahead of them.
    """
    issued: dict[int, int] = {}  # barrier -> when this iteration issued the load that will set the barrier
    now = serial = 0
    waited = False
    for line in loop:
        control = control_of(line.control or 0)
        if line.name.startswith("SYNCS.PHASECHK"):
            issued.clear()
        for barrier in control.waits:
            since = issued.pop(barrier, None)
            waited |= since is not None and now - since < EXPOSED
        if line.name.partition(".")[0] in ("LDG", "LD"):
            serial += waited
            waited = False
            if control.sets is not None:
                issued[control.sets] = now
        elif control.sets is not None:
            issued.pop(control.sets, None)
        now += control.stall
    return serial
