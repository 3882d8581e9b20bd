"""Builds the kernels on first use, keeps them by content, loads them by ctypes; the emulation of them likewise.

A library is kept in ~/.cache/ragged_attention under a digest of all that it is made of: sources, flags, architecture,
the compiler's release, the release of CUTLASS. One built ahead of time may lie in `prebuilt/` beside this file: its
name carries the digest of sources and flags, so one of other sources is never taken.

    library()                    the kernels, for a GPU; loads on a machine without one too, where `status` tells
    with emulating(): ...        inside, calls on a CPU run the same sources, compiled for its threads: `emulation()`
"""

import concurrent.futures
import contextlib
import contextvars
import ctypes
import dataclasses
import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ragged_attention.errors import BackendMissing, InvalidInput
from ragged_attention.kernels_cuda import abi, toolchain

logger = logging.getLogger("ragged_attention")

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
UNITS = ("mla_decode_dense", "sparse_mla_prefill", "mla_decode_sparse_fp8", "common")
ARCHITECTURE = "sm_90a"
NVCC_FLAGS = (
    "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr",
    "--expt-extended-lambda", "-Xcompiler=-fPIC,-fvisibility=hidden", "-DNDEBUG", "-lineinfo", "-cudart", "static",
)  # fmt: skip
# CuTe views fragments of registers through other types, which strict aliasing would turn into zeros.
EMULATION_FLAGS = (
    "-std=c++20", "-O2", "-fno-strict-aliasing", "-fPIC", "-fvisibility=hidden", "-w", "-DRA_EMULATE", "-DNDEBUG",
)  # fmt: skip
FFI_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden")
MODES = ("eager", "late", "crossed")
TOLD_LINES = 30  # of a failed compiler's output

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what was done or is next


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one shared library is made: each unit by `compiler` and `-c`, all of them together by `linker`."""

    what: str
    name: str
    digest: str
    texts: tuple[Path, ...]  # that the digest is of
    as_read: str  # their own digest, by which a change in the meantime is seen
    units: tuple[Path, ...]
    compiler: tuple[str, ...]
    linker: tuple[str, ...]
    libraries: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return cache_folder() / self.digest / self.name


class Status(NamedTuple):
    """What the library says of a device: a code, 0 if the kernels run there, and the code in words."""

    code: int
    text: str
    major: int
    minor: int
    num_multiprocessors: int


def cache_folder() -> Path:
    """Where built libraries are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~", ".cache").expanduser()
    return Path(base, "ragged_attention")


def digest_of(*parts: object) -> str:
    """A short name for all of `parts`; a path stands for the file's name and content."""
    found = hashlib.sha256()
    for part in parts:
        text = part.name.encode() + b"\0" + part.read_bytes() if isinstance(part, Path) else str(part).encode()
        found.update(len(text).to_bytes(8, "little") + text)
    return found.hexdigest()[:20]


def kernels_recipe() -> Recipe:
    """The kernels, by nvcc. Raises `BackendMissing` where the tools are not here."""
    nvcc, include = toolchain.nvcc(), toolchain.cutlass()
    if (reason := toolchain.missing_to_compile()) or nvcc is None or include is None:
        raise BackendMissing(reason or f"{toolchain.nvcc_path()} does not run")
    texts = _kernel_texts()
    name = _kernels_name(texts)
    return Recipe(
        what="CUDA kernels",
        name=name,
        digest=digest_of(name, nvcc.release, toolchain.cutlass_release(include)),
        texts=texts,
        as_read=digest_of(*texts),
        units=tuple(SOURCES / f"{unit}.cu" for unit in UNITS),
        compiler=(nvcc.path, *NVCC_FLAGS, f"-I{include}"),
        linker=(
            nvcc.path, "-shared", *NVCC_FLAGS, "-Xlinker", f"--exclude-libs,ALL,-soname,{name}",
            *(f"-L{folder}" for folder in nvcc.libraries),
        ),
    )  # fmt: skip


def _kernels_name(texts: Sequence[Path]) -> str:
    """The kernels' file name: a library of the same sources and flags is the same library, whoever compiled it."""
    return f"libragged_attention_cuda-{digest_of(*NVCC_FLAGS, *texts)}.so"


def _kernel_texts() -> tuple[Path, ...]:
    return tuple(path for path in _texts(SOURCES) if path.name not in ("emulated.h", "machine.h"))


def _texts(sources: Path) -> list[Path]:
    return sorted([*sources.glob("*.h"), *sources.glob("*.cu")])


def emulation_recipe(extra_flags: Sequence[str] = (), sources: Path = SOURCES) -> Recipe:
    """The same sources, by g++, over threads of the CPU."""
    gxx, include = toolchain.gxx(), toolchain.cutlass()
    if (reason := toolchain.missing_to_emulate()) or gxx is None or include is None:
        raise BackendMissing(reason or toolchain.NO_GXX)
    headers = toolchain.cuda_headers()
    flags = (*EMULATION_FLAGS, *extra_flags)
    texts = (*_texts(sources), sources / "emulation.cc")
    digest = digest_of(*flags, *texts, toolchain.gxx_release(gxx), toolchain.cutlass_release(include), *headers)
    name = f"libragged_attention_emulated-{digest}.so"
    includes = (f"-I{include}", *(f"-I{folder}" for folder in headers))
    return Recipe(
        what="emulation of the CUDA kernels",
        name=name,
        digest=digest,
        texts=texts,
        as_read=digest_of(*texts),
        units=(*(sources / f"{unit}.cu" for unit in UNITS), sources / "emulation.cc"),
        compiler=(gxx, *flags, *includes, "-x", "c++"),
        linker=(gxx, "-shared", *flags, "-pthread", f"-Wl,-soname,{name}"),
    )


def ffi_recipe(jax_include: str, kernels: Path, emulated: bool = False) -> Recipe:
    """The XLA FFI library over `kernels`, against the headers of one jaxlib: a newer FFI would break an older jaxlib.

    Its needing `kernels` is met by name, so those must be loaded first.
    """
    gxx = toolchain.gxx()
    if gxx is None:
        raise BackendMissing(toolchain.NO_GXX)
    interface = sorted(Path(jax_include, "xla", "ffi", "api").glob("*.h"))
    texts = (SOURCES / "api.h", SOURCES / "xla_ffi.cc", *interface)
    flags = (*FFI_FLAGS, *(("-DRA_EMULATE",) if emulated else ()))
    digest = digest_of(*flags, kernels.name, toolchain.gxx_release(gxx), *texts)
    includes = (f"-I{jax_include}", *(f"-isystem{folder}" for folder in toolchain.cuda_headers()))
    return Recipe(
        what="XLA FFI library of the CUDA kernels",
        name=f"libragged_attention_ffi-{digest}.so",
        digest=digest,
        texts=texts,
        as_read=digest_of(*texts),
        units=(SOURCES / "xla_ffi.cc",),
        compiler=(gxx, *flags, *includes),
        linker=(gxx, "-shared", f"-Wl,-rpath,$ORIGIN:{kernels.parent}"),
        libraries=(str(kernels),),
    )


def build(recipe: Recipe, progress: Progress | None = None) -> Path:
    """The recipe's library, from the cache or made now. A failure raises `BackendMissing` with the compiler's words."""
    try:
        recipe.path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(recipe.path.parent):
            if not recipe.path.is_file():
                _make(recipe, progress)
    except OSError as error:
        raise BackendMissing(f"the {recipe.what} cannot be kept in {cache_folder()}: {error}") from error
    return recipe.path


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Another process that wants the same library waits here, rather than make it again."""
    import fcntl  # not on Windows, where nothing is built

    with open(folder / "lock", "w") as file:
        with contextlib.suppress(OSError):  # file systems without locks: the work is done twice, the result is one
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(recipe: Recipe, progress: Progress | None) -> None:
    """Compile the units side by side, link them, and put the result into place in one step."""
    logger.info("building the %s with %s", recipe.what, recipe.compiler[0])
    start, steps = time.perf_counter(), len(recipe.units) + 1

    def told(done: int, text: str) -> None:
        if progress is not None:
            progress(done, steps, text)

    with tempfile.TemporaryDirectory(dir=recipe.path.parent) as folder:
        objects = [Path(folder, f"{unit.stem}.o") for unit in recipe.units]
        told(0, recipe.units[0].name)
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            waiting = {
                pool.submit(_call, recipe, (*recipe.compiler, "-c", str(unit), "-o", str(made))): unit
                for unit, made in zip(recipe.units, objects, strict=True)
            }
            try:
                for done, future in enumerate(concurrent.futures.as_completed(waiting), 1):
                    future.result()
                    told(done, waiting[future].name)
            except BackendMissing:
                pool.shutdown(cancel_futures=True)
                raise
        linked = Path(folder, recipe.name)
        _call(recipe, (*recipe.linker, "-o", str(linked), *map(str, objects), *recipe.libraries))
        if digest_of(*recipe.texts) != recipe.as_read:
            raise BackendMissing(f"the sources of the {recipe.what} changed while they were compiled")
        os.replace(linked, recipe.path)
    told(steps, recipe.name)
    logger.info("built the %s in %.0f s: %s", recipe.what, time.perf_counter() - start, recipe.path)


def _call(recipe: Recipe, command: Sequence[str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode:
        said = "\n".join(done.stdout.strip().splitlines()[-TOLD_LINES:])
        raise BackendMissing(
            f"building the {recipe.what} failed with exit code {done.returncode}:\n{shlex.join(command)}\n{said}"
        )


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
    """The library of `source`, built and opened once a process; a failure too is remembered, for it takes long."""
    if key in _loaded:
        return _loaded[key]
    with _lock:
        if key in _failed:
            raise BackendMissing(_failed[key])
        if key not in _loaded:
            found = source()
            try:
                _loaded[key] = opened(found if isinstance(found, Path) else build(found, progress))
            except (BackendMissing, OSError) as error:
                _failed[key] = str(error)
                raise BackendMissing(str(error)) from error
        return _loaded[key]


def prebuilt() -> Path | None:
    """The library built ahead of time of these very sources, if there is one."""
    path = PREBUILT / _kernels_name(_kernel_texts())
    return path if path.is_file() else None


def built() -> Path | None:
    """The kernels' library if it is built already."""
    if path := prebuilt():
        return path
    if toolchain.missing_to_compile() or toolchain.nvcc() is None:
        return None
    path = kernels_recipe().path
    return path if path.is_file() else None


def library(progress: Progress | None = None) -> ctypes.CDLL:
    """The kernels, built if need be. Loads without a driver; ask `status` before calling anything."""
    return _once(KERNELS, lambda: prebuilt() or kernels_recipe(), _bound, progress)


def _bound(path: Path) -> ctypes.CDLL:
    return abi.bind(ctypes.CDLL(str(path)))


def emulation(extra_flags: Sequence[str] = (), sources: Path = SOURCES) -> ctypes.CDLL:
    """The kernels for the CPU's threads: the same functions, given host pointers; `extra_flags` go to g++."""

    def opened(path: Path) -> ctypes.CDLL:
        found = _bound(path)
        found.ra_emulate.argtypes, found.ra_emulate.restype = (ctypes.c_int, ctypes.c_uint64), None
        return found

    return _once(("emulation", tuple(extra_flags), sources), lambda: emulation_recipe(extra_flags, sources), opened)


def ffi_library(jax_include: str, emulated: bool = False) -> ctypes.CDLL:
    """The XLA FFI handlers over the kernels or the emulation, for the jaxlib whose headers are in `jax_include`."""

    def source() -> Recipe:
        kernels = emulation() if emulated else library()
        return ffi_recipe(jax_include, Path(kernels._name), emulated)

    return _once(("ffi", jax_include, emulated), source, lambda path: ctypes.CDLL(str(path)))


class Emulation(NamedTuple):
    """How calls inside `emulating` run."""

    mode: str
    seed: int


_emulated: contextvars.ContextVar[Emulation | None] = contextvars.ContextVar("emulated", default=None)


@contextlib.contextmanager
def emulating(mode: str = "eager", seed: int = 0) -> Iterator[None]:
    """Inside, calls with backend="cuda" on CPU arrays run the kernels' own code on threads of the CPU.

    `mode` is when copies land and products are computed: "eager" at once, "late" no sooner than somebody waits for
    them, "crossed" copies at once and products late. `seed` shuffles the order in which threads run.
    """
    if mode not in MODES:
        raise InvalidInput(f"expected mode to be one of {', '.join(MODES)}, got {mode!r}")
    found, before = emulation(), _emulated.get()
    token = _emulated.set(Emulation(mode, seed))
    try:
        found.ra_emulate(MODES.index(mode), seed)
        yield
    finally:
        _emulated.reset(token)
        outer = before or Emulation(MODES[0], 0)
        found.ra_emulate(MODES.index(outer.mode), outer.seed)


def emulated() -> Emulation | None:
    """How calls are emulated here and now; None outside `emulating`."""
    return _emulated.get()


def why_not() -> str | None:
    """What is missing here to have `library()`, in a sentence; None if nothing is known to. Never builds or raises."""
    if KERNELS in _loaded:
        return None
    if KERNELS in _failed:
        return f"the CUDA kernels could not be built in this process: {_failed[KERNELS].splitlines()[-1]}"
    return None if prebuilt() else toolchain.missing_to_compile()


def status(device: int = 0) -> Status:
    """What the kernels say of a CUDA device; without a driver that is an error's code and text, never a crash."""
    found = library()
    major, minor, processors = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    code = found.ra_status(device, major, minor, processors)
    text = (found.ra_error_string(code) or b"").decode(errors="replace")
    return Status(code, text, major.value, minor.value, processors.value)
