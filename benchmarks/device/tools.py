"""Items that run other programs: NVIDIA's checkers and profiler, FlashMLA's cases, the cost of a call on the host.

Each item is a command. A process of this module starts it and reads its output, but never touches the device.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases.catalogue import CASES
from benchmarks.device.plan import program
from benchmarks.device.pool import ROOT, environment
from benchmarks.device.record import CANNOT, FAILED, LATE, PASSED

FOUND = 9  # exit status of a checker that has found an error
LAST = 1200  # characters kept from the end of a command's output
SPARE = 3.0  # seconds of an item's limit reserved for killing a late command and reading its output
CHECKERS = ("memcheck", "racecheck", "synccheck")
PROFILED = "dram__bytes.sum.per_second,gpu__time_duration.sum,sm__throughput.avg.pct_of_peak_sustained_elapsed"
MOST_LAUNCHES = 4  # most launches of a call that are profiled


class Items:
    def __init__(self, device: str) -> None:
        self.device = device
        self.limit = 600.0
        few = "" if device == "cuda" else ", cuda.SMALL[3::6]"
        self.checked = {
            "triton": watched_code(device, f"checks.poke(2, device={device!r})"),
            "cuda": watched_code(device, f"cuda.exercise(1, {device!r}{few})"),
        }

    def facts(self) -> dict[str, Any]:
        return {name: program(name) for name in ("compute-sanitizer", "ncu")}

    def names(self, what: str) -> list[str]:
        match what:
            case "memcheck":
                return [f"{what} {backend}" for backend in self.checked]
            case "sanitizers":
                return [f"{checker} cuda" for checker in CHECKERS if checker != "memcheck"]
            case "profile":
                return [f"{backend} {name}" for backend in ("triton", "cuda") for name in CASES]
            case _:
                return [what]

    def run(self, what: str, name: str) -> dict[str, Any]:
        runs: dict[str, Callable[[str], dict[str, Any]]] = {
            "profile": self.profiled, "host": self.host, "flash_mla": self.flash_mla,
        }  # fmt: skip
        return runs.get(what, self.watched)(name)

    def watched(self, name: str) -> dict[str, Any]:
        """Run small calls with arbitrary numbers in their index arrays under one of the checkers."""
        checker, backend = name.split()
        command = [sys.executable, "-c", self.checked[backend]]
        if self.device == "cuda":
            tool = program("compute-sanitizer")
            if tool is None:
                return {"result": CANNOT, "message": "compute-sanitizer is not installed"}
            options = ["--error-exitcode", str(FOUND), "--report-api-errors", "no"]
            command = [tool, "--tool", checker, *(options if checker == "memcheck" else options[:2]), *command]
        # torch's allocator reuses freed memory, so a stray access can fall into its pool unseen. Without the pool
        # each array is a separate allocation, and the checker sees the access.
        return self.run_command(command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")

    def profiled(self, name: str) -> dict[str, Any]:
        """Profile the kernels of one call. The clocks are left as they are."""
        tool = program("ncu")
        if tool is None:
            return {"result": CANNOT, "message": "ncu is not installed"}
        backend, case = name.split()
        code = f"from benchmarks.device.bench import call; call({case!r}, {backend!r})"
        command = [
            tool, "--clock-control", "none", "--profile-from-start", "off", "--launch-count", str(MOST_LAUNCHES),
            "--metrics", PROFILED, "--csv", sys.executable, "-c", code,
        ]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "metrics.csv")
            found = self.run_command([*command[:1], "--log-file", str(file), *command[1:]])
            return found | {"metrics": metrics(file.read_text() if file.is_file() else "")}

    def host(self, name: str) -> dict[str, Any]:
        """Measure the host's time for a call, in small cases."""
        del name
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "overhead.json")
            found = self.run_command(module(self.device, "benchmarks.overhead", "--json", str(file)))
            return found | {"calls": json.loads(file.read_text()) if file.is_file() else []}

    def flash_mla(self, name: str) -> dict[str, Any]:
        """Run FlashMLA's own cases on the CUDA kernels: a subset that covers all pairs of parameter values."""
        del name
        few = ["--list", "e0", "--heads", "2", "--max-tokens", "60", "--limit", "3"]
        arguments = ["--backend", "cuda", "--device", self.device, *(few if self.device == "cpu" else ["--covering"])]
        return self.run_command(module(self.device, "benchmarks.flash_mla_matrix", *arguments), COLUMNS="160")

    def run_command(self, command: Sequence[str], **more: str) -> dict[str, Any]:
        """Run a command within the item's limit. Returns the result, and as message the end of the output."""
        with tempfile.TemporaryFile() as printed:
            running = subprocess.Popen(
                command, cwd=ROOT, env=environment(more), stdin=subprocess.DEVNULL, stdout=printed,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                ended = f"exit status {running.wait(max(1.0, self.limit - SPARE))}"
            except subprocess.TimeoutExpired:
                running.kill()
                ended = f"{LATE} {self.limit - SPARE:.0f} s"
            size = printed.seek(0, os.SEEK_END)
            printed.seek(max(0, size - LAST))
            text = printed.read().decode(errors="replace").strip()
        if ended == "exit status 0":
            return {"result": PASSED, "message": text}
        return {"result": FAILED, "message": f"{ended}\n{text}"}

    def settle(self) -> None:
        """Do nothing, since the command has ended."""


def module(device: str, name: str, *arguments: str) -> list[str]:
    """The command line that runs a module with access to the carried parts."""
    code = (
        "import runpy, sys\nfrom benchmarks.device import carried\n"
        f"carried.use({device!r})\nsys.argv = {[name, *arguments]!r}\nrunpy.run_module({name!r}, run_name='__main__')"
    )
    return [sys.executable, "-c", code]


def metrics(text: str) -> list[dict[str, str]]:
    """The rows of the profiler's CSV output, one per kernel and metric, without the profiler's messages."""
    table = [line for line in text.splitlines() if line.startswith('"')]
    wanted = ("Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
    return [{name: row.get(name, "") for name in wanted} for row in csv.DictReader(table)]


def watched_code(device: str, call: str) -> str:
    """The source of a program that makes one call with access to the carried parts."""
    return (
        "from ragged_attention.testing import environment\n"
        f"environment.prepare({device!r})\n"
        "from benchmarks.device import carried, checks, cuda\n"
        f"carried.use({device!r})\n"
        f"with cuda.in_place({device!r}):\n    {call}\n"
    )
