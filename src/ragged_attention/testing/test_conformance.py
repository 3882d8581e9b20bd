"""Run the suite under pytest: `pytest --pyargs ragged_attention.testing --backend X`."""

import pytest

from ragged_attention.testing.drawing import Check
from ragged_attention.testing.runner import Declined, Runner
from ragged_attention.testing.suite import checks


@pytest.mark.parametrize("check", checks(), ids=str)
def test_conformance(runner: Runner, check: Check, examples: int) -> None:
    try:
        if not check.run(runner, examples):
            pytest.skip("nothing was judged")
    except Declined as refusal:
        pytest.skip(str(refusal))
