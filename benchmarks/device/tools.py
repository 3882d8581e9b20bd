"""Items: programs that watch ours: NVIDIA's checkers and profiler, FlashMLA's cases, the cost of a call to the host.

Each is a command of its own. A process of this module starts it and reads what it prints, and never touches the device.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases.catalogue import CASES
from benchmarks.device.pool import environment
from benchmarks.device.record import CANNOT, FAILED, PASSED

FOUND = 9  # the exit status by which a checker says that it found something
LAST = 1200  # characters of what a command printed
SECONDS = 280.0  # for one command; the limit of its item is the one that counts
CHECKERS = ("memcheck", "racecheck", "synccheck")
PROFILED = "dram__bytes.sum.per_second,gpu__time_duration.sum,sm__throughput.avg.pct_of_peak_sustained_elapsed"
MOST_LAUNCHES = 4  # of one call that are looked at


def program(name: str) -> str | None:
    """One of CUDA's programs, if it is here."""
    return shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")


class Items:
    def __init__(self, device: str) -> None:
        self.device = device
        few = "" if device == "cuda" else ", cuda.SMALL[3:4]"
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
        """Small calls, with any numbers in their index arrays, under one of the checkers."""
        checker, backend = name.split()
        command = [sys.executable, "-c", self.checked[backend]]
        if self.device == "cuda":
            tool = program("compute-sanitizer")
            if tool is None:
                return {"result": CANNOT, "message": "compute-sanitizer is not here"}
            command = [tool, "--tool", checker, "--error-exitcode", str(FOUND), *command]
        # torch keeps freed memory, so a stray access could land in what it holds; without that each array stands alone.
        return said(command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")

    def profiled(self, name: str) -> dict[str, Any]:
        """What the profiler counts of the kernels of one call; the clocks are left as they are."""
        tool = program("ncu")
        if tool is None:
            return {"result": CANNOT, "message": "ncu is not here"}
        backend, case = name.split()
        code = f"from benchmarks.device.bench import call; call({case!r}, {backend!r})"
        command = [
            tool, "--clock-control", "none", "--profile-from-start", "off", "--launch-count", str(MOST_LAUNCHES),
            "--metrics", PROFILED, "--csv", sys.executable, "-c", code,
        ]  # fmt: skip
        return said(command)

    def host(self, name: str) -> dict[str, Any]:
        """What a call costs the host, on small cases."""
        del name
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "overhead.json")
            found = said([sys.executable, "-m", "benchmarks.overhead", "--json", str(file)])
            return found | {"calls": json.loads(file.read_text()) if file.is_file() else []}

    def flash_mla(self, name: str) -> dict[str, Any]:
        """A part of FlashMLA's own cases that covers all pairs of parameters, by the CUDA kernels."""
        del name
        few = ["--list", "e0", "--heads", "2", "--max-tokens", "60", "--limit", "3"]
        command = [sys.executable, "-m", "benchmarks.flash_mla_matrix", "--backend", "cuda", "--device", self.device]
        return said([*command, *(few if self.device == "cpu" else ["--covering"])], COLUMNS="160")


def watched_code(device: str, call: str) -> str:
    """A program of one call, which finds what was carried."""
    return (
        "from ragged_attention.testing import environment\n"
        f"environment.prepare({device!r})\n"
        "from benchmarks.device import carried, checks, cuda\n"
        f"carried.use({device!r})\n"
        f"with cuda.in_place({device!r}):\n    {call}\n"
    )


def said(command: Sequence[str], **more: str) -> dict[str, Any]:
    """Run a command; whether it ended well, and the last that it printed."""
    done = subprocess.run(command, env=environment(more), capture_output=True, text=True, timeout=SECONDS, check=False)
    printed = done.stdout[-LAST:].strip()
    if done.returncode == 0:
        return {"result": PASSED, "message": printed}
    return {"result": FAILED, "message": f"exit status {done.returncode}\n{printed}\n{done.stderr[-LAST:].strip()}"}
