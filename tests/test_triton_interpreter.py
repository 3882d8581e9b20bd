"""What makes Triton's interpreter faster changes neither what it computes nor what it leaves behind."""

from typing import Any

import numpy as np
import pytest

from ragged_attention.testing import triton_interpreter

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def squared(x):
    return x * x


@triton.jit
def sum_of_squares(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.sum(squared(x), axis=0))


def launched() -> float:
    x, out = torch.arange(16, dtype=torch.float32), torch.zeros(1)
    kernel: Any = sum_of_squares
    kernel[(1,)](x, out, BLOCK=16)
    return float(out)


def test_the_language_is_prepared_once_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    launched()  # what functions of Triton itself leave prepared is so now
    walks = []
    walk = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *given: (walks.append(given[0]), walk(*given))[1])
    assert triton_interpreter.quicken()
    assert launched() == np.sum(np.arange(16.0) ** 2)
    assert walks.count(tl.tensor) == 1
    assert tl.core.is_builtin(tl.load)
    assert tl.core.is_builtin(tl.tensor.__add__)


def test_no_interpreter_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not triton_interpreter.quicken()


def test_an_interpreter_of_other_parts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(interpreter, "_LangPatchScope")
    assert not triton_interpreter.quicken()
