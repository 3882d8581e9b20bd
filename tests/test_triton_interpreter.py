"""The changes that make Triton's interpreter faster alter neither its results nor the state that it leaves behind."""

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
    launched()  # the first launch prepares state of Triton that is never restored
    walks = []
    walk = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *given: (walks.append(given[0]), walk(*given))[1])
    assert triton_interpreter.quicken()
    assert launched() == np.sum(np.arange(16.0) ** 2)
    assert walks.count(tl.tensor) == 1
    assert tl.core.is_builtin(tl.load)
    assert tl.core.is_builtin(tl.tensor.__add__)


@pytest.mark.parametrize(
    ("dtype", "held"),
    [(tl.bfloat16, np.uint16), (tl.int1, np.bool_), (tl.float8e5, np.uint8), (tl.pointer_type(tl.float32), np.uint64)],
)
def test_dtypes_are_those_of_the_interpreter(dtype: Any, held: Any) -> None:
    assert triton_interpreter.quicken()
    for _ in range(2):
        assert interpreter._get_np_dtype(dtype) == interpreter._get_np_dtype(tl.block_type(dtype, [4])) == held


@triton.jit
def doubled(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr) + tl.load(x_ptr))


def test_sums_of_integers_wrap_as_they_did() -> None:
    assert triton_interpreter.quicken()
    assert not interpreter.interpreter_builder.options.sanitize_overflow
    x, out, kernel = torch.tensor([2**31 - 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), doubled
    kernel[(1,)](x, out)  # type: ignore[index]
    assert out.item() == -2


def test_no_interpreter_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not triton_interpreter.quicken()


def test_an_interpreter_of_other_parts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(interpreter, "_LangPatchScope")
    assert not triton_interpreter.quicken()
