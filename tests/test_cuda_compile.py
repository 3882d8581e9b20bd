"""Tests of building the CUDA kernels: the choice of the compiler, the cache, error messages, and loading.

Most tests use a stand-in for nvcc that calls g++, so that they are quick and run everywhere. The real library is built
once, and the cache shares it with the other tests.
"""

import contextlib
import ctypes
import dataclasses
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragged_attention import dispatch, kernels_cuda
from ragged_attention.calls import CACHE_FORMATS
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported, how_to_install
from ragged_attention.kernels_cuda import _abi, _native, _report
from ragged_attention.kernels_cuda._build import compile, toolchain
from ragged_attention.tools import cli, doctor
from tests.processes import loaded, run_python

ROOT = Path(__file__).parent.parent
HEADER = (ROOT / "kernels_cuda" / "csrc" / "api.h").read_text()

STAND_IN = """\
#!{python}
import os, subprocess, sys, time
arguments = sys.argv[1:]
if "--version" in arguments:
    print("Cuda compilation tools, release {release}, V{release}.1")
elif "-dryrun" in arguments:
    print("#$ TOP={home}/bin/..", '#$ INCLUDES="-I{home}/bin/../include"  ', sep="\\n")
    print('#$ SYSTEM_INCLUDES="-isystem" "{home}/include/cccl"  ')
else:
    with open("{home}/log", "a") as log:
        log.write(" ".join(arguments) + "\\n")
    time.sleep({seconds})
    known = [word for word in arguments if word in ("-shared", "-c", "-o") or word.endswith((".cu", ".o", ".so"))]
    keep = [word for word in known if "soname" not in word]
    sys.exit(subprocess.call(["g++", "-fPIC", "-x", "c++", *keep] if "-c" in keep else ["g++", *keep]))
"""

SOURCE = """\
#include "api.h"
int ra_abi_version(void) { return RA_ABI_VERSION; }
int64_t ra_size_of_latent(void) { return sizeof(RaLatent); }
int64_t ra_size_of_schedule(void) { return sizeof(RaSchedule); }
int ra_status(int, int* major, int* minor, int* count) { *major = 9, *minor = 0, *count = 132; return 0; }
void ra_versions(int* driver, int* runtime) { *driver = 13010, *runtime = 13000; }
const char* ra_error_string(int) { return "all is well"; }
int ra_mla_decode_dense(const RaLatent*, void*) { return 1; }
int ra_sparse_mla_prefill(const RaLatent*, void*) { return 2; }
int ra_mla_decode_sparse_fp8(const RaLatent*, void*) { return 3; }
int ra_mla_decode_sparse_fp8_narrow(const RaLatent*, void*) { return 6; }
int ra_mla_decode_sparse_fp8_v4(const RaLatent*, void*) { return 5; }
int ra_mla_decode_sparse_v41(const RaLatent*, void*) { return 7; }
int ra_make_decode_schedule(const RaSchedule*, void*) { return 4; }
"""

# A stand-in for the source of the XLA handlers. Its function calls the library that is built from SOURCE.
THROUGH = """\
#include "api.h"
extern "C" RA_API int through(void) { return ra_mla_decode_sparse_fp8(nullptr, nullptr); }
"""


def stand_in(home: Path, release: str = "99.0", seconds: float = 0) -> Path:
    """Make a CUDA home whose nvcc is a script that logs its calls to `log`. Returns the script's path."""
    (home / "bin").mkdir(parents=True)
    for folder in ("nvvm/bin", "include/crt", "include/cccl/cuda/std", "lib"):
        (home / folder).mkdir(parents=True)
    for part in ("nvvm/bin/cicc", "include/cuda_runtime.h", "lib/libcudart_static.a"):
        (home / part).touch()
    program = home / "bin" / "nvcc"
    program.write_text(STAND_IN.format(python=sys.executable, home=home, release=release, seconds=seconds))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A fresh process state: no compiler found, nothing built or loaded, no recorded failure, and an empty cache."""
    for name in ("CUDACXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "PYPI_HOME", "nvidia.nothing_of_the_kind")
    monkeypatch.setattr(toolchain, "USUAL_HOME", tmp_path / "nowhere")
    monkeypatch.setattr(compile, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(_native, "_loaded", {})
    monkeypatch.setattr(_native, "_failed", {})
    toolchain._asked.cache_clear()
    yield
    toolchain._asked.cache_clear()


@pytest.fixture
def small(afresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in compiler as CUDA_HOME, and a source that it can compile. The fixture returns the home."""
    if toolchain.gxx() is None or toolchain.cutlass() is None:
        pytest.skip("needs g++ and the CUTLASS headers")
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "api.h").write_text(HEADER)
    (sources / "common.cu").write_text(SOURCE)
    (sources / "xla_ffi.cc").write_text(THROUGH)
    monkeypatch.setattr(compile, "SOURCES", sources)
    monkeypatch.setattr(compile, "UNITS", ("common",))
    stand_in(tmp_path / "home")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def reported(what: str) -> str:
    return dict(kernels_cuda.report())[what]


def calls(home: Path) -> list[str]:
    """The command lines with which a stand-in has compiled or linked."""
    return (home / "log").read_text().splitlines() if (home / "log").exists() else []


# ---- finding the compiler


def test_the_order_in_which_nvcc_is_looked_for(afresh, monkeypatch, tmp_path):
    for name in ("named", "home", "nvidia/wheels", "path", "usual"):
        stand_in(tmp_path / name)
    monkeypatch.setattr(toolchain, "USUAL_HOME", tmp_path / "usual")
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.setattr(toolchain, "pypi_home", lambda: tmp_path / "nvidia" / "wheels")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDACXX", str(tmp_path / "named" / "bin" / "nvcc"))
    for name in ("named", "home", "nvidia/wheels", "path", "usual"):
        assert toolchain.nvcc_path() == str(tmp_path / name / "bin" / "nvcc")
        (tmp_path / name / "bin" / "nvcc").unlink()
    assert toolchain.nvcc_path() is None
    assert toolchain.nvcc() is None


def test_the_wheels_of_nvcc_are_found_as_one_home(monkeypatch, tmp_path):
    stand_in(tmp_path / "wheelhouse" / "cu13")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(toolchain, "PYPI_HOME", "wheelhouse.cu13")
    assert toolchain.pypi_home() == tmp_path / "wheelhouse" / "cu13"
    monkeypatch.setattr(toolchain, "PYPI_HOME", "wheelhouse.cu12")
    assert toolchain.pypi_home() is None


def test_wheels_that_are_no_whole_compiler_are_passed_over(afresh, monkeypatch, tmp_path):
    """Wheels that lack a part of the compiler are passed over.

    jax for CUDA installs nvcc's wheel only for its assembler.
    """
    stand_in(tmp_path / "wheels")
    stand_in(tmp_path / "path")
    monkeypatch.setattr(toolchain, "pypi_home", lambda: tmp_path / "wheels")
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    releases = {"nvidia-cuda-nvcc": "13.0", "nvidia-nvvm": "13.0", "nvidia-cuda-crt": "13.0"}
    monkeypatch.setattr(toolchain, "_minor_release", releases.get)
    assert toolchain.nvcc_path() == str(tmp_path / "wheels" / "bin" / "nvcc")
    releases["nvidia-nvvm"] = "13.5"
    assert toolchain.nvcc_path() == str(tmp_path / "path" / "bin" / "nvcc")
    releases["nvidia-nvvm"] = "13.0"
    (tmp_path / "wheels" / "lib" / "libcudart_static.a").unlink()
    assert toolchain.nvcc_path() == str(tmp_path / "path" / "bin" / "nvcc")


def test_what_nvcc_says_of_itself(small):
    found = toolchain.nvcc()
    assert found is not None
    assert found.release == "release 99.0, V99.0.1"
    assert found.includes == (str(small / "include"), str(small / "include" / "cccl"))
    assert found.libraries == (str(small / "lib"),)
    assert f"-L{small / 'lib'}" in compile.kernels_recipe().linker
    assert toolchain.cuda_headers() == found.includes


def test_an_nvcc_that_does_not_run(small):
    (small / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert toolchain.nvcc() is None
    assert _report.tools() == f"{small}/bin/nvcc does not run"
    with pytest.raises(BackendMissing, match=f"{small}/bin/nvcc does not run"):
        _native.library()


def test_what_is_missing_is_said_in_a_sentence(afresh, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _native.why_not() == toolchain.NO_NVCC
    assert dict(kernels_cuda.report()) | {"CUTLASS": ""} == {
        "CUDA toolchain": "not found", "CUTLASS": "", "CUDA kernels": "not built"
    }  # fmt: skip
    assert kernels_cuda.missing() == toolchain.NO_NVCC
    with pytest.raises(BackendMissing, match=r"no nvcc in CUDACXX, CUDA_HOME, .*, or run pip install"):
        _native.library()
    monkeypatch.setenv("CUDACXX", "nvcc-13")
    assert _native.why_not() == "expected CUDACXX to name a compiler, got 'nvcc-13'"


def test_missing_parts_beside_nvcc(small, monkeypatch):
    assert _native.why_not() is None
    monkeypatch.setattr(toolchain, "cutlass", lambda: None)
    assert _native.why_not() == f"no CUTLASS headers: {how_to_install('cuda')}, or install nvidia-cutlass"
    assert dict(kernels_cuda.report()) == {
        "CUDA toolchain": f"release 99.0, V99.0.1 in {small}/bin/nvcc",
        "CUTLASS": "not found",
        "CUDA kernels": "not built",
    }
    states = {backend: state for backend, _, state in doctor.backends()}
    assert states["cuda"] == f"absent: {_native.why_not()}"
    monkeypatch.setattr(toolchain, "gxx", lambda: None)
    assert _native.why_not() == toolchain.missing_to_emulate() == "no g++ on PATH"
    with pytest.raises(BackendMissing, match=r"no g\+\+ on PATH"):
        compile.ffi_recipe("", Path("kernels.so"))
    with pytest.raises(BackendMissing, match=r"no g\+\+ on PATH"):
        _native.emulation()


def test_the_emulation_wants_headers_rather_than_nvcc(small, monkeypatch):
    (small / "bin" / "nvcc").unlink()
    monkeypatch.setattr(toolchain, "nvcc_path", lambda: None)
    assert toolchain.missing_to_emulate() == toolchain.NO_HEADERS
    monkeypatch.setattr(toolchain, "pypi_home", lambda: small)
    assert toolchain.missing_to_emulate() is None
    assert toolchain.cuda_headers() == (str(small / "include"), str(small / "include" / "cccl"))


def test_elsewhere_than_on_linux_nothing_is_built(small, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert _native.why_not() == toolchain.missing_to_emulate() == "the CUDA kernels are built on Linux, this is win32"


def test_cutlass_is_found_without_importing_it(monkeypatch, tmp_path):
    include = tmp_path / "cutlass_library" / "source" / "include"
    (include / "cute").mkdir(parents=True)
    (tmp_path / "cutlass_library" / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cutlass_library", raising=False)
    assert toolchain.cutlass() is None
    (include / "cute" / "tensor.hpp").touch()
    assert toolchain.cutlass() == include
    monkeypatch.setitem(sys.modules, "cutlass_library", SimpleNamespace(__spec__=None))  # type: ignore[arg-type]
    assert toolchain.cutlass() is None


def test_the_toolchain_from_pypi_is_of_one_release():
    """The pinned parts of the toolchain are of one release.

    Parts of different releases do not work together: an older ptxas cannot read a newer nvvm's code.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = dict(re.findall(r"([\w-]+)==([\d.]+); sys_platform == 'linux'", " / ".join(extras["cuda-toolchain"])))
    assert set(pins) == {f"nvidia-{name}" for name in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-cccl", "cuda-runtime")}
    assert len({pins[f"nvidia-{name}"] for name in ("cuda-nvcc", "nvvm", "cuda-crt")}) == 1
    assert {version.rpartition(".")[0] for version in pins.values()} == {"13.0"}


# ---- building and caching


def test_a_library_is_built_once(small, monkeypatch, caplog, capfd):
    caplog.set_level(logging.INFO, "ragged_attention")
    assert compile.built() is None
    assert "not built" in _report.kernels()
    steps = []
    library = _native.library(lambda *step: steps.append(step))
    assert library.ra_sparse_mla_prefill(None, None) == 2
    assert _native.library() is library
    path = compile.built()
    assert path is not None
    assert path.is_relative_to(small.parent / "cache" / "ragged_attention")
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, "lock"]
    assert steps == [(0, 2, "common.cu"), (1, 2, "common.cu"), (2, 2, path.name)]
    assert len(calls(small)) == 2
    assert [record.message.split(" of ")[0].split(" in ")[0] for record in caplog.records] == [
        f"building the CUDA kernels with {small}/bin/nvcc", "built the CUDA kernels",
    ]  # fmt: skip
    monkeypatch.setattr(_native, "_loaded", {})  # as in another process
    _native.library()
    assert len(calls(small)) == 2
    assert _report.kernels() == f"{path}; device 0: sm_90, 132 multiprocessors"
    assert capfd.readouterr() == ("", "")


def test_the_flags_that_the_kernels_rest_on(small):
    _native.library()
    compiled, linked = calls(small)
    for flag in ("-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-DNDEBUG", f"-I{toolchain.cutlass()}"):
        assert flag in compiled.split()
    assert "-Xlinker --exclude-libs,ALL,-soname,libragged_attention_cuda-" in linked
    assert "-cudart static" in linked


def test_what_a_kept_library_is_known_by(small, monkeypatch):
    sources = compile.SOURCES
    seen = {compile.kernels_recipe().digest}

    def is_new() -> bool:
        digest = compile.kernels_recipe().digest
        return digest not in seen and not seen.add(digest)

    (sources / "emulator").mkdir()
    (sources / "emulator" / "machine.h").write_text("// for g++ alone")
    assert not is_new()
    (sources / "api.h").write_text(HEADER + "// more")
    assert is_new()
    (sources / "sm90").mkdir()
    (sources / "sm90" / "more.h").write_text("")
    assert is_new()
    monkeypatch.setattr(compile, "NVCC_FLAGS", (*compile.NVCC_FLAGS, "-O1"))
    assert is_new()
    monkeypatch.setattr(toolchain, "cutlass_release", lambda include: "4.3.0")
    assert is_new()
    monkeypatch.setenv("CUDA_HOME", str(stand_in(small.parent / "newer", release="99.1").parent.parent))
    assert is_new()
    monkeypatch.setenv("CUDA_HOME", str(stand_in(small.parent / "same", release="99.1").parent.parent))
    assert not is_new()


def test_two_processes_build_a_library_once(small, monkeypatch):
    shutil.rmtree(small)
    stand_in(small, seconds=0.5)
    command = [sys.executable, "-m", "tests.programs.build_cuda", str(compile.SOURCES)]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate(timeout=120)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0]
    assert len(said) == 1
    assert len(calls(small)) == 2


def test_two_threads_load_a_library_once(small):
    found: list[ctypes.CDLL] = []
    threads = [threading.Thread(target=lambda: found.append(_native.library())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert len(calls(small)) == 2


def test_a_file_system_without_locks_will_do(small, monkeypatch):
    import fcntl

    def flock(file: object, operation: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert _native.library().ra_abi_version() == _abi.VERSION


def test_a_failed_build_shows_the_command_and_the_compilers_last_words(small, capfd):
    (compile.SOURCES / "common.cu").write_text('#include "api.h"\n' + "int wrong = nothing_of_that_name;\n")
    with pytest.raises(BackendMissing) as caught:
        _native.library()
    said = str(caught.value).splitlines()
    assert said[0] == "building the CUDA kernels failed with exit code 1:"
    assert said[1].startswith(f"{small}/bin/nvcc -std=c++17 -O3 ")
    assert " -c " in said[1]
    assert any("nothing_of_that_name" in line for line in said[2:])
    assert len(said) <= 2 + compile.SHOWN_LINES
    assert capfd.readouterr() == ("", "")
    assert not list((small.parent / "cache").rglob("*.so"))
    # The process does not build again, and raises the recorded reason.
    with pytest.raises(BackendMissing, match="nothing_of_that_name"):
        _native.library()
    assert len(calls(small)) == 1
    reason = _native.why_not()
    assert reason is not None
    assert reason == f"the CUDA kernels could not be built in this process: {said[-1]}"


SERIALISED = (
    "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the function 'kernel'"
)


def says(home: Path, text: str) -> None:
    """Make the compiler print a line and go on."""
    program = home / "bin" / "nvcc"
    program.write_text(program.read_text().replace("    time.sleep", f"    print({text!r})\n    time.sleep"))


def test_serialised_products_fail_the_build(small):
    says(small, SERIALISED)
    with pytest.raises(BackendMissing) as caught:
        _native.library()
    assert str(caught.value) == f"building the CUDA kernels was given up, for the compiler said: {SERIALISED}"
    assert not list((small.parent / "cache").rglob("*.so"))


def test_what_the_compiler_says_beside_is_logged(small, caplog):
    says(small, "ptxas warning : Registers are spilled to local memory in function 'kernel'")
    with caplog.at_level(logging.WARNING, logger="ragged_attention"):
        _native.library()
    assert "the compiler of the CUDA kernels succeeded with this output:\ncommon.cu:\nptxas warning" in caplog.text


@pytest.mark.parametrize("release", ["12.7", "9.2"])
def test_an_nvcc_that_is_too_old(afresh, monkeypatch, tmp_path, release):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    program = stand_in(tmp_path / "old", release)
    assert _native.why_not() == f"expected nvcc of release 12.8 or later, got {release} in {program}"
    with pytest.raises(BackendMissing, match=r"expected nvcc of release 12\.8 or later, got "):
        _native.library()


def test_the_driver_is_asked_once(small):
    source = SOURCE.replace("*driver = 13010", "static int asked; *driver = asked++ ? 99000 : 12040")
    (compile.SOURCES / "common.cu").write_text(source)
    assert _native.why_not() is None  # `why_not` does not build anything
    _native.library()
    reason = "expected a driver for CUDA 13.0 or later, which the kernels were compiled with, got one for CUDA 12.4"
    assert _native.why_not() == _native.why_not() == reason
    with pytest.raises(Unsupported) as caught:
        _native.Native("ra_mla_decode_dense").on("cuda")
    assert str(caught.value) == reason


@pytest.mark.parametrize("driver", [0, 13000, 13020])
def test_no_driver_and_a_newer_one_are_no_reason(small, driver):
    (compile.SOURCES / "common.cu").write_text(SOURCE.replace("13010", str(driver)))
    _native.library()
    assert _native.why_not() is None


def test_what_changes_while_it_is_compiled_is_not_kept(small, monkeypatch):
    def edit(done: int, total: int, text: str) -> None:
        (compile.SOURCES / "api.h").write_text(HEADER + "// edited")

    with pytest.raises(BackendMissing, match="the sources of the CUDA kernels changed while they were compiled"):
        _native.library(edit)
    assert not list((small.parent / "cache").rglob("*.so"))


def test_one_bad_unit_ends_the_build(small, monkeypatch):
    monkeypatch.setattr(compile, "UNITS", ("common", *(f"wrong{number}" for number in range(40))))
    for unit in compile.UNITS[1:]:
        (compile.SOURCES / f"{unit}.cu").write_text("#error this one")
    with pytest.raises(BackendMissing, match="this one"):
        _native.library()
    assert len(calls(small)) < 40


def test_a_cache_that_cannot_be_written(small, monkeypatch):
    (small / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(small / "file"))
    with pytest.raises(
        BackendMissing, match=r"the CUDA kernels cannot be stored in .*/file/ragged_attention: .*directory"
    ):
        _native.library()


def test_a_library_in_a_cache_that_is_not_ours_is_found(small, monkeypatch):
    """A library in a cache that root owns is found, although neither its folder nor the lock can be written."""
    path = compile.build(compile.kernels_recipe())
    (path.parent / "lock").unlink()
    (path.parent / "lock").mkdir()  # as the lock is a folder, not even root can open it for writing
    assert compile.built() == path
    assert _native.library()._name == str(path)
    assert len(calls(small)) == 2


def test_a_lock_that_another_user_made_is_waited_for(small, monkeypatch):
    asked, real = [], os.open

    def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).endswith("lock"):
            asked.append(flags)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", opened)
    compile.build(compile.kernels_recipe())
    assert [flags & os.O_ACCMODE for flags in asked] == [os.O_RDONLY]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_library_that_was_cut_short_is_built_again(small, share):
    path = compile.build(compile.kernels_recipe())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert compile.built() is None
    assert _native.library().ra_abi_version() == _abi.VERSION
    assert path.stat().st_size == len(whole)
    assert len(calls(small)) == 4


def test_what_is_cut_short_ahead_of_time_is_passed_over(small):
    path = compile.PREBUILT / compile._kernels_name(compile._kernel_texts())
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF")
    assert compile.prebuilt() is None
    assert _native.library()._name != str(path)


def test_what_a_killed_build_leaves_is_removed(small):
    killed = run_python("-m", "tests.programs.build_cuda", str(compile.SOURCES), "killed")
    assert killed.returncode == -signal.SIGKILL
    folder = compile.kernels_recipe().path.parent
    assert [path.name.startswith("building-") for path in folder.iterdir() if path.is_dir()] == [True]
    _native.library()
    assert not [path for path in folder.iterdir() if path.is_dir()]


@pytest.fixture
def long_build(small: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose compiler takes long for each of many units."""
    shutil.rmtree(small)
    stand_in(small, seconds=20)
    monkeypatch.setattr(compile, "UNITS", tuple(f"unit{number}" for number in range(40)))
    for unit in compile.UNITS:
        (compile.SOURCES / f"{unit}.cu").touch()
    return small


def test_ctrl_c_ends_a_build_and_what_it_runs(long_build, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore SIGINT
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not calls(long_build):
            time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _native.library()
    assert time.monotonic() - began < 15
    assert 0 < len(calls(long_build)) <= len(os.sched_getaffinity(0))
    assert not list((long_build.parent / "cache").rglob("building-*"))
    assert _native.why_not() is None  # the next call tries again


def test_no_home_is_no_place_to_keep_a_library(small, monkeypatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(Path, "expanduser", lambda path: home())
    assert _native.why_not() == compile.NO_CACHE == kernels_cuda.missing()
    assert _report.kernels() == "not built"
    assert compile.built() is None
    for load in (_native.library, _native.emulation):
        with pytest.raises(BackendMissing, match="no folder to store the CUDA kernels in: set HOME or XDG_CACHE_HOME"):
            load()


def test_a_library_that_others_may_have_written_is_not_loaded(small):
    path = compile.build(compile.kernels_recipe())
    for place in (path, path.parent):
        mode = place.stat().st_mode
        place.chmod(0o777)
        assert compile.built() is None
        with pytest.raises(BackendMissing, match=f"cannot be stored in .*: others can write {place}"):
            compile.build(compile.kernels_recipe())
        place.chmod(mode)
    assert compile.built() == path


def test_no_umask_lets_others_write_a_library(small):
    before = os.umask(0)
    try:
        path = compile.build(compile.kernels_recipe())
    finally:
        os.umask(before)
    assert compile.built() == path


def test_a_gxx_that_does_not_run(small, monkeypatch, tmp_path):
    broken = tmp_path / "broken" / "g++"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    for recipe in (compile.emulation_recipe, lambda: compile.ffi_recipe("", Path("kernels.so"))):
        with pytest.raises(BackendMissing, match=f"^{re.escape(str(broken))} does not run$"):
            recipe()


def test_the_cache_is_where_caches_are(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compile.cache_folder() == tmp_path / ".cache" / "ragged_attention"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # a relative path would put the cache into the current folder
    assert compile.cache_folder() == tmp_path / ".cache" / "ragged_attention"


def test_a_library_made_ahead_of_time_needs_no_compiler(small, monkeypatch, tmp_path):
    assert cli.main(["build-cuda", "--out", str(compile.PREBUILT)]) == 0
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(_native, "_loaded", {})
    assert _native.why_not() is None
    assert compile.built() == compile.prebuilt()
    assert Path(_native.library()._name).parent == compile.PREBUILT
    # A library from other sources is not used.
    monkeypatch.setattr(_native, "_loaded", {})
    (compile.SOURCES / "api.h").write_text(HEADER + "// newer")
    assert compile.prebuilt() is None
    assert _native.why_not() == toolchain.NO_NVCC


def test_the_library_for_xla_calls_the_kernels(small, tmp_path):
    interface = tmp_path / "jaxlib" / "xla" / "ffi" / "api"
    interface.mkdir(parents=True)
    (interface / "c_api.h").write_text("#define XLA_FFI_API_MINOR 3")
    library = _native.ffi_library(str(tmp_path / "jaxlib"))
    assert library.through() == 3
    assert _native.ffi_library(str(tmp_path / "jaxlib")) is library
    # Another jaxlib gets its own library, because the handlers for a newer jaxlib would not work with an older jaxlib.
    recipe = compile.ffi_recipe(str(tmp_path / "jaxlib"), Path(_native.library()._name))
    assert recipe.path == Path(library._name)
    (interface / "c_api.h").write_text("#define XLA_FFI_API_MINOR 4")
    assert compile.ffi_recipe(str(tmp_path / "jaxlib"), Path(_native.library()._name)).path != recipe.path


def test_building_ahead_of_time(small, capsys, monkeypatch):
    assert cli.main(["build-cuda"]) == 0
    said = capsys.readouterr().out
    assert f"nvcc: release 99.0, V99.0.1 in {small}/bin/nvcc\n" in said
    assert f"kernels: {compile.built()}\n" in said
    assert re.search(r"for jax: (/\S+/libragged_attention_ffi-\w+\.so|not built, for jax is not installed)\n", said)
    assert len(calls(small)) == 2


def test_building_ahead_of_time_without_a_compiler(afresh, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["build-cuda"]) == 2
    assert f"ragged-attention: {toolchain.NO_NVCC}" in " ".join(capsys.readouterr().err.split())


# ---- what the package offers


def test_the_package_is_cheap_to_import():
    heavy = ("torch", "jax", "numpy", "ctypes", "subprocess", "ragged_attention.kernels_cuda._native")
    assert loaded("ragged_attention.kernels_cuda:state", *heavy) == loaded("ragged_attention", *heavy)


def test_the_state_is_the_emulation_in_force(monkeypatch):
    fake = SimpleNamespace(ra_emulate=lambda *arguments: None, _name="emulated.so")
    monkeypatch.setattr(_native, "emulation", lambda: fake)
    assert kernels_cuda.state() is None
    with kernels_cuda.emulating():
        assert kernels_cuda.state() == "emulated.so"
        assert dispatch.state() != state_in_another_thread()
    assert kernels_cuda.state() is None


def state_in_another_thread() -> object:
    """The dispatch state in another thread, where the emulation is not in force."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(dispatch.state()))
    thread.start()
    thread.join()
    return found[0]


def test_the_report_has_a_row_for_each_part(small):
    compile.build(compile.kernels_recipe())
    assert dict(kernels_cuda.report()) == {
        "CUDA toolchain": f"release 99.0, V99.0.1 in {small}/bin/nvcc",
        "CUTLASS": _report.cutlass(),
        "CUDA kernels": f"{compile.built()}; device 0: sm_90, 132 multiprocessors",
    }


# ---- the ABI


def fields_of(name: str) -> list[tuple[str, str]]:
    """The fields of a struct in the header, in order: (name, kind)."""
    body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", HEADER, re.DOTALL)
    assert body is not None
    declarations = re.findall(r"(const )?(\w+\*?) ([\w, ]+);", re.sub(r"//.*", "", body[1]))
    return [
        (field.strip(), ("operand" if const else "result") if kind.endswith("*") else kind)
        for const, kind, names in declarations
        for field in names.split(",")
    ]


@pytest.mark.parametrize(("name", "record"), [("RaLatent", _abi.Latent), ("RaSchedule", _abi.Schedule)])
def test_records_mirror_the_header(name: str, record: type[Any]):
    pointer = ctypes.c_void_p
    kinds = {"operand": pointer, "result": pointer, "int64_t": ctypes.c_int64, "double": ctypes.c_double}
    fields = fields_of(name)
    assert [(field, kinds[kind]) for field, kind in fields] == list(record._fields_)
    for group, kind in ((record.OPERANDS, "operand"), (record.RESULTS, "result"), (record.NUMBERS, "int64_t")):
        assert group == tuple(field for field, of in fields if of == kind)


FORMATS = ("FP8_V32", "FP8_V4", "FP8_V41", "FP8_V41_PAGE", "FP4_V41", "FP4_V41_PAGE")


def test_every_cache_format_has_a_code() -> None:
    forms = [dataclasses.replace(form, layout=layout) for form in CACHE_FORMATS.values() for layout in form.layouts]
    names = [f"{form.name}_{form.layout}".removesuffix(f"_{form.layouts[0]}").upper() for form in forms]
    assert tuple(names) == FORMATS
    assert [_abi.code_of(form) for form in forms] == [getattr(_abi, name) for name in FORMATS]
    packed = CACHE_FORMATS["fp4_v41"]
    assert _abi.code_of(dataclasses.replace(packed, rotary=64, token_bytes=416)) == _abi.OTHER


def test_codes_mirror_the_header():
    codes = {name: int(value) for name, value in re.findall(r"(RA_\w+) = (-?\d+)", HEADER)}
    assert codes == {
        "RA_WRONG_DEVICE": _abi.WRONG_DEVICE, "RA_NO_KERNEL": _abi.NO_KERNEL, "RA_DEADLOCK": _abi.DEADLOCK,
        "RA_NO_TENSOR_MAP": _abi.NO_TENSOR_MAP,
        **{f"RA_{name.upper()}": code for name, code in _abi.DTYPES.items()},
        **{f"RA_{name}": getattr(_abi, name) for name in ("PLAIN", *FORMATS)},
    }  # fmt: skip
    assert f"#define RA_ABI_VERSION {_abi.VERSION}\n" in HEADER


@pytest.mark.parametrize(
    ("was", "now", "error_message"),
    [
        ("return RA_ABI_VERSION", "return 7", "expected CUDA kernels of ABI version 3, got 7"),
        ("sizeof(RaLatent)", "8", r"expected ra_size_of_latent\(\) == \d+ of the CUDA kernels, got 8"),
        ("sizeof(RaSchedule)", "9", r"expected ra_size_of_schedule\(\) == \d+ of the CUDA kernels, got 9"),
    ],
)
def test_a_library_of_another_abi_is_refused(small, was, now, error_message):
    (compile.SOURCES / "common.cu").write_text(SOURCE.replace(was, now))
    with pytest.raises(BackendMissing, match=error_message):
        _native.library()
    assert re.search(error_message, _native.why_not() or "")


def test_a_library_that_does_not_load(small):
    (compile.SOURCES / "common.cu").write_text(SOURCE + "int nobody(); RA_API int somebody() { return nobody(); }")
    path = compile.build(compile.kernels_recipe())
    with pytest.raises(BackendMissing, match=r"undefined symbol: .*nobody"):
        _native.library()
    assert "could not be built in this process" in (_native.why_not() or "")
    assert str(path) in _report.kernels()


# ---- the emulation's switch


def test_emulating_is_a_state_of_the_block(monkeypatch):
    requests = []
    fake = SimpleNamespace(ra_emulate=lambda *arguments: requests.append(arguments))
    monkeypatch.setattr(_native, "emulation", lambda: fake)
    assert _native.emulated() is None
    with _native.emulating("late", 7):
        assert _native.emulated() == ("late", 7)
        with contextlib.suppress(ZeroDivisionError), _native.emulating(seed=3):
            assert _native.emulated() == ("eager", 3)
            raise ZeroDivisionError
        assert _native.emulated() == ("late", 7)
    assert _native.emulated() is None
    assert requests == [(1, 7), (0, 3), (1, 7), (0, 0)]
    with (
        pytest.raises(InvalidInput, match="expected mode to be one of eager, late, crossed, got 'lazy'"),
        _native.emulating("lazy"),
    ):
        pass
