"""Planting a wrong kernel: the definition with some of its functions replaced, as a backend like another package's."""

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
ROOM = "mutant_room"


def _module(honest: types.ModuleType, function: Function) -> types.ModuleType:
    """An implementation whose `run` is the honest one's, with the operation's function replaced."""
    operation = honest.__name__.rpartition(".")[2]
    module = types.ModuleType(f"{ROOM}.{operation}")
    module.__spec__ = ModuleSpec(module.__name__, None)

    def run(call: Any, tile: Any, launch: Any) -> Any:
        with mock.patch.object(honest, operation, function):
            return honest.run(call, tile, launch)

    vars(module).update(FEATURES=getattr(honest, "FEATURES", frozenset()), run=run)
    return module


def planted(monkeypatch: pytest.MonkeyPatch, functions: Mapping[str, Function]) -> Runner:
    """The runner of a backend that computes each operation by its function, honestly where none is given."""
    parent = types.ModuleType(ROOM)
    parent.__spec__ = ModuleSpec(ROOM, None, is_package=True)
    parent.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ROOM, parent)
    for operation in CALLS:
        honest = importlib.import_module(f"ragged_attention.reference.{operation}")
        module = _module(honest, functions.get(operation) or getattr(honest, operation))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dispatch, "third_party_packages", lambda: {"mutant": ROOM})
    monkeypatch.setattr(drawing, "PHASES", (Phase.generate,))  # a failure is wanted here, not a small one
    dispatch.load.cache_clear()
    return runner_for("mutant", "torch")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Runner]]:
    """Plant functions in place of the honest ones as a backend, and return its runner."""
    yield lambda **functions: planted(monkeypatch, functions)
    dispatch.load.cache_clear()


def failures(runner: Runner, checks: Iterable[Check], examples: int) -> Iterable[str]:
    """The checks that a backend fails, as they are found."""
    for check in checks:
        try:
            check.run(runner, examples)
        except AssertionError:
            yield check.name
        except Absent:  # no fault: the definition has nothing to tune
            continue
