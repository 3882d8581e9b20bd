"""Compiles our Pallas kernels and JAX's own for every kind of TPU, and tabulates the cost of their code.

    python -m benchmarks.compiled.tpu_compile [--targets v6e ...] [--only NAME] [--options JSON] [--jobs N]

The command needs no TPU, but it needs the TPU compiler. That is the package libtpu, which is closed source. Nothing
else here depends on it, so `make tpu-compile` installs it into a separate virtual environment. Without options the
command writes docs/tpu_compile.md. It fails if a kernel of ours does not compile.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.cases import tpu as tpu_cases
from benchmarks.cases.tpu import TARGETS, Traceable
from benchmarks.compiled import tpu_dump
from benchmarks.peers import tpu as tpu_peers
from benchmarks.peers.tpu import PEERS

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "tpu_compile.md"
COLUMNS = (
    "case", "kernel", "bundles", "loop", "MXU", "VALU", "VLOAD", "VSTORE", "spills", "fills", "VMEM", "HBM",
)  # fmt: skip

HEADER = """\
# What the Pallas kernels compile to

`make tpu-compile` compiles these kernels with the real TPU compiler (libtpu), which needs no TPU. The cases are defined
in `benchmarks/cases/tpu.py`. Those that begin with `jax_` are JAX's own kernels (`jax.experimental.pallas.ops.tpu`),
compiled in the same way.

A TPU core issues one bundle of instructions per cycle, which has a slot for each unit. The columns are:

- **bundles**: the length of the whole kernel.
- **loop**: the length of the loop that has most of the matrix work, including the loops nested in it. That is the cost
  in cycles of one block of queries and keys if nothing waits for memory.
- **MXU**, **VALU**, **VLOAD**, **VSTORE**: how busy the matrix unit, the vector unit and the load and store ports of
  the vector memory are in that loop. The highest percentage bounds the loop's speed.
- **spills**, **fills**: the stores and loads of vector registers that are needed because there are too few registers,
  in the whole kernel and (in that loop).
- **VMEM**: the kernel's vector memory in KiB.
- **HBM**: the main memory in KiB that the whole call needs besides its arrays.

For equal work the matrix unit has the same number of busy cycles, so a loop in which its percentage is higher is
faster. The table of v6e has more cases than the others. `--only` compiles any other case of `benchmarks/cases/tpu.py`.
The numbers come from schedules, not measurements, and exclude waits for copies.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result of compiling one case for one kind of TPU."""

    case: str
    target: str
    kernels: tuple[tpu_dump.Kernel, ...] = ()
    error: str = ""
    temporary: int = 0  # bytes of main memory that the call needs besides its arrays
    seconds: float = 0.0


def find(name: str, options: Mapping[str, Any]) -> Traceable:
    """The case, or the JAX kernel, with this name. If `options` are not empty, they replace those of the case."""
    if name in PEERS:
        return tpu_peers.traceable(PEERS[name])
    case = tpu_cases.find(name)
    return tpu_cases.traceable(dataclasses.replace(case, options=options) if options else case)


def names(target: str, only: str = "") -> list[str]:
    """The names of our cases, then of JAX's, whose name contains `only` or whose operation is `only`.

    Without `only`, they are the names of the cases that the page shows.
    """
    every = {case.name: case.operation for case in tpu_cases.CASES}
    every |= {name: case.operation for name, case in PEERS.items()}
    if only:
        return [name for name, operation in every.items() if only in name or only == operation]
    shown = {*tpu_cases.EVERYWHERE, *(tpu_cases.FURTHER if target == tpu_cases.MOST else ())}
    return [name for name in every if name.removeprefix("jax_") in shown]


def environment(dumps: str) -> dict[str, str]:
    """Environment variables for the compiler, so that it does not look for TPUs and writes its dumps to `dumps`."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true",
    }


@functools.cache
def _mesh(target: str) -> Any:
    """A mesh of one TPU of the kind `target`, described to the compiler without hardware."""
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TARGETS[target][0])
    return jax.sharding.Mesh(topology.devices[:1], ("x",))  # type: ignore[arg-type]


def compile_case(name: str, target: str, dumps: str, options: Mapping[str, Any]) -> Outcome:
    """Compile one case. The folder `dumps` is empty before and after."""
    import jax

    begun = time.perf_counter()
    folder = Path(dumps)
    try:
        mesh = _mesh(target)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        for path in folder.iterdir():
            path.unlink()
        case = find(name, options)
        shapes = {
            key: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for key, (shape, dtype) in case.arrays.items()
        }
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = jax.jit(case.function).lower(**shapes).compile()
        kernels, error = tuple(tpu_dump.read(folder)), ""
        temporary = int(getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0))
        if not kernels:
            error = "the compiled call contains no kernel"
    except Exception as failure:  # the table shows whatever error the compiler raises
        kernels, error, temporary = (), first_words(failure), 0
    for path in folder.iterdir():
        path.unlink()
    return Outcome(name, target, kernels, error, temporary, time.perf_counter() - begun)


def first_words(failure: Exception) -> str:
    words = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {words}"[:160].replace("|", "/")


def _start_worker(settings: dict[str, str]) -> None:
    os.environ.update(settings)


def _pool(dumps: str) -> concurrent.futures.ProcessPoolExecutor:
    """A pool of one process. If the compiler crashes the process, the next case gets a new pool."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, context, _start_worker, (environment(dumps),))


def compile_on(target: str, cases: Sequence[str], timeout: float, options: Mapping[str, Any]) -> Iterator[Outcome]:
    """Compile cases one after another for one kind of TPU."""
    dumps = tempfile.mkdtemp(prefix="tpu_dump_")
    pool = _pool(dumps)
    try:
        for name in cases:
            try:
                yield pool.submit(compile_case, name, target, dumps, options).result(timeout)
            except (BrokenProcessPool, TimeoutError) as failure:
                what = "the compiler crashed its process" if isinstance(failure, BrokenProcessPool) else "took too long"
                _kill(pool)
                pool = _pool(dumps)
                yield Outcome(name, target, error=what)
    finally:
        _kill(pool)
        shutil.rmtree(dumps, ignore_errors=True)


def _kill(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    """Kill the process of a pool instead of waiting for it, since it may hang."""
    for process in (getattr(pool, "_processes", None) or {}).values():
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)


def compile_all(
    targets: Sequence[str],
    cases: Mapping[str, Sequence[str]],
    jobs: int,
    timeout: float,
    console: Console,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[Outcome]:
    """Compile the cases of each kind of TPU, `jobs` kinds at a time.

    The outcomes are in the order of kinds and cases.
    """
    outcomes: list[Outcome] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress, concurrent.futures.ThreadPoolExecutor(jobs) as threads:
        task = progress.add_task("compiling", total=sum(len(cases[target]) for target in targets))

        def run(target: str) -> None:
            for outcome in compile_on(target, cases[target], timeout, options):
                outcomes.append(outcome)
                progress.update(task, advance=1, description=f"{target} {outcome.case}")
                if not console.is_terminal or outcome.error:
                    summary = outcome.error or f"{outcome.seconds:.1f} s"
                    console.print(f"{target} {outcome.case}: {summary}", markup=False, highlight=False)

        for done in [threads.submit(run, target) for target in targets]:
            done.result()
    return sorted(outcomes, key=lambda one: (targets.index(one.target), cases[one.target].index(one.case)))


def rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """The table rows of one outcome, one per kernel."""
    if outcome.error:
        return [(outcome.case, outcome.error, *("-" for _ in COLUMNS[2:]))]
    found = []
    for kernel in outcome.kernels:
        busy = (f"{kernel.loop.percent(unit):.0f} %" for unit in tpu_dump.UNITS)
        spilled = (f"{kernel.spills} ({kernel.loop_spills})", f"{kernel.fills} ({kernel.loop_fills})")
        counts = (
            kernel.whole.bundles,
            kernel.loop.bundles,
            *busy,
            *spilled,
            kernel.vmem // 1024,
            outcome.temporary // 1024,
        )
        found.append((outcome.case, kernel.name, *map(str, counts)))
    return found


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each of our cases that does not compile."""
    return [f"{one.target} {one.case}: {one.error}" for one in outcomes if one.error and one.case not in PEERS]


def document(outcomes: Sequence[Outcome], made: str) -> str:
    """The text of the page for these outcomes."""
    lines = [HEADER, made, ""]
    wrong = failures(outcomes)
    lines += [
        f"{len(outcomes)} compilations, {len(wrong) or 'no'} failure{'s' if len(wrong) != 1 else ''} of ours.",
        "",
    ]
    for target in dict.fromkeys(one.target for one in outcomes):
        lines += [f"## {target}", "", "| " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
        table = [row for one in outcomes if one.target == target for row in rows(one)]
        lines += ["| " + " | ".join(row) + " |" for row in table] + [""]
    return "\n".join(lines)


def provenance() -> str:
    """The date, the commit and the versions behind a page."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "libtpu"))
    return f"{datetime.date.today()}, commit {commit}, {versions}."


def _show(console: Console, outcomes: Sequence[Outcome]) -> None:
    table = Table("kind", *COLUMNS)
    for outcome in outcomes:
        for row in rows(outcome):
            table.add_row(outcome.target, *row, style="red" if outcome.error else None)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled.tpu_compile", description=about)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), help="kinds of TPU (default: all)")
    parser.add_argument("--only", default="", help="only cases whose name contains this or whose operation is this")
    parser.add_argument(
        "--jobs", type=int, default=min(len(TARGETS), os.cpu_count() or 1), help="kinds of TPU compiled at a time"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one compilation")
    parser.add_argument("--options", type=json.loads, default={}, help="a JSON object that replaces our cases' options")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("libtpu") is None:
        print("expected the TPU compiler, the package libtpu, to be installed: see make tpu-compile", file=sys.stderr)
        return 2
    os.environ.update({name: value for name, value in environment("/dev/null").items() if name != "LIBTPU_INIT_ARGS"})
    targets = options.targets or list(TARGETS)
    cases = {target: names(target, options.only) for target in targets}
    if not any(cases.values()):
        parser.error(f"expected --only to be in a case's name or operation, got {options.only!r}")
    console = Console()
    outcomes = compile_all(targets, cases, options.jobs, options.timeout, console, options.options)
    _show(console, outcomes)
    for line in failures(outcomes):
        console.print(line, style="red", markup=False, highlight=False)
    if not (options.targets or options.only or options.options):
        DOCUMENT.write_text(document(outcomes, provenance()))
        console.print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return int(bool(failures(outcomes)))


if __name__ == "__main__":
    sys.exit(main())
