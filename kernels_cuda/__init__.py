"""CUTLASS kernels for Hopper."""

from ragged_attention.kernels_cuda import compile


def state() -> str | None:
    """What answers rest on beside a call: the library of the emulation in force here, None where there is none."""
    return None if compile.emulated() is None else compile.emulation()._name
