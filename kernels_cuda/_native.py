"""The compiled kernels that this process has loaded, and `Native`, through which a front end's launcher calls them.

library()                    the kernels for a GPU, which can be loaded without one; `status` tells whether they run
with emulating(): ...        calls on a CPU run `emulation()`, the same sources compiled for CPU threads
recorder(name)               a function's kernels as PTX, and its host code, which reports launches but makes none
"""

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported
from ragged_attention.host import forking
from ragged_attention.kernels_cuda import _abi
from ragged_attention.kernels_cuda._build import compile, toolchain
from ragged_attention.kernels_cuda._build.compile import Progress, Recipe

MODES = ("eager", "late", "crossed")
NOT_EMULATING = "runs on sm_90 GPUs, on a CPU inside ragged_attention.kernels_cuda.emulating() only"


class Status(NamedTuple):
    """What the library reports about a device."""

    code: int  # 0 if the kernels can run on the device
    text: str  # the code in words
    major: int
    minor: int
    num_multiprocessors: int


# ---- loading

KERNELS = ("kernels",)
_lock = threading.RLock()
_loaded: dict[tuple, ctypes.CDLL] = {}
_failed: dict[tuple, str] = {}


def _once(
    key: tuple,
    source: Callable[[], Recipe | Path],
    opened: Callable[[Path], ctypes.CDLL],
    progress: Progress | None = None,
) -> ctypes.CDLL:
    """The library of `source`, built and opened once per process. A failure is stored too, because building is slow."""
    if key in _loaded:
        return _loaded[key]
    with forking.postponed(), _lock:
        if key in _failed:
            raise BackendMissing(_failed[key])
        if key not in _loaded:
            recipe = source()
            try:
                _loaded[key] = opened(recipe if isinstance(recipe, Path) else compile.build(recipe, progress))
            except (BackendMissing, OSError) as error:
                _failed[key] = str(error)
                raise BackendMissing(_failed[key]) from error
        return _loaded[key]


def library(progress: Progress | None = None) -> ctypes.CDLL:
    """The kernels, built if necessary. They can be loaded without a driver, so check `status` before any call."""
    return _once(KERNELS, lambda: compile.prebuilt() or compile.kernels_recipe(), _bound, progress)


def _bound(path: Path) -> ctypes.CDLL:
    return _abi.bind(ctypes.CDLL(str(path)))


def emulation(extra_flags: Sequence[str] = (), sources: Path = compile.SOURCES) -> ctypes.CDLL:
    """The kernels for CPU threads, whose functions take host pointers. `extra_flags` are passed to g++."""

    def opened(path: Path) -> ctypes.CDLL:
        emulator = _bound(path)
        emulator.ra_emulate.argtypes, emulator.ra_emulate.restype = (ctypes.c_int, ctypes.c_uint64), None
        return emulator

    key = ("emulation", tuple(extra_flags), sources)
    return _once(key, lambda: compile.emulation_recipe(extra_flags, sources), opened)


def recorder(function: str) -> Path:
    """The library in which a function of the C ABI records its launches, with its kernels' PTX; built if necessary."""
    unit = f"sm90/{function.removeprefix('ra_')}"
    return compile.build(compile.recorder_recipe(unit if unit in compile.UNITS else "common"))


def ffi_library(jax_include: str, emulated: bool = False) -> ctypes.CDLL:
    """The XLA FFI handlers of the kernels or of the emulation, for the jaxlib whose headers are in `jax_include`."""

    def source() -> Recipe:
        kernels = emulation() if emulated else library()
        return compile.ffi_recipe(jax_include, Path(kernels._name), emulated)

    return _once(("ffi", jax_include, emulated), source, lambda path: ctypes.CDLL(str(path)))


class Emulation(NamedTuple):
    """How calls run inside `emulating`."""

    mode: str
    seed: int


_emulated: contextvars.ContextVar[Emulation | None] = contextvars.ContextVar("emulated", default=None)


@contextlib.contextmanager
def emulating(mode: str = "eager", seed: int = 0) -> Iterator[None]:
    """See `kernels_cuda.emulating`."""
    if mode not in MODES:
        raise InvalidInput(f"expected mode to be one of {', '.join(MODES)}, got {mode!r}")
    emulator, outer = emulation(), _emulated.get() or Emulation(MODES[0], 0)
    token = _emulated.set(Emulation(mode, seed))
    try:
        emulator.ra_emulate(MODES.index(mode), seed)
        yield
    finally:
        _emulated.reset(token)
        emulator.ra_emulate(MODES.index(outer.mode), outer.seed)


def emulated() -> Emulation | None:
    """The mode and seed of the emulation in use; None outside `emulating`."""
    return _emulated.get()


def why_not() -> str | None:
    """Why `library()` cannot work on this machine, in one sentence, or None. Never builds or raises."""
    if KERNELS in _loaded:
        return _refusal(_loaded[KERNELS])
    if KERNELS in _failed:
        return f"the CUDA kernels could not be built in this process: {_failed[KERNELS].splitlines()[-1]}"
    return None if compile.prebuilt() else toolchain.missing_to_compile() or compile.missing_to_store()


def status(device: int = 0) -> Status:
    """What the kernels report about a CUDA device. Without a driver, the status has an error code."""
    kernels = library()
    major, minor, processors = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    code = kernels.ra_status(device, major, minor, processors)
    text = (kernels.ra_error_string(code) or b"").decode(errors="replace")
    return Status(code, text, major.value, minor.value, processors.value)


@functools.cache
def _refusal(kernels: ctypes.CDLL) -> str | None:
    """Why the driver cannot run the loaded kernels; None if it can, or if there is no driver."""
    driver, runtime = ctypes.c_int(), ctypes.c_int()
    kernels.ra_versions(driver, runtime)
    if driver.value == 0 or driver.value >= runtime.value:
        return None
    wanted, got = (f"{version.value // 1000}.{version.value % 1000 // 10}" for version in (runtime, driver))
    return f"expected a driver for CUDA {wanted} or later, which the kernels were compiled with, got one for CUDA {got}"


# ---- handles for launchers


def _library_for(platform: str) -> ctypes.CDLL:
    """The library for a platform's arrays. Raises `Unsupported` for arrays of a CPU outside `emulating`."""
    if platform != "cpu":
        kernels = library()
        if reason := _refusal(kernels):
            raise Unsupported(reason)
        return kernels
    if emulated() is None:
        raise Unsupported(NOT_EMULATING)
    return emulation()


@dataclasses.dataclass(frozen=True, slots=True)
class Native:
    """A function of the C ABI."""

    name: str

    @property
    def record(self) -> type[Any]:
        """The record that the function takes: a ctypes structure with the lists OPERANDS, RESULTS and NUMBERS."""
        return _abi.LAUNCHERS[self.name]

    def on(self, platform: str) -> Any:
        """The function for a platform's arrays. It takes a record and a stream, and returns a code."""
        return getattr(_library_for(platform), self.name)

    def handler(self, platform: str, include: str) -> tuple[str, Any]:
        """A unique name, and the function's XLA FFI handler, compiled with the headers in `include`."""
        emulated = platform == "cpu"
        name = f"{self.name}.{_library_for(platform)._name}" if emulated else self.name
        return name, getattr(ffi_library(include, emulated=emulated), f"{self.name}_ffi")

    def error(self, code: int, platform: str, shapes: Mapping[str, Any]) -> RuntimeError:
        """The exception for a nonzero code, with the shapes of the call's arrays."""
        text = _library_for(platform).ra_error_string(code).decode()
        arrays = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        return RuntimeError(f"{self.name} failed with code {code}, {text}: {arrays}")
