"""Fixtures and helpers for tests of the transformers integration."""

from collections.abc import Iterator
from typing import Any

import pytest


def padding(kind: str) -> Any:
    """The attention mask [3, 13] of a batch. Padding is on the left or right, in holes, or missing, as `kind` says."""
    torch = pytest.importorskip("torch")
    shown = torch.ones(3, 13, dtype=torch.long)
    if kind == "left":
        shown[0, :3] = shown[2, :7] = 0
    elif kind == "right":
        shown[0, -3:] = shown[2, -7:] = 0
    elif kind == "holes":
        shown[0, 4:6] = shown[1, :2] = shown[1, 8] = 0
    return shown


def random(*size: int, seed: int = 0) -> Any:
    torch = pytest.importorskip("torch")
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Any, expected: Any, shown: Any = None) -> None:
    assert found.isfinite().all()  # at padding too
    if shown is not None:
        found, expected = found[shown.bool()], expected[shown.bool()]
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.fixture
def registered() -> Iterator[None]:
    """Register our attention with transformers, with an empty list of calls and one thread for torch."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from ragged_attention.integrations import transformers as ragged
    from ragged_attention.integrations.transformers import _calls

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ragged.register()
    _calls.calls.clear()
    yield
    ragged.unregister()
    torch.set_num_threads(threads)
