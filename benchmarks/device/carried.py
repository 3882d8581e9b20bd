"""How a call uses the parts that `--prepare` made on another machine: kernels, a library, wheels, peers.

A machine that is available for minutes has no network, and compiling there would take most of the time. Everything that
can be made in advance is sent in one folder of the checkout, `carried/`, which git ignores. A call unpacks it into the
folder for temporary files, since the checkout and the home folder may be read-only.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import json
import lzma
import pkgutil
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from ragged_attention.host import caches

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "carried"
MANIFEST, MODIFIED = "manifest.json", "-modified"
# The file of part PART is PART.tar.xz. It is unpacked into the folder PART. `site` has Python packages.
TRITON, LIBRARY, PEERS, SITE = PARTS = ("triton", "library", "peers", "site")
FOR_MEASURING = (PEERS,)
KERNELS = ("src", "reference", "kernels_triton", "kernels_pallas", "kernels_cuda")  # the sources that results depend on
SOURCES = (*KERNELS, "benchmarks")
SUFFIXES = (".py", ".cu", ".cc", ".h")


def unpacked() -> Path:
    """The folder into which a call unpacks the parts, and in which its processes keep their caches."""
    return Path(tempfile.gettempdir(), "ragged-attention-device")


def manifest() -> dict[str, Any]:
    """The manifest of carried/: its parts, and the commit from which they were made. Empty if there is no manifest."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads((FOLDER / MANIFEST).read_text())
    return {}


def source_digest(folders: tuple[str, ...] = SOURCES) -> str:
    """A digest of the source files. It works without git."""
    digest = hashlib.sha256()
    # Links in src are skipped, because they lead to folders that the list names too.
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    for path in sorted(paths):
        if not any(parent.is_symlink() for parent in path.parents):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def is_stale() -> bool:
    """Whether the carried parts were made from other sources than the present sources."""
    return bool(known := manifest()) and known["sources"] != source_digest()


def commit() -> str:
    """The commit of the sources, or "" if it is unknown.

    It is the carried parts' commit if they were made from the present sources, because the folder sent to the device
    may have no git. Otherwise it is the checkout's commit. A commit is marked as modified if files differ from it.
    """
    if (known := manifest()) and not is_stale():
        return known["commit"]
    command = ["git", "describe", "--always", f"--dirty={MODIFIED}", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError):  # git is not installed
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return known["commit"].removesuffix(MODIFIED) + MODIFIED if known else ""


# ---- for the process that conducts a call


def unpack(*, measuring: bool) -> dict[str, Any]:
    """Unpack the carried parts that a call needs.

    Returns the manifest, the seconds that unpacking took, and the parts that could not be unpacked, with the reasons.
    """
    began, target, known, broken = time.monotonic(), unpacked(), manifest(), {}
    for name in ("cache", TRITON):
        (target / name).mkdir(parents=True, exist_ok=True)
    for part, made in known.get("parts", {}).items():
        mark = target / f"{part}.digest"
        if (part in FOR_MEASURING and not measuring) or (mark.is_file() and mark.read_text() == made["digest"]):
            continue
        try:
            shutil.rmtree(target / part, ignore_errors=True)
            with lzma.open(FOLDER / f"{part}.tar.xz") as file, tarfile.open(fileobj=file) as archive:
                archive.extractall(target / part, filter="data")
            if part == TRITON:
                _move_groups(target / part)
            mark.write_text(made["digest"])
        # the other parts are useful without this one
        except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
            broken[part] = f"{type(error).__name__}: {error}"
    return {"carried": known or None, "unpacked": round(time.monotonic() - began, 1), "not_unpacked": broken}


def _move_groups(cache: Path) -> None:
    """Rewrite the absolute paths in Triton's cache, since the folder has another path on this machine."""
    for path in cache.glob("*/__grp__*"):
        group = json.loads(path.read_text())
        group["child_paths"] = {name: str(path.parent / name) for name in group["child_paths"]}
        path.write_text(json.dumps(group))


# ---- for the worker processes


def environment() -> dict[str, str]:
    """Environment variables that all processes share, so that a kernel is compiled only once.

    They place caches in writable folders.
    """
    base = unpacked()
    settings = {
        "TRITON_CACHE_DIR": str(base / TRITON),
        "TRITON_DEFAULT_FP_FUSION": "1",  # part of each compiled kernel's key
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # otherwise jax would take three quarters of the GPU's memory
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # otherwise each process would start a compiler per core
    }
    if not _home_is_writable():
        names = ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH")
        settings |= {name: str(base / "cache" / name.partition("_")[0].lower()) for name in names}
    return settings


def _home_is_writable() -> bool:
    try:
        folder = caches.cache_home()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except (OSError, RuntimeError):
        return False


def use(device: str) -> None:
    """Make the carried parts available in this process. Call it before triton, jax or a backend is imported."""
    base = unpacked()
    if (site := base / SITE).is_dir() and str(site) not in sys.path:
        sys.path.append(str(site))
    if (peers := base / PEERS).is_dir():
        registry: Any = importlib.import_module("benchmarks.peers.registry")
        registry.FOLDER = peers
    if (library := base / LIBRARY).is_dir():
        builder: Any = importlib.import_module("ragged_attention.kernels_cuda._build.compile")
        builder.PREBUILT = library
    if device == "cuda" and manifest().get("triton") == version("triton"):
        steady_kernel_keys()


def steady_kernel_keys() -> None:
    """Make every process use the same names for kernels in Triton's cache.

    The names depend on Triton's own files, which may differ between machines. Here Triton's version replaces the files.
    In addition, Triton 3.6 includes the globals of a called function only if that function already has a name. A
    kernel's name would then depend on which kernel runs first. So all functions get their names at once, in a fixed
    order.
    """
    if version("triton") is None:
        return
    cache: Any = importlib.import_module("triton.runtime.cache")
    if hasattr(cache, "triton_key"):
        cache.triton_key = functools.partial("triton-{}".format, version("triton"))
    kind = importlib.import_module("triton.runtime.jit").JITFunction
    package = importlib.import_module("ragged_attention.kernels_triton")
    names = sorted(module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    for module in map(importlib.import_module, names):
        for _, function in sorted(vars(module).items()):
            if isinstance(function, kind):
                function.cache_key  # noqa: B018  (this computes the name)


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def size() -> int:
    """The number of bytes in carried/."""
    return sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
