"""CUTLASS kernels for Hopper, and functions to emulate them, to build them ahead of time, and to report their state."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

_NATIVE = "ragged_attention.kernels_cuda._native"


def emulating(mode: str = "eager", seed: int = 0) -> contextlib.AbstractContextManager[None]:
    """A context manager inside which calls with backend="cuda" on CPU arrays run the kernels' own code on the CPU.

    `mode` determines when copies and matrix products take effect. "eager": at once. "late": as late as possible.
    "crossed": copies at once, and products late. A nonzero `seed` shuffles the order in which threads run. The
    emulation is compiled on first use, which takes about a minute and needs g++, the CUTLASS headers and the CUDA
    headers.
    """
    return importlib.import_module(_NATIVE).emulating(mode, seed)


def state() -> Hashable:
    """A value on which `why_not` depends in addition to the call: the path of the emulation in use, or None."""
    native: Any = sys.modules.get(_NATIVE)
    return None if native is None or native.emulated() is None else native.emulation()._name


def report() -> list[tuple[str, str]]:
    """Rows for `ragged-attention doctor`: the tools that were found, and whether the kernels are built."""
    return importlib.import_module("ragged_attention.kernels_cuda._report").rows()


def missing() -> str | None:
    """What the kernels lack on this machine, in one sentence, or None. A GPU is not required."""
    return importlib.import_module(_NATIVE).why_not()


def build(
    progress: Callable[[int, int, str], None] | None = None, copy_to: Path | None = None
) -> list[tuple[str, str]]:
    """Build the libraries ahead of time, for `ragged-attention build-cuda`. Returns rows with the libraries' paths.

    If jax is installed, the library that passes jax arrays to the kernels is built too, for the installed jaxlib. The
    kernels' library is copied to the folder `copy_to`.
    """
    return importlib.import_module("ragged_attention.kernels_cuda._report").build(progress, copy_to)
