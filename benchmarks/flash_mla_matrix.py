"""Run FlashMLA's own test cases through `compat.flash_mla`. An oracle in float32 checks each result.

On a GPU the cases run at full size. Elsewhere use `--heads` and `--max-tokens` to scale them down.
"""

import argparse
import collections
import contextlib
import importlib
import sys
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import ragged_attention as ra
from benchmarks.cases.flash_mla import LISTS, Case, cases_of, covering
from benchmarks.cases.flash_mla_data import check
from ragged_attention.errors import Unsupported

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_SHOWN = 20  # the most failures that are printed
# Backend -> the only operations that it has. It supports only some calls of them, so a declined call is not a failure.
PARTIAL = {"cuda": ("mla_decode", "sparse_mla_prefill")}

Failure = tuple[Case, Exception]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flash_mla_matrix", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--list", choices=LISTS, default="all", help="the list of cases to run (release and kind); default: all"
    )
    parser.add_argument("--backend", help="default: the device's default backend")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="a torch device")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--form",
        choices=("e0", "e2"),
        help="the release whose form of calls and results is used; default: the release of the case",
    )
    parser.add_argument("--heads", type=int, help="scale cases down to at most this number of query heads")
    parser.add_argument(
        "--max-tokens", type=int, help="scale batch, lengths and top-k down to about this number of tokens"
    )
    parser.add_argument(
        "--covering", action="store_true", help="run a subset of the cases that covers all pairs of parameter values"
    )
    parser.add_argument("--stride", type=int, default=1, help="run only every n-th case")
    parser.add_argument("--limit", type=int, help="the maximum number of cases")
    return parser.parse_args(argv)


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    cases = cases_of(options.list)
    if options.backend in PARTIAL:
        cases = [case for case in cases if case.OPERATION in PARTIAL[options.backend]]
    if options.covering:
        cases = covering(cases)
    cases = cases[:: options.stride][: options.limit]
    return [case.scaled_down(heads=options.heads, max_tokens=options.max_tokens) for case in cases]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    console = Console()
    cases = chosen_cases(options)
    passed: collections.Counter[str] = collections.Counter()
    failed: dict[str, list[Failure]] = collections.defaultdict(list)
    seconds: dict[str, float] = collections.defaultdict(float)
    declined: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ra.use_backend(requested(options.backend)),
        emulation(options),
    ):
        task = progress.add_task("", total=len(cases))
        for case in cases:
            group, start = case.group, time.perf_counter()
            try:
                check(case, options.device, form=options.form, dtype=DTYPES[options.dtype])
                passed[group] += 1
            except Unsupported as reason:
                if options.backend not in PARTIAL:
                    failed[group].append((case, reason))
                declined[group][str(reason).splitlines()[-1].strip()] += 1
            except Exception as error:  # a failing case is counted, and does not end the run
                failed[group].append((case, error))
            seconds[group] += time.perf_counter() - start
            wrong = sum(map(len, failed.values()))
            progress.update(task, advance=1, description=f"{group}: {wrong} failed")
    report(console, options, passed, failed, seconds, declined)
    return 1 if failed or not passed else 0


def requested(backend: str | None) -> str | dict[str, str] | None:
    """The argument for `use_backend`. A backend of PARTIAL is requested only for the operations that it has."""
    return {**dict.fromkeys(PARTIAL[backend], backend), "*": "auto"} if backend in PARTIAL else backend


def emulation(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """A context in which the CUDA kernels can run. On a CPU they run in the emulation."""
    if options.backend != "cuda" or options.device != "cpu":
        return contextlib.nullcontext()
    return importlib.import_module("ragged_attention.kernels_cuda").emulating()


def report(
    console: Console,
    options: argparse.Namespace,
    passed: collections.Counter[str],
    failed: dict[str, list[Failure]],
    seconds: dict[str, float],
    declined: dict[str, collections.Counter[str]],
) -> None:
    backend = options.backend or "the default backend"
    table = Table(title=f"FlashMLA's cases, {options.list}, by {backend} on {options.device}")
    table.add_column("cases")
    for name in ("passed", "failed", "declined", "seconds"):
        table.add_column(name, justify="right")
    for group, spent in seconds.items():
        refused = declined[group].total() if options.backend in PARTIAL else 0
        table.add_row(group, str(passed[group]), str(len(failed.get(group, ()))), str(refused), f"{spent:.1f}")
    wrong = [failure for group in failed.values() for failure in group]
    table.add_section()
    reasons = sum(declined.values(), collections.Counter()) if options.backend in PARTIAL else collections.Counter()
    table.add_row("all", str(passed.total()), str(len(wrong)), str(reasons.total()), f"{sum(seconds.values()):.1f}")
    console.print(table)
    for reason, count in reasons.most_common():
        console.print(f"declined {count}: {reason}", markup=False, highlight=False)
    for case, error in wrong[:MOST_SHOWN]:
        console.print(f"{case}: {type(error).__name__}: {error}", markup=False, highlight=False)
    if len(wrong) > MOST_SHOWN:
        console.print(f"and {len(wrong) - MOST_SHOWN} more")


if __name__ == "__main__":
    sys.exit(main())
