"""What plans must take with the code that they are run by, known before anything runs.

    python -m benchmarks.compiled.loops [--cases NAME ...]

`roofline.py` says what a plan multiplies and reads. How long that takes rests on machine code too: a loop may fetch its
operands from shared memory more often than its matrix units can use them, or take more instructions than there are
cycles. So every attention kernel of the Triton room is compiled for Hopper, the cycles that a turn of its inner loops
keeps a multiprocessor's units busy are counted (`sass.cycles`), and multiplied by the turns of the plan. The longest of
these times and of the plan's own is a bound that only other code or another plan can get below; what programs wait for
comes on top. That is modelled too: turns that wait for memory (`pipelines.py`), on as many programs as fit, and a plan
that ends no sooner than its longest program. Writes its part of docs/predictions.md; with `--cases` only prints.
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
from ragged_attention.tools.samples import device_of


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A case: its plan, and the seconds that its kernels' loops keep each kind of unit busy."""

    plan: roofline.Plan
    busy: dict[str, float]
    waiting: dict[float, float]  # seconds with what programs wait for, by the latency of memory in cycles

    @property
    def bound(self) -> str:
        """What the loops keep busy longest."""
        return max(self.busy, key=self.busy.__getitem__)

    @property
    def least(self) -> float:
        return max(self.plan.exact, self.busy[self.bound])


def predicted(name: str) -> Prediction:
    """A case of the catalogue on the Triton room's kernels."""
    case = catalogue.find(name)
    device = device_of("torch", ARCH)
    launches = {launch.name: launch for launch in compiling.record(case.attention_call(device))}
    busy: dict[str, float] = {}
    waiting = dict.fromkeys(LATENCIES, 0.0)
    for step in case.steps("triton", device):
        least = max(step.times(roofline.H200, exact=True).values())
        walks = pipelines.walks(launches[step.name]) if step.turns else []
        keep_busy(busy, step, walks)
        for latency in LATENCIES:
            waiting[latency] += max(seconds(step, walks, latency) if walks else 0.0, least)
    return Prediction(roofline.plan_of(case, "triton", device), busy, waiting)


def keep_busy(busy: dict[str, float], step: roofline.Step, walks: Sequence[Walk]) -> None:
    """Add the seconds that a kernel's turns keep each kind of unit busy."""
    # A list that comes in two caches is walked by two loops of the same code.
    for walk, number in zip(walks, step.turns, strict=False):
        for unit, cycles in walk.busy:
            busy[unit] = busy.get(unit, 0.0) + cycles * number / (MULTIPROCESSORS * CLOCK)


def seconds(step: roofline.Step, walks: Sequence[Walk], latency: float) -> float:
    """How long a kernel takes at least if its turns wait for memory: all its programs together, and the longest."""
    if not walks[0].programs:
        return math.inf  # it does not fit a multiprocessor
    resident = min(walks[0].programs, step.working / MULTIPROCESSORS)
    cycles = [walk.turn(latency, max(resident, 1)) for walk in walks]
    together = sum(each * turns for each, turns in zip(cycles, step.turns, strict=False))
    alone = [walk.turn(latency) for walk in walks]
    longest = max(sum(map(float.__mul__, alone, map(float, turns))) for turns in step.programs)
    return max(together / (MULTIPROCESSORS * resident), longest) / CLOCK


HEAD = (
    "| | case | floor, us | plan, us | loops, us | of these | bound, us | of the floor | waiting, us | launches "
    "| skew |\n"
)


def table(found: Iterable[Prediction]) -> str:
    lines = []
    for one in found:
        plan, floor = one.plan, one.plan.floor
        waits = " - ".join(dict.fromkeys(f"{seconds * 1e6:.1f}" for seconds in one.waiting.values()))
        lines.append(
            f"| {plan.case.workload} | {plan.case.name} | {floor * 1e6:.1f} | {plan.exact * 1e6:.1f} "
            f"| {one.busy[one.bound] * 1e6:.1f} | {one.bound} | {one.least * 1e6:.1f} | {one.least / floor:.2f} "
            f"| {waits} | {', '.join(map(str, plan.launches))} | {plan.skew:.1f} |\n"
        )
    return document.table(HEAD, lines)


# Bounds in microseconds of the code and the tiles that were, before anybody had read what they compile to.
BEFORE = {
    "gpt_oss_prefill_4k": 46.3, "gemma2_prefill_4k": 430.2, "gemma4_global_prefill_4k": 4170.5,
    "mla_dense_h64_128x4k": 434.6, "mla_dense_h128_128x4k": 869.3, "mla_sparse_h128_128q2": 2187.9,
    "mla_sparse_v4_h64_128q2": 301.4, "mla_sparse_h8_b64": 96.2, "mla_sparse_h32_b64": 136.7,
    "mla_prefill_h128_32k": 14126.3, "mla_prefill_v4_h64_32k": 3849.3, "mla_prefill_fp8_h128_32k": 35007.0,
}  # fmt: skip


def changes(found: Iterable[Prediction]) -> str:
    """Those bounds beside today's."""
    lines = ["| | case | floor, us | before, us | now, us |\n|---|---|---|---|---|\n"]
    for one in found:
        case = one.plan.case
        if case.name in BEFORE:
            least = f"{BEFORE[case.name]:.1f} | {one.least * 1e6:.1f}"
            lines.append(f"| {case.workload} | {case.name} | {one.plan.floor * 1e6:.1f} | {least} |\n")
    return "".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled.loops", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--cases", "--case", nargs="+", help="only these; nothing is written")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    options = parser.parse_args(argv)
    if reason := compiling.why_not():
        print(reason, file=sys.stderr)
        return 2
    device = device_of("torch", ARCH)
    names = options.cases or [name for name, case in catalogue.CASES.items() if case.planned(device)]
    with compiling.processes(options.jobs) as pool:
        found = list(pool.map(predicted, names))
    if options.cases:
        print(table(found))
    else:
        document.replace("loops", table(found))
        document.replace("changed", changes(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
