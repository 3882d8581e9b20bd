"""What jax lowers to, counted in a process that has no interpreter of Triton; needs no GPU."""

import pytest

from tests.apart import apart


def kernels_in(script: str) -> tuple[int, int]:
    """Triton's kernels in what `script` lowers for CUDA and for a CPU, which it prints; compiled into the text."""
    done = apart("-W", "ignore", "-c", "import jax_triton\n" + script, JAX_PLATFORMS="cpu")
    if "import jax_triton" in done.stderr and "ImportError" in done.stderr:
        pytest.skip("jax_triton cannot be imported: it needs a CUDA plugin of jax")
    assert done.returncode == 0, done.stderr
    on_gpu, on_cpu = map(int, done.stdout.split())
    return on_gpu, on_cpu
