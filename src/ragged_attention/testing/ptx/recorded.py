"""Emulated launches of CUDA kernels that nvcc compiled, as their own host code requests them.

The library has the PTX and the host code, which is linked with a recorder of launches and tensor maps
(`kernels_cuda/csrc/emulator/recorder.cc`) in place of the CUDA runtime. So grids, parameters and tensor maps are the
same as on a GPU.
"""

import ctypes
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.calls.base import shared_memory_of
from ragged_attention.testing.ptx import machine, parsing
from ragged_attention.testing.ptx.errors import Unknown
from ragged_attention.testing.ptx.launcher import Emulator, Operand
from ragged_attention.testing.ptx.tensor_maps import TensorMap

MAGIC, PTX = 0xBA55ED50, 1  # the first word of a fat binary, and the kind of its entries that are PTX
# The code of an element type in a tensor map, for each code of CUtensorMapDataType that differs from it.
ELEMENTS = {8: 9, 9: 10}
INVALID_VALUE, UNKNOWN = 1, 999  # error codes of CUDA
Launched = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64)
)
Encoded = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_int32),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch that host code requested; a `dependent` launch may begin before the previous launch has ended."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    dependent: bool
    params: tuple[NDArray[np.uint8], ...]


class Library:
    """A library of kernels that records its launches."""

    def __init__(self, path: Path) -> None:
        self.loaded = ctypes.CDLL(str(path))
        self.loaded.ra_fat_binary.restype = ctypes.c_void_p
        self.text = ptx_of(self.loaded.ra_fat_binary())
        self._launches: list[Launch] = []
        self._failed: list[Exception] = []
        self._listeners = Launched(self._launched), Encoded(self._encoded)

    def launches(self, function: str, record: ctypes.Structure) -> tuple[int, list[Launch]]:
        """Call a function of the library with its argument record. Returns its status and its launches."""
        self._launches, self._failed = [], []
        self.loaded.ra_listen(*self._listeners)  # in each call, because another `Library` may have listened
        code = getattr(self.loaded, function)(ctypes.byref(record), None)
        if self._failed:
            raise self._failed[0]
        return code, self._launches

    def _launched(self, name: bytes, arguments: Any, numbers: Any) -> int:
        try:
            kernel = parsing.parse(self.text, name.decode())
            sizes = [parsing.size_of(kind) for _, kind in kernel.params]
            params = tuple(np.array(_bytes(arguments[at], size)) for at, size in enumerate(sizes))
            if numbers[4] != 1 or numbers[5] != 1:
                raise Unknown("CTAs of more than one dimension")
            grid = numbers[0], numbers[1], numbers[2]
            self._launches.append(Launch(kernel.name, grid, numbers[3], numbers[6], bool(numbers[7]), params))
        except Exception as error:  # an exception cannot pass through C
            self._failed.append(error)
            return UNKNOWN
        return 0

    def _encoded(
        self, target: int, address: int, rank: int, dims: Any, strides: Any, box: Any, steps: Any, codes: Any
    ) -> int:
        try:
            elements, interleaving, swizzle, filling = map(int, codes[:4])
            if interleaving or any(step != 1 for step in steps[:rank]):
                raise Unknown("a tensor map with steps between elements or with interleaving")
            tensor_map = TensorMap(
                address, tuple(dims[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]),
                ELEMENTS.get(elements, elements), swizzle, bool(filling),
            )  # fmt: skip
            if tensor_map.wrong():
                return INVALID_VALUE
            data = tensor_map.pack()
            ctypes.memmove(target, data.tobytes(), data.size)
        except Exception as error:
            self._failed.append(error)
            return UNKNOWN
        return 0


def ptx_of(binary: int) -> str:
    """The PTX in the fat binary at an address: a header, then entries, each with a header of its own."""
    magic, _, header, size = np.frombuffer(_bytes(binary, 16), "u4, u2, u2, u8")[0].tolist()
    if magic != MAGIC:
        raise Unknown("expected a fat binary, got something else")
    at, end = binary + header, binary + header + size
    while at < end:
        kind, _, header, size = np.frombuffer(_bytes(at, 16), "u2, u2, u4, u8")[0].tolist()
        if kind == PTX:
            return bytes(_bytes(at + header, size)).rstrip(b"\0").decode()
        at += header + size
    raise Unknown("expected PTX in the library, got none")


def _bytes(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def run(
    emulator: Emulator,
    library: Library,
    function: str,
    record: ctypes.Structure,
    arrays: Mapping[str, Any],
    notice: Callable[[str, machine.Outcome], None],
) -> int:
    """Call a function of a library with the addresses of `arrays` in its argument record, and run its launches.

    The kernels write the arrays in place. After each launch, `notice` is called with the kernel's name and the outcome.
    Returns the function's status.
    """
    operands = [(name, Operand.of(array)) for name, array in arrays.items()]
    space, addresses = emulator.mapped(operands)
    for name, operand in operands:
        setattr(record, name, addresses[id(operand)])
    code, launches = library.launches(function, record)
    for launch in launches:
        text = library.text if emulator.change is None else emulator.change(launch.kernel, library.text)
        kernel = parsing.parse(text, launch.kernel)
        if (shared := kernel.shared + launch.shared) > shared_memory_of(emulator.arch):
            raise Unknown(f"a launch of {launch.kernel} with {shared} bytes of shared memory")
        space.seal(overlapping=launch.dependent)
        params = {name: data for (name, _), data in zip(kernel.params, launch.params, strict=True)}
        try:
            outcome = machine.launch(
                kernel, space, params, launch.grid, launch.threads, launch.shared, lanes=emulator.lanes,
                seed=emulator.schedule,
            )  # fmt: skip
        except (machine.Fault, machine.Unknown) as error:
            error.add_note(f"in {launch.kernel}")
            raise
        space.back()
        emulator.launches[launch.kernel] += 1
        notice(launch.kernel, outcome)
    return code
