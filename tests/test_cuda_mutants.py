"""The emulation and the suite catch planted faults in our own CUDA kernels: each mutant must fail a check."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ragged_attention.kernels_cuda._build import toolchain
from ragged_attention.testing import cuda_emulator
from ragged_attention.testing.drawing import PROFILES, examples_of
from ragged_attention.testing.suite import checks
from tests.cuda_mutants import CHECKS, HONEST, MUTANTS, RACES, Mutant, build

pytest.importorskip("torch")

needs_emulation = pytest.mark.skipif(cuda_emulator.missing() is not None, reason=str(cuda_emulator.missing()))
DEV = examples_of() == PROFILES["dev"]
# The default profile runs a few mutants, and with the sanitizer one other kernel. In every profile, the texts that the
# mutants replace must occur in the sources.
JUDGED = list(MUTANTS)[4::22] if DEV else list(MUTANTS)
CLEAN = ["honest dense"] if DEV else list(HONEST)
PASSING = ["honest lists"] if DEV else list(HONEST)
RACY = list(RACES)[:1] if DEV else list(RACES)


def built(folder: Path, name: str, *, sanitized: bool = False) -> None:
    """Build a library with a fault, with a cache in the same folder so that nothing remains in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        build({**HONEST, **MUTANTS, **RACES}[name], folder / "csrc", sanitized)


def judged(folder: Path, name: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The finished process that has checked a mutant; it is separate, because a fault may crash it."""
    command = [sys.executable, "-m", "tests.cuda_mutants", name, str(folder / "csrc"), *flags]
    surroundings: Mapping[str, str] = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")} | environ
    return subprocess.run(command, capture_output=True, text=True, env=surroundings, timeout=600, check=False)


@needs_emulation
@pytest.mark.parametrize("name", JUDGED)
def test_a_planted_fault_is_caught(tmp_path: Path, name: str) -> None:
    built(tmp_path, name)
    ended = judged(tmp_path, name)
    assert ended.returncode < 0 or ended.stdout, f"no check fails: {ended.stderr[-2000:]}"


@needs_emulation
@pytest.mark.parametrize("name", PASSING)
def test_an_honest_kernel_passes(tmp_path: Path, name: str) -> None:
    built(tmp_path, name)
    ended = judged(tmp_path, name)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr[-2000:]


@pytest.fixture(scope="module")
def sanitizer() -> Mapping[str, str]:
    """The environment in which Python can load a library with ThreadSanitizer."""
    compiler = toolchain.gxx() or ""
    asked = subprocess.run([compiler, "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    library = Path(asked.stdout.strip())
    if not library.is_absolute():
        pytest.skip(f"{compiler} comes without libtsan")
    # ThreadSanitizer would report fibers that remain at the end of a process as leaked threads.
    environ = {"LD_PRELOAD": str(library), "TSAN_OPTIONS": "halt_on_error=1 report_thread_leaks=0"}
    environ["OPENBLAS_NUM_THREADS"] = "1"  # products of the reference implementation need not be checked for races
    command = [sys.executable, "-c", ""]
    started = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)
    if started.returncode:
        pytest.skip(f"ThreadSanitizer does not start here: {started.stderr[-300:]}")
    return environ


@needs_emulation
@pytest.mark.parametrize("name", CLEAN)
def test_the_sanitizer_finds_no_race(tmp_path: Path, sanitizer: Mapping[str, str], name: str) -> None:
    built(tmp_path, name, sanitized=True)
    ended = judged(tmp_path, name, "--sanitized", **sanitizer)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr[:4000]


@needs_emulation
@pytest.mark.parametrize("name", RACY)
def test_the_sanitizer_reports_a_planted_race(tmp_path: Path, sanitizer: Mapping[str, str], name: str) -> None:
    built(tmp_path, name, sanitized=True)
    ended = judged(tmp_path, name, "--sanitized", **sanitizer)
    assert ended.returncode, ended.stdout
    assert "WARNING: ThreadSanitizer: data race" in ended.stderr


@pytest.mark.parametrize("name", MUTANTS | RACES)
def test_every_fault_can_be_planted(name: str) -> None:
    mutant = (MUTANTS | RACES)[name]
    assert mutant.source() != HONEST["honest dense"].source()


def test_a_fault_that_is_nowhere_is_reported() -> None:
    with pytest.raises(ValueError, match=r"expected kernels_cuda/csrc/api.h to have the text 'no such text'"):
        Mutant("api.h", "no such text", "").source()


def test_checks_of_mutants_exist() -> None:
    assert {name for names in CHECKS.values() for name in names} <= {str(check) for check in checks()}
