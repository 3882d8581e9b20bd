"""The compiled kernels that this process has loaded, and the handles by which a front end's launcher calls them.

library()                    the kernels for a GPU; it loads without a GPU too, which `status` then reports
with emulating(): ...        inside, calls on a CPU run the same sources, compiled for CPU threads: `emulation()`
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
    """The library's answer about a device: a code, 0 if the kernels run there, and the code in words."""

    code: int
    text: str
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
    """The library of `source`, built and opened once per process. A failure is remembered too: building is slow."""
    if key in _loaded:
        return _loaded[key]
    with forking.postponed(), _lock:
        if key in _failed:
            raise BackendMissing(_failed[key])
        if key not in _loaded:
            made_of = source()
            try:
                _loaded[key] = opened(made_of if isinstance(made_of, Path) else compile.build(made_of, progress))
            except (BackendMissing, OSError) as error:
                _failed[key] = str(error)
                raise BackendMissing(_failed[key]) from error
        return _loaded[key]


def library(progress: Progress | None = None) -> ctypes.CDLL:
    """The kernels, built if necessary. They load without a driver, so check `status` before any call."""
    return _once(KERNELS, lambda: compile.prebuilt() or compile.kernels_recipe(), _bound, progress)


def _bound(path: Path) -> ctypes.CDLL:
    return _abi.bind(ctypes.CDLL(str(path)))


def emulation(extra_flags: Sequence[str] = (), sources: Path = compile.SOURCES) -> ctypes.CDLL:
    """The kernels for CPU threads: the same functions, which take host pointers. `extra_flags` go to g++."""

    def opened(path: Path) -> ctypes.CDLL:
        emulator = _bound(path)
        emulator.ra_emulate.argtypes, emulator.ra_emulate.restype = (ctypes.c_int, ctypes.c_uint64), None
        return emulator

    key = ("emulation", tuple(extra_flags), sources)
    return _once(key, lambda: compile.emulation_recipe(extra_flags, sources), opened)


def recorder(function: str) -> Path:
    """The library in which a function of the C ABI records its launches, with the kernels' PTX; built if necessary."""
    unit = f"sm90/{function.removeprefix('ra_')}"
    return compile.build(compile.recorder_recipe(unit if unit in compile.UNITS else "common"))


def ffi_library(jax_include: str, emulated: bool = False) -> ctypes.CDLL:
    """The XLA FFI handlers over the kernels or the emulation, for the jaxlib whose headers are in `jax_include`."""

    def source() -> Recipe:
        kernels = emulation() if emulated else library()
        return compile.ffi_recipe(jax_include, Path(kernels._name), emulated)

    return _once(("ffi", jax_include, emulated), source, lambda path: ctypes.CDLL(str(path)))


class Emulation(NamedTuple):
    """How calls inside `emulating` run."""

    mode: str
    seed: int


_emulated: contextvars.ContextVar[Emulation | None] = contextvars.ContextVar("emulated", default=None)


@contextlib.contextmanager
def emulating(mode: str = "eager", seed: int = 0) -> Iterator[None]:
    """The emulation of `kernels_cuda.emulating`, which describes `mode` and `seed`."""
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
    """The mode and seed of the emulation in force; None outside `emulating`."""
    return _emulated.get()


def why_not() -> str | None:
    """What `library()` lacks on this machine, in one sentence, or None. Never builds or raises."""
    if KERNELS in _loaded:
        return _refusal(_loaded[KERNELS])
    if KERNELS in _failed:
        return f"the CUDA kernels could not be built in this process: {_failed[KERNELS].splitlines()[-1]}"
    return None if compile.prebuilt() else toolchain.missing_to_compile() or compile.missing_to_store()


def status(device: int = 0) -> Status:
    """What the kernels report about a CUDA device. Without a driver it has an error's code and text."""
    kernels = library()
    major, minor, processors = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    code = kernels.ra_status(device, major, minor, processors)
    text = (kernels.ra_error_string(code) or b"").decode(errors="replace")
    return Status(code, text, major.value, minor.value, processors.value)


@functools.cache
def _refusal(kernels: ctypes.CDLL) -> str | None:
    """Why the driver cannot run the loaded kernels, asked once; None if it can, or if there is no driver."""
    driver, runtime = ctypes.c_int(), ctypes.c_int()
    kernels.ra_versions(driver, runtime)
    if driver.value == 0 or driver.value >= runtime.value:
        return None
    wanted, got = (f"{version.value // 1000}.{version.value % 1000 // 10}" for version in (runtime, driver))
    return f"expected a driver for CUDA {wanted} or later, which the kernels were compiled with, got one for CUDA {got}"


# ---- handles for launchers


def _library_for(platform: str) -> ctypes.CDLL:
    """The library for a platform's arrays. Raises `Unsupported` for a CPU's outside `emulating`."""
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
        """The record that the function takes: a ctypes structure that lists OPERANDS, RESULTS and NUMBERS."""
        return _abi.LAUNCHERS[self.name]

    def on(self, platform: str) -> Any:
        """The function for a platform's arrays. It takes a record and a stream, and returns a code."""
        return getattr(_library_for(platform), self.name)

    def handler(self, platform: str, include: str) -> tuple[str, Any]:
        """A unique name, and the function as an XLA FFI handler, compiled with the headers in `include`."""
        emulated = platform == "cpu"
        name = f"{self.name}.{_library_for(platform)._name}" if emulated else self.name
        return name, getattr(ffi_library(include, emulated=emulated), f"{self.name}_ffi")

    def error(self, code: int, platform: str, shapes: Mapping[str, Any]) -> RuntimeError:
        """The exception for a code that is not 0, with the shapes of the call's arrays."""
        text = _library_for(platform).ra_error_string(code).decode()
        arrays = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        return RuntimeError(f"{self.name} failed with code {code}, {text}: {arrays}")
