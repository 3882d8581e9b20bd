"""Computes, before anything runs, what a plan costs beyond the needs of its call.

The plan of a case is the launches that a backend makes for it. For Triton's paged attention,
`ragged_attention.tools.schedule` runs the kernels' own index arithmetic and so finds the keys that each program visits.
For the other operations, the modules of this package repeat the rules by which the kernels divide their work. The
visited keys give the operations and the bytes of each program. These exceed the needs of the call for three reasons:
masks and padding fill parts of tiles, several programs read the same keys, and partial results have to be merged.

Three rates limit a GPU: operations, bytes from memory, and bytes from its L2 cache. The slowest of the three gives the
least time of a step of the plan. The floor of a case is the time in which each needed byte is read or written once and
no operation is wasted. The plan's excess is the additional time of its steps. Operations that correct the rounding of
operands to 16 bits do not count as excess. They are the price of exactness, and the table shows them separately.
Latency, exponentials and the decoding of 8-bit formats are ignored. So a plan without excess may still be slow, but a
plan with much excess cannot be fast.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.cases.base import Case
from benchmarks.compiled import compiling
from benchmarks.roofline import indexer, mla, paged, ragged_mla
from benchmarks.roofline.model import H200, Machine, Step, Work
from ragged_attention.calls import Device

# Operation -> the module that computes its plans. No plans are computed for other operations.
MODULES: dict[str, Any] = {
    "ragged_paged_attention": paged,
    "mla_decode": mla,
    "sparse_mla_prefill": mla,
    "ragged_mla_attention": ragged_mla,
    "indexer_topk": indexer,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A launch of a plan: its number of programs, and the number of those that have work."""

    name: str
    programs: int
    working: int

    def __str__(self) -> str:
        return f"{self.name.removesuffix('_kernel')} {self.working} of {self.programs}"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a case on a backend: the floor and the least time in seconds, and what bounds that time."""

    case: Case
    backend: str
    floor: float
    least: float  # least time without the operations that correct rounding
    exact: float  # least time with the operations that correct rounding
    bound: str
    flops: float  # operations, relative to the needs of the case
    requested: float  # bytes, relative to the needs of the case
    launches: tuple[Launched, ...] = ()  # the launches of the Triton backend
    skew: float = 1.0  # the largest skew of a kernel

    @property
    def excess(self) -> float:
        """The plan's additional time over the floor, as a fraction of the floor."""
        return self.least / self.floor - 1


def planned(case: Case, device: Device) -> tuple[str, ...]:
    """The backends for which the plan of the case can be computed."""
    module = MODULES.get(case.operation)
    return module.planned(case, device) if module else ()


def steps(case: Case, backend: str, device: Device, machine: Machine = H200, tile: Any = None) -> Iterator[Step]:
    """The steps of the case's plan on a backend of `planned`. `tile` defaults to the heuristic's tile."""
    return MODULES[case.operation].steps(case, backend, device, machine, tile)


def plan_of(case: Case, backend: str, device: Device, machine: Machine = H200) -> Plan:
    counted = list(steps(case, backend, device, machine))
    least, exact = ([step.times(machine, exact=exact) for step in counted] for exact in (False, True))
    work = sum((step.work for step in counted), Work())
    launches = compiling.record(case.attention_call(device)) if backend == "triton" else []
    working = {step.name: step.working for step in counted}
    return Plan(
        case=case,
        backend=backend,
        floor=sum(step.floor for step in counted),
        least=sum(max(times.values()) for times in least),
        exact=sum(max(times.values()) for times in exact),
        bound=max(exact[0], key=exact[0].__getitem__),
        flops=(work.flops + work.again) / case.flops(),
        requested=(work.keys + work.rows) / case.needed_bytes(),
        launches=tuple(Launched(one.name, one.programs, working.get(one.name, 0)) for one in launches),
        skew=max((step.skew for step in counted), default=1.0),
    )


def plans(cases: Iterable[Case], device: Device, machine: Machine = H200) -> Iterator[Plan]:
    """The plans of every case, on every backend for which its plan can be computed."""
    for case in cases:
        for backend in planned(case, device):
            yield plan_of(case, backend, device, machine)
