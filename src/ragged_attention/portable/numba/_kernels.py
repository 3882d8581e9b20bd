"""From a kernel's two functions to what a front end's launcher calls: records, compiling, threads, XLA.

A kernel is two functions of the address of a record. `plan` divides the call into programs and returns how many there
are, negative if there is no memory; it may keep a table for them in one block of memory, `workspace`. `work` takes one
program after another until none is left, and is run by as many threads as there are; which thread runs which program
does not change results.

From torch the threads are torch's own: with a second pool beside it the two would take the CPUs from each other. In a
forked process, where OpenMP's threads are gone, and where torch runs on something else, they are Python's. From jax
they are those of XLA's pool.
"""

import ctypes
import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ragged_attention.portable.numba import _xla
from ragged_attention.portable.numba._compiling import machine_code, quietly
from ragged_attention.portable.numba._records import Fields

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _beside_torch() -> Iterator[Path]:
    """The OpenMP libraries that come with torch."""
    if torch := sys.modules.get("torch"):
        package = Path(str(torch.__file__)).parent
        for folder in (package / "lib", package.parent / "torch.libs"):
            yield from sorted(folder.glob("libgomp*.so*"))


@functools.cache
def _openmp() -> Any:
    """GOMP_parallel of the OpenMP library that torch has loaded, or None."""
    for file in _beside_torch():
        try:
            team = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_LOCAL).GOMP_parallel
        except OSError:
            continue
        team.argtypes, team.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return team
    return None


def spread(work: Any, record: int, num_threads: int) -> None:
    """Run the compiled `work` on a record in so many threads, of which the calling one is the first."""
    if num_threads < 2:
        work.ctypes(record)
    elif not _forked and (team := _openmp()) is not None:
        team(work.address, record, num_threads, 0)
    else:
        others = [threading.Thread(target=work.ctypes, args=(record,)) for _ in range(num_threads - 1)]
        for thread in others:
            thread.start()
        work.ctypes(record)
        for thread in others:
            thread.join()


@functools.cache
def _free() -> Any:
    function = ctypes.CDLL(None).free
    function.argtypes, function.restype = (ctypes.c_void_p,), None
    return function


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

    @functools.cached_property
    def compiled(self) -> tuple[Any, Any]:
        """`plan` and `work` in machine code; both take the address of a record and return a number."""
        return machine_code(f"the kernel {self.name}", dict.fromkeys((self.plan, self.work), "int64(int64)"))

    def compile_ahead(self, *, for_jax: bool) -> None:
        """Compile it now and say nothing, with what XLA calls of it if asked to."""
        with quietly():
            _ = self.compiled
            if for_jax:
                _xla.compile_ahead()

    def on(self, platform: str) -> Callable[[Any, Any], int]:
        """The function itself, which takes a record and returns a code."""
        del platform
        return self._run

    def _run(self, reference: Any, stream: Any) -> int:
        del stream
        record, (plan, work) = reference._obj, self.compiled
        address = ctypes.addressof(record)
        count = plan.ctypes(address)
        try:
            if count > 0:
                record.num_programs = count
                spread(work, address, min(record.num_threads, count))
        finally:
            _free()(record.workspace)
        return min(count, 0)

    def handler(self, platform: str, include: str) -> tuple[str, Any]:
        """The same for XLA, under a name that no other function has."""
        del platform
        return f"ragged_attention.numba.{self.name}", _xla.handler(self, include)

    def error_message(self, code: int, platform: str, shapes: Mapping[str, Any]) -> str:
        del code, platform
        arrays = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        return f"{self.name} found no memory for its plan: {arrays}"
