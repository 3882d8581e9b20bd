"""FlashMLA's own Hopper kernels, from the library that `python -m benchmarks.peers.sources` fetches."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.compiled import sass
from benchmarks.peers import sources

ARCH = "sm_90a"
# Part of a mangled kernel name -> (what the kernel computes, our kernel for the same computation).
NAMES = {
    "decode5dense": ("dense decode", "mla_decode_dense"),
    "prefill10sparse_fwd": ("sparse prefill", "sparse_mla_prefill"),
    "decode6sparse": ("sparse decode, fp8", "mla_decode_sparse_fp8"),
}


class Theirs(NamedTuple):
    """A kernel of FlashMLA and what it computes."""

    what: str
    kernel: sass.Kernel


def library(folder: Path = sources.FOLDER) -> Path:
    """The path at which the library is expected. The file may not exist."""
    return folder / "flash_mla" / "_C_legacy.abi3.so"


def kernels(path: Path) -> Iterator[Theirs]:
    """The Hopper kernels that have a counterpart of ours, sorted by what they compute and by name."""
    program = sass.tool("cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "-arch", ARCH, "-xelf", "all", str(path.resolve())]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        found = []
        for cubin in sorted(Path(folder).glob("*.cubin")):
            content = cubin.read_bytes()
            if what := next((what for name, (what, _) in NAMES.items() if name.encode() in content), None):
                found += [Theirs(what, kernel) for kernel in sass.read(cubin) if kernel.counts["HGMMA"]]
    yield from sorted(found, key=lambda theirs: (theirs.what, short(theirs.kernel)))


def short(kernel: sass.Kernel) -> str:
    """The part of a kernel's name that differs between FlashMLA's kernels."""
    name = kernel.name.rpartition("::")[2]
    return name.replace("(ModelType)", "model ")
