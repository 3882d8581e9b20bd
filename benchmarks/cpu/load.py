"""Time decodes on a CPU under other load: how much slower are they while other threads use the same CPUs?

    python -m benchmarks.cpu.load [--threads 2] [--seconds 1] [--loads busy,product] [--save]

A load is another process that runs all the time, another thread of this process, or work before each call, such as
products by torch, whose threads spin for a while afterwards. Each contender runs alone under each load for some
seconds. The result is the mean, because a median says little here: most calls take their usual time, and a call that
loses a CPU takes some milliseconds longer. If a process occupies one of two CPUs, a fair scheduler at most doubles the
time of an idle machine. Everything is measured with OpenMP's default settings for threads, and in a second process with
threads that hardly spin. Nothing else should run meanwhile. The last column shows how many CPUs other processes have
used. With --save the results go to benchmarks/results, and as tables to docs/cpu_measured.md.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu import page
from benchmarks.cpu.__main__ import facts
from benchmarks.cpu.cases import BF16, DECODES, Paged

FILE = page.RESULTS / "load_cpu.json"
BEGIN = "<!-- written by `python -m benchmarks.cpu.load` -->\n"
CASES = (
    Paged(name="C2", what="8 decodes at 1k, bf16", dtype=BF16, lens=DECODES),
    Paged(name="one", what="1 decode at 1k, bf16", dtype=BF16, lens=DECODES[:1]),
)
PEERS = ("vllm", "sdpa", "eager")
IDLE = "idle"
SETTINGS: dict[str, dict[str, str]] = {"by default": {}, "with GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"}}
STARTING = 3.0  # seconds until a load counts as running
# A load ends with its parent process, even if that process is killed.
HEADER = "import os, sys\nparent = os.getppid()\ndef goes_on(): return os.getppid() == parent\n"
TORCH = HEADER + "import torch\ntorch.set_num_threads(int(sys.argv[1]))\n"
TRAINING = """
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(64, 512)
while goes_on():
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()
"""


@dataclasses.dataclass(frozen=True)
class Load:
    """A kind of load: a program for another process, a thread of this process, or work before each call."""

    name: str
    what: str
    program: str = ""
    thread: bool = False
    before: Callable[[], Any] | None = None


def product(size: int = 512) -> Callable[[], Any]:
    """A function that multiplies matrices on all of torch's threads."""
    square = torch.randn(size, size)
    return lambda: square @ square


LOADS = (
    Load(IDLE, "nothing"),
    Load("busy", "a process that uses one CPU", HEADER + "while goes_on():\n    pass\n"),
    Load("product", "a process that multiplies with torch on as many threads",
         TORCH + "a = torch.randn(512, 512)\nwhile goes_on():\n    a @ a\n"),
    Load("training", "a process that trains on as many threads", TORCH + TRAINING),
    Load("after", "torch's product before each call", before=product()),
    Load("pause", "a pause of 10 ms before each call", before=lambda: time.sleep(0.01)),
    Load("thread", "torch's products on another thread of the process", thread=True),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="duration of each measurement (default: %(default)s)"
    )
    parser.add_argument("--loads", default="", help="names of loads, besides idle (default: all)")
    parser.add_argument("--contenders", default=",".join(("ours", *PEERS)), help="default: %(default)s")
    parser.add_argument("--here", action="store_true", help="only measure in this process, and write JSON")
    parser.add_argument("--save", action="store_true", help="write the results and their tables")
    options = parser.parse_args(argv)
    if options.here:
        sys.stdout.write(json.dumps(measured(options)))
        return 0
    record = {name: value for name, value in facts().items() if name != "runs"} | {"threads": options.threads}
    record["runs"] = {name: measured_with(setting, argv) for name, setting in SETTINGS.items()}
    sys.stdout.write(report(record))
    if options.save:
        FILE.write_text(json.dumps(record, indent=1) + "\n")
        page.replace(page.PAGE, report(record), BEGIN, page.END)
    return 0


def measured_with(setting: Mapping[str, str], argv: Sequence[str] | None) -> list[dict[str, Any]]:
    """The results of a new process with this setting for OpenMP, which reads its settings only when it is loaded."""
    command = [sys.executable, "-m", "benchmarks.cpu.load", "--here", *(sys.argv[1:] if argv is None else argv)]
    done = subprocess.run(command, env=unset() | dict(setting), stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def unset() -> dict[str, str]:
    """The environment without settings of OpenMP."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each load, starting with the idle machine."""
    torch.set_num_threads(options.threads)
    names = (IDLE, *options.loads.split(",")) if options.loads else tuple(load.name for load in LOADS)
    contenders = {case.name: named_contenders(case, options.contenders.split(",")) for case in CASES}
    loads = (load for load in LOADS if load.name in names)
    return [beside(load, contenders, options.threads, options.seconds) for load in loads]


def named_contenders(case: Paged, names: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """The contenders of a case that are in `names` and installed."""
    installed = case.contenders()
    return {name: installed[name] for name in names if name in installed}


def beside(
    load: Load, contenders: Mapping[str, Mapping[str, Callable[[], Any]]], threads: int, seconds: float
) -> dict[str, Any]:
    """The mean milliseconds of every contender in every case under a load."""
    with running(load, threads) as process:
        before, begin = others(process), time.perf_counter()
        means = {
            case: {name: mean_of(function, load.before, seconds) for name, function in functions.items()}
            for case, functions in contenders.items()
        }
        used = (others(process) - before) / (time.perf_counter() - begin)
    return {"load": load.name, "what": load.what, "milliseconds": means, "others": used}


@contextlib.contextmanager
def running(load: Load, threads: int) -> Iterator[int | None]:
    """A context in which a load runs. It yields the id of the load's process, or None if the load has no process."""
    if load.program:
        command = [sys.executable, "-c", load.program, str(threads)]
        with subprocess.Popen(command, env=unset()) as process:
            time.sleep(STARTING)
            try:
                yield process.pid
            finally:
                process.kill()
    elif load.thread:
        over, work = threading.Event(), product()

        def repeat() -> None:
            while not over.is_set():
                work()

        thread = threading.Thread(target=repeat)
        thread.start()
        try:
            yield None
        finally:
            over.set()
            thread.join()
    else:
        yield None


def mean_of(function: Callable[[], Any], before: Callable[[], Any] | None, seconds: float) -> float:
    """The mean time of a call in milliseconds, not counting the work before a call."""
    for _ in range(3):
        function()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if before is not None:
            before()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.fmean(times)


def others(process: int | None) -> float:
    """The CPU seconds since boot of all processes except this process and the load's, or 0 if unknown."""
    total = Path("/proc/stat")
    if not total.exists():
        return 0.0
    fields = [int(word) for word in total.read_text().splitlines()[0].split()[1:]]
    known = sum(
        sum(map(int, Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[11:13]))
        for number in (os.getpid(), process)
        if number is not None
    )
    return (sum(fields) - fields[3] - fields[4] - known) / os.sysconf("SC_CLK_TCK")  # without idle and I/O wait time


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: our milliseconds, and each contender's time relative to its time on the idle machine."""
    idle, lines = rows[0]["milliseconds"], []
    heads = ["beside"]
    for case in CASES:
        titles = (page.TITLES.get(name, name) for name in idle[case.name])
        heads += [f"{case.what}: ours, ms", *(f"{title} / idle" for title in titles)]
    for row in rows:
        cells = [row["what"]]
        for case, means in row["milliseconds"].items():
            cells += [f"{means['ours']:.2f}", *(f"{mean / idle[case][name]:.1f}" for name, mean in means.items())]
        lines.append([*cells, f"{row['others']:.2f}"])
    heads.append("CPUs of others")
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, ["---"] * len(heads), *lines))


def report(record: Mapping[str, Any]) -> str:
    """The tables, and the machine and versions with which they were measured."""
    about = f"{record['threads']} threads of {record['cpu']}, torch {record['torch']}, {record['date']}, "
    parts = [f"Measured on {about}commit {record['commit']}.\n"]
    parts += [f"\nOpenMP's threads {name}:\n\n{table(rows)}" for name, rows in record["runs"].items()]
    return "".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
