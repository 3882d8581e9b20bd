"""The patches that launches of interpreted kernels apply to Triton's interpreter."""

import types
from typing import Any

import numpy as np
import pytest

from ragged_attention.host.interpreting import let_scalars_be_indices
from tests.processes import printed

triton = pytest.importorskip("triton")


class Scope:
    """A stand-in for the interpreter's scope, which restores replaced attributes at its end."""

    def set_attr(self, tensor: Any, name: str, value: Any) -> None:
        setattr(tensor, name, value)


def interpreter() -> Any:
    """A stand-in for the interpreter module of Triton 3.6, with the one function that is patched."""
    module: Any = types.ModuleType("interpreter")
    module._patch_lang_tensor = lambda tensor, scope: scope.set_attr(tensor, "__index__", lambda self: "the old way")
    return module


def tensor_of(module: Any) -> Any:
    class Tensor:
        handle = types.SimpleNamespace(data=np.array([3], np.int32))

    module._patch_lang_tensor(Tensor, Scope())
    return Tensor()


def test_scalars_are_indices_in_triton_3_6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    module = interpreter()
    with pytest.raises(TypeError, match="__index__ returned non-int"):
        range(tensor_of(module))
    let_scalars_be_indices(module)
    assert list(range(tensor_of(module))) == [0, 1, 2]


def test_later_interpreters_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    module = interpreter()
    before = module._patch_lang_tensor
    let_scalars_be_indices(module)
    assert module._patch_lang_tensor is before


def test_ranges_of_keys_run_in_the_interpreter_of_users() -> None:
    pytest.importorskip("torch")
    assert printed("-m", "tests.programs.ranges_as_users_interpret", TRITON_INTERPRET="1") == "well\n"
