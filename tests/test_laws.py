"""The laws of `reference/README.md` hold on every backend."""

import re
from pathlib import Path

import pytest

from ragged_attention.testing.laws import LAWS
from ragged_attention.testing.runners import Runner
from ragged_attention.testing.suite import Check, laws

README = Path(__file__).parents[1] / "reference" / "README.md"
PACE = {"torch-reference": 1.0, "torch-eager": 1.0, "torch-triton": 0.25}


@pytest.mark.parametrize("check", list(laws()), ids=str)
def test_law(runner: Runner, check: Check, examples: int) -> None:
    check.run(runner, max(4, int(examples * PACE.get(str(runner), 0.2))))


def test_every_law_of_the_definition_is_in_the_suite() -> None:
    numbered = re.findall(r"^(\d+)\. ", README.read_text().partition("## Laws")[2], re.MULTILINE)
    assert [int(number) for number in numbered] == list(range(1, 11))
    assert len(LAWS) >= len(numbered)
