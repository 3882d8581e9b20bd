"""Compile the kernels for this CPU ahead of time, so that no call waits for a compiler.

The compiled kernels are kept on disk for this CPU, this version of Numba and this version of the kernels. A kernel that
is already there is not compiled again.
"""

import _thread
import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console

from ragged_attention import dispatch
from ragged_attention.calls import CALLS
from ragged_attention.errors import BackendMissing, InvalidInput
from ragged_attention.tools.arguments import Parser, nearest
from ragged_attention.tools.build_cuda import shown

BACKEND = "numba"
REPEATED_AFTER = 0.1  # seconds after which a Ctrl-C that was ignored is sent again


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the kernels. Returns 0; raises `BackendMissing` if Numba is not installed."""
    parser = Parser(prog="ragged-attention warmup", positional="[OPERATION ...] ", description=__doc__)
    parser.add_argument(
        "operations", nargs="*", metavar="OPERATION", help="an operation (default: all that have kernels for CPUs)"
    )
    operations = parser.parse_args(argv).operations
    for name in operations:
        if name not in CALLS:
            raise InvalidInput(
                f"expected OPERATION to be one of {', '.join(CALLS)}, got {name!r}{nearest(name, CALLS)}"
            )
    kernels = _kernels(operations)
    compiled, cached = shown(lambda report: _compile(kernels, report), Console(stderr=True, soft_wrap=True))
    for what, names in (("compiled", compiled), ("already compiled", cached)):
        if names:
            Console(soft_wrap=True).print(f"{what}: {', '.join(names)}", highlight=False)
    return 0


def _compile(kernels: Sequence[Any], report: Callable[[int, int, str], None]) -> tuple[list[str], list[str]]:
    """Compile the kernels that are not on disk. Returns their names, and those of the kernels that are on disk."""
    names: tuple[list[str], list[str]] = ([], [])
    with _heeded_interrupts() as stop_if_interrupted:
        for done, kernel in enumerate(kernels):
            report(done, len(kernels), kernel.name)
            is_new = kernel.compile_ahead(for_jax=importlib.util.find_spec("jax") is not None)
            stop_if_interrupted()
            names[0 if is_new else 1].append(kernel.name)
    return names


@contextlib.contextmanager
def _heeded_interrupts() -> Iterator[Callable[[], None]]:
    """A context for calls of a compiler. It yields a function that raises `KeyboardInterrupt` if Ctrl-C had no effect.

    The compiler calls Python from C. Python ignores an exception that is raised in such a call, even the exception of
    Ctrl-C. So Ctrl-C is repeated soon after it was ignored.
    """
    repeats: list[threading.Timer] = []
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        repeats.append(threading.Timer(REPEATED_AFTER, _thread.interrupt_main))
        repeats[-1].daemon = True
        repeats[-1].start()

    def stop_if_interrupted() -> None:
        if repeats:
            raise KeyboardInterrupt

    sys.unraisablehook = hook
    try:
        yield stop_if_interrupted
    finally:
        sys.unraisablehook = before
        for repeat in repeats:
            repeat.cancel()


def _kernels(operations: Sequence[str]) -> list[Any]:
    """The kernels of the named operations without duplicates, or of all operations if none is named."""
    kernels: dict[str, Any] = {}
    for name in operations or CALLS:
        try:
            kernel: Any = dispatch.load(name, BACKEND).KERNEL  # type: ignore[attr-defined]
        except BackendMissing:
            if operations or importlib.util.find_spec(BACKEND) is None:
                raise
            continue
        kernels.setdefault(kernel.name, kernel)
    return list(kernels.values())
