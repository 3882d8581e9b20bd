"""`ragged-attention warmup`: compile the kernels for this CPU ahead of time, so that no call waits for a compiler.

The compiled kernels are stored on disk for this CPU, this version of Numba and this version of the kernels.
"""

import argparse
import importlib.util
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ragged_attention import dispatch
from ragged_attention.calls import CALLS
from ragged_attention.errors import BackendMissing, InvalidInput
from ragged_attention.tools.build_cuda import shown

BACKEND = "numba"


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the kernels. Returns 0; raises `BackendMissing` if Numba is not installed."""
    parser = argparse.ArgumentParser(prog="ragged-attention warmup", description=__doc__)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help="default: all that have a kernel for CPUs")
    operations = parser.parse_args(argv).operations
    for name in operations:
        if name not in CALLS:
            raise InvalidInput(f"expected OPERATION to be one of {', '.join(CALLS)}, got {name!r}")
    console = Console(stderr=True, soft_wrap=True)
    kernels = _kernels(operations)

    def compile_all(report: Any) -> None:
        for done, kernel in enumerate(kernels):
            report(done, len(kernels), kernel.name)
            kernel.compile_ahead(for_jax=importlib.util.find_spec("jax") is not None)

    shown(compile_all, console)
    Console(soft_wrap=True).print(f"compiled: {', '.join(kernel.name for kernel in kernels)}", highlight=False)
    return 0


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
