"""The suite on Pallas TPU kernels where there is no TPU: by jax's interpreter of them, in processes of their own.

The interpreter simulates a TPU core's memories, copies and semaphores. Fresh memory is NaN, a read outside an array
raises, and each batch is judged in two modes that show different faults: `on_wait`, in which a copy arrives only when
it is waited for and races are looked for, and `eager`, in which it arrives at once and a copy nobody waits for leaves
its semaphore non-zero. A wait that nothing satisfies hangs, deaf to signals: hence processes that can be ended.

    for verdict in judged("pallas", [str(check) for check in checks()], mode="on_wait"): ...

`ragged-attention conformance --backend pallas` does this on a CPU, in both modes.
"""

import argparse
import atexit
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any
from unittest import mock

from ragged_attention.testing import environment, safety
from ragged_attention.testing.drawing import PATHS, Check, examples_of, paths
from ragged_attention.testing.mla import garbage as mla_safety
from ragged_attention.testing.runner import Absent, Declined, Runner
from ragged_attention.testing.suite import checks as suite_checks
from ragged_attention.testing.verdicts import Verdict, verdict_of

MODULE = "ragged_attention.testing.tpu_interpreter"
MODES: Mapping[str, Mapping[str, Any]] = {
    "on_wait": {"dma_execution_mode": "on_wait", "detect_races": True},
    "eager": {"dma_execution_mode": "eager"},
}
# What the interpreter prints where it does not raise.
PRINTED_FAULTS = ("RACE DETECTED", "non-zero count")
TIMEOUT = 300.0
SLOWER = 5  # so many times fewer batches are drawn than elsewhere, unless a number is asked for
READY = "ready\n"


def _no_step_back(ranges: tuple[Any, ...], shape: tuple[int, ...], *, clip: Any) -> Any:
    """The interpreter's own bounds check lets negative indices wrap around, which no TPU does."""
    if any((index.start if isinstance(index, slice) else index) < 0 for index in ranges):
        raise IndexError(f"Out-of-bounds access: {ranges} of a buffer of shape {shape}")
    return clip(ranges, shape)


def _compiling_once() -> Callable[..., None]:
    """What runs a kernel's program on one of several cores; the interpreter's own compiles it anew on each."""
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
    """Pallas TPU kernels that are called in here run in the interpreter, negative indices refused."""
    jax = importlib.import_module("jax")
    tpu = importlib.import_module("jax.experimental.pallas.tpu")
    utils = importlib.import_module("jax._src.pallas.mosaic.interpret.utils")
    threads = importlib.import_module("jax._src.pallas.mosaic.interpret.thread_map")
    clip = functools.partial(_no_step_back, clip=utils.clip_range_to_shape)
    parameters = tpu.InterpretParams(num_cores_or_threads=cores, **MODES[mode])
    # What is judged is a kernel, not the program that interprets it, which is compiled anew for each.
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
    """As `interpreting`; at the end raises AssertionError for a race, a leaked semaphore or whatever was raised."""
    jax = importlib.import_module("jax")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), interpreting(mode, cores):
        try:
            yield
            # Kernels run on after a call has returned, and what they run on is about to be taken away.
            jax.effects_barrier()
        except jax.errors.JaxRuntimeError as error:
            # What was raised once is not raised again by whoever waits next.
            importlib.import_module("jax._src.dispatch").runtime_tokens.clear()
            raise AssertionError(f"expected the kernel to run, got {_cause(error)}") from None
        finally:
            importlib.import_module("jax.experimental.pallas.tpu").reset_tpu_interpret_mode_state()
    printed = said.getvalue()
    if any(fault in printed for fault in PRINTED_FAULTS):
        raise AssertionError(f"expected no race and every copy waited for once, got {printed.strip()[:1000]}")


def _cause(error: Exception) -> str:
    """The last line of what a callback raised, which jax hands on as text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error: " in line), lines[-1] if lines else "an error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterpretedRunner(Runner):
    """A Pallas backend in the interpreter, in this very process."""

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
            return "jax is not installed"
        with interpreting(self.mode, self.cores):
            return super().absent()


def runners(backend: str, device: str | None) -> list[InterpretedRunner]:
    """A runner for each mode, if the backend can run in the interpreter here."""
    found = [InterpretedRunner(backend=backend, mode=mode) for mode in MODES] if device in (None, "cpu") else []
    return [runner for runner in found if runner.absent() is None]


def _survives_garbage(runner: Runner, examples: int) -> int:
    """In the interpreter a step outside an array raises, so that no process need die of it."""
    turns = [(*safety.EXAMPLES, *mla_safety.EXAMPLES)[seed::examples] for seed in range(examples)]
    taken, refusals = 0, []
    for seed in range(examples):
        for operation, example in (*safety.EXAMPLES, *mla_safety.EXAMPLES) if examples > 12 else turns[seed]:
            ways = paths(runner, operation)
            try:
                example(runner, seed, ways[seed % len(ways)])
                taken += 1
            except Declined as refusal:
                refusals.append(refusal)
    if refusals and not taken:
        raise refusals[0]
    return taken


def checks() -> list[Check]:
    """The suite's checks, the one of memory safety in the form that the interpreter makes possible."""
    return [
        dataclasses.replace(check, run=_survives_garbage) if check.kind == "memory" else check
        for check in suite_checks()
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked(Runner):
    """No backend: notes which operation a check begins with."""

    asked: list[str] = dataclasses.field(default_factory=list)

    def _call(self, operation: str, batch: Any, options: Any, **extra: Any) -> Any:
        self.asked.append(operation)
        raise Absent("only asked")

    def tunables(self, operation: str) -> tuple[str, ...]:
        return tuple({name for options in PATHS.get(operation, ()) for name in options})


def operation_of(check: Check) -> str | None:
    """The operation that a check calls first."""
    runner = _Asked(framework="jax", backend="pallas")
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
    timeout: float = TIMEOUT,
    command: Sequence[str] = (sys.executable, "-m", MODULE),
) -> Iterator[Verdict]:
    """Run the checks of these names in a process apart; one that hangs is ended, and the next go on in another.

    `timeout` is for each check. `command` starts the process, given this module's arguments. The process stays for the
    next call that would start the same one.
    """
    arguments = ["--backend", backend, "--mode", mode, "--cores", str(cores)]
    arguments += ["--examples", str(examples or max(1, examples_of() // SLOWER))]
    for name in names:
        yield _process((*command, *arguments)).verdict(name, timeout)


def _process(command: tuple[str, ...]) -> "_Process":
    """The process of this command; no other remains, for each takes much memory."""
    if (running := _Process.last) and (running.ended or running.command != command):
        running.end()
    if _Process.last is None:
        _Process.last = _Process(command)
    return _Process.last


class _Process:
    """A process that is given names of checks and answers each with a line of JSON."""

    last: "_Process | None" = None

    def __init__(self, command: tuple[str, ...]) -> None:
        self.command, self.ended = command, False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `end`)
        environ = os.environ | {"JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environ
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._begun = False

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def verdict(self, name: str, timeout: float) -> Verdict:
        """What becomes of a check."""
        if not self._begun:  # the time that imports take is no check's
            self._begun = self._lines.get() == READY
        begun = time.perf_counter()
        try:
            line = self._answer(name, timeout) if self._begun else None
        except queue.Empty:
            line, hung, message = None, True, f"no end after {timeout:.0f} s: a wait that nothing satisfies?"
        else:
            hung, message = False, "the process ended"
        if line is not None:
            return Verdict(**json.loads(line))
        self.ended = True
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        report = f"{message}\n{self._errors.read()[-2000:]}".strip()
        return Verdict(name, "FAILED", seconds=time.perf_counter() - begun, message=report, hung=hung)

    def _answer(self, name: str, timeout: float) -> str | None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a process that has ended answers None
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        return self._lines.get(timeout=timeout)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        _Process.last = None


@atexit.register
def _end_the_last() -> None:
    if _Process.last:
        _Process.last.end()


def run_checks(runner: Runner, names: Iterable[str], examples: int, out: IO[str]) -> None:
    """Run the checks of these names here, and write a line of JSON for each as soon as it is known."""
    known = {str(check): check for check in checks()}
    for name in names:
        out.write(json.dumps(dataclasses.asdict(verdict_of(runner, known[name.strip()], examples))) + "\n")
        out.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the checks named on standard input; what `judged` starts."""
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--backend", default="pallas")
    parser.add_argument("--mode", choices=list(MODES), default="on_wait")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--examples", type=int, default=25)
    options = parser.parse_args(argv)
    environment.prepare("cpu")
    importlib.import_module("ragged_attention.testing.jax_front")
    sys.stdout.write(READY)
    out, sys.stdout = sys.stdout, sys.stderr  # the answers alone go to standard output
    out.flush()
    runner = InterpretedRunner(backend=options.backend, mode=options.mode, cores=options.cores)
    run_checks(runner, sys.stdin, options.examples, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
