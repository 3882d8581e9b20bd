"""What plans must take with the code that they are run by, known before anything runs.

    python -m benchmarks.compiled.loops [--case NAME ...]

`roofline.py` says what a plan multiplies and reads. How long that takes rests on machine code too: a loop may fetch its
operands from shared memory more often than its matrix units can use them, or take more instructions than there are
cycles. So every attention kernel of the Triton room is compiled for Hopper, the cycles that a turn of its inner loops
keeps a multiprocessor's units busy are counted (`sass.cycles`), and multiplied by the turns of the plan. The longest of
these times and of the plan's own is a bound that only other code or another plan can get below; what programs wait for
comes on top. Writes docs/predictions.md; with `--case` only prints.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import roofline
from benchmarks.cases import catalogue
from benchmarks.compiled import compiling
from ragged_attention.samples import device_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "predictions.md"
ARCH = "sm_90"
CLOCK = 1.75e9  # cycles in a second, of an H200 at work; not measured
MULTIPROCESSORS = 132
HERE, END = "<!-- table -->\n", "<!-- end -->\n"  # between what the document says of it


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A case: its plan, and the seconds that its kernels' loops keep each kind of unit busy."""

    plan: roofline.Plan
    busy: dict[str, float]

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
    for step in case.steps("triton", device):
        if step.name == "combine_kernel":
            continue
        loops = compiling.compile_launch(launches[step.name], ARCH).loops
        # A list that comes in two caches is walked by two loops of the same code.
        for loop, number in zip(loops, step.turns, strict=False):
            for unit, cycles in loop.cycles:
                busy[unit] = busy.get(unit, 0.0) + cycles * number / (MULTIPROCESSORS * CLOCK)
    return Prediction(roofline.plan_of(case, "triton", device), busy)


HEAD = "| | case | floor, us | plan, us | loops, us | of these | bound, us | of the floor |\n"


def table(found: Iterable[Prediction]) -> str:
    lines = []
    for one in found:
        plan, floor = one.plan, one.plan.floor
        lines.append(
            f"| {plan.case.workload} | {plan.case.name} | {floor * 1e6:.1f} | {plan.exact * 1e6:.1f} "
            f"| {one.busy[one.bound] * 1e6:.1f} | {one.bound} | {one.least * 1e6:.1f} | {one.least / floor:.2f} |\n"
        )
    return HEAD + "|---" * HEAD.count(" |") + "|\n" + "".join(lines)


def written(document: str, new: str) -> str:
    """The document with its table replaced."""
    before, _, rest = document.partition(HERE)
    return before + HERE + "\n" + new + "\n" + END + rest.partition(END)[2]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled.loops", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--case", nargs="+", help="only these; nothing is written")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    options = parser.parse_args(argv)
    if reason := compiling.why_not():
        print(reason, file=sys.stderr)
        return 2
    with compiling.processes(options.jobs) as pool:
        text = table(
            pool.map(
                predicted,
                options.case
                or [name for name, case in catalogue.CASES.items() if case.planned(device_of("torch", ARCH))],
            )
        )
    if options.case:
        print(text)
    else:
        DOCUMENT.write_text(written(DOCUMENT.read_text(), text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
