"""What must be set before triton or jax is imported."""

import os

PTX = "ptx:"  # begins the name of a GPU that is emulated: ptx:sm_90


def prepare(device: str = "cpu") -> None:
    """On a CPU: Triton by its interpreter, or compiling for an emulated GPU; jax without a look for accelerators."""
    # Triton 3.9 warns where this is unset; it leaves a * b + c to the compiler, which is its own default.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if device.startswith(PTX):
        os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled, and either is for good
    if device == "cpu" or device.startswith(PTX):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
