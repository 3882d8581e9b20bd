"""Python programs in processes of their own, such as those in tests/programs.

Triton compiles there: whether it interprets is settled when it is first imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    """The output of such a process, which must exit with status 0."""
    done = apart(*arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loaded(target: str, *names: str) -> list[str]:
    """The modules among `names` that are loaded after the import of a module, or a call of MODULE:FUNCTION."""
    return printed("-m", "tests.programs.loaded", target, *names).split()


def triton_kernels(family: str) -> tuple[int, int]:
    """How many Triton kernels the jax functions of a family call, lowered for CUDA and for a CPU; needs no GPU."""
    done = apart("-W", "ignore", "-m", "tests.programs.lowered", family, JAX_PLATFORMS="cpu")
    if "import jax_triton" in done.stderr and "ImportError" in done.stderr:
        pytest.skip("jax_triton cannot be imported: it needs a CUDA plugin of jax")
    assert done.returncode == 0, done.stderr
    on_gpu, on_cpu = map(int, done.stdout.split())
    return on_gpu, on_cpu
