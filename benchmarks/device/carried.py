"""What `--prepare` made on another machine, and how a call takes it: compiled kernels, a library, wheels, peers.

A machine that is lent for minutes has no network, and compiling there would use up most of the time. All that can be
made before travels in one folder, `carried/` at the root of the checkout, which git ignores. A call unpacks it into the
folder for temporary files; the checkout and the home folder may be read-only.
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
# Each is a file PART.tar.xz that becomes a folder of that name; `site` is a folder of Python packages.
TRITON, LIBRARY, PEERS, SITE = PARTS = ("triton", "library", "peers", "site")
FOR_MEASURING = (PEERS,)
KERNELS = ("src", "reference", "kernels_triton", "kernels_pallas", "kernels_cuda")  # what results depend on
SOURCES = (*KERNELS, "benchmarks")
SUFFIXES = (".py", ".cu", ".cc", ".h")


def unpacked() -> Path:
    """Where a call's processes find what was carried, and keep what they make."""
    return Path(tempfile.gettempdir(), "ragged-attention-device")


def manifest() -> dict[str, Any]:
    """What the folder holds and of which commit it was made; empty if nothing was carried."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads((FOLDER / MANIFEST).read_text())
    return {}


def source_digest(folders: tuple[str, ...] = SOURCES) -> str:
    """A digest of the sources, which also works where git does not."""
    found = hashlib.sha256()
    # Links in src lead to folders of the root, which are in the list themselves.
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    for path in sorted(paths):
        if not any(parent.is_symlink() for parent in path.parents):
            found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:20]


def is_stale() -> bool:
    """Whether the carried parts were made from other sources than those that are here."""
    return bool(known := manifest()) and known["sources"] != source_digest()


def commit() -> str:
    """The commit of the carried parts, if they were made from the sources that are here; else that of the checkout.

    What travels may be the files of a commit without that commit. A commit is marked if files differ from it.
    """
    if (known := manifest()) and not is_stale():
        return known["commit"]
    command = ["git", "describe", "--always", f"--dirty={MODIFIED}", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError):  # there is no git
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return known["commit"].removesuffix(MODIFIED) + MODIFIED if known else ""


# ---- for the process that conducts a call


def unpack(*, measuring: bool) -> dict[str, Any]:
    """Unpack what a call needs of what was carried; what there is, how long it took, and what could not be unpacked."""
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
        except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:  # the other parts are useful without it
            broken[part] = f"{type(error).__name__}: {error}"
    return {"carried": known or None, "unpacked": round(time.monotonic() - began, 1), "not_unpacked": broken}


def _move_groups(cache: Path) -> None:
    """Triton's cache lists a kernel's files by absolute paths; write the paths that hold here."""
    for path in cache.glob("*/__grp__*"):
        group = json.loads(path.read_text())
        group["child_paths"] = {name: str(path.parent / name) for name in group["child_paths"]}
        path.write_text(json.dumps(group))


# ---- for the processes that it starts


def environment() -> dict[str, str]:
    """Settings that all processes share, so that one finds what another compiled; caches where one may write."""
    base = unpacked()
    settings = {
        "TRITON_CACHE_DIR": str(base / TRITON),
        "TRITON_DEFAULT_FP_FUSION": "1",  # part of the key of every compiled kernel
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # jax would take three quarters of the card
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # each process would start as many as there are cores
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
    """Let this process find what was carried. To be called before triton, jax or a backend is imported."""
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
    """Have every process give a kernel the same name in Triton's cache.

    Triton's own files are part of it, which may differ from one machine to another: its version takes their place.
    And Triton 3.6 takes account of the globals that a called function uses only if that function was named before, so
    names depend on which kernel runs first: all functions are named at once, in one order.
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
                function.cache_key  # noqa: B018  (which names it)


def version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def size() -> int:
    """Bytes that travel."""
    return sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
