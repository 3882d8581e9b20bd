"""Test a backend with the conformance suite: show a progress bar, and print a table at the end.

On a CPU, Pallas TPU kernels run in jax's interpreter and the CUDA kernels in an emulation of the GPU, once in each mode
of the interpreter or the emulation. With `--device ptx:sm_90`, the Triton or CUDA kernels are compiled for such a GPU
and their PTX is emulated. Through the torch front end, the PTX runs under two schedules.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ragged_attention.errors import InvalidInput
from ragged_attention.testing import environment, progress, reporting
from ragged_attention.testing.verdicts import Verdict
from ragged_attention.tools.arguments import Parser, at_least

INTERPRETED = "No TPU is used: jax's interpreter of TPU kernels runs them, in two modes that find different faults."
EMULATED = (
    "No GPU is used: an emulation of sm_90 runs the kernels' own code, in three modes that find different faults."
)
COMPILED = "No GPU is used: the kernels are compiled for one, and an emulator runs and watches their PTX."

PASSED, FAILED, NOTHING = 0, 1, 2
EXIT_STATUS = """\
exit status:
  0  every check that could run passed
  1  a check failed
  2  the command line has a mistake, or no check could run"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, one of those in `EXIT_STATUS`."""
    parser = Parser(
        prog="ragged-attention conformance", positional="--backend NAME ", description=__doc__, epilog=EXIT_STATUS
    )
    parser.add_argument(
        "--backend", required=True, metavar="NAME", help="the backend to test; it may be a third-party one"
    )
    parser.add_argument(
        "--framework", choices=["torch", "jax"], help="test through this front end only (default: all that can run)"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu (default), a torch device such as cuda, or ptx:sm_90"
    )
    parser.add_argument(
        "--examples", type=at_least(1), metavar="N",
        help="the number of batches drawn for each check (default: by HYPOTHESIS_PROFILE)",
    )  # fmt: skip
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only checks whose name contains TEXT, such as packed"
    )
    parser.add_argument(
        "--rounded-weights",
        action="store_true",
        help="accept softmax weights that are rounded to 16 bits before they are multiplied with values",
    )
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first check that fails")
    parser.add_argument("--junit", metavar="FILE", help="also write the results to FILE as JUnit XML")
    options = parser.parse_args(argv)
    if options.junit:
        _expect_writable(options.junit)
    environment.prepare(options.device)

    console = Console()
    present, absent = _runners(console, options.backend, options.framework, options.device)
    if not present:
        for name, reason in absent.items():
            console.print(f"[bold red]{name} cannot run here:[/] {escape(reason)}", highlight=False, soft_wrap=True)
        if options.junit:
            reporting.write_junit(options.junit, {})
        return NOTHING
    checks, judged = _chosen(options.only), {}
    for runner in (dataclasses.replace(each, rounded_weights=options.rounded_weights) for each in present):
        lines = judged[str(runner)] = _judge(console, runner, checks, options)
        reporting.print_report(console, runner, lines, options)
        if options.fail_fast and any(line.result == "FAILED" for line in lines):
            break
    if options.junit:
        reporting.write_junit(options.junit, judged)
    results = {line.result for lines in judged.values() for line in lines}
    return FAILED if "FAILED" in results else PASSED if "passed" in results else NOTHING


def _expect_writable(path: str) -> None:
    """Raise InvalidInput unless the file can be written.

    This is tested before the first check, because a whole run may take hours.
    """
    try:
        Path(path).touch()
    except OSError as error:
        raise InvalidInput(f"expected --junit to be a file that can be written, got {path}: {error.strerror}") from None


def _runners(console: Console, backend: str, framework: str | None, device: str) -> tuple[list[Any], dict[str, str]]:
    """The runners of the backend that can run here, and for each other one the reason why it cannot.

    Prints a line for the runners that emulate a device.
    """
    from ragged_attention.testing import cuda_emulator, runner, tpu_interpreter

    if device.startswith(environment.PTX):
        from ragged_attention.testing import ptx_runner

        compiled, absent = ptx_runner.runners(backend, framework, device)
        if compiled:
            console.print(COMPILED)
        return [*compiled], absent
    on_device, absent = runner.runners(backend, framework, device)
    present: list[Any] = [*on_device]
    if "jax" not in [present_runner.framework for present_runner in on_device] and framework != "torch":
        interpreted = tpu_interpreter.runners(backend, device)
        if interpreted:
            console.print(INTERPRETED)
        present += interpreted
    if emulated := cuda_emulator.runners(backend, framework, device):
        console.print(EMULATED)
        present += emulated
    return present, absent


def _chosen(only: str) -> list[Any]:
    from ragged_attention.testing import suite

    checks = suite.checks()
    if matching := [check for check in checks if only in str(check)]:
        return matching
    raise InvalidInput(f"expected --only to be part of a check's name, such as {str(checks[0])!r}, got {only!r}")


def _judge(console: Console, runner: object, checks: Sequence[Any], options: argparse.Namespace) -> list[Verdict]:
    lines: list[Verdict] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    piped = progress.Progress(len(checks))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(str(runner), total=len(checks))

        def begin(check: object) -> None:
            bar.update(task, description=f"{runner}  {str(check)[:60]:60}")
            if not console.is_terminal:  # a pipe shows no progress bar
                piped.say(len(lines), f"{runner}  {check}")

        begin(checks[0] if checks else "")
        for index, line in enumerate(_verdicts(runner, checks, options.examples), 1):
            lines.append(line)
            if options.fail_fast and line.result == "FAILED":
                break
            bar.advance(task)
            begin(checks[index] if index < len(checks) else "")
    return lines


def _verdicts(runner: Any, checks: Sequence[Any], examples: int | None) -> Iterator[Verdict]:
    """The verdict of each check, in order."""
    from ragged_attention.testing import tpu_interpreter, verdicts
    from ragged_attention.testing.drawing import examples_of

    if isinstance(runner, tpu_interpreter.InterpretedRunner):
        names = [str(check) for check in checks]
        yield from tpu_interpreter.judged(
            runner.backend, names, mode=runner.mode, examples=examples, rounded_weights=runner.rounded_weights
        )
        return
    for check in checks:
        yield verdicts.verdict_of(runner, check, examples or examples_of())
