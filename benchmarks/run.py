"""Times named cases on this machine's device.

    ragged-attention bench [CASE ...] [--framework torch|jax] [--backend NAME ...] [--peers] [--rounds N] [--json FILE]

Before a call is timed, some rows of its result are compared with the reference in float64. A backend that fails this
check is not timed. On a GPU, torch's times are those of kernels alone, with a cold L2 cache. jax's times, and all times
on a CPU, are wall-clock times. Without a GPU the cases run scaled down.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import timing
from benchmarks.cases.base import Case
from benchmarks.cases.catalogue import CASES, find
from benchmarks.peers import registry
from ragged_attention import dispatch
from ragged_attention.tools.arguments import Parser, at_least

DEFAULT_CASES = ("decode_64x4k", "mixed_2q2k_32q1s1k")
SMALL_LENGTH = 512  # the longest sequence if there is no GPU


@dataclasses.dataclass
class Result:
    """The result of one backend or peer for one case."""

    case: str
    workload: str
    who: str
    seconds: float | None = None
    spread: float = 0.0
    share_of_floor: float | None = None
    bound: str = ""
    ratio: float | None = None  # the time relative to the first backend's; above 1, the first backend is faster
    host_seconds: float | None = None
    graphed: bool = False
    why: str = ""  # why there is no time, or a note about it

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, "")}


@dataclasses.dataclass(frozen=True)
class Machine:
    """The device. Its rates are None if they were not measured."""

    framework: str
    gpu: bool
    name: str
    bytes_per_second: float | None = None
    flops_per_second: float | None = None


def this_machine(framework: str, *, ceilings: bool = False) -> Machine:
    import torch

    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else "CPU"
    if framework == "jax":
        import jax

        gpu = jax.default_backend() == "gpu"
        name = jax.devices()[0].device_kind
    if not (ceilings and gpu):
        return Machine(framework, gpu, name)
    return Machine(framework, gpu, name, timing.copy_bandwidth(), timing.matmul_rate())


def default_backends(machine: Machine) -> list[str]:
    portable = "xla" if machine.framework == "jax" else "eager"
    return ["triton", portable] if machine.gpu else [portable]


def make_inputs(case: Case, machine: Machine, seed: int) -> dict[str, Any]:
    if machine.framework == "jax":
        return case.jax_inputs(seed)
    return case.torch_inputs(seed, "cuda" if machine.gpu else "cpu")


def to_numpy(array: Any) -> Any:
    """An array on the host: floats as float64, 8-bit floats as their bits."""
    name = "torch" if type(array).__module__.partition(".")[0] == "torch" else "jax"
    if name == "torch":
        from ragged_attention.torch import _launcher as launcher
    else:
        from ragged_attention.jax import _launcher as launcher
    return launcher.to_numpy(array)


def our_call(case: Case, inputs: dict[str, Any], machine: Machine, backend: str) -> Callable[[], Any]:
    """A function that makes one call of the operation on a backend."""
    if machine.framework == "torch":
        function = getattr(importlib.import_module("ragged_attention.torch"), case.operation)
        return functools.partial(function, **inputs, backend=backend)
    import jax

    attention = getattr(importlib.import_module("ragged_attention.jax"), case.operation)

    arrays = {name: value for name, value in inputs.items() if hasattr(value, "shape") or isinstance(value, tuple)}
    rest = {name: value for name, value in inputs.items() if name not in arrays}
    call = jax.jit(lambda arrays: attention(**arrays, **rest, backend=backend))
    return lambda: jax.block_until_ready(call(arrays))


def run_case(
    case: Case, machine: Machine, backends: Sequence[str], *, with_peers: bool, rounds: int, seed: int = 0
) -> list[Result]:
    """The results of one case: every backend and peer is checked, then timed."""
    inputs = make_inputs(case, machine, seed)
    results: list[Result] = []
    calls: dict[str, Callable[[], Any]] = {}
    for who, prepare in _contenders(case, inputs, machine, backends, with_peers, results):
        result = Result(case.name, case.workload, who)
        results.append(result)
        try:
            call = prepare()
            out = case.judged(call())
            calls[who] = call
            case.check(inputs, out, to_numpy)
        except AssertionError as wrong:
            result.why = _wrong_result_note(wrong)
            # Our own backends are not timed with a wrong result. A peer may be less exact: it is timed, with a note.
            if who in backends:
                del calls[who]
        except Exception as error:  # a failing contender is a row of the table, and does not end the run
            result.why = f"{type(error).__name__}: {_reason(error)}"
    _time(calls, {result.who: result for result in results}, case, machine, rounds)
    return results


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return " ".join(line.strip() for line in lines[:3])[:160]


def _wrong_result_note(wrong: AssertionError) -> str:
    beyond = re.search(r"([\d.e+]+) times the bound", str(wrong))
    return f"wrong: error {beyond[1]} times the bound" if beyond else f"wrong: {_reason(wrong)}"


def _contenders(
    case: Case, inputs: Any, machine: Machine, backends: Sequence[str], with_peers: bool, results: list[Result]
) -> list[tuple[str, Callable[[], Any]]]:
    contenders = [(backend, functools.partial(our_call, case, inputs, machine, backend)) for backend in backends]
    for peer in registry.PEERS if with_peers else ():
        if (peer.framework, peer.kind) == (machine.framework, type(case)) and peer.absent() is None:
            if why := peer.declines(case):
                results.append(Result(case.name, case.workload, peer.name, why=why))
            else:
                contenders.append((peer.name, functools.partial(peer.prepare, case, inputs)))
    return contenders


def _time(
    calls: dict[str, Callable[[], Any]], results: dict[str, Result], case: Case, machine: Machine, rounds: int
) -> None:
    if not calls:
        return
    on_device = machine.gpu and machine.framework == "torch"
    timed = dict(calls)
    if on_device:
        for who, call in calls.items():
            try:
                timed[who] = timing.captured(call)
                results[who].graphed = True
            except Exception:  # a call that cannot be captured is timed without a graph
                timed[who] = call
        times = timing.on_gpu(timed, rounds=rounds)
    else:
        times = timing.on_cpu(timed, rounds=rounds)
    ours = next(iter(times))
    for who, samples in times.items():
        result = results[who]
        result.seconds, result.spread = samples.median, samples.spread
        result.ratio = None if who == ours else timing.ratio(times[ours], samples)
        if machine.bytes_per_second and machine.flops_per_second:
            floor, result.bound = case.floor_seconds(machine.bytes_per_second, machine.flops_per_second)
            result.share_of_floor = floor / samples.median
        if on_device:
            result.host_seconds = _host_seconds(calls[who])


def _host_seconds(call: Callable[[], Any]) -> float:
    import torch

    return timing.host_seconds(call, calls=100, settle=torch.cuda.synchronize)


def table_of(results: Sequence[Result], machine: Machine) -> Table:
    table = Table(title=f"{machine.framework} on {machine.name}")
    for name, justify in (("case", "left"), ("who", "left"), *((name, "right") for name in HEADS[2:])):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for result in results:
        table.add_row(*cells(result))
    return table


HEADS = ("case", "who", "us", "spread", "% of floor", "time / ours", "host us", "note")


def cells(result: Result) -> tuple[str, ...]:
    """A result as table cells, in the order of `HEADS`."""

    def number(value: float | None, factor: float = 1.0, places: int = 1) -> str:
        return "" if value is None else f"{value * factor:.{places}f}"

    note = result.why or (result.bound and f"{result.bound} bound") or ""
    return (
        result.case, result.who, number(result.seconds, 1e6), "" if result.seconds is None else f"{result.spread:.1%}",
        number(result.share_of_floor, 100), number(result.ratio, places=2), number(result.host_seconds, 1e6), note,
    )  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="ragged-attention bench", positional="[CASE ...] ", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"one of {', '.join(CASES)} (default: {' and '.join(DEFAULT_CASES)})"
    )
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch", help="default: torch")
    parser.add_argument(
        "--backend",
        nargs="+",
        metavar="NAME",
        help="backends to time (default: Triton on a GPU, and the portable backend)",
    )
    parser.add_argument("--peers", action="store_true", help="also time other implementations")
    parser.add_argument("--rounds", type=at_least(1), default=20, metavar="N", help="rounds of timing (default: 20)")
    parser.add_argument(
        "--length", type=at_least(1), default=SMALL_LENGTH, metavar="N",
        help=f"the longest sequence if there is no GPU (default: {SMALL_LENGTH})",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    options = parser.parse_args(argv)
    known = (*dispatch.backends(), "portable", "auto")
    for name in options.backend or ():
        if name not in known:
            parser.error(f"expected --backend to be among {', '.join(known)}, got {name!r}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    console = Console()
    machine = this_machine(options.framework, ceilings=True)
    try:
        cases = [find(name) for name in options.cases or DEFAULT_CASES]
    except KeyError as unknown:
        Console(stderr=True).print(unknown.args[0], markup=False)
        return 2
    if not machine.gpu:
        cases = [case.scaled_down(length=options.length) for case in cases]
        console.print(f"no GPU: cases scaled down to {options.length} positions, timed by the clock")
    results: list[Result] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for case in progress.track(cases, description="timing"):
            backends = options.backend or default_backends(machine)
            results += run_case(case, machine, backends, with_peers=options.peers, rounds=options.rounds)
    console.print(table_of(results, machine))
    for name, why in registry.presence(machine.framework).items() if options.peers else ():
        if why:
            console.print(f"peer {name}: absent, {why}", markup=False)
    if options.json:
        options.json.write_text(json.dumps([result.as_json() for result in results], indent=1) + "\n")
    return 1 if any(is_red(result) for result in results) else 0


def is_red(result: Result) -> bool:
    """Whether one of our backends computed a wrong result, which makes the command fail."""
    return result.seconds is None and result.why.startswith("wrong:")


if __name__ == "__main__":
    sys.exit(main())
