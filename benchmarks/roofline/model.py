"""The parts of a plan, which is the launches of a case: the work of each kernel, and its time at the rates of a GPU."""

import dataclasses
from collections.abc import Mapping
from typing import Any

KernelArgs = Mapping[str, Any]  # arguments of a launch by name, without the arrays
# (iterations of each inner loop) -> the number of programs with these iterations. Programs without work are left out.
# If a kernel has a loop without masks and a masked loop, the loop without masks comes first.
Programs = Mapping[tuple[float, ...], int]


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The rates of a GPU, per second, and the size of its L2 cache."""

    memory: float  # bytes from memory
    cache: float  # bytes from the L2 cache to the multiprocessors
    cache_size: int  # bytes of the L2 cache
    multiplying: float  # floating-point operations of bfloat16 matrix products


# The rates of memory and matrix products were measured on an H200. The rate of the L2 cache is an estimate: at its
# fastest on an H100 (740 TFLOP/s, 128 rows per program), FlashAttention-3 must have read 5.8e12 bytes of keys and
# values per second from the L2 cache. We assume that its other traffic adds a tenth.
H200 = Machine(memory=4.3e12, cache=6.4e12, cache_size=50 * 10**6, multiplying=7.9e14)


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The work of programs."""

    flops: int = 0  # operations of matrix products, over all rows, columns and keys of the tiles
    again: int = 0  # operations in addition to `flops`, which correct the rounding of operands
    keys: int = 0  # bytes of keys and values that are read from memory or a cache
    rows: int = 0  # bytes of queries, results and partial results, read or written

    def __add__(self, other: "Work") -> "Work":
        both = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(mine + others for mine, others in both))

    def __mul__(self, times: int) -> "Work":
        return Work(*(number * times for number in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One kernel of a plan: its work, the bytes that it reads and writes in memory, its floor, and its programs."""

    name: str
    work: Work
    fetched: float = 0  # bytes from or to memory
    floor: float = 0  # the least seconds that the case needs for this step
    programs: Programs = dataclasses.field(default_factory=dict)

    @property
    def turns(self) -> tuple[float, ...]:
        """The iterations of each loop, summed over all programs."""
        per_group = ([count * number for number in turns] for turns, count in self.programs.items())
        return tuple(map(sum, zip(*per_group, strict=True)))

    @property
    def working(self) -> int:
        """The number of programs that have work."""
        return sum(self.programs.values())

    @property
    def longest(self) -> float:
        """The iterations of the longest program."""
        return max(map(sum, self.programs), default=0.0)

    @property
    def skew(self) -> float:
        """The iterations of the longest program, divided by the average iterations of a program."""
        return self.longest * self.working / sum(self.turns) if self.longest else 1.0

    def times(self, machine: Machine, *, exact: bool) -> dict[str, float]:
        """Resource of the machine -> the seconds for which the step uses it.

        `exact` includes the operations that correct rounding.
        """
        return {
            "memory": self.fetched / machine.memory,
            "cache": (self.work.keys + self.work.rows) / machine.cache,
            "arithmetic": (self.work.flops + exact * self.work.again) / machine.multiplying,
        }


def visible(low: int, high: int, kv_len: int, window: int | None) -> tuple[int, int]:
    """The range of keys [first, last) that at least one query at a position in [low, high] sees."""
    return max(low - window + 1, 0) if window else 0, min(high + 1, kv_len)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
