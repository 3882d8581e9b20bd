"""wgmma descriptors and TMA tensor maps address the intended elements, which the emulation cannot show."""

import ctypes
import itertools
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ragged_attention.kernels_cuda import _abi
from ragged_attention.kernels_cuda._build import compile
from ragged_attention.testing import cuda_emulator

if reason := cuda_emulator.missing():
    pytest.skip(f"the emulation cannot be built: {reason}", allow_module_level=True)

ROWS, VALUES = range(6), range(6, 12)  # operands in `wrong_elements`: K-major rows, then MN-major values
STRIDE, LEADING, SWIZZLE = 1, 2, 3  # numbers of the faults to plant
SWIZZLE_128B = 3  # the driver's code for this swizzle


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    recipe, library = compile.emulation_recipe(), tmp_path_factory.mktemp("layouts") / "layouts.so"
    source = Path(__file__).parent / "cuda_layouts.cc"
    command = [*recipe.compiler, str(source), f"-I{compile.SOURCES}", "-O0", "-shared", "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("operand", [*ROWS, *VALUES])
def test_descriptors_are_those_of_ptx(layouts: ctypes.CDLL, operand: int) -> None:
    assert layouts.wrong_elements(operand, 0) == 0


@pytest.mark.parametrize(
    ("operand", "fault"),
    [*itertools.product([*ROWS, *VALUES], [STRIDE, SWIZZLE]), *((operand, LEADING) for operand in VALUES)],
)
def test_a_wrong_descriptor_is_noticed(layouts: ctypes.CDLL, operand: int, fault: int) -> None:
    assert layouts.wrong_elements(operand, fault) > 0


def test_products_of_a_warp_are_of_the_elements_that_cute_says(layouts: ctypes.CDLL) -> None:
    assert layouts.wrong_products() == 0


def tensor_map(layouts: ctypes.CDLL, *numbers: int, tile: tuple[int, ...] = (0, 0, 0, 0), shift: int = 0):
    """The status code, a tile's byte offset and the box of the map of a cache; strides are in elements."""
    memory = np.zeros(4096, np.uint8)
    address = memory.ctypes.data + -memory.ctypes.data % 1024 + shift
    given, where = np.array(numbers, np.int64), np.array(tile, np.int64)
    byte, box = np.zeros(1, np.int64), np.zeros(7, np.int64)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (given, where, byte, box))
    return layouts.tensor_map(ctypes.c_void_p(address), *pointers), int(byte[0]), box.tolist()


CACHES = {  # pages, page size, KV heads; strides of a page, a slot and a head, in elements
    "packed": (1000, 64, 1, 64 * 576, 576, 576),
    "two heads": (7, 128, 2, 128 * 1152, 1152, 576),
    "a row between pages": (1000, 64, 1, 65 * 576, 576, 576),
    "one page of any stride": (1, 64, 1, 7, 576, 3),
    "64 GiB": (900_000, 64, 1, 64 * 576, 576, 576),
}


@pytest.mark.parametrize("cache", CACHES)
def test_tensor_maps_address_the_rows(layouts: ctypes.CDLL, cache: str) -> None:
    pages, page_size, heads, page, slot, head = CACHES[cache]
    for tile in itertools.product({0, page_size // 64 - 1}, (0, 3, 8), {0, heads - 1}, {0, pages - 1}):
        code, byte, box = tensor_map(layouts, *CACHES[cache], tile=tile)
        assert code == 0
        assert byte == 2 * (tile[0] * 64 * slot + tile[1] * 64 + tile[2] * head + tile[3] * page), tile
        assert box == [64, 64, 1, 1, SWIZZLE_128B, 1, 0]


@pytest.mark.parametrize(
    ("numbers", "shift"),
    [((4, 64, 1, 64 * 576, 577, 576), 0), ((4, 64, 1, 64 * 576 + 4, 576, 576), 0),
     ((4, 64, 2, 64 * 1152, 1152, 580), 0), (CACHES["packed"], 8)],
)  # fmt: skip
def test_a_tensor_map_that_the_driver_refuses_is_noticed(
    layouts: ctypes.CDLL, capfd: pytest.CaptureFixture[str], numbers: tuple[int, ...], shift: int
) -> None:
    code, *_ = tensor_map(layouts, *numbers, shift=shift)
    assert code == _abi.NO_TENSOR_MAP
    assert "Failed to initialize the TMA descriptor" in capfd.readouterr().err
