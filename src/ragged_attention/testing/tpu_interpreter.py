"""Run the suite on Pallas TPU kernels without a TPU, in jax's interpreter and in a separate process.

The interpreter simulates a TPU core's memories, copies and semaphores. New memory is NaN, and a read outside an array
raises. Each batch runs in two modes, which find different faults: in `on_wait`, a copy arrives only when it is waited
for, and races are detected; in `eager`, it arrives at once, and a copy that is never waited for leaves its semaphore
non-zero. A wait that nothing can satisfy hangs and ignores signals, so the process must be killed from outside.

    for verdict in judged("pallas", [str(check) for check in checks()], mode="on_wait"): ...

`ragged-attention conformance --backend pallas` does this on a CPU, in both modes.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from ragged_attention import dispatch
from ragged_attention.testing import environment, worker
from ragged_attention.testing.drawing import PATHS, Check, examples_of
from ragged_attention.testing.runner import Absent, Declined, Runner
from ragged_attention.testing.suite import checks
from ragged_attention.testing.verdicts import Verdict

MODULE = "ragged_attention.testing.tpu_interpreter"
MODES: Mapping[str, Mapping[str, Any]] = {
    "on_wait": {"dma_execution_mode": "on_wait", "detect_races": True},
    "eager": {"dma_execution_mode": "eager"},
}
# Texts that the interpreter prints for faults that do not raise.
PRINTED_FAULTS = ("RACE DETECTED", "non-zero count")
TIMEOUT = 300.0
SLOWER = 5  # the default number of drawn batches is divided by this


def _no_step_back(ranges: tuple[Any, ...], shape: tuple[int, ...], *, clip: Any) -> Any:
    """Clip like the interpreter, but raise for negative indices. The interpreter wraps them around; a TPU does not."""
    if any((index.start if isinstance(index, slice) else index) < 0 for index in ranges):
        raise IndexError(f"Out-of-bounds access: {ranges} of a buffer of shape {shape}")
    return clip(ranges, shape)


def _compiling_once() -> Callable[..., None]:
    """A function that runs a kernel's program on one core. It compiles the program once for all cores."""
    jax = importlib.import_module("jax")
    programs: dict[int, tuple[Any, Any]] = {}
    one_at_a_time = threading.Lock()

    def run(jaxpr: Any, consts: Any, *arguments: Any) -> None:
        with one_at_a_time:
            if id(jaxpr) not in programs:
                evaluate = jax.jit(functools.partial(jax.core.eval_jaxpr, jaxpr))
                programs[id(jaxpr)] = evaluate.lower(consts, *arguments).compile(), jaxpr
        programs[id(jaxpr)][0](consts, *arguments)

    return run


@contextlib.contextmanager
def interpreting(mode: str, cores: int = 1) -> Iterator[None]:
    """Inside this context, Pallas TPU kernels run in the interpreter, and negative indices raise."""
    jax = importlib.import_module("jax")
    tpu = importlib.import_module("jax.experimental.pallas.tpu")
    utils = importlib.import_module("jax._src.pallas.mosaic.interpret.utils")
    threads = importlib.import_module("jax._src.pallas.mosaic.interpret.thread_map")
    clip = functools.partial(_no_step_back, clip=utils.clip_range_to_shape)
    parameters = tpu.InterpretParams(num_cores_or_threads=cores, **MODES[mode])
    # Compile quickly rather than well, because each interpreting program runs only a few times.
    unoptimised = "jax_disable_most_optimizations"
    before = jax.config.read(unoptimised)
    jax.config.update(unoptimised, True)
    try:
        with (
            mock.patch.object(utils, "clip_range_to_shape", clip),
            mock.patch.object(threads, "_run_jaxpr", _compiling_once()),
            tpu.force_tpu_interpret_mode(parameters),
        ):
            yield
    finally:
        jax.config.update(unoptimised, before)


@contextlib.contextmanager
def watched(mode: str, cores: int = 1) -> Iterator[None]:
    """Like `interpreting`, but raises AssertionError at the end for a race, a leaked semaphore or an error."""
    jax = importlib.import_module("jax")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), interpreting(mode, cores):
        try:
            yield
            # Kernels still run after a call has returned, and must finish before the interpreter's state is reset.
            jax.effects_barrier()
        except jax.errors.JaxRuntimeError as error:
            # Keep the next wait from raising the same error again.
            importlib.import_module("jax._src.dispatch").runtime_tokens.clear()
            raise AssertionError(f"expected the kernel to run, got {_cause(error)}") from None
        finally:
            importlib.import_module("jax.experimental.pallas.tpu").reset_tpu_interpret_mode_state()
    printed = output.getvalue()
    if any(fault in printed for fault in PRINTED_FAULTS):
        raise AssertionError(f"expected no race and every copy waited for once, got {printed.strip()[:1000]}")


def _cause(error: Exception) -> str:
    """The last line of a callback's error, which jax passes on as text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error: " in line), lines[-1] if lines else "an error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterpretedRunner(Runner):
    """A runner whose Pallas kernels are interpreted in this process."""

    notices_steps_outside = True

    framework: str = "jax"
    mode: str = "on_wait"
    cores: int = 1

    def __str__(self) -> str:
        return f"{super().__str__()}, interpreted, {self.mode}"

    def _call(self, operation: str, batch: Any, options: Any, **extra: Any) -> Any:
        jax = importlib.import_module("jax")
        with watched(self.mode, self.cores):
            return jax.block_until_ready(super()._call(operation, batch, options, **extra))

    def absent(self) -> str | None:
        if importlib.util.find_spec("jax") is None:
            return dispatch.missing_package("jax")
        with interpreting(self.mode, self.cores):
            return super().absent()


def runners(backend: str, device: str | None) -> list[InterpretedRunner]:
    """A runner for each mode, if the backend can run in the interpreter here."""
    candidates = [InterpretedRunner(backend=backend, mode=mode) for mode in MODES] if device in (None, "cpu") else []
    return [runner for runner in candidates if runner.absent() is None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OperationRecorder(Runner):
    """A runner without a backend, which records the operations that a check calls first."""

    asked: list[str] = dataclasses.field(default_factory=list)

    def _call(self, operation: str, batch: Any, options: Any, **extra: Any) -> Any:
        self.asked.append(operation)
        raise Absent("only asked")

    def tunables(self, operation: str) -> tuple[str, ...]:
        return tuple({name for options in PATHS.get(operation, ()) for name in options})


def operation_of(check: Check) -> str | None:
    """The operation that a check calls first."""
    runner = _OperationRecorder(framework="jax", backend="pallas")
    with contextlib.suppress(Declined):
        check.run(runner, 1)
    return runner.asked[0] if runner.asked else None


def judged(
    backend: str,
    names: Sequence[str],
    *,
    mode: str,
    cores: int = 1,
    examples: int | None = None,
    rounded_weights: bool = False,
    timeout: float = TIMEOUT,
    command: Sequence[str] = (sys.executable, "-m", MODULE),
) -> Iterator[Verdict]:
    """The verdicts of the named checks, run in a separate process.

    A process that hangs is killed, and a new process continues with the next check.

    `timeout` applies to each check, in seconds. `command` starts the process, with this module's arguments appended.
    The process stays alive, so that the next call with the same arguments reuses it.
    """
    arguments = ["--backend", backend, "--mode", mode, "--cores", str(cores)]
    arguments += ["--examples", str(examples or max(1, examples_of() // SLOWER))]
    arguments += ["--rounded-weights"] if rounded_weights else []
    yield from worker.judged((*command, *arguments), names, timeout=timeout)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks that are named on standard input; `judged` starts this in a separate process."""
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--backend", default="pallas")
    parser.add_argument("--mode", choices=list(MODES), default="on_wait")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--examples", type=int, default=25)
    parser.add_argument("--rounded-weights", action="store_true")
    options = parser.parse_args(argv)
    environment.prepare("cpu")
    importlib.import_module("ragged_attention.testing.jax_front")
    runner = InterpretedRunner(
        backend=options.backend, mode=options.mode, cores=options.cores, rounded_weights=options.rounded_weights
    )
    worker.serve(runner, checks(), options.examples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
