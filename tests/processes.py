"""Helpers that run Python programs, such as those in tests/programs, in separate processes.

Triton compiles kernels in these processes. A process cannot switch between compiling and interpreting, because Triton
decides between the two when it is first imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A finished Python process with these arguments, run in the project's root; `variables` extend the environment."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")])
    environ |= {"TRITON_DEFAULT_FP_FUSION": "1"} | variables  # Triton's default, set here to silence its warning
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False
    )


def printed(*arguments: str, **variables: str) -> str:
    """The standard output of a process that `run_python` runs, which must exit with status 0."""
    done = run_python(*arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loaded(target: str, *names: str) -> list[str]:
    """The modules among `names` that are loaded after a module is imported or MODULE:FUNCTION is called."""
    return printed("-m", "tests.programs.loaded", target, *names).split()


def triton_kernels(family: str) -> tuple[int, int]:
    """The numbers of Triton kernels that a family's jax functions call when lowered for CUDA and for a CPU.

    This needs no GPU.
    """
    done = run_python("-W", "ignore", "-m", "tests.programs.lowered", family, JAX_PLATFORMS="cpu")
    if "import jax_triton" in done.stderr and "ImportError" in done.stderr:
        pytest.skip("jax_triton cannot be imported: it needs a CUDA plugin of jax")
    assert done.returncode == 0, done.stderr
    on_gpu, on_cpu = map(int, done.stdout.split())
    return on_gpu, on_cpu
