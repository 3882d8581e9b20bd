"""What a room's `run` hands to a front end's launcher: a function of the C ABI, wherever it is called.

On a GPU the function is that of the library built for it; on a CPU, inside `compile.emulating()`, the emulation's.
"""

import ctypes
import dataclasses
from collections.abc import Mapping
from typing import Any

from ragged_attention.errors import Unsupported
from ragged_attention.kernels_cuda import abi, compile

NOT_EMULATING = "runs on sm_90 GPUs, on a CPU inside ragged_attention.kernels_cuda.compile.emulating() only"


def _library(platform: str) -> ctypes.CDLL:
    """What works on a platform's arrays; refuses a CPU's outside `compile.emulating()`."""
    if platform != "cpu":
        return compile.library()
    if compile.emulated() is None:
        raise Unsupported(NOT_EMULATING)
    return compile.emulation()


@dataclasses.dataclass(frozen=True, slots=True)
class Native:
    """A function of the C ABI, with the names of what it takes and in which order."""

    name: str

    @property
    def record(self) -> type[Any]:
        """The record of a call: a ctypes structure that lists OPERANDS, RESULTS and NUMBERS."""
        return abi.LAUNCHERS[self.name]

    def on(self, platform: str) -> Any:
        """The function itself, which takes a record and a stream and returns a code."""
        return getattr(_library(platform), self.name)

    def handler(self, platform: str, include: str) -> tuple[str, Any]:
        """The same for XLA, compiled with the FFI headers in `include`, and a name that no other function has."""
        emulated = platform == "cpu"
        name = f"{self.name}.{_library(platform)._name}" if emulated else self.name
        return name, getattr(compile.ffi_library(include, emulated=emulated), f"{self.name}_ffi")

    def complaint(self, code: int, platform: str, shapes: Mapping[str, Any]) -> str:
        """What is to be said of a code that is not 0, and of the call that gave it."""
        said = _library(platform).ra_error_string(code).decode()
        arrays = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        return f"{self.name} failed with code {code}, {said}: {arrays}"
