"""Make the parts that are sent to a machine with a GPU: `python -m benchmarks.device --prepare`.

There are four parts. A part is made again only if its sources have changed:

    triton    our Triton kernels and vLLM's, compiled for that machine by the versions in constraints-device.txt
    library   our CUDA kernels, compiled by nvcc
    peers     FlashMLA, FlashAttention-3 and vLLM's Triton kernels, from vLLM's wheel
    site      Python packages that the machine lacks

The first part takes twenty minutes on two cores the first time. Compiled kernels are kept, so later runs compile only
kernels whose source has changed. A network is needed, but no GPU.
"""

import contextlib
import hashlib
import importlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.device import carried
from benchmarks.device.carried import FOLDER, LIBRARY, PEERS, ROOT, SITE, TRITON

CACHE = ROOT / ".cache" / "device"  # compiled kernels and downloads from which the parts are made
PYTHON = ROOT / ".venv-device" / "bin" / "python"
CONSTRAINTS = ROOT / "constraints-device.txt"
LIMIT = 64 * 2**20  # the most bytes that may be sent: the tree and the ignored folders, such as carried/
LACKING = ("jax-triton",)  # packages that the device machine lacks
KEPT = (".cubin", ".json", ".so")  # suffixes of a compiled kernel's files that are needed to run it
COMPILED_FROM = ("src", "kernels_triton", "benchmarks/cases", "benchmarks/device/precompile.py")


def prepare(only: Sequence[str] = ()) -> int:
    """Make the parts that are missing or stale. Returns 0 if all parts exist and fit the limit, otherwise 1."""
    known, made = carried.manifest().get("parts", {}), {}
    FOLDER.mkdir(exist_ok=True)
    broken = []
    for part, (digest, make) in parts().items():
        began, path = time.monotonic(), FOLDER / f"{part}.tar.xz"
        if only and part not in only:
            made |= {part: known[part]} if part in known else {}
            continue
        try:
            wanted = digest()
            if known.get(part, {}).get("digest") == wanted and path.is_file():
                made[part] = known[part]
                print(f"{part}: up to date, {_mib(path.stat().st_size)}")
                continue
            note = make(path)
        except Exception as error:  # the other parts are useful without this one
            broken.append(part)
            print(f"{part}: FAILED: {type(error).__name__}: {error}", flush=True)
            continue
        made[part] = {"digest": wanted, "bytes": path.stat().st_size, **note}
        print(f"{part}: made in {time.monotonic() - began:.0f} s, {_mib(path.stat().st_size)}, {note}", flush=True)
    text = {"commit": carried.commit(), "sources": carried.source_digest(), "triton": _pins()["triton"], "parts": made}
    (FOLDER / carried.MANIFEST).write_text(json.dumps(text, indent=1) + "\n")
    return _report(broken)


def parts() -> dict[str, tuple[Callable[[], str], Callable[[Path], dict[str, Any]]]]:
    """Part -> (a function that returns the digest of its sources, a function that makes the part)."""
    return {
        TRITON: (lambda: _digest(CONSTRAINTS, *_sources()), compiled_kernels),
        LIBRARY: (_library_name, cuda_library),
        PEERS: (lambda: _digest(repr(_sources_of_peers())), peers),
        SITE: (lambda: _digest(CONSTRAINTS, repr(LACKING)), site),
    }


def _report(broken: Sequence[str]) -> int:
    travels, tree = carried.size(), tree_size()
    spare = LIMIT - travels - tree
    print(
        f"{FOLDER.name}/ {_mib(travels)} and the tree {_mib(tree)}: {_mib(travels + tree)} of {_mib(LIMIT)} that may "
        f"be sent, {'' if spare >= 0 else 'TOO MUCH, '}{_mib(abs(spare))} {'left' if spare >= 0 else 'over'}"
    )
    if broken:
        print(f"not made: {', '.join(broken)}")
    return int(bool(broken) or spare < 0)


# ---- the parts


def compiled_kernels(path: Path) -> dict[str, Any]:
    """Compile in one process per core, then pack the kernels that were used."""
    cores, cache = len(os.sched_getaffinity(0)), CACHE / "triton"
    cache.mkdir(parents=True, exist_ok=True)
    kept_peers = CACHE / "peers"
    _fetch_peers(kept_peers)
    with tempfile.TemporaryDirectory() as lists:
        started = []
        for number in range(cores):
            command = [str(python()), "-m", "benchmarks.device.precompile", str(cache), "--peers", str(kept_peers)]
            command += ["--list", str(Path(lists, f"{number}.json")), "--shard", f"{number}/{cores}"]
            paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
            started.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}))
        if any(process.wait() for process in started):
            raise RuntimeError("a process that compiles kernels failed")
        reports = [json.loads(file.read_text()) for file in Path(lists).glob("*.json")]
    folders = {folder for report in reports for folder in report["folders"]}
    failed = {name: why for report in reports for name, why in report["failed"].items()}
    for name, why in list(failed.items())[:10]:
        print(f"  not compiled ahead: {name}: {why}")
    for gone in {entry.name for entry in cache.iterdir()} - folders:
        shutil.rmtree(cache / gone)
    pack_kernels(path, cache, folders)
    return {"folders": len(folders), "failed": len(failed)}


def pack_kernels(path: Path, cache: Path, folders: Iterable[str]) -> None:
    """Pack folders of Triton's cache. Similar files are adjacent, so that they compress well."""
    files = [file for folder in folders for file in (cache / folder).iterdir() if file.suffix in KEPT]
    files.sort(key=lambda file: (file.suffix, file.name, file.parent.name))
    _pack(path, ((file, f"{file.parent.name}/{file.name}") for file in files))


def python() -> Path:
    """The Python of an environment with the device machine's versions. The environment is made if it is missing."""
    subprocess.run(["make", "--no-print-directory", ".venv-device/all"], cwd=ROOT, check=True)
    return PYTHON


def _sources() -> list[Path]:
    paths = [ROOT / name for name in COMPILED_FROM]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return sorted(file for file in files if not any(parent.is_symlink() for parent in file.parents))


def _library_name() -> str:
    return _builder()._kernels_name(_builder()._kernel_texts())


def _builder() -> Any:
    return importlib.import_module("ragged_attention.kernels_cuda._build.compile")


def cuda_library(path: Path) -> dict[str, Any]:
    builder = _builder()
    library = builder.build(builder.kernels_recipe())
    _pack(path, [(library, library.name)])
    return {"library": library.name}


def _sources_of_peers() -> Any:
    return importlib.import_module("benchmarks.peers.sources").DEVICE_SOURCES


def _fetch_peers(folder: Path) -> None:
    """Fetch the peers' files into a folder, unless they are already there."""
    mark, wanted = folder / "digest", _digest(repr(_sources_of_peers()))
    if mark.is_file() and mark.read_text() == wanted:
        return
    for source in _sources_of_peers():
        importlib.import_module("benchmarks.peers.sources").fetch(source, folder)
    mark.write_text(wanted)


def peers(path: Path) -> dict[str, Any]:
    folder = CACHE / "peers"
    _fetch_peers(folder)
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in (".so", ".py")]
    _pack(path, ((file, str(file.relative_to(folder))) for file in files))
    return {"files": len(files)}


def site(path: Path) -> dict[str, Any]:
    """Pack the files from the wheels of LACKING, which have no binaries."""
    with tempfile.TemporaryDirectory() as folder:
        pinned = [f"{name}=={_pins()[name]}" for name in LACKING]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, *pinned], check=True)
        inside = Path(folder, "inside")
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(inside)
        files = [file for file in sorted(inside.rglob("*")) if file.is_file()]
        _pack(path, ((file, str(file.relative_to(inside))) for file in files))
    return {"packages": pinned}


# ---- helpers


def _pack(path: Path, files: Iterable[tuple[Path, str]]) -> None:
    """Write a tar.xz of (file, new name). Equal files give equal bytes."""
    unfinished = path.with_name(f"{path.name}.part")
    with lzma.open(unfinished, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for file, name in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = file.stat().st_size, 0o644
            with open(file, "rb") as content:
                archive.addfile(entry, content)
    unfinished.replace(path)


def tree_size() -> int:
    """The bytes of all files in `tree`, or 0 if git cannot list them."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return sum(path.lstat().st_size for path in tree())
    return 0


def tree() -> Iterator[Path]:
    """The files that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in done.stdout.split("\0"):
        path = ROOT / name
        if name and (path.is_symlink() or path.is_file()):
            yield path


def _pins() -> dict[str, str]:
    lines = CONSTRAINTS.read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def _digest(*parts: Path | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        named = f"{part.relative_to(ROOT)}\0".encode() + part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(len(named).to_bytes(8, "little") + named)
    return digest.hexdigest()[:20]


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
