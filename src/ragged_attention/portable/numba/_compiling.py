"""Machine code of functions, compiled by Numba on first use and cached on disk."""

import contextlib
import functools
import gc
import hashlib
import pickle
import platform
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import config, sigutils
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ragged_attention.host import caches, forking
from ragged_attention.portable.numba._pipeline import link_parts
from ragged_attention.portable.numba._vectors import OPTIONS

# Numba settings that change the compiled code.
SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")
WHY_NOT = "NUMBA_DISABLE_JIT has Numba compile nothing" if config.DISABLE_JIT else None  # type: ignore[attr-defined]

# ---- the cache on disk


def _cache_folder() -> Path:
    return caches.cache_folder() / "numba"


@functools.cache
def _digest() -> str:
    """A hash of the sources and versions that determine the machine code; the cache has a folder for each hash."""
    digest = hashlib.sha256()
    for part in (numba.__version__, llvmlite.__version__, platform.python_implementation(), sys.version):
        digest.update(part.encode() + b"\0")
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class _Shelf:
    """The cache of a CFunc's machine code, with the methods that Numba expects. A cache error never fails a call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"

    def _path(self, signature: Any, context: Any) -> Path:
        """The file for this signature, CPU and Numba configuration."""
        settings = [getattr(config, name, None) for name in SETTINGS]
        key = hashlib.sha256(repr((signature, context.codegen().magic_tuple(), settings)).encode()).hexdigest()
        return _cache_folder() / _digest() / f"{self._name}-{key[:16]}"

    def load_overload(self, signature: Any, context: Any) -> Any:
        context.refresh()
        try:
            kept = caches.read(self._path(signature, context))
            return None if kept is None else CompileResult._rebuild(context, *pickle.loads(kept))
        except Exception:  # the file may hold anything; None makes Numba compile the function and write the file again
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        try:
            if result.library.has_dynamic_globals:
                raise ValueError("its code holds addresses of this process")
            caches.write(self._path(signature, result.target_context), dumps(result._reduce()))
        except Exception as error:
            _say_once(f"compiled code is not cached: {error}")


# ---- compiling

PATIENCE = 1.0  # seconds of compilation before a message
_quiet = False  # whether the caller announces the compilation itself
_said: set[str] = set()
_num_compiled = 0  # functions that this process has compiled instead of loading them


def num_compiled() -> int:
    """The number of functions that this process has compiled so far; those that it loaded from disk do not count."""
    return _num_compiled


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A context in which compilation is not announced."""
    global _quiet
    before, _quiet = _quiet, True
    try:
        yield
    finally:
        _quiet = before


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        sys.stderr.write(f"ragged_attention: {text}\n")


def _announce(name: str) -> None:
    """Say that `name` is being compiled, and whether the code can be cached."""
    try:
        folder = _cache_folder() / _digest()
        caches.make_folder(folder)
        reason = caches.why_untrusted(folder)
    except (OSError, RuntimeError) as error:
        reason = str(error)
    caching = f"the code cannot be cached: {reason}" if reason else f"the code will be cached in {_cache_folder()}"
    _say_once(f"compiling {name} for this CPU, once, which takes some seconds; {caching}")


class _Function(CFunc):
    """A function compiled for C callers, or loaded from disk; compiling it starts the timer `announcement`."""

    def __init__(self, function: Callable[..., Any], types: Any, announcement: threading.Timer) -> None:
        options = {key: value for key, value in OPTIONS.items() if key not in ("nogil", "no_cpython_wrapper")}
        super().__init__(function, sigutils.normalize_signature(types), {}, options)
        self._cache, self._announcement = _Shelf(function), announcement

    def _compile_uncached(self) -> Any:
        if not _quiet and self._announcement.ident is None:
            self._announcement.start()
        global _num_compiled
        _num_compiled += 1  # under the lock of `machine_code`
        result = super()._compile_uncached()  # type: ignore[misc]
        _optimise_once(result.library, result.fndesc.llvm_cfunc_wrapper_name)
        return result


def _optimise_once(library: Any, entry: str) -> None:
    """Optimise a library once, and make the names of all its functions unique, except the name `entry`.

    The library must not be linked yet. Numba's names contain numbers that every process counts from 0, so two processes
    may give the same name to different functions. If a third process loaded both functions, one of them would run
    instead of the other. Numba would optimise a second time, to remove reference counting; the kernels have no objects.
    """

    def rename_and_optimize() -> None:
        prefix = f"ragged_attention.{secrets.token_hex(8)}."
        for function in [*library._final_module.functions]:
            if not function.is_declaration and function.name != entry:
                function.name = prefix + function.name
                function.linkage = "internal"
        passes, builder = library._codegen._module_pass_manager()
        passes.run(library._final_module, builder)

    library._optimize_final_module = rename_and_optimize
    link_parts(library)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """A context without Python's search for cyclic garbage, which would take as long as Numba's own work."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_compiling = threading.RLock()
_made: dict[tuple[tuple[Callable[..., Any], Any], ...], tuple[Any, ...]] = {}


def machine_code(name: str, functions: Mapping[Callable[..., Any], Any]) -> tuple[Any, ...]:
    """Compile functions for C callers, each with its signature, or load them from disk. Later calls reuse them.

    The functions must be defined at module level, since their names identify them in the cache.
    """
    key = tuple(functions.items())
    if (compiled := _made.get(key)) is not None:
        return compiled
    if WHY_NOT:
        raise RuntimeError(f"{name} is not compiled: {WHY_NOT}")
    with forking.postponed(), _compiling, _without_collection():
        if key not in _made:
            announcement = threading.Timer(PATIENCE, _announce, (name,))
            announcement.daemon = True
            compiled = tuple(_Function(function, types, announcement) for function, types in functions.items())
            try:
                for function in compiled:
                    function.compile()
            finally:
                announcement.cancel()
            _made[key] = compiled
        return _made[key]
