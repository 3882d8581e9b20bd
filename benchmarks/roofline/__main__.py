"""Print a table of all plans: the launches of each case, with their work and its cost."""

import argparse
import sys
from collections.abc import Sequence

from benchmarks import roofline
from benchmarks.cases import catalogue
from benchmarks.compiled import document
from ragged_attention.tools.samples import device_of

HEAD = (
    "| | case | backend | floor, us | plan, us | bound by | excess | exactness | x FLOP | x bytes | skew "
    "| programs at work, by launch |\n"
)


def table(found: Sequence[roofline.Plan]) -> str:
    lines = [
        f"| {plan.case.workload} | {plan.case.name} | {plan.backend} "
        f"| {plan.floor * 1e6:.1f} | {plan.exact * 1e6:.1f} | {plan.bound} "
        f"| {plan.excess:.0%} | {plan.exact / plan.least - 1:.0%} | {plan.flops:.2f} | {plan.requested:.2f} "
        f"| {plan.skew:.1f} | {', '.join(map(str, plan.launches))} |\n"
        for plan in found
    ]
    return document.table(HEAD, lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=roofline.__doc__)
    parser.parse_args(argv)
    print(table(list(roofline.plans(catalogue.CASES.values(), device_of("torch", "sm_90")))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
