"""Finds the compilers and headers for building the kernels. Nothing here builds or raises.

The search for nvcc has this order: $CUDACXX, $CUDA_HOME, the compiler from PyPI (extra `cuda-toolchain`), PATH,
/usr/local/cuda. CUTLASS consists of headers only, which are in the wheel `nvidia-cutlass` (extra `cuda`).
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

USUAL_HOME = Path("/usr/local/cuda")
PYPI_HOME = "nvidia.cu13"  # the namespace package of the compiler's wheels, which together are a CUDA home

NO_NVCC = (
    "no nvcc in CUDACXX, CUDA_HOME, nvidia.cu13, PATH or /usr/local/cuda: set CUDA_HOME to a CUDA toolkit, or install "
    "ragged-attention[cuda-toolchain]"
)
NO_CUTLASS = "no CUTLASS headers: install ragged-attention[cuda] or nvidia-cutlass"
LEAST_NVCC = (12, 8)  # the machine code of older releases has not been checked
NO_GXX = "no g++ on PATH"
NO_HEADERS = "no CUDA headers (cuda_runtime.h and cuda/std) beside nvcc or in nvidia.cu13"

# jax for CUDA installs the first of these wheels only for its assembler, and pip may pick any release of the others.
WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt")
PARTS = ("nvvm/bin/cicc", "include/crt", "include/cccl", "include/cuda_runtime.h", "lib/libcudart_static.a")


@dataclasses.dataclass(frozen=True)
class Nvcc:
    """An nvcc, its release, and the folders of its headers and libraries."""

    path: str
    release: str
    includes: tuple[str, ...]
    libraries: tuple[str, ...]

    @property
    def number(self) -> tuple[int, int] | None:
        """The release as numbers, such as (13, 0); None if it cannot be parsed."""
        found = re.search(r"release (\d+)\.(\d+)", self.release)
        return (int(found[1]), int(found[2])) if found else None


def missing_to_compile() -> str | None:
    """What is missing to compile the kernels, in one sentence, or None."""
    if reason := _wrong_platform():
        return reason
    wanted = os.environ.get("CUDACXX")
    if wanted and not shutil.which(wanted):
        return f"expected CUDACXX to name a compiler, got {wanted!r}"
    if nvcc_path() is None:
        return NO_NVCC
    if (found := nvcc()) and (number := found.number) and number < LEAST_NVCC:
        least, got = (".".join(map(str, release)) for release in (LEAST_NVCC, number))
        return f"expected nvcc of release {least} or later, got {got} in {found.path}"
    return NO_GXX if gxx() is None else NO_CUTLASS if cutlass() is None else None


def missing_to_emulate() -> str | None:
    """What is missing to compile the emulation, in one sentence, or None."""
    if reason := _wrong_platform():
        return reason
    if gxx() is None:
        return NO_GXX
    return NO_CUTLASS if cutlass() is None else None if cuda_headers() else NO_HEADERS


def _wrong_platform() -> str | None:
    return None if sys.platform == "linux" else f"the CUDA kernels are built on Linux, this is {sys.platform}"


def nvcc_candidates() -> Iterator[tuple[str, str | None]]:
    """Each place to search, in order, with its nvcc or None."""
    environ = os.environ
    yield "CUDACXX", _program(environ.get("CUDACXX"))
    yield "CUDA_HOME", _program(environ.get("CUDA_HOME"), "bin", "nvcc")
    yield PYPI_HOME, _program(_whole(pypi_home()), "bin", "nvcc")
    yield "PATH", shutil.which("nvcc")
    yield str(USUAL_HOME), _program(USUAL_HOME, "bin", "nvcc")


def _program(*parts: str | Path | None) -> str | None:
    return shutil.which(str(Path(*(part for part in parts if part)))) if parts[0] else None


def _whole(home: Path | None) -> Path | None:
    """The folder of the wheels if it has all parts of a compiler, in one release."""
    if home is None or not all((home / part).exists() for part in PARTS):
        return None
    return home if len({_minor_release(wheel) for wheel in WHEELS}) == 1 else None


@functools.cache
def _minor_release(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution).rpartition(".")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def nvcc_path() -> str | None:
    """The path of the first nvcc found, or None."""
    return next((path for _, path in nvcc_candidates() if path), None)


def nvcc() -> Nvcc | None:
    """The first nvcc found, with its release and folders; None if there is none or it does not run."""
    path = nvcc_path()
    return _asked(path) if path else None


@functools.cache
def _asked(path: str) -> Nvcc | None:
    try:
        release = _say([path, "--version"])
        plan = _say([path, "-dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull])
    except (OSError, subprocess.SubprocessError):
        return None
    folders = " ".join(re.findall(r"^#\$ (?:SYSTEM_)?INCLUDES=(.*)", plan, re.MULTILINE))
    includes = [os.path.normpath(name) for name in re.findall(r'"(?:-I)?([^"]*/[^"]*)"', folders)]
    top = re.search(r"^#\$ TOP=(.*)", plan, re.MULTILINE)
    # The wheels have the libraries in lib/, where nvcc's own profile does not look.
    libraries = [str(Path(top[1].strip(), "lib").resolve())] if top else []
    libraries = [folder for folder in libraries if Path(folder, "libcudart_static.a").is_file()]
    found = re.search(r"release .*", release)
    return Nvcc(path, found[0] if found else "unknown release", tuple(includes), tuple(libraries))


def _say(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True)
    return done.stdout


def gxx() -> str | None:
    return shutil.which("g++")


@functools.cache
def gxx_release(path: str) -> str | None:
    """The first line of g++'s version output; None if it does not run."""
    try:
        return _say([path, "--version"]).partition("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def pypi_home() -> Path | None:
    """The folder into which the wheels of NVIDIA's compiler are installed, or None."""
    try:
        found = importlib.util.find_spec(PYPI_HOME)
    except (ImportError, ValueError):
        return None
    folders = list(found.submodule_search_locations or ()) if found else []
    return Path(folders[0]) if folders else None


def cuda_headers() -> tuple[str, ...]:
    """Include folders with the headers of CUDA and of its C++ library: those of nvcc, or of the wheels."""
    compiler, home = nvcc(), pypi_home()
    for folders in (compiler.includes if compiler else (), (str(home / "include"),) if home else ()):
        beside = (str(Path(folder, "cccl")) for folder in folders if Path(folder, "cccl").is_dir())
        searched = tuple(dict.fromkeys((*folders, *beside)))
        if all(any(Path(folder, name).exists() for folder in searched) for name in ("cuda_runtime.h", "cuda/std")):
            return searched
    return ()


def cutlass() -> Path | None:
    """The folder of the CUTLASS headers, or None. The wheel's Python code is slow to import, so it is not imported."""
    try:
        found = importlib.util.find_spec("cutlass_library")
    except (ImportError, ValueError):
        return None
    for folder in (found.submodule_search_locations or ()) if found else ():
        include = Path(folder, "source", "include")
        if (include / "cute" / "tensor.hpp").is_file():
            return include
    return None


def cutlass_release(include: Path) -> str:
    """The release, such as 4.2.0, as the headers state it."""
    text = (include / "cutlass" / "version.h").read_text()
    return ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", text))
