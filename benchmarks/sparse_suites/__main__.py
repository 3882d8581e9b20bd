"""Run another project's attention tests through our operations, and print the outcomes."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.foreign_tests import Sample, without_cuda

SUITES = ("aiter", "fla", "minimax_m3", "qsa")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if nothing failed, and 1 otherwise."""
    parser = argparse.ArgumentParser(prog="benchmarks.sparse_suites", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--checkout", type=Path, required=True, help="a folder with the project's tests")
    parser.add_argument("--only", default="", help="only tests whose name contains this")
    parser.add_argument("--cases", type=int, default=12, help="the maximum number of cases per test")
    parser.add_argument("--largest", type=float, help="the maximum product of a case's sizes (default: the suite's)")
    options = parser.parse_args(argv)
    suite = importlib.import_module(f"benchmarks.sparse_suites.{options.suite}")
    checkout = options.checkout.resolve()
    without_cuda()
    suite.install(checkout)
    tests = [test for test in suite.TESTS if options.only in test]
    sample = Sample(options.cases, options.largest or suite.LARGEST, suite.SIZES, tests)
    sample.run(checkout, suite.FILES, suite)
    sample.show()
    return int(bool(sample.failures))


if __name__ == "__main__":
    sys.exit(main())
