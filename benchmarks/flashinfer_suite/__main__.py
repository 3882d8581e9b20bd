"""Run FlashInfer's definitions and a sample of its tests, and print the outcomes."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.flashinfer_suite import cases, definitions, substitute


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if nothing failed, and 1 otherwise."""
    parser = argparse.ArgumentParser(prog="benchmarks.flashinfer_suite", description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True, help="a folder with FlashInfer's tests and definitions")
    parser.add_argument("--only", default="", help="only definitions and files whose name contains this")
    parser.add_argument("--cases", type=int, default=12, help="the maximum number of cases per test")
    parser.add_argument("--largest", type=float, default=1e7, help="the maximum product of a case's sizes")
    options = parser.parse_args(argv)
    substitute.install(options.checkout.resolve())
    outcomes = definitions.judge(options.only)
    for name, outcome in outcomes.items():
        print(f"definition {name}: {outcome}")
    sample = cases.run(options.checkout.resolve(), options.only, options.cases, options.largest)
    sample.show()
    return int(bool(sample.failures) or "failed" in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
