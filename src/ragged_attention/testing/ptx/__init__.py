"""Compiled Triton kernels on a CPU: each launch is compiled for an NVIDIA GPU, and its PTX runs in NumPy, watched.

    from ragged_attention.testing import ptx
    ptx.run(kernel, (8,), {"x_ptr": x, "out_ptr": out, "n": 1000, "BLOCK": 128}, arch="sm_90")

`parsing`, `machine` and `memory` run PTX; `launcher` compiles, and brings arrays there and back.
"""

from ragged_attention.testing.ptx.launcher import ARCHITECTURES, Emulator, Hazard, run
from ragged_attention.testing.ptx.machine import Fault, Outcome, Unknown

__all__ = ["ARCHITECTURES", "Emulator", "Fault", "Hazard", "Outcome", "Unknown", "run"]
