"""Machine code of functions, made by Numba on first use and kept on disk."""

import contextlib
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CacheImpl, _CacheLocator

from ragged_attention.calls import mla_cache
from ragged_attention.portable.numba._vectors import OPTIONS


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
    for file in (*sorted(Path(__file__).parent.glob("*.py")), Path(mla_cache.__file__)):  # whose sizes are constants
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class _Kept(_CacheLocator):
    """Where Numba keeps what is compiled of this package; other functions are left to its own places."""

    def __init__(self, line: int) -> None:
        self.line = line

    def get_cache_path(self) -> str:  # type: ignore[override]
        return str(_cache_folder() / _digest())

    def get_source_stamp(self) -> str:  # type: ignore[override]
        return _digest()

    def get_disambiguator(self) -> str:  # type: ignore[override]
        return str(self.line)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        ours = Path(py_file).parent == Path(__file__).parent and _writable()
        return cls(py_func.__code__.co_firstlineno) if ours else None


CacheImpl._locator_classes.insert(0, _Kept)
_compiling = threading.RLock()


def _after_fork() -> None:
    global _compiling
    _compiling = threading.RLock()  # which another thread may have held


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


PATIENCE = 1.0  # seconds of compiling before a line says so
_quiet = False  # where somebody else says it


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Inside, compiling is not announced."""
    global _quiet
    before, _quiet = _quiet, True
    try:
        yield
    finally:
        _quiet = before


def _say(name: str) -> None:
    if _quiet:
        return
    kept = f"kept in {_cache_folder()}" if _writable() else f"not kept, since {_cache_folder()} cannot be written"
    sys.stderr.write(f"ragged_attention: compiling {name} for this CPU, once, 10 to 20 s; {kept}\n")


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
