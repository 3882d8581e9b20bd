"""Planted wrong kernels: the reference with some functions replaced, registered like another package's backend."""

import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from typing import Any
from unittest import mock

import pytest
from hypothesis import Phase

from ragged_attention import dispatch
from ragged_attention.calls import CALLS
from ragged_attention.testing import drawing
from ragged_attention.testing.drawing import Check
from ragged_attention.testing.runner import Absent, Runner, runner_for

Function = Callable[..., Any]
PACKAGE = "mutant_room"


def _module(honest: types.ModuleType, function: Function) -> types.ModuleType:
    """A copy of the correct implementation whose `run` uses `function` for the operation."""
    operation = honest.__name__.rpartition(".")[2]
    module = types.ModuleType(f"{PACKAGE}.{operation}")
    module.__spec__ = ModuleSpec(module.__name__, None)

    def run(call: Any, tile: Any, launch: Any) -> Any:
        with mock.patch.object(honest, operation, function):
            return honest.run(call, tile, launch)

    vars(module).update(FEATURES=getattr(honest, "FEATURES", frozenset()), run=run)
    return module


def planted(monkeypatch: pytest.MonkeyPatch, functions: Mapping[str, Function]) -> Runner:
    """A runner of a backend that computes each operation by its given function, and the others correctly."""
    parent = types.ModuleType(PACKAGE)
    parent.__spec__ = ModuleSpec(PACKAGE, None, is_package=True)
    parent.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, PACKAGE, parent)
    for operation in CALLS:
        honest = importlib.import_module(f"ragged_attention.reference.{operation}")
        module = _module(honest, functions.get(operation) or getattr(honest, operation))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dispatch, "third_party_packages", lambda: {"mutant": PACKAGE})
    monkeypatch.setattr(drawing, "PHASES", (Phase.generate,))  # do not shrink: any failure will do
    dispatch.load.cache_clear()
    return runner_for("mutant", "torch")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Runner]]:
    """A function that replaces the given operations' functions in a backend and returns its runner."""
    yield lambda **functions: planted(monkeypatch, functions)
    dispatch.load.cache_clear()


def failures(runner: Runner, checks: Iterable[Check], examples: int) -> Iterable[str]:
    """The names of the checks that a backend fails, yielded one by one."""
    for check in checks:
        try:
            check.run(runner, examples)
        except AssertionError:
            yield check.name
        except Absent:  # not a failure: the reference has no tunables
            continue
