"""Host code of all kernels: tile sizes, devices, and launch arguments."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton

from ragged_attention.calls import dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.kernels_triton._compiler import VERSION

SMALLEST_SHARED_MEMORY = 64 * 1024  # bytes, for GPUs whose shared memory size is unknown
OLDER_COMPILER = VERSION < (3, 7)  # most kernels take more registers than with Triton 3.9, and a few take fewer
WGMMA = ("sm_90", "sm_100", "sm_103")  # GPUs whose matrix units read operands from shared memory


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


NARROWEST = 16  # the minimum number of columns of a matrix product


def item_size(array: Any) -> int:
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype_name(array), 1)


def on_cuda_cores(call: Any) -> bool:
    """Whether products are exact float32, which matrix units cannot compute. Operands are then in registers."""
    return item_size(call.q) == 4 and call.device.platform != "cpu"


class Sizes(NamedTuple):
    """The sizes of one kernel's tile."""

    rows: int  # rows of queries per block
    keys: int  # keys per block
    warps: int
    stages: int
    edge_keys: int | None = None  # keys per block of the masked loop; None if the `Tile` has no `edge_kv`

    def fields(self, rows: str, prefix: str = "") -> dict[str, int]:
        """The sizes as the fields of a `Tile`, in which the number of rows is called `rows`."""
        names = (rows, "block_kv", "num_warps", "num_stages", "edge_kv")
        return {prefix + name: size for name, size in zip(names, self, strict=True) if size is not None}


def shared_memory(call: Any) -> int:
    """The device's shared memory in bytes, or SMALLEST_SHARED_MEMORY if it is unknown."""
    return call.device.shared_memory or SMALLEST_SHARED_MEMORY


def fit(
    call: Any, keys: int, stages: int, size: Callable[[int, int], int], *, good_keys: int, good_stages: int = 2
) -> tuple[int, int]:
    """Keys and stages, reduced until `size(keys, stages)` bytes fit the device's shared memory.

    Stages are first reduced to `good_stages`, then keys to `good_keys`, then stages to 1, and finally keys to 16.
    """
    while size(keys, stages) > shared_memory(call) and (stages > 1 or keys > 16):
        if stages > good_stages or (stages > 1 and keys <= good_keys):
            stages -= 1
        else:
            keys //= 2
    return keys, stages


def expect_power_of_two(tile: Any, **bounds: tuple[int, int]) -> None:
    """Check that each named field of a tile is a power of two within its (low, high)."""
    for name, (low, high) in bounds.items():
        value = getattr(tile, name)
        if not isinstance(value, int) or value & (value - 1) or not low <= value <= high:
            raise InvalidInput(f"expected {name} to be a power of two from {low} to {high}, got {value!r}")


def expect_between(tile: Any, **bounds: tuple[int, int]) -> None:
    """Check that each named field of a tile is an integer within its (low, high)."""
    for name, (low, high) in bounds.items():
        value = getattr(tile, name)
        if not isinstance(value, int) or not low <= value <= high:
            raise InvalidInput(f"expected {name} from {low} to {high}, got {value!r}")


def page_unit(stride: int) -> int:
    """The unit, in elements, in which a page stride is passed to kernels.

    The compiler knows only whether an argument is a multiple of 16, but pages may begin at multiples of smaller powers
    of two. The unit is a constant, from which the compiler knows this alignment.
    """
    return math.gcd(stride, 16)


def stride_arguments(launch: Any, axes: Sequence[str], **arrays: Any) -> dict[str, int]:
    """The kernel arguments NAME_AXIS_stride for each array NAME; `axes` names the leading axes of the arrays."""
    return {
        f"{name}_{axis}_stride": stride
        for name, array in arrays.items()
        for axis, stride in zip(axes, launch.strides(array), strict=False)
    }


def overlaps(call: Any) -> bool:
    """Whether a kernel may start before the previous one has ended: programmatic dependent launch (PDL).

    The dependent kernel starts when every program of the previous one has called `gdc_launch_dependents`, and calls
    `gdc_wait` before it needs the previous kernel's results.
    """
    device = call.device
    return device.framework == "torch" and device.platform == "cuda" and int(device.arch.removeprefix("sm_")) >= 90


def dependent(overlapping: bool) -> dict[str, bool]:
    """The launch option for PDL, which Triton accepts only for NVIDIA GPUs."""
    return {"launch_pdl": True} if overlapping else {}


def launchable(call: Any, kernel: Any) -> str | None:
    """The reason why Triton kernels cannot run on the call's device; None if they can."""
    device = call.device
    if device.platform == "cpu":
        if isinstance(kernel, triton.JITFunction):
            return "a CPU runs Triton only in its interpreter: set TRITON_INTERPRET=1 before triton is first imported"
        return None
    if device.platform not in ("cuda", "rocm"):
        return f"expected a platform of cuda or rocm, got {device.platform}"
    if device.platform == "cuda" and int(device.arch.removeprefix("sm_")) < 80:
        return f"expected sm_80 or newer, got {device.arch}"
    return None


def launchable_in_float32(call: Any, kernel: Any) -> str | None:
    """`launchable` for operations that other backends also run in float64."""
    if dtype_name(call.q) == "float64":
        return "expected q.dtype to be bfloat16, float16 or float32, got float64"
    return launchable(call, kernel)
