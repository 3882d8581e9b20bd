"""The example that trains on rollouts as a prefix tree has the loss and the gradients of separate rollouts."""

from typing import Any

import pytest

from tests import scripts

torch = pytest.importorskip("torch")
SHORT = ["--device", "cpu", "--prompt", "40", "--length", "9", "--answers", "3"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return scripts.training_example("train_tree", monkeypatch)


def printed_numbers(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[list[list[str]], float]:
    """The printed numbers of both rows, and the printed largest difference of gradients."""
    assert script["main"]([*SHORT, *more]) == 0
    out = capsys.readouterr().out
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row[1:]] for row in rows], float(out.rpartition(": ")[2])


@pytest.mark.parametrize("backend", [[], ["--backend", "reference"]])
def test_a_tree_has_the_loss_and_the_gradients_of_its_rollouts(script, capsys, backend):
    (tree, unshared), difference = printed_numbers(script, capsys, *backend)
    assert (tree[0], unshared[0]) == (str(40 + 2 * 9 + 6 * 9), str(6 * (40 + 9 + 9)))
    assert float(tree[1]) == pytest.approx(float(unshared[1]), rel=1e-5)
    assert float(tree[3]) < 0.5 * float(unshared[3])  # the kept bytes are proportional to tokens
    assert difference < 1e-4


def test_tokens_that_see_other_branches_show(script, capsys):
    script["main"].__globals__["tree_ranges"] = lambda parents: torch.stack(
        [torch.zeros_like(parents), torch.arange(1, len(parents) + 1, dtype=torch.int32)], -1
    )[:, None]
    assert printed_numbers(script, capsys)[1] > 1e-3


def test_rollouts_share_what_they_begin_with(script):
    tree = script["tree_of"]([(1, 2, 3), (1, 2), (1, 2, 4, 5), (7,), (1, 2, 3)])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 7]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 3, -1]
    assert tree.depths.tolist() == [0, 1, 2, 2, 3, 0]
    assert tree.counts.tolist() == [4, 4, 2, 1, 1, 1]
