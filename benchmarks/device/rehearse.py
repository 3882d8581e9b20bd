"""Rehearse `prove` and `measure` on a CPU as a machine with a GPU would run them: python -m benchmarks.device.rehearse.

The tree is copied as it would be sent: without git, but with carried/. The home folder is not writable, and Python and
packages have the versions in constraints-device.txt. The rehearsal fails if a call breaks, if any item fails, or if no
item of a phase passed or was declined.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.device import carried, plan, prepare, record

NOWHERE = "/proc/home"  # no folder can be made below it
# Phases that cannot run on a CPU, or have no items on a CPU.
WITHOUT = ("profile", "timed checks", plan.BENCH_ALONE)


def rehearse(python: Path, arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        tree, out, temporary = (Path(folder, name) for name in ("tree", "out", "tmp"))
        copy(tree)
        temporary.mkdir()
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GIT_", "XDG_"))}
        environ |= {"HOME": NOWHERE, "TMPDIR": str(temporary), "GIT_DIR": NOWHERE}
        for call in ("prove", "measure"):
            command = [str(python), "-m", "benchmarks.device", call, "--device", "cpu", "--out", str(out), *arguments]
            print(f"\n== {' '.join(command[1:])}", flush=True)
            if subprocess.run(command, cwd=tree, env=environ, check=False).returncode:
                return 1
        return faults(record.Record.begun(out))


def copy(tree: Path) -> None:
    """Copy the files that would be sent to the device machine."""
    for path in prepare.tree():
        target = tree / path.relative_to(prepare.ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target, follow_symlinks=False)
    if carried.FOLDER.is_dir():
        shutil.copytree(carried.FOLDER, tree / carried.FOLDER.name)


def faults(recorded: record.Record) -> int:
    """Report the phases in which no item passed or was declined. Returns 1 if there are any."""
    passed = {phase for (phase, _), line in recorded.items().items() if line["result"] in record.DONE}
    begun = {line["phase"] for kind in ("phase", "item") for line in recorded.of_kind(kind)} - {*WITHOUT}
    for phase in sorted(begun - passed):
        print(f"{phase}: no item passed or was declined")
    return int(bool(begun - passed))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.rehearse", description=__doc__)
    parser.add_argument(
        "--python", type=Path, default=prepare.PYTHON, help="a Python to use instead of the one in .venv-device"
    )
    options, more = parser.parse_known_args(argv)
    return rehearse(options.python, more)


if __name__ == "__main__":
    sys.exit(main())
