"""Turns a kernel's two functions into the object that a front end's launcher calls: records, compiling, threads, XLA.

A kernel consists of two functions, which take the address of a record. `plan` divides the call into programs and
returns their number, or NO_MEMORY; it may allocate one block of memory for all of them, `workspace`. Every thread calls
`work`, which runs programs until none is left; results do not depend on which thread runs a program. A thread that
finds no memory for its work runs no program.

A third kind of function, a branch (`_branches`), is called by `plan` and `work` for work that few calls need.

Calls from torch run on torch's own threads, since a second pool would compete with them for the CPUs. In a forked
process, which has lost the threads of OpenMP, or if torch does not use libgomp, each call starts its own threads. Calls
from jax run on the threads of XLA's pool.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ragged_attention.calls import Call, dtype_name, is_array
from ragged_attention.host import forking
from ragged_attention.portable.numba import _splits, _tiles, _xla
from ragged_attention.portable.numba._branches import Branch
from ragged_attention.portable.numba._compiling import machine_code, num_compiled, quietly
from ragged_attention.portable.numba._formats import CODES
from ragged_attention.portable.numba._records import Fields, bits_of, record_type, runner, stride_names

# Types of the parameters of branches.
RECORDS = {"tile": record_type((*_tiles.NUMBERS, *_tiles.BUFFERS)), "unit": record_type(_splits.UNIT)}


@functools.cache
def _openmp() -> int:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded; 0 if there is none."""
    if (torch := sys.modules.get("torch")) is None:
        return 0
    package = Path(str(torch.__file__)).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for file in sorted(folder.glob("libgomp*.so*")):
            with contextlib.suppress(OSError):
                library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
                return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    return 0


@functools.cache
def _names_of(record: type[Call]) -> frozenset[str]:
    """The names of the arguments and properties of a call's record."""
    return frozenset((*record.KINDS, *dir(record)))


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
        self, launch: Any, call: Call, tile: Any, operands: Mapping[str, Any], numbers: Mapping[str, Any], *,
        axes: Mapping[str, str] | None = None, results: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Launch the kernel and return its results by name.

        An operand or number that is not passed is the call's argument or property of that name. If the call has none,
        the operand is None and the number is 0. The fields of `tile` are numbers too. `axes` replaces axes that
        `fields.strides` names; the stride of an axis that an operand lacks is 0. `results` replaces the call's results:
        each is a shape and dtype, or the name of the operand that the kernel writes in place.
        """
        fields, names = self.fields, _names_of(type(call))
        from_call = {name: getattr(call, name) for name in fields.operands if name in names and name not in operands}
        arrays = {**dict.fromkeys(fields.operands), **operands}
        for name, array in from_call.items():
            if is_array(array):
                arrays[name] = launch.packed(array) if name in fields.strides else launch.contiguous(array)
        given = {**self._describe(arrays, from_call, {**fields.strides, **(axes or {})}, launch), **numbers}
        given |= {field.name: getattr(tile, field.name) for field in dataclasses.fields(tile)}
        given["num_threads"] = launch.num_threads
        for name in fields.numbers:
            if name not in given:
                given[name] = getattr(call, name) or 0 if name in names else 0
        given |= {name: bits_of(given[name]) for name in fields.floats if name in given}
        given["branches"] = self._needed_branches(arrays, given)
        if results is None:
            shapes = ((result.shape, result.dtype) for result in call.results())
            results = dict(zip(fields.results, shapes, strict=False))  # the call may lack the last results
        return launch.native(self, arrays, {**dict.fromkeys(fields.results), **results}, given)

    def _describe(
        self, arrays: Mapping[str, Any], from_call: Mapping[str, Any], axes: Mapping[str, str], launch: Any
    ) -> dict[str, Any]:
        """The numbers that describe `arrays`; `from_call` has the call's operands, in which a scale may be a float."""
        numbers: dict[str, Any] = {}
        for name, letters in axes.items():
            if (array := arrays[name]) is not None:
                numbers.update(zip(stride_names(name, letters), launch.strides(array), strict=False))
        for name in (*self.fields.formats, *self.fields.scales):
            if (array := arrays[name]) is not None:
                numbers[f"{name}_format"] = CODES[dtype_name(array)]
        for name in self.fields.scales:
            array, scale = arrays[name], from_call.get(name)
            numbers[f"{name}_stride"] = int(array is not None and array.shape not in ((), (1,)))
            numbers[f"{name}_number"] = 1.0 if scale is None or array is not None else float(scale)
        return numbers

    @functools.cached_property
    def addresses(self) -> Any:
        """The addresses of the kernel's branches, 0 for those that are not compiled yet."""
        return (ctypes.c_int64 * len(self.fields.branches))()

    def _needed_branches(self, arrays: Mapping[str, Any], numbers: Mapping[str, Any]) -> int:
        """Compile the branches that a call needs; returns a bit for each of them."""
        needed = 0
        for index, branch in enumerate(self.fields.branches):
            if any(numbers.get(name) or arrays.get(name) is not None for name in branch.needed_by):
                needed |= 1 << index
                self._compile_branch(index, branch)
        return needed

    def _compile_branch(self, index: int, branch: Branch) -> None:
        if not self.addresses[index]:
            types = branch.signature({"call": self.fields.type, **RECORDS})
            (code,) = machine_code(f"{branch.name} of the kernel {self.name}", {branch.function: types})
            self.addresses[index] = code.address

    @property
    def compiled(self) -> tuple[Any, Any]:
        """`plan` and `work` as machine code; both take the address of a record and return a number."""
        return machine_code(f"the kernel {self.name}", dict.fromkeys((self.plan, self.work), "int64(int64)"))

    def compile_ahead(self, *, for_jax: bool) -> bool:
        """Compile the kernel without a message, and the code that runs it from torch and, if `for_jax`, from jax.

        Returns whether anything was compiled, and not just loaded from disk.
        """
        before = num_compiled()
        with quietly():
            _ = self.compiled, runner()
            for index, branch in enumerate(self.fields.branches):
                self._compile_branch(index, branch)
            if for_jax:
                _xla.shared_code()
        return num_compiled() > before

    def on(self, platform: str) -> Callable[[Any, Any], int]:
        """The function that takes a record and returns an error code."""
        del platform
        return self._run

    def _run(self, reference: Any, stream: Any) -> int:
        del stream
        record, (plan, work) = reference._obj, self.compiled
        place = ctypes.addressof(record) + self.fields.branches_at
        ctypes.memmove(place, self.addresses, ctypes.sizeof(self.addresses))
        team = 0 if forking.forked() else _openmp()
        return runner()(ctypes.addressof(record), plan.address, work.address, team, record.num_threads)

    def handler(self, platform: str, include: str) -> tuple[str, Any]:
        """A unique name and the handler that XLA calls."""
        del platform
        return f"ragged_attention.numba.{self.name}", _xla.handler(self, include)

    def error(self, code: int, platform: str, shapes: Mapping[str, Any]) -> MemoryError:
        """The exception for an error code that is not 0; it names the arrays of the call."""
        del code, platform
        arrays = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        return MemoryError(f"{self.name} found no memory to work in{arrays and f': {arrays}'}")
