"""The serving engine for torch: it is short, runs without numba, and notices planted faults."""

import ast
import re
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.processes import printed
from tests.scripts import EXAMPLES

SCRIPT = EXAMPLES / "serve_torch.py"
PRINTED = re.compile(
    r"requests: 9, steps: (\d+), shared pages: (\d+), drafts: (\d+)\ntokens as of plain attention: 9 of 9 requests\n"
)


def test_the_script_is_short_and_imports_little() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 150
    assert max(map(len, text.splitlines())) <= 120
    found = {ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)}
    assert found == {
        "import argparse",
        "import torch",
        "import torch.nn.functional as F",
        "from ragged_attention.torch import ragged_paged_attention",
    }


@pytest.mark.parametrize("missing", ["hypothesis,pytest", "numba,hypothesis,pytest"])
def test_the_tokens_are_those_of_plain_attention(missing: str) -> None:
    match = PRINTED.fullmatch(printed("-W", "error", "-m", "tests.programs.without", missing, str(SCRIPT)))
    assert match is not None
    steps, shared, accepted = map(int, match.groups())
    assert steps < 60  # without accepted drafts, the engine would need more than 70 steps
    assert min(shared, accepted) > 5


def test_help_runs_nothing() -> None:
    text = printed(str(SCRIPT), "--help")
    assert "A serving engine for torch in one file." in text
    assert "requests:" not in text


def main_of(text: str) -> Any:
    names = {"__name__": SCRIPT.stem}
    exec(compile(text, str(SCRIPT), "exec"), names)
    return names["main"]


def test_other_models_are_served_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_of(SCRIPT.read_text())(seed=1) == 0
    assert capsys.readouterr().out.endswith("tokens as of plain attention: 9 of 9 requests\n")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("        rows[:, target] = rows[:, source]", ""),
        ('"draft_mask": draft_mask, ', ""),
        ("draft_mask.sum(1) - 1  #", "torch.cat([torch.arange(int(count)) for count in counts])  #"),
        ("self.holders[request.pages] += 1", "self.holders[request.pages] = 1"),
        ('"v_scale": KV_SCALE', '"v_scale": 1.5 * KV_SCALE'),
    ],
    ids=["rows do not move", "drafts see other branches", "positions by row", "pages without counts", "another scale"],
)
def test_a_fault_is_noticed(right: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = SCRIPT.read_text()
    assert text.count(right) == 1
    assert main_of(text.replace(right, wrong))() == 1
    assert " of 9 requests\n" in capsys.readouterr().out
