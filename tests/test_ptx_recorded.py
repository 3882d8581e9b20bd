"""Launches that the host code of a small library of CUDA kernels requests, in the PTX emulator.

Launches of our own kernels are tested in tests/test_ptx_cuda.py.
"""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ragged_attention.kernels_cuda._build import compile, toolchain
from ragged_attention.testing.ptx import Emulator, Unknown, recorded
from ragged_attention.testing.ptx.machine import Outcome
from ragged_attention.testing.ptx.tensor_maps import TensorMap

if reason := toolchain.missing_to_compile():
    pytest.skip(reason, allow_module_level=True)

SOURCE = Path(__file__).with_name("recorded_launches.cu")
SCALE, TWO_DIMENSIONS, CLUSTER, MAP, MAP_WITH_STEPS, MAP_UNALIGNED, MUCH_SHARED = range(7)
BFLOAT16 = 10  # an element type of tensor maps
NOT_SUPPORTED, INVALID_VALUE = 801, 1  # error codes of CUDA


class Call(ctypes.Structure):
    """The struct `Call` in the library's source."""

    _fields_ = (("x", ctypes.c_void_p), ("what", ctypes.c_int64))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> recorded.Library:
    folder, recipe = tmp_path_factory.mktemp("recorded"), compile.recorder_recipe("common")
    objects = []
    for source in (SOURCE, recipe.units[-1]):
        objects.append(str(folder / f"{source.stem}.o"))
        subprocess.run((*recipe.compiler, "-c", str(source), "-o", objects[-1]), check=True)
    subprocess.run((*recipe.linker, "-o", str(folder / "library.so"), *objects), check=True)
    return recorded.Library(folder / "library.so")


def run(library: recorded.Library, what: int, x: np.ndarray, emulator: Emulator | None = None) -> list[Outcome]:
    """The outcomes of the launches of a call, which must return 0."""
    outcomes: list[Outcome] = []
    code = recorded.run(
        emulator or Emulator("sm_90"), library, "call", Call(what=what), {"x": x},
        lambda name, outcome: outcomes.append(outcome),
    )  # fmt: skip
    assert code == 0
    return outcomes


def test_a_launch_runs_in_place(library: recorded.Library) -> None:
    """A kernel with an integer and a float parameter, and more threads than elements, changes `x` in place."""
    x, emulator = np.arange(100, dtype=np.float32), Emulator("sm_90")
    (outcome,) = run(library, SCALE, x, emulator)
    np.testing.assert_array_equal(x, 3 * np.arange(100, dtype=np.float32))
    assert not outcome.reports
    assert sum(emulator.launches.values()) == 1
    assert all("scale" in name for name in emulator.launches)


def test_an_array_that_is_too_short_is_noticed(library: recorded.Library) -> None:
    with pytest.raises(recorded.machine.Fault, match="outside memory: x") as caught:
        run(library, SCALE, np.zeros(99, np.float32))
    assert any("scale" in note for note in caught.value.__notes__)


def test_what_cannot_be_emulated_is_refused(library: recorded.Library) -> None:
    with pytest.raises(Unknown, match="CTAs of more than one dimension"):
        library.launches("call", Call(what=TWO_DIMENSIONS))
    with pytest.raises(Unknown, match="with steps between elements"):
        library.launches("call", Call(what=MAP_WITH_STEPS))
    with pytest.raises(Unknown, match="1048576 bytes of shared memory"):
        run(library, MUCH_SHARED, np.zeros(100, np.float32))
    assert library.launches("call", Call(what=CLUSTER)) == (NOT_SUPPORTED, [])


def test_tensor_maps_are_those_of_the_emulator(library: recorded.Library) -> None:
    assert library.launches("call", Call(what=MAP)) == (0, [])
    library.loaded.made_map.restype = ctypes.c_void_p
    data = np.ctypeslib.as_array((ctypes.c_uint8 * 128).from_address(library.loaded.made_map()))
    assert TensorMap.unpack(data) == TensorMap(4096, (32, 4), (128,), (32, 4), BFLOAT16, 2)
    assert library.launches("call", Call(what=MAP_UNALIGNED)) == (INVALID_VALUE, [])


def test_binaries_without_ptx_are_refused() -> None:
    binary = np.zeros(64, np.uint8)
    with pytest.raises(Unknown, match="expected a fat binary"):
        recorded.ptx_of(binary.ctypes.data)
    binary[:4] = np.frombuffer(np.uint32(recorded.MAGIC).tobytes(), np.uint8)
    binary[6], binary[8] = 16, 32  # bytes of the header, and of the single entry after it
    binary[16], binary[20], binary[24] = 2, 16, 16  # an entry of machine code
    with pytest.raises(Unknown, match="expected PTX in the library"):
        recorded.ptx_of(binary.ctypes.data)
