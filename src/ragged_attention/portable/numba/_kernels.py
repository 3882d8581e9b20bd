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
import hashlib
import os
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.caching import CacheImpl, _CacheLocator
from numba.extending import intrinsic

from ragged_attention.portable.numba._vectors import OPTIONS, add_to, inlined

NO_MEMORY = -1
STATE = ("claimed", "num_programs", "workspace", "finished")  # in front of every record
CLAIMED, NUM_PROGRAMS, WORKSPACE, FINISHED = range(len(STATE))


# ---- records


def record_at(layout: np.dtype) -> Any:
    """An intrinsic from an address to the record of this layout that lies there."""
    record = numba.from_dtype(layout)

    @intrinsic
    def at(context: Any, address: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return record(types.int64), generate

    return at


def bits_of(number: float) -> int:
    """A float64 as the int64 of its bits, the form in which records are handed over."""
    return struct.unpack("<q", struct.pack("<d", number))[0]


class Fields:
    """The fields of a kernel's record, all of eight bytes: addresses and numbers of the call, then the plan's own."""

    def __init__(
        self, operands: Sequence[str], results: Sequence[str], numbers: Sequence[str], plan: Sequence[str] = (), *,
        floats: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`floats` are those of the numbers that are float64, handed over as `bits_of` them."""
        self.operands, self.results, self.numbers = tuple(operands), tuple(results), tuple(numbers)
        names = (*STATE, *operands, *results, *numbers, *plan)
        self.layout = np.dtype([(name, np.float64 if name in floats else np.int64) for name in names])
        self.at = record_at(self.layout)

    @functools.cached_property
    def structure(self) -> type[Any]:
        """The record as ctypes has it."""
        members = {
            "OPERANDS": self.operands,
            "RESULTS": self.results,
            "NUMBERS": self.numbers,
            "_fields_": [(name, ctypes.c_int64) for name in self.layout.names or ()],
        }
        return type("Record", (ctypes.Structure,), members)


# ---- compiling


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ragged_attention" / "numba"


@functools.cache
def _writable() -> bool:
    """Whether compiled kernels can be kept."""
    try:
        _cache_folder().mkdir(parents=True, exist_ok=True)
        return os.access(_cache_folder(), os.W_OK)
    except (OSError, RuntimeError):
        return False


@functools.cache
def _digest() -> str:
    """Of everything that kernels are made of: a kernel is compiled again if any function that it calls may differ."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class _Kept(_CacheLocator):
    """Where Numba keeps what is compiled of this package; other functions are left to its own places."""

    def __init__(self, line: int) -> None:
        self.line = line

    def get_cache_path(self) -> str:
        return str(_cache_folder() / _digest())

    def get_source_stamp(self) -> str:
        return _digest()

    def get_disambiguator(self) -> str:
        return str(self.line)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        ours = Path(py_file).parent == Path(__file__).parent and _writable()
        return cls(py_func.__code__.co_firstlineno) if ours else None


CacheImpl._locator_classes.insert(0, _Kept)
_compiling = threading.RLock()
PATIENCE = 1.0  # seconds of compiling before a line says so


def _say(name: str) -> None:
    kept = f"kept in {_cache_folder()}" if _writable() else f"not kept, since {_cache_folder()} cannot be written"
    print(f"ragged_attention: compiling {name} for this CPU, once, 10 to 20 s; {kept}", file=sys.stderr, flush=True)


def machine_code(name: str, functions: Mapping[Callable[..., Any], str]) -> tuple[Any, ...]:
    """Functions compiled for C callers, each with its signature, or taken from the disk.

    They must be a module's own, so that they can be kept.
    """
    options = {key: value for key, value in OPTIONS.items() if key not in ("nogil", "no_cpython_wrapper")}
    with _compiling:
        teller = threading.Timer(PATIENCE, _say, (name,))
        teller.daemon = True
        teller.start()
        try:
            made = (numba.cfunc(types, cache=_writable(), **options)(each) for each, types in functions.items())
            return tuple(made)
        finally:
            teller.cancel()


# ---- threads

_forked = False


def _after_fork() -> None:
    global _forked, _compiling
    _forked, _compiling = True, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _openmp() -> Any:
    """GOMP_parallel of the OpenMP library that torch has loaded, or None."""
    torch = sys.modules.get("torch")
    folders = [Path(torch.__file__).parent / "lib", Path(torch.__file__).parents[1] / "torch.libs"] if torch else []  # type: ignore[arg-type]
    for file in (file for folder in folders for file in sorted(folder.glob("libgomp*.so*"))):
        try:
            library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
        except OSError:
            continue
        team = library.GOMP_parallel
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


# ---- kernels


@inlined
def next_program(address, num_programs):  # type: ignore[no-untyped-def]
    """The number of a program that no other thread takes, -1 if there is none; `address` is the record's."""
    index = add_to(address + 8 * CLAIMED, 1)
    return index if index < num_programs else -1


@inlined
def finished(address):  # type: ignore[no-untyped-def]
    """Say that a program is done, and with it everything that it wrote."""
    add_to(address + 8 * FINISHED, 1)


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
        return machine_code(self.name, dict.fromkeys((self.plan, self.work), "int64(int64)"))

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
        from ragged_attention.portable.numba import _xla

        del platform
        return f"ragged_attention.numba.{self.name}", _xla.handler(self, include)

    def error_message(self, code: int, platform: str, shapes: Mapping[str, Any]) -> str:
        del code, platform
        arrays = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        return f"{self.name} found no memory for its plan: {arrays}"
