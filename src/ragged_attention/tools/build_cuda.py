"""Build the CUDA kernels ahead of time, so that no call waits for a compiler.

This needs nvcc, g++ and the CUTLASS headers (`ragged-attention doctor` shows which are found), but no GPU. If jax is
installed, the library that passes its arrays to the kernels is built too, against the installed jaxlib.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ragged_attention import kernels_cuda
from ragged_attention.tools.arguments import Parser

Result = TypeVar("Result")


def main(argv: Sequence[str] | None = None) -> int:
    """Build the kernels. Returns 0; raises `BackendMissing` if a tool is missing or a kernel does not compile."""
    parser = Parser(prog="ragged-attention build-cuda", description=__doc__)
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="also copy the kernels' library to DIR; wheels contain the library in kernels_cuda/prebuilt",
    )  # fmt: skip
    options = parser.parse_args(argv)
    console = Console(soft_wrap=True)
    for what, text in shown(lambda progress: kernels_cuda.build(progress, options.out), Console(stderr=True)):
        console.print(f"{what}: {escape(text)}", highlight=False)
    return 0


def shown(build: Callable[[Callable[[int, int, str], None]], Result], console: Console) -> Result:
    """The result of `build`, which gets a function to show each step: in a progress bar, or as a line if piped."""
    if not console.is_terminal:

        def say(done: int, total: int, text: str) -> None:
            print(f"[{done}/{total}] {text}", file=console.file, flush=True)

        return build(say)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=None)
        return build(lambda done, total, text: bar.update(task, completed=done, total=total, description=text))
