"""Run the suite on compiled Triton and CUDA kernels without a GPU: an emulator runs the PTX of each launch.

Calls go through a front end whose arrays are on the CPU. Kernels and tiles are chosen, and calls declined, as on a GPU
of the named architecture. A check fails if a result is wrong, or if the emulator reports anything: an access outside
the arrays, a read of uninitialised memory, accesses that no barrier or wait orders, or an instruction that must run on
a whole warp and runs on part of one. See `testing/ptx`.

`ragged-attention conformance --backend triton --device ptx:sm_90` does this, also for a third-party backend of Triton
kernels. `--backend cuda` does it through the torch front end: nvcc compiles each file of kernels when one of its
kernels is first called, and the kernels' own host code requests the launches. `judged` does it in a separate process,
for callers whose own process interprets Triton kernels or that need another version of Triton.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from ragged_attention import dispatch
from ragged_attention.calls import Device
from ragged_attention.calls.base import shared_memory_of
from ragged_attention.host.interpreting import interpreting
from ragged_attention.kernels_cuda import _latent, _native
from ragged_attention.kernels_cuda._build import compile, toolchain
from ragged_attention.testing import environment, ptx, worker
from ragged_attention.testing.drawing import examples_of
from ragged_attention.testing.environment import PTX
from ragged_attention.testing.ptx import Emulator, Hazard, launcher, machine, recorded
from ragged_attention.testing.runner import FRAMEWORKS, Absent, Runner
from ragged_attention.testing.suite import checks
from ragged_attention.testing.verdicts import Verdict

MODULE = "ragged_attention.testing.ptx_runner"
BACKENDS = {"triton": FRAMEWORKS, "cuda": ("torch",)}  # each backend with the front ends that can call it
MULTIPROCESSORS = 4  # few, so that small batches are split as large ones are on a real GPU
# Finds the emulator's message in the text of a jax error, without the tracebacks around it.
ERRORS = [name for name, one in vars(ptx).items() if isinstance(one, type) and issubclass(one, Exception)]
MESSAGE = re.compile(rf"\b(?:{'|'.join(ERRORS)}): .*?(?=^-{{10}}|\Z)", re.DOTALL | re.MULTILINE)
SCHEDULES = (None, 1)  # seeds for the order in which warps run; None: in turn
TIMEOUT = 600.0
SLOWER = 100  # the default number of drawn batches is divided by this, because each batch compiles kernels
DIRECT = "the emulator needs kernels that are started through `launch`, but Triton was asked to start one itself"
# Texts of Triton's errors if there is no GPU, and if arrays are on the CPU.
STARTED = ("active drivers (", "(cpu tensor?)")
OVERLAP = "write different values to one place of global memory"


def arch_of(device: str | None) -> str | None:
    """The architecture in the name of an emulated device, such as sm_90 in ptx:sm_90; None for other devices."""
    return device.removeprefix(PTX) if device and device.startswith(PTX) else None


def device_of(arch: str, framework: str = "torch") -> Device:
    """The description of a GPU of this architecture, as a front end needs it."""
    return Device(
        framework=framework,
        platform="cuda",
        arch=arch,
        num_multiprocessors=MULTIPROCESSORS,
        shared_memory=shared_memory_of(arch),
    )


Notice = Callable[[str, machine.Outcome], None]  # called with each kernel's name and the outcome of its run


@functools.cache
def _torch_launcher() -> Any:
    torch = importlib.import_module("torch")
    front = importlib.import_module("ragged_attention.torch._launcher")

    class EmulatedLauncher(front.Launcher):
        """Allocates on the CPU, and emulates there the kernels that Triton or nvcc compiles for a GPU."""

        def __init__(self, emulator: Emulator, notice: Notice) -> None:
            super().__init__()
            self.emulator, self.notice = emulator, notice

        def __call__(
            self, kernel: Any, grid: tuple[int, ...], inputs: Any, outputs: Any, *, inplace: Any = (), **arguments: Any
        ) -> list[Any]:
            new = [torch.empty(tuple(shape), dtype=front.DTYPES.get(dtype, dtype)) for shape, dtype in outputs]
            for tensor in new:
                self.emulator.forget(tensor)
            new += [inputs[index] for index in inplace]
            if 0 not in grid:
                arguments.pop("launch_pdl", None)  # in the emulator, kernels never overlap
                options = {name: arguments.pop(name, default) for name, default in front.OPTIONS.items()}
                operands = map(front.to_bits, (*inputs, *new))
                _run(self.emulator, self.notice, kernel, grid, operands, arguments | options)
            return new

        def _enqueue(self, function: Any, record: Any, arrays: Any) -> int:
            for name in function.record.RESULTS:
                if name in arrays:
                    self.emulator.forget(arrays[name])
            library = _recorder(function.name)
            if code := recorded.run(self.emulator, library, function.name, record, arrays, self.notice):
                raise RuntimeError(f"expected {function.name} to return 0, got {code}")
            return code

    return EmulatedLauncher


@functools.cache
def _recorder(function: str) -> recorded.Library:
    return recorded.Library(_native.recorder(function))


@functools.cache
def _jax_launcher() -> Any:
    jax = importlib.import_module("jax")
    np = importlib.import_module("numpy")
    front = importlib.import_module("ragged_attention.jax._launcher")

    class EmulatedLauncher(front.Launcher):
        """Launches kernels in jax callbacks, on copies of the arrays."""

        def __init__(self, emulator: Emulator, notice: Notice) -> None:
            super().__init__(device_of(emulator.arch, "jax"))
            self.emulator, self.notice = emulator, notice

        def _launch(
            self, kernel: Any, grid: Any, inputs: Any, new: Any, inplace: Any, arguments: dict[str, Any]
        ) -> list[Any]:
            options = {name: arguments.pop(name) for name in front.OPTIONS}
            inplace_shapes = [jax.ShapeDtypeStruct(inputs[index].shape, inputs[index].dtype) for index in inplace]

            def host(*arrays: Any) -> list[Any]:
                copies = [np.array(array) for array in arrays]
                results = [np.empty(shape.shape, shape.dtype) for shape in new]
                for array in results:
                    self.emulator.forget(array)
                results += [copies[index] for index in inplace]
                with interpreting():  # XLA may run independent callbacks in parallel
                    _run(self.emulator, self.notice, kernel, grid, [*copies, *results], arguments | options)
                return results

            return list(jax.pure_callback(host, [*new, *inplace_shapes], *inputs, vmap_method="sequential"))

    return EmulatedLauncher


def expect_no_fault(name: str, outcome: machine.Outcome, *, tolerated: Collection[str] = ()) -> None:
    """Raise `Hazard` if the kernel's run has reports, except reports that contain one of the tolerated texts."""
    reports = outcome.reports.values()
    launcher.expect_none(name, [one for one in reports if not any(text in one.text for text in tolerated)])


def _run(
    emulator: Emulator, notice: Notice, kernel: Any, grid: Any, operands: Iterable[Any], named: Mapping[str, Any]
) -> None:
    notice(kernel.__name__, emulator.run(kernel, grid, *operands, **named))


def launcher_of(emulator: Emulator, framework: str = "torch", notice: Notice = expect_no_fault) -> Any:
    """A launcher for the front end of `framework`. It runs kernels in the emulator, on CPU arrays."""
    return {"torch": _torch_launcher, "jax": _jax_launcher}[framework]()(emulator, notice)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledRunner(Runner):
    """A runner whose kernels are compiled for a GPU and emulated in this process."""

    notices_steps_outside = True

    framework: str = "torch"
    backend: str = "triton"
    arch: str = "sm_90"
    seed: int | None = None

    def __str__(self) -> str:
        order = "" if self.seed is None else f", schedule {self.seed}"
        return f"{super().__str__()}, compiled for {self.arch}{order}"

    @functools.cached_property
    def emulator(self) -> Emulator:
        """The emulator that runs all launches of this runner."""
        return Emulator(self.arch, schedule=self.seed)

    @functools.cached_property
    def tolerated(self) -> set[str]:
        """Texts of reports that do not count as faults."""
        return set()

    @contextlib.contextmanager
    def overlapping(self) -> Iterator[None]:
        self.tolerated.add(OVERLAP)
        try:
            yield
        finally:
            self.tolerated.discard(OVERLAP)

    def _call(self, operation: str, batch: Any, options: Any, **extra: Any) -> Any:
        try:
            result = super()._call(operation, batch, options, **extra)
            if self.framework == "jax":  # jax runs asynchronously, but must end before `around` does
                importlib.import_module("jax").block_until_ready(result)
            return result
        except (machine.Fault, machine.Unknown) as error:
            raise Hazard("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])) from error
        except (RuntimeError, ValueError) as error:
            if any(text in str(error) for text in STARTED):  # kernel[grid](...) bypasses the emulator
                raise Absent(f"{self.backend}: {DIRECT}") from None
            # The text of jax's error contains the callback's error.
            if isinstance(error, ValueError) or (match := MESSAGE.search(str(error))) is None:
                raise
            raise Hazard(match[0].removeprefix("Hazard: ").strip()) from error

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        notice = functools.partial(expect_no_fault, tolerated=self.tolerated)
        launches, device = launcher_of(self.emulator, self.framework, notice), device_of(self.arch, self.framework)
        replaced: dict[str, Any] = {"device_facts": lambda where: device}
        if self.framework == "torch":
            module = importlib.import_module("ragged_attention.torch._plan")
            replaced |= {"LAUNCHER": launches, "Launcher": lambda out: launches}
            replaced |= {"RECORDED": set(), "_plans": {}}  # disable replay and hide plans that were made for a CPU
        else:
            module = importlib.import_module("ragged_attention.jax._lower")
            replaced |= {"Launcher": lambda device: launches, "PLATFORMS": ("cpu",)}
        with (
            mock.patch.multiple(module, **replaced),
            mock.patch.object(self.front, "facts", return_value=device),
            _traced_anew(module),
            super().around(),
        ):
            yield

    def absent(self) -> str | None:
        return missing(self.arch, self.framework, self.backend) or super().absent()


@contextlib.contextmanager
def _traced_anew(module: Any) -> Iterator[None]:
    """Clear jax's cache of traced functions on entry and exit, because each is traced for one launcher."""
    clear = getattr(getattr(module, "_run", None), "clear_cache", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()


def missing(arch: str, framework: str = "torch", backend: str = "triton") -> str | None:
    """Why nothing can be compiled and emulated in this process, or None."""
    if reason := launcher.why_not(arch):
        return reason
    for name in (framework, *(("triton",) if backend != "cuda" else ())):
        if importlib.util.find_spec(name) is None:
            return dispatch.missing_package(name)
    if backend == "cuda":
        if arch != _latent.ARCH:
            return f"the CUDA kernels are for {_latent.ARCH}, got {arch}"
        return toolchain.missing_to_compile() or compile.missing_to_store()
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "expected TRITON_INTERPRET to be unset, got 1: the interpreter compiles nothing"
    return None


def runners(backend: str, framework: str | None, device: str | None) -> tuple[list[CompiledRunner], dict[str, str]]:
    """A runner for each schedule if `device` is an emulated GPU, and the reason for each runner that is missing."""
    if (arch := arch_of(device)) is None:
        return [], {}
    if backend not in BACKENDS and backend not in dispatch.third_party_packages():
        expected = " or ".join(BACKENDS)
        return [], {f"{backend} on {device}": f"expected the backend {expected} for {device}, got {backend}"}
    frameworks = BACKENDS.get(backend, FRAMEWORKS)  # a third-party backend is expected to launch Triton kernels
    if framework and framework not in frameworks:
        return [], {f"{framework}-{backend} on {device}": f"{backend} is emulated from {frameworks[0]} only"}
    present, absent = [], {}
    for name in (framework,) if framework else frameworks:
        every = [CompiledRunner(framework=name, backend=backend, arch=arch, seed=seed) for seed in SCHEDULES]
        if reason := every[0].absent():
            absent[str(every[0])] = reason
        else:
            present += every if name == FRAMEWORKS[0] else every[:1]
    return present, absent


def judged(
    arch: str,
    names: Iterable[str],
    *,
    framework: str = "torch",
    seed: int | None = None,
    examples: int | None = None,
    triton: str | None = None,
) -> Iterator[Verdict]:
    """The verdicts of the named checks, run in a separate process, with the Triton in the folder `triton` if given."""
    number = examples or max(1, examples_of() // SLOWER)
    arguments = ["--arch", arch, "--framework", framework, "--examples", str(number)]
    arguments += [] if seed is None else ["--seed", str(seed)]
    environ = {} if triton is None else {"PYTHONPATH": os.pathsep.join([triton, os.environ.get("PYTHONPATH", "")])}
    command = (sys.executable, "-m", MODULE, *arguments)
    yield from worker.judged(command, names, timeout=TIMEOUT, environ=environ)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks that are named on standard input; `judged` starts this in a separate process."""
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--examples", type=int, default=1)
    options = parser.parse_args(argv)
    environment.prepare(PTX + options.arch)
    runner = CompiledRunner(framework=options.framework, arch=options.arch, seed=options.seed)
    if reason := runner.absent():
        raise SystemExit(reason)
    worker.serve(runner, checks(), options.examples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
