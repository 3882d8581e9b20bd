"""Compare the digests of a kernel's versions in FOLDER/edit_0, edit_1 and so on, and the digests of different launches.

Usage: digests.py FOLDER COUNT, where COUNT is the number of versions
"""

import importlib
import sys
from typing import Any

from benchmarks.compiled import compiling
from ragged_attention.tools.samples import FakeArray

x = FakeArray((64,), "bfloat16")


def launch(module: Any, num_warps: int = 4, **arguments: Any) -> compiling.Launch:
    return compiling.Launch(module.copy_kernel, (x, x), {"strides": (16, 1), "SIZE": 64} | arguments, num_warps, 2)


def digest(module: Any, arch: str = "sm_90", num_warps: int = 4, **arguments: Any) -> str:
    return compiling.digest(launch(module, num_warps, **arguments), arch)


sys.path.insert(0, sys.argv[1])
modules = [importlib.import_module(f"edit_{index}.kernels") for index in range(int(sys.argv[2]))]
first = modules[0]
print(*[digest(module) == digest(first) for module in modules])
others = [digest(first, "sm_80"), digest(first, num_warps=8), digest(first, SIZE=32), digest(first, strides=(16, 2))]
print(len({digest(first), *others}))
print(compiling.compile_launch(launch(first), "sm_90").failure)
