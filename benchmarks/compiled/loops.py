"""Predicts the least time of each plan from its compiled kernels, before anything runs.

    python -m benchmarks.compiled.loops [--cases NAME ...]

`benchmarks.roofline` counts what a plan multiplies and reads. Its time also depends on the machine code: a loop may
load operands from shared memory too slowly for the matrix units, or need too many instructions. So every attention
kernel of the Triton backend is compiled for Hopper, and `sass.cycles` counts the cycles for which an iteration of its
inner loops keeps each unit of a multiprocessor busy. Multiplied by the iterations of the plan, that gives a time for
each unit. The longest of these times and of the plan's own times is a lower bound for this code and this plan. Waits
are modelled in addition: iterations wait for memory (`pipelines.py`) while as many programs run as fit, and a plan ends
no earlier than its longest program. The command writes its part of docs/predictions.md; with `--cases` it only prints.
"""

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Iterable, Sequence

from benchmarks import roofline
from benchmarks.cases import catalogue
from benchmarks.compiled import compiling, document, pipelines
from benchmarks.compiled.hopper import ARCH, CLOCK, LATENCIES, MULTIPROCESSORS
from benchmarks.compiled.pipelines import Walk
from benchmarks.roofline.model import H200, Step
from ragged_attention.tools.samples import device_of


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """The plan of a case, and the seconds for which the loops of its kernels keep each kind of unit busy."""

    plan: roofline.Plan
    busy: dict[str, float]
    waiting: dict[float, float]  # latency of memory in cycles -> seconds including waits

    @property
    def bound(self) -> str:
        """The unit that the loops keep busy longest."""
        return max(self.busy, key=self.busy.__getitem__)

    @property
    def least(self) -> float:
        return max(self.plan.exact, self.busy[self.bound])


def predicted(name: str) -> Prediction:
    """The prediction for a case of the catalogue on the Triton backend."""
    case = catalogue.find(name)
    device = device_of("torch", ARCH)
    launches = {launch.name: launch for launch in compiling.record(case.attention_call(device))}
    busy: dict[str, float] = {}
    waiting = dict.fromkeys(LATENCIES, 0.0)
    for step in roofline.steps(case, "triton", device):
        least = max(step.times(H200, exact=True).values())
        walks = pipelines.walks(launches[step.name]) if step.turns else []
        keep_busy(busy, step, walks)
        for latency in LATENCIES:
            waiting[latency] += max(seconds(step, walks, latency) if walks else 0.0, least)
    return Prediction(roofline.plan_of(case, "triton", device), busy, waiting)


def keep_busy(busy: dict[str, float], step: Step, walks: Sequence[Walk]) -> None:
    """Add the seconds for which the iterations of a kernel keep each kind of unit busy."""
    # `step.turns` has one number for two loops with equal code, which visit the two caches of a list.
    for walk, number in zip(walks, step.turns, strict=False):
        for unit, cycles in walk.busy:
            busy[unit] = busy.get(unit, 0.0) + cycles * number / (MULTIPROCESSORS * CLOCK)


def seconds(step: Step, walks: Sequence[Walk], latency: float) -> float:
    """The least time of a kernel whose iterations wait for memory: of all programs, or of the longest program."""
    if not walks[0].programs:
        return math.inf  # the kernel does not fit a multiprocessor
    resident = min(walks[0].programs, step.working / MULTIPROCESSORS)
    cycles = [walk.turn(latency, max(resident, 1)) for walk in walks]
    together = sum(per_turn * turns for per_turn, turns in zip(cycles, step.turns, strict=False))
    alone = [walk.turn(latency) for walk in walks]
    longest = max(sum(map(float.__mul__, alone, map(float, turns))) for turns in step.programs)
    return max(together / (MULTIPROCESSORS * resident), longest) / CLOCK


HEAD = (
    "| | case | floor, us | plan, us | loops, us | of these | bound, us | of the floor | waiting, us | launches "
    "| skew |\n"
)


def table(predictions: Iterable[Prediction]) -> str:
    lines = []
    for one in predictions:
        plan, floor = one.plan, one.plan.floor
        waits = " - ".join(dict.fromkeys(f"{seconds * 1e6:.1f}" for seconds in one.waiting.values()))
        lines.append(
            f"| {plan.case.workload} | {plan.case.name} | {floor * 1e6:.1f} | {plan.exact * 1e6:.1f} "
            f"| {one.busy[one.bound] * 1e6:.1f} | {one.bound} | {one.least * 1e6:.1f} | {one.least / floor:.2f} "
            f"| {waits} | {', '.join(map(str, plan.launches))} | {plan.skew:.1f} |\n"
        )
    return document.table(HEAD, lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled.loops", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--cases", "--case", nargs="+", help="only these cases; nothing is written")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    options = parser.parse_args(argv)
    if reason := compiling.why_not():
        print(reason, file=sys.stderr)
        return 2
    device = device_of("torch", ARCH)
    names = options.cases or [name for name, case in catalogue.CASES.items() if roofline.planned(case, device)]
    with compiling.processes(options.jobs) as pool:
        predictions = list(pool.map(predicted, names))
    if options.cases:
        print(table(predictions))
    else:
        document.replace("loops", table(predictions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
