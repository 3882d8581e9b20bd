"""Measures the host's time for a call: the microseconds of Python until all kernels are enqueued.

    python -m benchmarks.overhead [CASE ...] [--backend numba] [--json FILE]

On a GPU the calls are real. Without a GPU, a stand-in replaces Triton's driver. Kernels are compiled for Hopper, but a
launch does nothing, so the times include everything except the driver's own share of a launch. Kernels of `numba` run
on the CPU. Their sequences have no queries and keys, so that the kernels have almost nothing to do.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks import timing
from benchmarks.cases.base import Case
from benchmarks.cases.catalogue import CASES
from ragged_attention.testing import environment
from ragged_attention.tools.samples import device_of

CHOSEN = {
    "triton": ("decode_64x4k", "mla_sparse_h16_b8", "mla_prefill_h128_32k"),
    "numba": ("decode_64x4k", "mixed_2q2k_32q1s1k", "fp8_64x4k"),
}
ARCH = "sm_90"
ROUNDS, CALLS = 30, 50
MOST_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Overhead:
    """The host's microseconds for one case."""

    case: str
    operation: str
    launches: int
    call: float  # the whole call of the public function
    dispatch: float  # part of the call: converting arguments, torch's dispatcher
    plan: float  # part of the call: finding the plan of an earlier call like this one
    launch: float  # part of the call: allocating results, enqueuing kernels
    not_replayed: float  # `launch` without a recording: the backend runs again, and Triton itself launches


class StandInDriver:
    """A Triton driver without a device: kernels are compiled for `arch`, and launches are noted or ignored."""

    def __init__(self, arch: str = ARCH, note: Callable[..., Any] | None = None) -> None:
        self.arch, self.note = arch, note or (lambda *launch: None)
        self.device, self.stream = 0, 0
        facts = {"max_shared_mem": device_of("torch", arch).shared_memory}
        self.utils = SimpleNamespace(
            load_binary=lambda name, *rest: (name, name, 0, 0, 1024),  # module, function, registers, spills, threads
            unload_module=lambda module: None,
            get_device_properties=lambda device: facts,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., Any]:
        return self.note

    def get_current_target(self) -> Any:
        targets = importlib.import_module("triton.backends.compiler")
        if self.arch.startswith("sm_"):
            return targets.GPUTarget("cuda", int(self.arch[3:]), 32)
        return targets.GPUTarget("hip", self.arch, 64)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream


@contextlib.contextmanager
def standing_in(driver: StandInDriver) -> Iterator[StandInDriver]:
    """A context in which torch's front end treats the CPU as the driver's GPU."""
    triton = importlib.import_module("triton")
    plans = importlib.import_module("ragged_attention.torch._plan")
    facts = device_of("torch", driver.arch)
    triton.runtime.driver.set_active(driver)

    def device_facts(device: Any) -> Any:
        return facts

    with mock.patch.object(plans, "device_facts", device_facts):
        plans._plans.clear()
        yield driver
        plans._plans.clear()


def inputs_of(case: Case, device: str, backend: str = "triton") -> dict[str, Any]:
    """Arguments of the case's shapes. They are zeros, or uninitialised if no kernel reads them."""
    torch = importlib.import_module("torch")

    def tensor(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(tensor, value))
        if not hasattr(value, "shape"):
            return value
        make = torch.empty if device == "cpu" and backend == "triton" else torch.zeros
        return make(value.shape, dtype=getattr(torch, value.dtype), device=device)

    arguments = case.attention_call(device_of("torch", ARCH)).arguments()
    return {name: tensor(value) for name, value in arguments.items() if value is not None}


def microseconds(candidates: Mapping[str, Callable[[], Any]], settle: Callable[[], Any] | None) -> dict[str, float]:
    """Candidate -> the least median over interleaved rounds, since other load can only add time."""
    least = dict.fromkeys(candidates, math.inf)
    for _ in range(ROUNDS):
        for name, function in candidates.items():
            least[name] = min(least[name], 1e6 * timing.host_seconds(function, calls=CALLS, settle=settle))
    return least


def measure(case: Case, device: str, backend: str = "triton") -> Overhead:
    """Time one case's call, and the parts of the call that can be called separately."""
    torch = importlib.import_module("torch")
    plans, launcher = (importlib.import_module(f"ragged_attention.torch.{name}") for name in ("_plan", "_launcher"))
    function = getattr(importlib.import_module("ragged_attention.torch"), case.operation)
    call = functools.partial(function, **inputs_of(case, device, backend), backend=backend)
    with mock.patch.object(plans, "execute", wraps=plans.execute) as inside:
        call()
    values = inside.call_args.args
    plan, tensors = plans._plan(*values)
    addresses = [tensor.data_ptr() for tensor in tensors]
    recording = plans._recording(values[0], values[1], plan, tensors, addresses)
    record = plans._call(values[0], values[1], plan)
    candidates = {
        "call": call,
        "within": lambda: plans.execute(*values),
        "launch": lambda: recording.replay(tensors, addresses),
        "not_replayed": lambda: plan.choice.run(record, launcher.LAUNCHER),
    }
    found = microseconds(candidates, torch.cuda.synchronize if device == "cuda" else None)
    within = found.pop("within")
    return Overhead(
        case=case.name,
        operation=case.operation,
        launches=len(recording.steps),
        dispatch=found["call"] - within,
        plan=within - found["launch"],
        **found,
    )


def table_of(found: Sequence[Overhead], where: str) -> Table:
    table = Table(title=f"microseconds of the host per call, {where}")
    for field in dataclasses.fields(Overhead):
        table.add_column(field.name, justify="left" if field.type in ("str", str) else "right")
    for overhead in found:
        values = dataclasses.asdict(overhead).values()
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in values))
    return table


def measured(names: Sequence[str], device: str, backend: str) -> list[Overhead]:
    """The costs of the named cases on the GPU, or on the CPU, where `triton` runs without a GPU.

    A long prefill is scaled down, which does not change the host's time for it. At full size, thousands of calls would
    wait for the GPU, and on a CPU the allocation of large results would add time.
    """
    cases = [case if case.num_tokens <= MOST_TOKENS else case.scaled_down() for case in map(CASES.__getitem__, names)]
    without_gpu = device == "cpu" and backend == "triton"
    with standing_in(StandInDriver()) if without_gpu else contextlib.nullcontext():
        return [measure(case, device, backend) for case in cases]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names of cases (default: a few for the backend)")
    parser.add_argument("--backend", choices=CHOSEN, default="triton")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    native = options.backend == "numba"
    environment.prepare("cpu" if native else "cuda")  # without a GPU, Triton still compiles
    torch = importlib.import_module("torch")
    device = "cuda" if torch.cuda.is_available() and not native else "cpu"
    if not native and importlib.import_module("triton").knobs.runtime.interpret:
        parser.error("expected TRITON_INTERPRET to be unset, since the interpreter launches nothing")
    found = measured(options.cases or CHOSEN[options.backend], device, options.backend)
    place = "empty sequences on a CPU" if native else "no GPU, launches into nothing"
    where = torch.cuda.get_device_name() if device == "cuda" else place
    Console(width=140).print(table_of(found, where))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(overhead) for overhead in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
