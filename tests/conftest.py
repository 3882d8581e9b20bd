"""Options, backends, tiers and examples for the whole test suite; on a CPU, Triton's interpreter runs its kernels."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ragged_attention import reload_config
from ragged_attention.pytest_plugin import add_options
from ragged_attention.testing import environment

environment.prepare("cpu")  # before any test module imports triton or jax

from ragged_attention.testing import triton_interpreter  # noqa: E402
from ragged_attention.testing.collection import *  # noqa: E402, F403
from tests import durations, record, tiers  # noqa: E402
from tests.planting import plant as plant  # noqa: E402
from tests.record import pytest_runtest_call as pytest_runtest_call  # noqa: E402
from tests.tiers import pytest_collection_modifyitems as pytest_collection_modifyitems  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    group = parser.getgroup("ragged_attention")
    tiers.add_options(group)
    durations.add_options(group)
    record.add_options(group)


def pytest_configure(config: pytest.Config) -> None:
    tiers.configure(config)
    durations.configure(config)
    record.configure(config)


def pytest_collection_finish() -> None:
    gc.freeze()  # the thousands of collected tests stay alive, and scanning them in each collection takes time


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise Triton's objects that tests hold survive until exit, and nanobind reports leaks


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    triton_interpreter.quicken()


@pytest.fixture(autouse=True)
def no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test without the RAGGED_ATTENTION_* settings of the person who runs the tests."""
    for name in ("BACKEND", "CONFIG", "VALIDATE", "BATCH_INVARIANT"):
        monkeypatch.delenv(f"RAGGED_ATTENTION_{name}", raising=False)
    reload_config()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The registry of a fake vLLM, which is installed for the duration of the test."""
    from tests import vllm_fakes  # needs torch

    monkeypatch.delenv("RAGGED_ATTENTION_VLLM_CPU", raising=False)
    with vllm_fakes.installed(monkeypatch) as registry:
        yield registry


@pytest.fixture
def setting() -> Iterator[Callable[[str, Any], None]]:
    """A function that sets an option of jax for the duration of the test."""
    import jax

    original_values: dict[str, Any] = {}

    def update(name: str, value: Any) -> None:
        original_values.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)

    yield update
    for name, value in original_values.items():
        jax.config.update(name, value)
