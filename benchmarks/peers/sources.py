"""Fetches the sources of other projects' Triton kernels from their wheels. They are read and measured, never shipped.

    python -m benchmarks.peers.sources [--folder FOLDER]

The command downloads the wheels with pip: 390 MB. It keeps the few files that the kernels need, 20 MB, in the
repository's folder `peers/`, which git ignores. For FlashMLA it keeps the compiled library, whose machine code is
compared with ours.
"""

import argparse
import fnmatch
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "peers"
FLA = "fla-core"


class Source(NamedTuple):
    """A wheel, and the files of it that are kept in `folder`. If `flat` is False, they keep their paths."""

    requirement: str
    folder: str
    members: tuple[str, ...]
    flat: bool = True


SOURCES = (
    Source("vllm==0.33.0", "vllm", tuple(f"vllm/v1/attention/ops/triton_{name}.py" for name in (
        "unified_attention", "attention_helpers", "decode_attention"))),
    Source("sglang==0.5.23", "sglang", tuple(f"sglang/kernels/ops/attention/{name}.py" for name in (
        "decode_attention", "score_mod"))),
    Source("fla-core==0.6.0", FLA, ("fla/*.py",), flat=False),
    Source("sgl-flash-mla==1.0.0", "flash_mla", ("flash_mla/_C_legacy.abi3.so",)),
    Source("einops", FLA, ("einops/*.py",), flat=False),  # FLA imports it
)  # fmt: skip

# The peers that are timed on a GPU. They are compiled for the torch of constraints-device.txt.
DEVICE_SOURCES = (
    Source("vllm==0.26.0", "vllm", (
        "vllm/_flashmla_C.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
        "vllm/v1/attention/ops/triton_unified_attention.py", "vllm/v1/attention/ops/triton_attention_helpers.py")),
)  # fmt: skip


def missing(folder: Path, package: str) -> str | None:
    """The reason why a peer's sources cannot be read, or None."""
    extracted = next(source for source in SOURCES if source.folder in (package, f"{package}-core"))
    if any((folder / extracted.folder).rglob("*.py")):
        return None
    return f"expected {extracted.folder}/ in {folder.name}/: python -m benchmarks.peers.sources fetches it"


def fetch(source: Source, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", wheels, source.requirement], check=True)
        (wheel,) = Path(wheels).glob("*.whl")
        unpack(wheel, source, folder)


def unpack(wheel: Path, source: Source, folder: Path) -> None:
    """Extract the files of a wheel that `source` lists."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if any(fnmatch.fnmatch(name, member) for member in source.members):
                path = PurePosixPath(name)
                target = folder / source.folder / (path.name if source.flat else path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.sources", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the folder for the files")
    folder = parser.parse_args(argv).folder
    for source in SOURCES:
        fetch(source, folder)
        print(f"{source.requirement}: {folder.name}/{source.folder}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
