"""Python in a process of its own, where Triton compiles: whether it interprets is settled when it is first imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def apart(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the project's root; `variables` are added to the environment."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")])
    environ |= {"TRITON_DEFAULT_FP_FUSION": "1"} | variables  # its default, of which Triton would warn
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False
    )


def printed(*arguments: str, **variables: str) -> str:
    """What such a process prints; it must come to a good end."""
    done = apart(*arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
