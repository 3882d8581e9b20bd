"""What a plan costs beyond what its call needs, known before anything runs.

`compiling.record` says what the Triton room launches: tiles, splits, grids. With the lengths of a case that tells which
keys each program visits, so how much it multiplies and how many bytes it asks for. Three things make that more than
the call needs: tiles that masks and padding fill, keys that several programs read, results that are put together from
parts. The CUDA kernels' plan is known from their heuristic and the size of their tiles.

A GPU can multiply, ask its memory and ask its second-level cache for only so much in a second; whichever takes longest
is the least time that a step of the plan can take. The floor of a case is the time in which each needed byte comes once
and no operation is in vain; what the steps together take beyond it is the plan's excess. What is multiplied in a second
part, because rounding to 16 bits would lose it, is not excess but the price of exactness, and shown by itself. Latency,
exponentials and the decoding of 8-bit formats are in neither: a plan without excess may still be slow, but one with
much of it cannot be fast.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.compiled import compiling
from ragged_attention.calls import Device

if TYPE_CHECKING:
    from benchmarks.cases.base import Case

KernelArgs = Mapping[str, Any]  # by name, without the arrays
# Programs that have something to do, by how often they turn in each loop of their kernel: the one without masks, if
# there are two, first.
Programs = Mapping[tuple[float, ...], int]


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What a GPU can do in a second."""

    memory: float  # bytes
    cache: float  # bytes that its second-level cache hands to the multiprocessors
    cache_size: int  # bytes
    multiplying: float  # multiplications and additions of bfloat16 matrices


# Memory and matrices as measured on one. The cache is not: FlashAttention-3 at its fastest (740 TFLOP/s, 128 rows a
# program) must have had 5.8e12 bytes from an H100's, and what it does beside that is taken to be a tenth.
H200 = Machine(memory=4.3e12, cache=6.4e12, cache_size=50 * 10**6, multiplying=7.9e14)


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What programs do."""

    flops: int = 0  # given to the matrix units, with all rows, columns and keys of the tiles
    again: int = 0  # beside these: products of what rounding took from operands
    keys: int = 0  # bytes of keys and values asked for, wherever they come from
    rows: int = 0  # bytes of queries, results and parts of results, read and written

    def __add__(self, other: "Work") -> "Work":
        both = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(mine + others for mine, others in both))

    def __mul__(self, times: int) -> "Work":
        return Work(*(number * times for number in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What the programs of a kernel do, with what must come from memory for it, and what the case needs of it."""

    name: str
    work: Work
    fetched: float = 0  # bytes
    floor: float = 0  # seconds
    programs: Programs = dataclasses.field(default_factory=dict)

    @property
    def turns(self) -> tuple[float, ...]:
        """Of all programs together, in each loop."""
        each = ([count * number for number in turns] for turns, count in self.programs.items())
        return tuple(map(sum, zip(*each, strict=True)))

    @property
    def working(self) -> int:
        """How many programs have something to do."""
        return sum(self.programs.values())

    @property
    def longest(self) -> float:
        """The turns of the program that has most."""
        return max(map(sum, self.programs), default=0.0)

    @property
    def skew(self) -> float:
        """The turns of the longest program, times those of all on average."""
        return self.longest * self.working / sum(self.turns) if self.longest else 1.0

    def times(self, machine: Machine, *, exact: bool) -> dict[str, float]:
        """Seconds by what takes them; `exact`: with what is multiplied again."""
        return {
            "memory": self.fetched / machine.memory,
            "cache": (self.work.keys + self.work.rows) / machine.cache,
            "arithmetic": (self.work.flops + exact * self.work.again) / machine.multiplying,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A launch of a plan: all its programs, and those that have something to do."""

    name: str
    programs: int
    working: int

    def __str__(self) -> str:
        return f"{self.name.removesuffix('_kernel')} {self.working} of {self.programs}"


def launched(found: Iterable[compiling.Launch], steps: Iterable[Step]) -> tuple[Launched, ...]:
    """The launches of a plan beside its steps; one that no step knows has nothing to do."""
    working = {step.name: step.working for step in steps}
    return tuple(Launched(launch.name, launch.programs, working.get(launch.name, 0)) for launch in found)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A case on a backend: its floor and the least time of its plan, in seconds, and what takes that."""

    case: "Case"
    backend: str
    floor: float
    least: float  # without what is multiplied again
    exact: float  # with it
    bound: str
    flops: float  # times what the case needs
    asked: float  # times the bytes that it needs
    launches: tuple[Launched, ...] = ()  # of the Triton room's
    skew: float = 1.0  # of its kernel whose longest program exceeds the average most

    @property
    def excess(self) -> float:
        """How much longer than the floor the plan takes, as a fraction of the floor."""
        return self.least / self.floor - 1


def plan_of(case: "Case", backend: str, device: Device, machine: Machine = H200) -> Plan:
    found = list(case.steps(backend, device, machine))
    least, exact = ([step.times(machine, exact=exact) for step in found] for exact in (False, True))
    work = sum((step.work for step in found), Work())
    recorded = compiling.record(case.attention_call(device)) if backend == "triton" else []
    return Plan(
        case=case,
        backend=backend,
        floor=sum(step.floor for step in found),
        least=sum(max(times.values()) for times in least),
        exact=sum(max(times.values()) for times in exact),
        bound=max(exact[0], key=exact[0].__getitem__),
        flops=(work.flops + work.again) / case.flops(),
        asked=(work.keys + work.rows) / case.needed_bytes(),
        launches=launched(recorded, found),
        skew=max((step.skew for step in found), default=1.0),
    )


def plans(cases: "Iterable[Case]", device: Device, machine: Machine = H200) -> Iterator[Plan]:
    """Every case on every backend whose plans for it can be counted."""
    for case in cases:
        for backend in case.planned(device):
            yield plan_of(case, backend, device, machine)
