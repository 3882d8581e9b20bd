"""What must be set before triton or jax is imported."""

import os


def prepare(device: str = "cpu") -> None:
    """On a CPU: Triton by its interpreter, jax without a look for accelerators."""
    # Triton 3.9 warns where this is unset; it leaves a * b + c to the compiler, which is its own default.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
