"""`ragged-attention conformance`: the suite on one backend, with a progress bar and a table at the end.

On a CPU a backend of Pallas TPU kernels is judged by jax's interpreter of them, and the CUDA kernels by an emulation of
the GPU, once in each of their modes. On `--device ptx:sm_90` the Triton or the CUDA kernels are compiled for such a GPU
and their PTX is emulated, from torch under two schedules.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ragged_attention.errors import InvalidInput
from ragged_attention.testing import environment
from ragged_attention.testing.verdicts import Verdict

INTERPRETED = "No TPU is used: jax's interpreter of TPU kernels runs them, in two modes that show different faults."
EMULATED = (
    "No GPU is used: an emulation of sm_90 runs the kernels' own code, in three modes that show different faults."
)
COMPILED = "No GPU is used: the kernels are compiled for one, and an emulator runs and watches their PTX."


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every check passed, 1 if one failed, 2 if the backend cannot run here."""
    parser = argparse.ArgumentParser(prog="ragged-attention conformance", description=__doc__)
    parser.add_argument("--backend", required=True, help="the backend to judge, a third-party one included")
    parser.add_argument("--framework", choices=["torch", "jax"], help="one front end (default: all that can)")
    parser.add_argument("--device", default="cpu", help="cpu (default), a torch device such as cuda, or ptx:sm_90")
    parser.add_argument("--examples", type=int, help="drawn batches a check (default: by HYPOTHESIS_PROFILE)")
    parser.add_argument("--only", default="", help="checks whose name contains this, such as packed")
    options = parser.parse_args(argv)
    environment.prepare(options.device)

    console = Console()
    present, absent = _runners(console, options.backend, options.framework, options.device)
    if not present:
        for name, reason in absent.items():
            console.print(f"[bold red]{name} cannot run here:[/] {reason}", highlight=False)
        return 2
    chosen, failed = _chosen(options.only), False
    for runner in present:
        lines = _judge(console, runner, chosen, options.examples)
        _report(console, str(runner), options.device, lines)
        failed = failed or any(line.result == "FAILED" for line in lines)
    return int(failed)


def _runners(console: Console, backend: str, framework: str | None, device: str) -> tuple[list[Any], dict[str, str]]:
    """All that can judge the backend, saying which emulate a device, and why others cannot."""
    from ragged_attention.testing import cuda_emulator, runner, tpu_interpreter

    if device.startswith(environment.PTX):
        from ragged_attention.testing import ptx_runner

        compiled, absent = ptx_runner.runners(backend, framework, device)
        if compiled:
            console.print(COMPILED)
        return [*compiled], absent
    found, absent = runner.runners(backend, framework, device)
    present: list[Any] = [*found]
    if "jax" not in [one.framework for one in found] and framework != "torch":
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
    if found := [check for check in checks if only in str(check)]:
        return found
    raise InvalidInput(f"expected --only to be part of a check's name, such as {str(checks[0])!r}, got {only!r}")


def _judge(console: Console, runner: object, chosen: Sequence[Any], examples: int | None) -> list[Verdict]:
    lines: list[Verdict] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(str(runner), total=len(chosen))

        def begin(check: object) -> None:
            progress.update(task, description=f"{runner}  {str(check)[:60]:60}")

        begin(chosen[0] if chosen else "")
        for index, line in enumerate(_verdicts(runner, chosen, examples), 1):
            lines.append(line)
            progress.advance(task)
            begin(chosen[index] if index < len(chosen) else "")
    return lines


def _verdicts(runner: Any, chosen: Sequence[Any], examples: int | None) -> Iterator[Verdict]:
    """What becomes of each check, in order."""
    from ragged_attention.testing import tpu_interpreter, verdicts
    from ragged_attention.testing.drawing import examples_of

    if isinstance(runner, tpu_interpreter.InterpretedRunner):
        names = [str(check) for check in chosen]
        yield from tpu_interpreter.judged(runner.backend, names, mode=runner.mode, examples=examples)
        return
    for check in chosen:
        yield verdicts.verdict_of(runner, check, examples or examples_of())


def _reason(message: str) -> str:
    """Of a refusal that lists what each backend said, what the first did."""
    first, _, rest = message.partition("\n")
    return (rest.partition("\n")[0] or first).strip()


def _report(console: Console, runner: str, device: str, lines: list[Verdict]) -> None:
    for line in lines:
        if line.result == "FAILED":
            console.print(f"[bold red]{line.check}[/]", highlight=False)
            console.print(line.message, highlight=False, markup=False)
    table = Table(title=f"{runner} on {device}", title_justify="left")
    for name, justify in (("check", "left"), ("examples", "right"), ("seconds", "right"), ("result", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    colours = {"passed": "green", "declined": "yellow", "FAILED": "bold red"}
    for line in _folded(lines):
        result = f"[{colours[line.result]}]{line.result}[/]"
        table.add_row(line.check, str(line.taken), f"{line.seconds:.1f}", result)
    console.print(table)
    counts = {result: sum(line.result == result for line in lines) for result in colours}
    console.print(", ".join(f"{count} {result}" for result, count in counts.items()), highlight=False)


def _folded(lines: list[Verdict]) -> list[Verdict]:
    """The corners that passed as one line, of what was declined one line for each reason, everything else as it is."""
    reasons: dict[str, list[Verdict]] = {}
    for line in lines:
        if line.result == "declined":
            reasons.setdefault(_reason(line.message), []).append(line)
    lines = [line for line in lines if line.result != "declined"]
    for reason, same in reasons.items():
        name = f"{len(same)} checks: {reason}" if len(same) > 1 else f"{same[0].check}: {reason}"
        lines.append(Verdict(name, "declined", seconds=sum(line.seconds for line in same)))
    passed = [line for line in lines if line.check.startswith("corner: ") and line.result == "passed"]
    rest = [line for line in lines if line not in passed]
    if not passed:
        return rest
    name = f"corner: {len(passed)} named batches"
    total = Verdict(name, "passed", len(passed), sum(line.seconds for line in passed))
    return [total, *rest]
