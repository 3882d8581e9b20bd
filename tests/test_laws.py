"""The laws of `reference/README.md` hold on every backend."""

import re
from pathlib import Path

import pytest

from ragged_attention.testing.drawing import Check
from ragged_attention.testing.heads_first.suite import HEADS_FIRST_LAWS
from ragged_attention.testing.mla.laws import MLA_LAWS
from ragged_attention.testing.paged.laws import LAWS
from ragged_attention.testing.runner import Absent, Runner
from ragged_attention.testing.suite import laws
from ragged_attention.testing.varlen.laws import SPARSE_GRADIENT_LAWS, VARLEN_LAWS

README = Path(__file__).parents[1] / "reference" / "README.md"
PACE = {"torch-reference": 0.6, "torch-eager": 0.6, "torch-triton": 0.12}


@pytest.mark.parametrize("check", list(laws()), ids=str)
def test_law(runner: Runner, check: Check, examples: int) -> None:
    try:
        check.run(runner, max(3, int(examples * PACE.get(str(runner), 0.12))))
    except Absent as lack:
        pytest.skip(str(lack))


def test_every_law_of_the_definition_is_in_the_suite() -> None:
    numbered = re.findall(r"^(\d+)\. ", README.read_text().partition("## Laws")[2], re.MULTILINE)
    assert [int(number) for number in numbered] == list(range(1, len(numbered) + 1))
    tested = [*LAWS, *HEADS_FIRST_LAWS, *MLA_LAWS, *VARLEN_LAWS, *SPARSE_GRADIENT_LAWS]
    assert len(tested) >= len(numbered) >= 10
