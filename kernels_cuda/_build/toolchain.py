"""Finds the compilers and headers for building the kernels. Nothing here builds or raises.

nvcc is searched for in this order: $CUDACXX, $CUDA_HOME, the compiler from PyPI (extra `cuda-toolchain`), PATH,
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
from pathlib import Path

from ragged_attention.errors import how_to_install

USUAL_HOME = Path("/usr/local/cuda")
PYPI_HOME = "nvidia.cu13"  # the namespace package of the compiler's wheels, which together form a CUDA home

NO_NVCC = (
    "no nvcc in CUDACXX, CUDA_HOME, nvidia.cu13, PATH or /usr/local/cuda: set CUDA_HOME to a CUDA toolkit, or "
    + how_to_install("cuda-toolchain")
)
NO_CUTLASS = f"no CUTLASS headers: {how_to_install('cuda')}, or install nvidia-cutlass"
MIN_NVCC = (12, 8)  # the machine code of older releases has not been checked
NO_GXX = "no g++ on PATH"
NO_HEADERS = "no CUDA headers (cuda_runtime.h and cuda/std) beside nvcc or in nvidia.cu13"

# jax for CUDA installs only the first wheel, for its assembler. pip may combine it with any release of the other
# wheels.
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
        match = re.search(r"release (\d+)\.(\d+)", self.release)
        return (int(match[1]), int(match[2])) if match else None


def missing_to_compile() -> str | None:
    """What is missing to compile the kernels, in one sentence, or None."""
    if reason := _wrong_platform():
        return reason
    wanted = os.environ.get("CUDACXX")
    if wanted and not shutil.which(wanted):
        return f"expected CUDACXX to name a compiler, got {wanted!r}"
    if nvcc_path() is None:
        return NO_NVCC
    if (compiler := nvcc()) and (number := compiler.number) and number < MIN_NVCC:
        least, got = (".".join(map(str, release)) for release in (MIN_NVCC, number))
        return f"expected nvcc of release {least} or later, got {got} in {compiler.path}"
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


def _nvcc_in(home: str | Path | None) -> str | None:
    """The path of nvcc in a CUDA home, or None."""
    return shutil.which(str(Path(home, "bin", "nvcc"))) if home else None


def _complete_wheels() -> Path | None:
    """The folder of the wheels if it has all parts of a compiler, from the same release; otherwise None."""
    home = pypi_home()
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
    named = os.environ.get("CUDACXX")
    return (
        (shutil.which(named) if named else None)
        or _nvcc_in(os.environ.get("CUDA_HOME"))
        or _nvcc_in(_complete_wheels())
        or shutil.which("nvcc")
        or _nvcc_in(USUAL_HOME)
    )


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
    match = re.search(r"release .*", release)
    return Nvcc(path, match[0] if match else "unknown release", tuple(includes), tuple(libraries))


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
    return next(iter(_package_folders(PYPI_HOME)), None)


def _package_folders(package: str) -> list[Path]:
    """The folders of a package, which is not imported; none if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def cuda_headers() -> tuple[str, ...]:
    """The include folders of CUDA and of its C++ library, from nvcc or from the wheels; () if neither is installed."""
    compiler, home = nvcc(), pypi_home()
    for folders in (compiler.includes if compiler else (), (str(home / "include"),) if home else ()):
        subfolders = (str(Path(folder, "cccl")) for folder in folders if Path(folder, "cccl").is_dir())
        includes = tuple(dict.fromkeys((*folders, *subfolders)))
        if all(any(Path(folder, name).exists() for folder in includes) for name in ("cuda_runtime.h", "cuda/std")):
            return includes
    return ()


def cutlass() -> Path | None:
    """The folder of the CUTLASS headers, or None. The wheel's Python code is slow to import, so it is not imported."""
    includes = (folder / "source" / "include" for folder in _package_folders("cutlass_library"))
    return next((include for include in includes if (include / "cute" / "tensor.hpp").is_file()), None)


def cutlass_release(include: Path) -> str:
    """The release of CUTLASS that the headers state, such as 4.2.0."""
    text = (include / "cutlass" / "version.h").read_text()
    return ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", text))
