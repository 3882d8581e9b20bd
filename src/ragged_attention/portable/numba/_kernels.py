"""From a kernel's two functions to what a front end's launcher calls: records, compiling, threads, XLA.

A kernel is two functions of the address of a record. `plan` divides the call into programs and returns how many there
are, negative if there is no memory; it may keep a table for them in one block of memory, `workspace`. `work` takes one
program after another until none is left, and is run by as many threads as there are; which thread runs which program
does not change results. A thread that finds no memory for its work takes none.

From torch the threads are torch's own: with a second pool beside it the two would take the CPUs from each other. In a
forked process, where OpenMP's threads are gone, and where torch runs on something else, each call starts some. From jax
they are those of XLA's pool.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ragged_attention.host import forking
from ragged_attention.portable.numba import _threads, _xla
from ragged_attention.portable.numba._compiling import machine_code, quietly
from ragged_attention.portable.numba._records import Fields


def _beside_torch() -> Iterator[Path]:
    """The OpenMP libraries that come with torch."""
    if torch := sys.modules.get("torch"):
        package = Path(str(torch.__file__)).parent
        for folder in (package / "lib", package.parent / "torch.libs"):
            yield from sorted(folder.glob("libgomp*.so*"))


@functools.cache
def _openmp() -> int:
    """The address of GOMP_parallel of the OpenMP library that torch has loaded, 0 without one."""
    for file in _beside_torch():
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    return 0


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel, as the launchers' `native` takes it."""

    name: str
    fields: Fields
    plan: Callable[..., Any]
    work: Callable[..., Any]

    @property
    def record(self) -> type[Any]:
        return self.fields.structure

    @property
    def compiled(self) -> tuple[Any, Any]:
        """`plan` and `work` in machine code; both take the address of a record and return a number."""
        return machine_code(f"the kernel {self.name}", dict.fromkeys((self.plan, self.work), "int64(int64)"))

    def compile_ahead(self, *, for_jax: bool) -> None:
        """Compile it now and say nothing, with what calls it from torch, and from jax if asked to."""
        with quietly():
            _ = self.compiled, _threads.runner()
            if for_jax:
                _xla.compile_ahead()

    def on(self, platform: str) -> Callable[[Any, Any], int]:
        """The function itself, which takes a record and returns a code."""
        del platform
        return self._run

    def _run(self, reference: Any, stream: Any) -> int:
        del stream
        record, (plan, work) = reference._obj, self.compiled
        team = 0 if forking.forked() else _openmp()
        return _threads.runner().ctypes(ctypes.addressof(record), plan.address, work.address, team, record.num_threads)

    def handler(self, platform: str, include: str) -> tuple[str, Any]:
        """The same for XLA, under a name that no other function has."""
        del platform
        return f"ragged_attention.numba.{self.name}", _xla.handler(self, include)

    def error(self, code: int, platform: str, shapes: Mapping[str, Any]) -> MemoryError:
        """What to raise for a code that is not 0, with the arrays of the call that returned it."""
        del code, platform
        arrays = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        return MemoryError(f"{self.name} found no memory to work in{arrays and f': {arrays}'}")
