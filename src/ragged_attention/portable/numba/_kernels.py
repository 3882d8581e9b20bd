"""From a kernel's two functions to the object that a front end's launcher calls: records, compiling, threads, XLA.

A kernel is two functions of the address of a record. `plan` divides the call into programs and returns their number,
which is negative if there is no memory; it may keep a table for them in one block of memory, `workspace`. `work` runs
programs until none is left, and every thread calls it; results do not depend on the thread that runs a program. A
thread that finds no memory for its work runs no program.

Calls from torch run on torch's own threads, since a second pool would compete with them for the CPUs. In a forked
process, which has lost the threads of OpenMP, and where torch uses another thread library, each call starts threads of
its own. Calls from jax run on the threads of XLA's pool.
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

from ragged_attention.calls import Call
from ragged_attention.host import forking
from ragged_attention.portable.numba import _threads, _xla
from ragged_attention.portable.numba._compiling import machine_code, quietly
from ragged_attention.portable.numba._records import Fields, bits_of


def _beside_torch() -> Iterator[Path]:
    """The OpenMP libraries that are installed with torch."""
    if torch := sys.modules.get("torch"):
        package = Path(str(torch.__file__)).parent
        for folder in (package / "lib", package.parent / "torch.libs"):
            yield from sorted(folder.glob("libgomp*.so*"))


@functools.cache
def _openmp() -> int:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded; 0 if there is none."""
    for file in _beside_torch():
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    return 0


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel, in the form that the launchers' `native` takes."""

    name: str
    fields: Fields
    plan: Callable[..., Any]
    work: Callable[..., Any]

    @property
    def record(self) -> type[Any]:
        return self.fields.structure

    def launch(
        self,
        launch: Any,
        tile: Any,
        operands: Mapping[str, Any],
        results: Mapping[str, Any],
        numbers: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Launch the kernel and return its results by name.

        An operand left out is None, and a number left out is 0. The fields of `tile` are numbers too.
        """
        given = {**dict.fromkeys(self.fields.numbers, 0), **numbers, "num_threads": launch.num_threads}
        given |= {field.name: getattr(tile, field.name) for field in dataclasses.fields(tile)}
        for name in self.fields.floats:
            if name in given:
                given[name] = bits_of(given[name])
        return launch.native(self, {**dict.fromkeys(self.fields.operands), **operands}, results, given)

    def results_of(self, call: Call) -> dict[str, Any]:
        """The shapes and dtypes of the results, by name, of a call that has all of them."""
        return dict(zip(self.fields.results, call.results(), strict=True))

    @property
    def compiled(self) -> tuple[Any, Any]:
        """`plan` and `work` as machine code; both take the address of a record and return a number."""
        return machine_code(f"the kernel {self.name}", dict.fromkeys((self.plan, self.work), "int64(int64)"))

    def compile_ahead(self, *, for_jax: bool) -> None:
        """Compile the kernel now, without a message, and the code that calls it from torch and, on demand, from jax."""
        with quietly():
            _ = self.compiled, _threads.runner()
            if for_jax:
                _xla.compile_ahead()

    def on(self, platform: str) -> Callable[[Any, Any], int]:
        """The function that takes a record and returns an error code."""
        del platform
        return self._run

    def _run(self, reference: Any, stream: Any) -> int:
        del stream
        record, (plan, work) = reference._obj, self.compiled
        team = 0 if forking.forked() else _openmp()
        return _threads.runner().ctypes(ctypes.addressof(record), plan.address, work.address, team, record.num_threads)

    def handler(self, platform: str, include: str) -> tuple[str, Any]:
        """A unique name and the handler that XLA calls."""
        del platform
        return f"ragged_attention.numba.{self.name}", _xla.handler(self, include)

    def error(self, code: int, platform: str, shapes: Mapping[str, Any]) -> MemoryError:
        """The exception for an error code that is not 0; it names the arrays of the call."""
        del code, platform
        arrays = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        return MemoryError(f"{self.name} found no memory to work in{arrays and f': {arrays}'}")
