"""Builds the kernels, their emulation, the recorders of their launches and the library for XLA.

A library is stored in ~/.cache/ragged_attention under a digest of everything from which it is made: sources, flags, and
the releases of the compiler and of CUTLASS. A library built ahead of time may be in `kernels_cuda/prebuilt/`. Its name
has the digest of its sources and flags, so it is used only if neither has changed.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ragged_attention.errors import BackendMissing
from ragged_attention.host import caches
from ragged_attention.kernels_cuda._build import toolchain

logger = logging.getLogger("ragged_attention")

PACKAGE = Path(__file__).parent.parent
SOURCES = PACKAGE / "csrc"
PREBUILT = PACKAGE / "prebuilt"
UNITS = (
    "sm90/mla_decode_dense", "sm90/sparse_mla_prefill", "sm90/mla_decode_sparse_fp8",
    "sm90/mla_decode_sparse_fp8_narrow", "sm90/mla_decode_sparse_fp8_v4", "sm90/mla_decode_sparse_v41", "common",
)  # fmt: skip
EMULATOR = "emulator"  # the folder of the sources that are compiled only for a CPU
NVCC_FLAGS = (
    "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr",
    "--expt-extended-lambda", "-Xcompiler=-fPIC,-fvisibility=hidden", "-DNDEBUG", "-lineinfo", "-Xptxas=--warn-on-spills",
    "-cudart", "static",
)  # fmt: skip
# These flags put PTX as text into the library, instead of machine code, so that it can be extracted.
RECORDER_FLAGS = (
    "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=compute_90a", "--no-compress", "--expt-relaxed-constexpr",
    "--expt-extended-lambda", "-Xcompiler=-fPIC,-fvisibility=hidden", "-DNDEBUG", "-lineinfo", "-cudart", "none",
)  # fmt: skip
# CuTe reads register fragments through pointers of other types, so with strict aliasing it would read zeros.
EMULATION_FLAGS = (
    "-std=c++20", "-O2", "-fno-strict-aliasing", "-fPIC", "-fvisibility=hidden", "-w", "-DRA_EMULATE", "-DNDEBUG",
)  # fmt: skip
FFI_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden")
SHOWN_LINES = 30  # maximum lines of a failed compiler's output that an error quotes
NO_CACHE = "no folder to store the CUDA kernels in: set HOME or XDG_CACHE_HOME"
# In these warnings, C7510 and others, ptxas says that it serialised wgmma: each product waits for the previous one.
SERIALISED = r".*\(C75\d\d\).*"
UNFINISHED = "building-"  # the prefix of the folders in which libraries are built

# Takes the number of finished steps, the total number of steps, and the last finished file, at first the first file.
Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a shared library is made: `compiler` with `-c` compiles each of the `units`, then `linker` links them."""

    what: str  # a description of the library for messages
    name: str
    digest: str
    texts: tuple[Path, ...]  # the sources that the digest covers
    units: tuple[Path, ...]
    compiler: tuple[str, ...]
    linker: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    refused: str = ""  # a pattern in a compiler's output that makes the build fail, even with exit code 0
    as_read: str = dataclasses.field(init=False)  # the digest of the sources alone, to detect changes during the build

    def __post_init__(self) -> None:
        object.__setattr__(self, "as_read", digest_of(*self.texts))

    @property
    def path(self) -> Path:
        return cache_folder() / self.digest / self.name


def cache_folder() -> Path:
    """The folder that stores built libraries."""
    try:
        return caches.cache_folder()
    except RuntimeError as error:
        raise BackendMissing(NO_CACHE) from error


def missing_to_store() -> str | None:
    """Why a built library cannot be stored, or None."""
    try:
        cache_folder()
    except BackendMissing as error:
        return str(error)
    return None


def digest_of(*parts: object) -> str:
    """A short digest of all `parts`; a path stands for the file's name and content."""
    digest = hashlib.sha256()
    for part in parts:
        text = part.name.encode() + b"\0" + part.read_bytes() if isinstance(part, Path) else str(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:20]


def kernels_recipe() -> Recipe:
    """The recipe of the kernels. Raises `BackendMissing` if a tool is missing."""
    nvcc, include = _nvcc()
    texts = _kernel_texts()
    name = _kernels_name(texts)
    return Recipe(
        what="CUDA kernels",
        name=name,
        digest=digest_of(name, nvcc.release, toolchain.cutlass_release(include)),
        texts=texts,
        units=tuple(SOURCES / f"{unit}.cu" for unit in UNITS),
        compiler=(nvcc.path, *NVCC_FLAGS, f"-I{SOURCES}", f"-I{include}"),
        linker=(
            nvcc.path, "-shared", *NVCC_FLAGS, "-Xlinker", f"--exclude-libs,ALL,-soname,{name}",
            *(f"-L{folder}" for folder in nvcc.libraries),
        ),
        refused=SERIALISED,
    )  # fmt: skip


def _kernels_name(texts: Sequence[Path]) -> str:
    """The kernels' file name, which depends on sources and flags but not on the compiler."""
    return f"libragged_attention_cuda-{digest_of(*NVCC_FLAGS, *texts)}.so"


def _kernel_texts() -> tuple[Path, ...]:
    return tuple(path for path in _texts(SOURCES) if path.parent.name != EMULATOR)


def _texts(sources: Path) -> list[Path]:
    return sorted([*sources.rglob("*.h"), *sources.rglob("*.cu")])


def _nvcc() -> tuple[toolchain.Nvcc, Path]:
    """nvcc and the folder of the CUTLASS headers. Raises `BackendMissing`."""
    nvcc, include = toolchain.nvcc(), toolchain.cutlass()
    if (reason := toolchain.missing_to_compile()) or nvcc is None or include is None:
        raise BackendMissing(reason or f"{toolchain.nvcc_path()} does not run")
    return nvcc, include


def _gxx() -> tuple[str, str]:
    """g++ and its release. Raises `BackendMissing`."""
    path = toolchain.gxx()
    release = toolchain.gxx_release(path) if path else None
    if path is None or release is None:
        raise BackendMissing(f"{path} does not run" if path else toolchain.NO_GXX)
    return path, release


def emulation_recipe(extra_flags: Sequence[str] = (), sources: Path = SOURCES) -> Recipe:
    """The recipe of the emulation: the kernels' sources, compiled by g++ for the CPU."""
    (gxx, release), include = _gxx(), toolchain.cutlass()
    if (reason := toolchain.missing_to_emulate()) or include is None:
        raise BackendMissing(reason or toolchain.NO_CUTLASS)
    headers = toolchain.cuda_headers()
    flags = (*EMULATION_FLAGS, *extra_flags)
    entry = sources / EMULATOR / "emulation.cc"
    texts = (*_texts(sources), entry)
    digest = digest_of(*flags, *texts, release, toolchain.cutlass_release(include), *headers)
    name = f"libragged_attention_emulated-{digest}.so"
    includes = (f"-I{folder}" for folder in (sources, include, *headers))
    return Recipe(
        what="emulation of the CUDA kernels",
        name=name,
        digest=digest,
        texts=texts,
        units=(*(sources / f"{unit}.cu" for unit in UNITS if unit != "common"), entry),  # `entry` includes common.cu
        compiler=(gxx, *flags, *includes, "-x", "c++"),
        linker=(gxx, "-shared", *flags, "-pthread", f"-Wl,-soname,{name}"),
    )


def recorder_recipe(unit: str) -> Recipe:
    """The recipe of a recorder: one of `UNITS` as PTX, and its host code, linked with csrc/emulator/recorder.cc.

    recorder.cc replaces the CUDA runtime, so the functions of the C ABI work as on a GPU, but report launches
    instead of making them.
    """
    nvcc, include = _nvcc()
    texts = (*_kernel_texts(), SOURCES / EMULATOR / "recorder.cc")
    digest = digest_of(unit, *RECORDER_FLAGS, *texts, nvcc.release, toolchain.cutlass_release(include))
    return Recipe(
        what=f"recorder of the launches of {unit}.cu",
        name=f"libragged_attention_recorder-{digest}.so",
        digest=digest,
        texts=texts,
        units=(SOURCES / f"{unit}.cu", texts[-1]),
        compiler=(nvcc.path, *RECORDER_FLAGS, f"-I{SOURCES}", f"-I{include}"),
        # The library must use its own functions even if the process has loaded a CUDA runtime, and no symbol may be
        # missing.
        linker=(nvcc.path, "-shared", *RECORDER_FLAGS, "-Xlinker", "-Bsymbolic,-z,defs"),
    )


def ffi_recipe(jax_include: str, kernels: Path, emulated: bool = False) -> Recipe:
    """The recipe of the XLA FFI library over `kernels`, for the jaxlib whose headers are in `jax_include`.

    Each jaxlib needs a library of its own, because an older jaxlib cannot use a newer FFI. The library links
    to `kernels`. If the process has not loaded them, they must be in the library's folder, or still be in their present
    folder.
    """
    gxx, release = _gxx()
    interface = sorted(Path(jax_include, "xla", "ffi", "api").glob("*.h"))
    texts = (SOURCES / "api.h", SOURCES / "xla_ffi.cc", *interface)
    flags = (*FFI_FLAGS, *(("-DRA_EMULATE",) if emulated else ()))
    digest = digest_of(*flags, kernels.name, release, *texts)
    includes = (f"-isystem{folder}" for folder in (jax_include, *toolchain.cuda_headers()))  # without their warnings
    return Recipe(
        what="XLA FFI library of the CUDA kernels",
        name=f"libragged_attention_ffi-{digest}.so",
        digest=digest,
        texts=texts,
        units=(SOURCES / "xla_ffi.cc",),
        compiler=(gxx, *flags, *includes),
        linker=(gxx, "-shared", f"-Wl,-rpath,$ORIGIN:{kernels.parent}"),
        libraries=(str(kernels),),
    )


def is_whole(path: Path) -> bool:
    """Whether a library is at least as long as its ELF header says. Loading a truncated one would crash the process."""
    try:
        with open(path, "rb") as file:
            header, size = file.read(64), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    (sections,), (entry, count) = struct.unpack_from("=Q", header, 40), struct.unpack_from("=2H", header, 58)
    return size >= sections + entry * count


def build(recipe: Recipe, progress: Progress | None = None) -> Path:
    """The recipe's library, cached or built now. Raises `BackendMissing`, with the output of a compiler that failed."""
    try:
        caches.expect_trusted(recipe.path)
        if is_whole(recipe.path):  # without the lock, which cannot be taken in a cache folder of root
            return recipe.path
        caches.make_folder(recipe.path.parent)
        caches.expect_trusted(recipe.path)
        with _alone(recipe.path.parent) as alone:
            if is_whole(recipe.path):  # another process has built it meanwhile
                return recipe.path
            if alone:
                for folder in recipe.path.parent.glob(f"{UNFINISHED}*"):  # left by builds that were killed
                    shutil.rmtree(folder, ignore_errors=True)
            _make(recipe, progress)
    except OSError as error:
        raise BackendMissing(f"the {recipe.what} cannot be stored in {cache_folder()}: {error}") from error
    return recipe.path


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Wait until no other process builds in `folder`. Yields False without waiting if the file system has no locks."""
    import fcntl  # does not exist on Windows, where nothing is built

    # The lock's file may belong to another user, so it is opened for reading, which is enough for a lock.
    file = os.open(folder / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # no locks: two processes may build the library, with the same result
            yield False
        else:
            yield True
    finally:
        os.close(file)


def _make(recipe: Recipe, progress: Progress | None) -> None:
    """Compile the units in parallel, link them, and move the result to its path in one step."""
    logger.info("building the %s with %s", recipe.what, recipe.compiler[0])
    start, steps = time.perf_counter(), len(recipe.units) + 1

    def report(done: int, text: str) -> None:
        if progress is not None:
            progress(done, steps, text)

    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=recipe.path.parent) as folder, _Compilers(recipe) as run:
        objects = [Path(folder, f"{unit.stem}.o") for unit in recipe.units]
        report(0, recipe.units[0].name)
        started = {
            run.later((*recipe.compiler, "-c", str(unit), "-o", str(made))): unit
            for unit, made in zip(recipe.units, objects, strict=True)
        }
        for done, future in enumerate(concurrent.futures.as_completed(started), 1):
            future.result()
            report(done, started[future].name)
        printed = "".join(f"{unit.name}:\n{text}" for future, unit in started.items() if (text := future.result()))
        if printed:
            logger.warning("the compiler of the %s succeeded with this output:\n%s", recipe.what, printed)
        linked = Path(folder, recipe.name)
        run.later((*recipe.linker, "-o", str(linked), *map(str, objects), *recipe.libraries)).result()
        if digest_of(*recipe.texts) != recipe.as_read:
            raise BackendMissing(f"the sources of the {recipe.what} changed while they were compiled")
        linked.chmod(linked.stat().st_mode & ~0o022)  # only the owner may write to it, whatever the umask
        os.replace(linked, recipe.path)
    report(steps, recipe.name)
    logger.info("built the %s in %.0f s: %s", recipe.what, time.perf_counter() - start, recipe.path)


class _Compilers:
    """Runs a recipe's commands, at most one per core at a time. An exception, even Ctrl-C, ends them all."""

    def __init__(self, recipe: Recipe) -> None:
        self._what, self._refused = recipe.what, recipe.refused
        self._pool = concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._running: set[subprocess.Popen[str]] = set()
        self._lock, self._ended = threading.Lock(), False

    def __enter__(self) -> "_Compilers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            with self._lock:
                self._ended = True
                for process in self._running:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)  # nvcc and the programs that it has started
        self._pool.shutdown(cancel_futures=True)

    def later(self, command: Sequence[str]) -> concurrent.futures.Future[str]:
        """Start a command. Returns a future of its output, which raises `BackendMissing` if it fails or is refused."""
        return self._pool.submit(self._call, command)

    def _call(self, command: Sequence[str]) -> str:
        with self._lock:
            if self._ended:
                return ""
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", process_group=0,
            )  # fmt: skip
            self._running.add(process)
        with process:
            printed, _ = process.communicate()
        with self._lock:
            self._running.discard(process)
        if process.returncode:
            last = "\n".join(printed.strip().splitlines()[-SHOWN_LINES:])
            raise BackendMissing(
                f"building the {self._what} failed with exit code {process.returncode}:\n{shlex.join(command)}\n{last}"
            )
        if self._refused and (match := re.search(self._refused, printed)):
            raise BackendMissing(f"building the {self._what} was given up, for the compiler said: {match[0].strip()}")
        return printed


def prebuilt() -> Path | None:
    """The library that was built ahead of time, if it was built from the present sources, or None."""
    path = PREBUILT / _kernels_name(_kernel_texts())
    return path if is_whole(path) else None


def built() -> Path | None:
    """The kernels' library if it is already built, or None."""
    if path := prebuilt():
        return path
    if toolchain.missing_to_compile() or missing_to_store() or toolchain.nvcc() is None:
        return None
    path = kernels_recipe().path
    try:
        return path if is_whole(path) and not caches.why_untrusted(path) else None
    except OSError:
        return None
