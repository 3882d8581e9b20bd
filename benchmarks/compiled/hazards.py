"""What must not stand in the machine code of a kernel for Hopper, whatever it costs: three readings of a listing.

Emulation runs a kernel's source. What the compiler may still do wrong, or slow, shows in its output alone: registers
that a product under way reads or writes and that something else touches meanwhile; products that are not ordered
behind what was written to their operands; loads that wait for each other where they could be under way together.
"""

import re
from collections.abc import Iterator, Sequence

from benchmarks.compiled import sass
from benchmarks.compiled.sass import Instruction
from benchmarks.compiled.scoreboard import control_of

WARPGROUP = 128  # threads that share a product
EXPOSED = 200  # issue cycles after which a load counts as hidden: about the latency of L2, less what other warps issue
HARMLESS = ("R2UR",)  # reads what descriptors are made from; its operands never are accumulators


def found(code: Sequence[Instruction], most_serial: int = 0) -> list[str]:
    """What is wrong with a kernel, one line each; so many loads of a turn may wait for the one before."""
    loads = max((serial_loads(loop) for loop in sass.working_loops(code)), default=0)
    wrong = [f"{line.name} at {line.address:#x} touches registers of a product under way" for line in touching(code)]
    wrong += [
        f"{line.name} at {line.address:#x} is not ordered behind writes to shared memory" for line in unordered(code)
    ]
    if loads > most_serial:
        wrong.append(f"{loads} loads of a turn wait for the one before, which should be under way together")
    return wrong


# ---- products under way


def touching(code: Sequence[Instruction]) -> Iterator[Instruction]:
    """Instructions between a product and the wait for it that read or write its registers, in order of addresses.

    Branches are not followed: a product is waited for in the stretch of code that begins it.
    """
    groups: list[set[int]] = []
    begun: set[int] = set()
    for line in code:
        kind = line.name.partition(".")[0]
        if kind == "HGMMA":
            begun |= _of_product(line)
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


def _of_product(line: Instruction) -> set[int]:
    """The accumulator of an HGMMA, and its left operand where that is in registers."""
    m, n, _ = map(int, line.name.split(".")[1].split("x"))
    first, second = (part.strip() for part in line.operands.split(",")[:2])
    used = _run(first, m * n // WARPGROUP)
    return used | _run(second, 4) if re.fullmatch(r"R\d+", second) else used


def _run(register: str, count: int) -> set[int]:
    first = int(re.sub(r"\D", "", register))
    return set(range(first, first + count))


def registers_of(line: Instruction) -> set[int]:
    """The general registers that an instruction reads or writes, as far as names and modifiers say."""
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
    """The first product of each group that no WARPGROUP.ARRIVE precedes since the group before."""
    arrived = False
    for line in code:
        if line.name == "WARPGROUP.ARRIVE":
            arrived = True
        elif line.name.startswith("HGMMA"):
            if not arrived:
                yield line
            arrived = "gsb0" not in line.operands  # which closes the group
        elif line.name.startswith(("EXIT", "RET")):
            arrived = False


# ---- loads


def serial_loads(loop: Sequence[Instruction]) -> int:
    """Loads from global memory in a turn of a loop that are issued only after something has waited for an earlier one.

    A load that was issued long before, in instructions or in the turn before, costs its waiter nothing; nor does one
    behind which a producer first waits for its readers, as it does wherever it is ahead of them.
    """
    issued: dict[int, int] = {}  # barriers that loads of this turn will set, and when they were issued
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
