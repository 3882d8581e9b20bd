"""Arrays that begin or end exactly at the edge of readable memory, so that any access outside kills the process."""

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
PROT_NONE = 0


def guarded(array: NDArray[Any], side: str = "end") -> NDArray[Any]:
    """A C-contiguous copy of `array` between two unreadable pages, adjacent to the page on `side` ("start" or "end").

    The memory lives as long as any view of the copy, including a tensor from `torch.from_numpy`. POSIX only.
    """
    capacity = max(1, -(-array.nbytes // PAGE)) * PAGE
    memory = mmap.mmap(-1, capacity + 2 * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (base, base + PAGE + capacity):
        _protect(page)
    offset = PAGE if side == "start" else PAGE + capacity - array.nbytes
    copy = np.ndarray(array.shape, array.dtype, memory, offset)
    copy[...] = array
    return copy


def _protect(address: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect refused to make a page unreadable")


def run_module(module: str, arguments: Sequence[str], *, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` in a separate process, which may die: a returncode of -11 means SIGSEGV."""
    command = [sys.executable, "-X", "faulthandler", "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
