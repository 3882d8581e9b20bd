"""Dtype conversions that Triton compiles for an H100 and the PTX emulator runs.

The script reads floats from a .npy file and writes the results to a .npz file. Run it without TRITON_INTERPRET.
"""

import sys
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

TARGETS = {
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2": tl.float8e5,
    **{name: getattr(tl, name) for name in ("int16", "int32", "int64")},
}


@triton.jit
def convert(x_ptr, out_ptr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i).to(DTYPE)
    if x.dtype.is_fp8():
        x = x.to(tl.uint8, bitcast=True)
    tl.store(out_ptr + i, x)


def every_conversion(launch: Any, floats: Any) -> dict[str, Any]:
    """float32 numbers [n] converted to each of TARGETS by the torch front end's `launch`; n is a multiple of 256."""
    found = {}
    for name, dtype in TARGETS.items():
        stored = torch.uint8 if dtype.is_fp8() else getattr(torch, name)
        grid = (floats.shape[0] // 256,)
        (found[name],) = launch(convert, grid, (floats,), [(floats.shape, stored)], DTYPE=dtype, BLOCK=256)
    return found


if __name__ == "__main__":
    from ragged_attention.testing.ptx import Emulator
    from ragged_attention.testing.ptx_runner import launcher_of

    source, target = sys.argv[1:]
    found = every_conversion(launcher_of(Emulator("sm_90")), torch.from_numpy(np.load(source)))
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    np.savez(target, **{name: tensor.view(integers[tensor.itemsize]).numpy() for name, tensor in found.items()})
