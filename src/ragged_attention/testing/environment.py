"""What must be installed for the suite, and environment variables that must be set before triton or jax is imported."""

import os
from importlib.util import find_spec

from ragged_attention.errors import how_to_install

PTX = "ptx:"  # prefix of an emulated GPU's device name, as in ptx:sm_90


def missing_tools() -> str | None:
    """The sentence that says which packages of the extra `testing` are not installed, and how to install them, or None.

    The sentence has no subject: the caller puts the name of the command or module that needs them before it.
    """
    missing = [name for name in ("hypothesis", "ml_dtypes", "pytest") if find_spec(name) is None]
    return f"needs {' and '.join(missing)}: {how_to_install('testing')}" if missing else None


def prepare(device: str = "cpu") -> None:
    """Set the environment variables for a device.

    On "cpu", Triton interprets kernels; for an emulated GPU, it compiles them. In both cases jax looks for no
    accelerators.
    """
    # Triton 3.9 warns if this is unset. 1 is its default: the compiler may fuse a * b + c.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if device.startswith(PTX):
        os.environ.pop("TRITON_INTERPRET", None)  # a kernel that was defined for the interpreter can never be compiled
    if device == "cpu" or device.startswith(PTX):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
