"""Runs a sample of another project's pytest cases on a CPU, and counts the outcomes.

The benchmarks that run test suites of other projects share this module.
"""

import collections
import hashlib
import math
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ragged_attention.errors import Unsupported

COLUMNS = ("passed", "unsupported", "skipped", "failed")
# Errors of a torch without CUDA. A case with such an error is about streams, graphs or several GPUs, and counts as
# skipped.
NEEDS_CUDA = ("Torch not compiled with CUDA", "requires CUDA support", "Expected a cuda device", "dummy base class")


class Generator(torch.Generator):
    """A random number generator on the CPU, whichever device is requested."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, on_cpu(device))  # type: ignore[call-arg]


class OnCpu(TorchFunctionMode):
    """A mode in which torch's calls for CUDA devices run on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cpu", *args[2:])
        moved: dict[str, Any] = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        if type(moved.get("device")) is int:
            moved["device"] = "cpu"
        dtype: Any = moved.pop("out_dtype") if func is torch.bmm and "out_dtype" in moved else None
        if dtype is not None:  # torch has this argument only for CUDA
            return torch.bmm(args[0].to(dtype), args[1].to(dtype))
        return func(*map(on_cpu, args), **moved)


def on_cpu(value: Any) -> Any:
    """The CPU if `value` is a CUDA device or the name of one, otherwise `value`."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def bare_package(name: str, folder: Path) -> None:
    """Register a package whose modules can be imported without running its `__init__`."""
    package: Any = types.ModuleType(name)
    package.__path__, package.__version__ = [str(folder)], "0"
    sys.modules[name] = package


def without_cuda() -> None:
    """Replace torch's functions that need CUDA and that tests call besides the kernels."""
    torch.Generator = Generator  # type: ignore[misc]
    torch.cuda.synchronize = lambda device=None: None
    torch.accelerator.synchronize = lambda device=None: None


class Sample:
    """A pytest plugin that keeps some small cases of each test, runs them on the CPU, and counts the outcomes.

    Args:
        cases: the number of cases per test.
        largest: the largest product of sizes among a case's parameters.
        sizes: the names of the parameters that are sizes, or lists whose last entry is a size.
        tests: the tests to run, or None for all.
        left_out: tests that do not run, with the reason.
    """

    def __init__(
        self,
        cases: int,
        largest: float,
        sizes: Sequence[str],
        tests: Sequence[str] | None = None,
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        self.cases, self.largest, self.sizes = cases, largest, sizes
        self.tests, self.left_out = tests, left_out or {}
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.reasons: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Keep a sample of the cases. Every run keeps the same cases."""
        names = {item.originalname for item in items}
        self.reasons.update(f"absent: {test}" for test in self.tests or () if test not in names)
        by_test = collections.defaultdict(list)
        for item in items:
            wanted = self.tests is None or item.originalname in self.tests
            if wanted and self.size_of(item) <= self.largest:
                by_test[item.nodeid.partition("[")[0]].append(item)
        items[:] = [
            item
            for group in by_test.values()
            for item in sorted(group, key=lambda case: hashlib.sha256(case.nodeid.encode()).digest())[: self.cases]
        ]

    def size_of(self, item: Any) -> float:
        """The product of the sizes among a case's parameters, a rough measure of its run time."""
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        sizes = [value for name, value in parameters.items() if name in self.sizes]
        lasts = (value[-1] if isinstance(value, list) and value else value for value in sizes)
        return math.prod(value for value in lasts if type(value) is int and value > 0)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failures.append(f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        if reason := self.left_out.get(item.originalname):
            pytest.skip(reason)
        with OnCpu():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        if call.when == "call" or (call.when == "setup" and report.outcome != "passed"):
            file = Path(str(item.path)).name
            outcome = report.outcome
            error = None if call.excinfo is None else call.excinfo.value
            text = (str(error).strip() or type(error).__name__).splitlines()[0][:150]
            if isinstance(error, Unsupported):
                outcome = "unsupported"
                self.reasons[text.partition(", got")[0]] += 1
            elif outcome == "failed" and any(words in text for words in NEEDS_CUDA):
                outcome = "skipped"
                self.reasons[f"skipped: {text}"] += 1
            elif outcome == "failed":
                self.failures.append(f"{item.nodeid}: {type(error).__name__}: {text}")
            elif outcome == "skipped":
                self.reasons[f"skipped: {text[:100]}"] += 1
            self.outcomes[file][outcome] += 1
        return report

    def run(self, checkout: Path, files: Sequence[str], *plugins: Any) -> None:
        """Run the files that exist in the checkout, without the fixtures of its conftest.py files."""
        existing = [str(checkout / file) for file in files if (checkout / file).exists()]
        options = ["--noconftest", "--continue-on-collection-errors", f"--rootdir={checkout}", "-c", "/dev/null"]
        without = [f"-pno:{plugin}" for plugin in ("terminal", "cacheprovider", "xdist", "warnings")]
        if existing:
            pytest.main([*options, *without, *existing], plugins=[self, *plugins])

    def show(self) -> None:
        print(f"\n| file | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
        for file, counts in self.outcomes.items():
            print(f"| {file} | {' | '.join(str(counts[column]) for column in COLUMNS)} |")
        totals = [sum(counts[column] for counts in self.outcomes.values()) for column in COLUMNS]
        print(f"| all | {' | '.join(map(str, totals))} |\n")
        for reason, count in self.reasons.most_common():
            print(f"{count} x {reason}")
        for failure in self.failures:
            print(f"FAILED {failure}")
