"""The emulated machine reports what a kernel must not do, and otherwise behaves like the hardware."""

import ctypes
import itertools
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ragged_attention.kernels_cuda import _native
from ragged_attention.kernels_cuda._build import compile
from ragged_attention.testing import cuda_emulator, formats

if reason := cuda_emulator.missing():
    pytest.skip(f"the emulation cannot be built: {reason}", allow_module_level=True)

DEADLOCK, NO_KERNEL = -3, -2
# The expected reports, in the order of `Deed` in cuda_machine.cc.
REPORTS = (
    "32 for barrier 9 of 64 threads",
    "block 0, thread 0: expected 64 threads at barrier 9 as before, got 96",
    "expected whole warps at barrier 9, got 33",
    "expected a barrier of 0 to 15, got 16",
    "expected the warp to stay together, got another instruction",
    "expected an mbarrier that was made, got none at byte 16384",
    "block 0, thread 32: expected the mbarrier's making to be known, got none that orders it before",
    "expected 1 arrivals in a phase of an mbarrier, got more",
    "expected a copy to 16 aligned bytes of shared memory",
    "expected a copy from 16 aligned bytes",
    "expected a store to shared memory",
    "every thread waits; 384 for 216 registers",
    "expected at most 168 registers to keep, got 200",
    "expected at least 168 registers to want, got 40",
    "expected fence_barrier_init before a load that arrives at an mbarrier",
    "block 0, thread 5: expected the thread's index in its warpgroup, got 6",
    "expected one product of all lanes of a warp",
    "expected an operand in shared memory",
    "expected a proxy fence between ordinary writes and a load by TMA to the same place",
    "expected rows of matrices at 16 aligned bytes of shared memory",
    "expected every thread to wait for the grid before",
    "expected a wait for the grid before what it has written is read",
)
UNFENCED, COPIED, FENCED, ARRIVED = range(len(REPORTS), len(REPORTS) + 4)
MODES = range(len(_native.MODES))
# Deed 6, an arrival at a barrier that is made but not yet visible to the thread, cannot occur in the last mode.
LAST, UNKNOWN = MODES[-1], 6
CASES = [(deed, mode) for deed in range(len(REPORTS)) for mode in MODES if (deed, mode) != (UNKNOWN, LAST)]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    recipe, library = compile.emulation_recipe(), tmp_path_factory.mktemp("machine") / "machine.so"
    source = Path(__file__).parent / "cuda_machine.cc"
    command = [*recipe.compiler, str(source), f"-I{compile.SOURCES}", "-O1", "-shared", "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    found = ctypes.CDLL(str(library))
    found.judge.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    found.ra_emulate.argtypes = (ctypes.c_int, ctypes.c_uint64)
    found.ra_error_string.restype = ctypes.c_char_p
    found.low_half.restype = ctypes.c_float
    found.half_pair.restype = found.quotient.restype = ctypes.c_uint32
    found.quotient.argtypes = (ctypes.c_uint32, ctypes.c_uint32)
    found.approximate.argtypes, found.approximate.restype = (ctypes.c_int, ctypes.c_float), ctypes.c_float
    for name in ("pack_halves", "pack_bfloats"):
        function = getattr(found, name)
        function.argtypes, function.restype = (ctypes.c_float, ctypes.c_float), ctypes.c_uint32
    return found


def judged(machine: ctypes.CDLL, deed: int, mode: int = 0) -> tuple[int, str, np.ndarray]:
    """The error code of a deed, its report and the sums that it computed."""
    memory, sums = np.zeros(8192 + 16, np.uint8), np.zeros((64, 64), np.float32)
    address = memory.ctypes.data + -memory.ctypes.data % 16
    machine.ra_emulate(mode, 0)
    code = machine.judge(deed, address, sums.ctypes.data)
    return code, machine.ra_error_string(code).decode(), sums


@pytest.mark.parametrize(("deed", "mode"), CASES)
def test_what_is_not_defined_is_reported(machine: ctypes.CDLL, deed: int, mode: int) -> None:
    code, report, _ = judged(machine, deed, mode)
    assert code == DEADLOCK
    # In the last mode another thread may be the first to fail.
    expected = REPORTS[deed].partition(": ")[2] if mode == LAST and ", thread" in REPORTS[deed] else REPORTS[deed]
    assert expected in report


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("honest", "faulty"), [(FENCED, UNFENCED), (ARRIVED, COPIED)])
def test_products_see_what_a_fence_covers(machine: ctypes.CDLL, honest: int, faulty: int, mode: int) -> None:
    """Products see writes of the fencing thread, and of threads whose arrival at a barrier it waited for.

    They see NaN if there is no fence, or if only the copies' own asynchronous arrivals precede the fence.
    """
    code, report, sums = judged(machine, honest, mode)
    assert (code, report) == (0, "no error")
    assert (sums == 64).all()
    code, _, sums = judged(machine, faulty, mode)
    assert code == 0
    assert np.isnan(sums).all()


@pytest.mark.parametrize(("function", "exact"), [(0, np.exp2), (1, np.reciprocal), (2, np.log2)])
def test_functions_are_as_approximate_as_the_hardware_s(machine: ctypes.CDLL, function: int, exact: np.ufunc) -> None:
    arguments = np.exp2(np.linspace(-20, 6, 400)).astype(np.float32)
    found = np.array([machine.approximate(function, float(x)) for x in arguments], np.float32)
    wanted = exact(arguments.astype(np.float64)).astype(np.float32)
    ulps = np.abs(found - wanted) / np.spacing(np.abs(wanted))
    assert 1 < ulps.max() <= 3  # an error of 2 ulps, and the rounding of the exact value
    assert (ulps > 0).mean() > 0.5


def test_subnormal_numbers_are_zeros(machine: ctypes.CDLL) -> None:
    assert machine.approximate(0, -127.0) == 0.0
    assert machine.approximate(1, 1e-40) == np.inf
    assert machine.approximate(1, 2.0**127) == 0.0
    assert machine.approximate(2, 1e-40) == -np.inf
    assert machine.approximate(0, -np.inf) == 0.0


def test_divisions_by_multiplication_are_exact(machine: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    divisors = [*range(1, 70), 127, 128, 129, 1000, 65535, 65537, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 65536]
    for by in divisors:
        near = [by * times + step for times in (1, 2, 3, (2**31 - 1) // by) for step in (-1, 0, 1)]
        numbers = [0, 1, 2**31 - 1, *near, *rng.integers(0, 2**31, 20).tolist()]
        for number in numbers:
            if number < 2**31:
                assert machine.quotient(number, by) == number // by, (number, by)


def test_a_block_has_only_so_much_memory(machine: ctypes.CDLL) -> None:
    assert machine.most_shared(232448) == 0
    assert machine.most_shared(232449) == NO_KERNEL


def test_codes_become_halves(machine: ctypes.CDLL) -> None:
    codes = np.arange(256, dtype=np.uint8)
    words = np.array([machine.half_pair(int(code) | int(255 - code) << 8) for code in codes], np.uint32)
    halves = words.view(np.uint16).view(np.float16).reshape(256, 2).astype(np.float32)
    want = formats.values_of(codes, "float8_e4m3fn")
    np.testing.assert_array_equal(halves, np.stack([want, want[::-1]], axis=1))


def test_floats_are_packed_to_the_nearest(machine: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    ties = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-24, 65519.0, -0.0]
    edges = [2.0**-25, 3 * 2.0**-25, 65520.0, -1e9, 3.3895314e38, 3.396e38, 1e-40, np.inf, -np.inf, np.nan, -np.nan]
    values = np.concatenate([ties, edges, rng.standard_normal(200), np.exp(rng.uniform(-16, 10, 200))]).astype(
        np.float32
    )
    for low, high in itertools.pairwise(values):
        halves = np.array([machine.pack_halves(low, high)], np.uint32).view(np.float16)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(halves, np.array([low, high], np.float16))
        np.testing.assert_equal(machine.low_half(int(halves.view(np.uint32)[0])), np.float32(halves[0]))
        wide = np.array([machine.pack_bfloats(low, high)], np.uint32).view(np.uint16).astype(np.uint32) << 16
        np.testing.assert_array_equal(wide.view(np.float32), formats.rounded(np.array([low, high]), "bfloat16"))
