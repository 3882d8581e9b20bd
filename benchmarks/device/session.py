"""What the steps of `benchmarks.device` share: the session, its report, and commands in processes of their own."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).parents[2]
FOUND = 9  # the exit status by which a checker says that it found something


@dataclasses.dataclass
class Session:
    """One command's run: where results go, how much time is left, what the device is."""

    folder: Path
    quick: bool
    rehearse: bool
    until: float
    console: Console
    report: dict[str, Any]
    markdown: Callable[[dict[str, Any]], str]

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def store(self) -> None:
        """Write both forms; after every result, so that a command that is cut short loses nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = self.folder / self.report["name"]
        stem.with_suffix(".json").write_text(json.dumps(self.report, indent=1) + "\n")
        stem.with_suffix(".md").write_text(self.markdown(self.report))


def apart(session: Session, command: list[str], meaning: dict[int, str], **environment: str) -> dict[str, Any]:
    """Run a command in a process of its own; what it said last, and what its exit status means."""
    began = time.monotonic()
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | environment
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=max(30.0, session.left - 20)
        )
        result, said = meaning.get(done.returncode, "FAILED"), done.stdout[-6000:] + done.stderr[-2000:]
    except subprocess.TimeoutExpired as late:
        result, said = "out of time", str(late.stdout or b"", errors="replace")[-2000:] if late.stdout else ""
    return {"result": result, "seconds": round(time.monotonic() - began, 1), "said": said.splitlines()[-40:]}


def compute_sanitizer() -> str | None:
    """NVIDIA's checker of kernels, if it is here."""
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def apart_checked(session: Session, tool: str | None, checker: str, code: str, found: str) -> dict[str, Any]:
    """Run Python code in a process of its own under one of the tool's checkers, or under none if there is no tool."""
    wrapped = [tool, "--tool", checker, "--error-exitcode", str(FOUND)] if tool else []
    # PyTorch keeps freed memory, so a stray access could land in what it holds; without that each array stands alone.
    return apart(
        session, [*wrapped, sys.executable, "-c", code], {0: "passed", FOUND: f"FAILED: {found}"},
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )  # fmt: skip


def outcomes(title: str, what: str, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A part of the page: what came of commands in processes of their own, and what those said that did not pass."""
    lines = [f"## {title}", "", f"| {what} | result | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {row['result']} | {row['seconds']} |" for name, row in rows.items()] + [""]
    for name, row in rows.items():
        lines += [] if row["result"] == "passed" else [f"{name}:", "", "```", *row["said"][-25:], "```", ""]
    return lines
