"""Options, backends and examples for the whole test suite; a CPU runs Triton by its interpreter."""

import pytest

from ragged_attention.pytest_plugin import add_options
from ragged_attention.testing import environment

environment.prepare("cpu")  # before any test module imports triton or jax

from ragged_attention.testing.collection import *  # noqa: E402, F403


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests start without the wishes of whoever runs them."""
    for name in ("RAGGED_ATTENTION_BACKEND", "RAGGED_ATTENTION_CONFIG", "RAGGED_ATTENTION_VALIDATE"):
        monkeypatch.delenv(name, raising=False)
