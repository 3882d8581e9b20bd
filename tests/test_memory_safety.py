"""No index value makes a kernel touch memory outside its arrays, which lie between unreadable pages.

Each backend runs in a separate process, because an access outside ends the process.
"""

import os
import signal

import numpy as np
import pytest

from ragged_attention.testing import guarded
from ragged_attention.testing.drawing import Check
from ragged_attention.testing.guarding import run_module
from ragged_attention.testing.runner import FRAMEWORKS, Runner
from ragged_attention.testing.safety import MODULE
from ragged_attention.testing.suite import memory
from tests.processes import ROOT


@pytest.mark.parametrize("check", list(memory()), ids=str)
def test_garbage_indices(runner: Runner, check: Check, examples: int) -> None:
    # Few examples for jax-xla: XLA clamps indices by itself, and compiles for every example.
    share = {"jax-xla": 0.04, "jax-triton": 0.06, "jax-reference": 0.2, "torch-triton": 0.12}.get(
        str(runner), 2.0 if runner.framework == "torch" else 1.0
    )
    check.run(runner, int(examples * share))


@pytest.mark.parametrize("side", ["start", "end"])
def test_a_step_outside_a_guarded_array_ends_the_process(side: str) -> None:
    assert run_module(MODULE, ["--prove-guard", side]).returncode == -signal.SIGSEGV


@pytest.mark.parametrize("side", ["start", "end"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (7000,)])
def test_a_guarded_array_is_like_any_other(side: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    copy = guarded(array, side)
    assert np.array_equal(copy, array)
    copy += 1
    assert np.array_equal(copy, array + 1)


@pytest.mark.parametrize("index", [0, -1], ids=["input", "output"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_kernel_that_steps_outside_dies(monkeypatch: pytest.MonkeyPatch, framework: str, index: int) -> None:
    """The positive control: a backend that accesses an input or output one element too far is killed."""
    pytest.importorskip(framework)
    monkeypatch.setenv("STEPS_OUTSIDE", str(index))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    room = "tests.programs.trusting"
    arguments = ["--backend", "trusting", "--room", room, "--framework", framework, "--examples", "2"]
    ended = run_module(MODULE, arguments)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    assert ended.stdout == "ragged_paged_attention, seed 0, guarded at the end, options {}\n"
