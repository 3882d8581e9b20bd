"""`ragged-attention conformance`: the suite on one backend, with a progress bar and a table at the end."""

import argparse
import dataclasses
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ragged_attention.testing import environment


@dataclasses.dataclass
class Line:
    """One line of the table."""

    check: str
    examples: int
    result: str  # passed | declined | FAILED
    seconds: float
    message: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every check passed, 1 if one failed, 2 if the backend cannot run here."""
    parser = argparse.ArgumentParser(prog="ragged-attention conformance", description=__doc__)
    parser.add_argument("--backend", required=True, help="the backend to judge, a third-party one included")
    parser.add_argument("--framework", choices=["torch", "jax"], help="one front end (default: all that can)")
    parser.add_argument("--device", default="cpu", help="cpu (default), or a torch device such as cuda")
    parser.add_argument("--examples", type=int, help="drawn batches a check (default: by HYPOTHESIS_PROFILE)")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    options = parser.parse_args(argv)
    environment.prepare(options.device)

    from ragged_attention.testing.runners import runners

    console = Console()
    present, absent = runners(options.backend, options.framework, options.device)
    if not present:
        for name, reason in absent.items():
            console.print(f"[bold red]{name} cannot run here:[/] {reason}", highlight=False)
        return 2
    failed = False
    for runner in present:
        lines = _judge(console, runner, options.examples, options.only)
        _report(console, str(runner), options.device, lines)
        failed = failed or any(line.result == "FAILED" for line in lines)
    return int(failed)


def _judge(console: Console, runner: object, examples: int | None, only: str) -> list[Line]:
    from ragged_attention.testing.drawing import examples_of
    from ragged_attention.testing.runners import Declined
    from ragged_attention.testing.suite import checks

    chosen = [check for check in checks() if only in str(check)]
    lines: list[Line] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(str(runner), total=len(chosen))
        for check in chosen:
            progress.update(task, description=f"{runner}  {str(check)[:60]:60}")
            begun, taken, result, message = time.perf_counter(), 0, "passed", ""
            try:
                taken = check.run(runner, examples or examples_of())  # type: ignore[arg-type]
            except Declined as refusal:
                result, message = "declined", str(refusal)
            except Exception as error:  # whatever a kernel of others may raise is a failure, and the next check goes on
                result, message = "FAILED", _told(error)
            lines.append(Line(str(check), taken, result, time.perf_counter() - begun, message))
            progress.advance(task)
    return lines


def _told(error: Exception) -> str:
    """An error with the batch that Hypothesis shrank it to."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _report(console: Console, runner: str, device: str, lines: list[Line]) -> None:
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
        table.add_row(line.check, str(line.examples), f"{line.seconds:.1f}", result)
    console.print(table)
    counts = {result: sum(line.result == result for line in lines) for result in colours}
    console.print(", ".join(f"{count} {result}" for result, count in counts.items()), highlight=False)


def _folded(lines: list[Line]) -> list[Line]:
    """The corners that passed as one line, everything else as it is."""
    passed = [line for line in lines if line.check.startswith("corner: ") and line.result == "passed"]
    rest = [line for line in lines if line not in passed]
    if not passed:
        return rest
    total = Line(f"corner: {len(passed)} named batches", len(passed), "passed", sum(line.seconds for line in passed))
    return [total, *rest]
