"""The suite's parameters for pytest: use `from ragged_attention.testing.collection import *` in a conftest.py.

A test that takes `runner` runs on every backend that is available here. A test that takes `examples` gets the number
of batches to draw, which depends on the profile in HYPOTHESIS_PROFILE (dev, ci or nightly).
"""

import dataclasses
import functools

import pytest

from ragged_attention.testing import environment
from ragged_attention.testing.drawing import examples_of
from ragged_attention.testing.runner import Runner, runners

__all__ = ["examples", "pytest_generate_tests"]


@functools.cache
def _runners(backend: str | None, framework: str | None, device: str) -> tuple[list[Runner], dict[str, str]]:
    environment.prepare(device)
    return runners(backend, framework, device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "runner" not in metafunc.fixturenames:
        return
    backend, framework = metafunc.config.getoption("--backend"), metafunc.config.getoption("--framework")
    present, absent = _runners(backend, framework, metafunc.config.getoption("--device"))
    if backend and not present:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise pytest.UsageError(f"--backend {backend} cannot run here: {reasons}")
    rounded = metafunc.config.getoption("--rounded-weights")
    metafunc.parametrize("runner", [dataclasses.replace(each, rounded_weights=rounded) for each in present], ids=str)


@pytest.fixture(scope="session")
def examples() -> int:
    return examples_of()
