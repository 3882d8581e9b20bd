"""Reads the TPU compiler's dumps of a kernel: its schedule, the busy units, the spills.

A TPU core runs bundles. A bundle has one instruction for each unit, and takes one cycle if nothing stalls. The compiler
schedules all bundles, so their number, and the share of them that use a unit, show what limits a kernel. No TPU is
needed. `--xla_jf_dump_to=FOLDER --xla_jf_dump_llo_text=true` in LIBTPU_INIT_ARGS makes the dumps.
"""

import dataclasses
import re
from pathlib import Path

UTILIZATION = "final_hlo-static-per-bundle-utilization"
BUNDLES = "final_bundles"
ANALYSIS = "schedule-analysis_final_bundles"
PROGRAM = "TLP"  # the program that calls the kernels
CUSTOM_CALL = 'custom_call_target="tpu_custom_call"'
UNITS = ("MXU", "VALU", "VLOAD", "VSTORE")
SPILLS, FILLS = "VSTORE:SPILL", "VLOAD:FILL"

_FILE = re.compile(r"\d+-(?P<kernel>.+?)-(?P<stage>\d+)-(?P<name>[^/]+)\.txt")
_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(?P<mark>[A-Z]{2})? *: *(?P<depth>>*) *{(?P<empty>})?", re.MULTILINE)
_ALLOCATION = re.compile(r"^ *#allocation(\d+) \[.*?space=vmem, size = 0x([0-9a-f]+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A piece of a schedule: its length, and how busy each unit is."""

    bundles: int = 0
    busy: tuple[tuple[str, float], ...] = ()  # (unit, percent of its capacity)

    def percent(self, unit: str) -> float:
        return dict(self.busy).get(unit, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel."""

    name: str
    whole: Part
    loop: Part  # the loop with most of the matrix work, including the loops nested in it
    spills: int  # vector registers stored to memory because there are too few
    loop_spills: int  # spills in `loop`
    fills: int  # spilled vector registers that are loaded again
    loop_fills: int
    vmem: int  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Utilization:
    """How often each bundle uses each unit."""

    units: tuple[str, ...]
    capacities: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]

    def total(self, unit: str, first: int = 0, stop: int | None = None) -> int:
        index = self.units.index(unit)
        return sum(row[index] for row in self.rows[first:stop])

    def part(self, first: int = 0, stop: int | None = None) -> Part:
        count = len(self.rows[first:stop])
        slots = {unit: count * capacity for unit, capacity in zip(self.units, self.capacities, strict=True)}
        busy = ((unit, 100 * self.total(unit, first, stop) / slots[unit]) for unit in UNITS if slots.get(unit))
        return Part(count, tuple(busy))


def utilization(text: str) -> _Utilization:
    """The parsed table of uses per bundle. In `text`, the units' names and their capacities come before the table."""
    lines = text.splitlines()
    begin = next(index for index, line in enumerate(lines) if "UTILIZATION" in line)
    rows = (tuple(map(int, line.split())) for line in lines[begin + 1 :] if re.fullmatch(r"[\d\s]+", line))
    units = tuple(name.strip() for name in lines[1].split(","))
    return _Utilization(units, tuple(map(int, lines[2].split())), tuple(rows))


def loops(text: str) -> list[tuple[int, int]]:
    """The loops of a schedule: (first bundle of the body, first bundle after it)."""
    found: list[tuple[int, int]] = []
    opened: list[tuple[int, int]] = []  # (depth, first bundle)
    index = 0
    for index, bundle in enumerate(_BUNDLE.finditer(text)):
        begins = bundle["mark"] == "LB"
        if bundle["empty"] and not begins:  # an empty bundle is printed without its depth
            continue
        depth = len(bundle["depth"])
        while opened and (depth < opened[-1][0] or (begins and depth == opened[-1][0])):
            found.append((opened.pop()[1], index))
        if begins:
            opened.append((depth, index))
    return found + [(first, index + 1) for _, first in opened]


def vmem(text: str) -> int:
    """The bytes of vector memory in a list of allocations."""
    return sum(int(size, 16) for size in dict(_ALLOCATION.findall(text)).values())


def _main_loop(use: _Utilization, bodies: list[tuple[int, int]]) -> tuple[int, int]:
    """The loop with the most matrix work outside its inner loops. If several have equally much, it is the longest.

    A schedule without loops is returned whole.
    """
    if not bodies:
        return 0, len(use.rows)

    def own_work(body: tuple[int, int]) -> int:
        inner = [other for other in bodies if other != body and body[0] <= other[0] and other[1] <= body[1]]
        outermost = [one for one in inner if not any(o != one and o[0] <= one[0] and one[1] <= o[1] for o in inner)]
        return use.total("MXU", *body) - sum(use.total("MXU", *one) for one in outermost)

    return max(bodies, key=lambda body: (own_work(body), body[1] - body[0]))


def read(folder: Path) -> list[Kernel]:
    """The Pallas kernels in a folder of dumps, sorted by name."""
    files: dict[tuple[str, str], dict[str, tuple[int, Path]]] = {}
    for path in sorted(folder.glob("*.txt")):
        if found := _FILE.fullmatch(path.name):
            stages = files.setdefault((found["kernel"], path.name.partition("-")[0]), {})
            stages[found["name"]] = int(found["stage"]), path
    kernels = []
    for (name, _), stages in files.items():
        if name == PROGRAM or not {UTILIZATION, BUNDLES, ANALYSIS} <= set(stages):
            continue
        if CUSTOM_CALL not in stages[ANALYSIS][1].read_text():
            continue
        use = utilization(stages[UTILIZATION][1].read_text())
        memory = (path for _, path in sorted(stages.values(), reverse=True) if _ALLOCATION.search(path.read_text()))
        loop = _main_loop(use, loops(stages[BUNDLES][1].read_text()))
        kernels.append(
            Kernel(
                name=name.rpartition(".")[0] or name,
                whole=use.part(),
                loop=use.part(*loop),
                spills=use.total(SPILLS),
                loop_spills=use.total(SPILLS, *loop),
                fills=use.total(FILLS),
                loop_fills=use.total(FILLS, *loop),
                vmem=vmem(next(memory).read_text()) if "post-ra" in stages else 0,
            )
        )
    return sorted(kernels, key=lambda kernel: kernel.name)
