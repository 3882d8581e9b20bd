"""What the steps of `benchmarks.device` share: the session, its report, and commands in processes of their own."""

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).parent.parent


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
