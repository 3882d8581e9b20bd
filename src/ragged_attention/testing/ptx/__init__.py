"""An emulator of GPU kernels. It runs the PTX of Triton or another compiler in NumPy, without a GPU, and checks it.

    from ragged_attention.testing import ptx
    ptx.run(kernel, (8,), x, out, 1000, BLOCK=128, num_warps=4, arch="sm_90")

`run` compiles and runs a `@triton.jit` kernel, `compile` returns its PTX, and `run_text` runs PTX of other compilers.
`run` and `run_text` change arrays in place, and raise if the kernel is wrong: `Hazard` (`Race`, `Uninitialised`),
`Fault` (`OutOfBounds`, `Misaligned`, `Deadlock`, `Diverged`) or `Unknown`. `Emulator` runs several launches on the same
arrays, and can run PTX that a function has edited. The package needs only NumPy; `run` and `compile` also need Triton.
"""

from ragged_attention.testing.ptx.errors import (
    Deadlock,
    Diverged,
    Fault,
    Hazard,
    Misaligned,
    OutOfBounds,
    Race,
    Report,
    Rounding,
    Uninitialised,
    Unknown,
)
from ragged_attention.testing.ptx.launcher import ARCHITECTURES, Emulator, compile, run, run_text
from ragged_attention.testing.ptx.machine import Outcome

__all__ = [
    "ARCHITECTURES",
    "Deadlock",
    "Diverged",
    "Emulator",
    "Fault",
    "Hazard",
    "Misaligned",
    "OutOfBounds",
    "Outcome",
    "Race",
    "Report",
    "Rounding",
    "Uninitialised",
    "Unknown",
    "compile",
    "run",
    "run_text",
]
