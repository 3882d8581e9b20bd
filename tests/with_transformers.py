"""What tests of the transformers integration begin with and end with."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def registered() -> Iterator[None]:
    """Our attention is known to transformers, no call of it is counted yet, and torch has one thread."""
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
