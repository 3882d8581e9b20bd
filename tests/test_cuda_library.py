"""The library of CUDA kernels that nvcc builds loads without a driver and exports only its ABI.

Building takes minutes. `make test` uses the library that `make cuda-compile` has built; the other tiers build it.
"""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from ragged_attention.kernels_cuda import _abi, _native
from ragged_attention.kernels_cuda._build import compile, toolchain
from tests import tiers
from tests.processes import run_python

HEADER = (compile.SOURCES / "api.h").read_text()


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> ctypes.CDLL:
    if reason := _native.why_not():
        pytest.skip(reason)
    if tiers.tier_of(pytestconfig) == "covering" and not compile.built():
        pytest.skip("the library has not been built: make cuda-compile builds it")
    return _native.library()


def test_the_kernels_load_and_tell_without_a_driver(kernels):
    status = _native.status()
    assert status.text
    if status.code:
        assert status[2:] == (0, 0, 0)
        assert re.search("driver|device", status.text)
    else:
        assert status.major == 9


def test_no_device_is_a_code_too(kernels):
    assert _native.status(device=4096).code != 0


def test_the_kernels_export_their_abi_alone(kernels):
    names = set(re.findall(r"(\w+)\(", re.sub(r"//.*", "", HEADER))) - {"__attribute__", "visibility"}
    listing = subprocess.run(["nm", "-D", "--defined-only", kernels._name], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in listing.stdout.splitlines() if line.split()[1] == "T"}
    assert exported == {name for name in names if name.startswith("ra_")}


def test_the_kernels_depend_on_no_cuda_library(kernels):
    listing = subprocess.run(["readelf", "-d", kernels._name], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", listing)
    assert all(name.startswith(("libstdc++", "libgcc_s", "libm.", "libc.", "ld-linux")) for name in needed), needed
    assert f"[{Path(kernels._name).name}]" in re.sub(r"\s+", " ", listing)


def test_the_emulation_has_the_same_functions(kernels):
    if reason := toolchain.missing_to_emulate():
        pytest.skip(reason)
    emulation = _native.emulation()
    assert emulation.ra_size_of_latent() == ctypes.sizeof(_abi.Latent) == kernels.ra_size_of_latent()
    assert emulation.ra_size_of_schedule() == ctypes.sizeof(_abi.Schedule) == kernels.ra_size_of_schedule()
    assert all(hasattr(emulation, name) for name in _abi.LAUNCHERS)


def test_a_build_of_a_clean_process_says_nothing(kernels):
    done = run_python("-m", "tests.programs.cuda_status")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"\d+\n", done.stdout)
