"""The example that trains a sparse attention layer with its indexer: gradients, losses and selected keys."""

from typing import Any

import pytest

from tests import scripts

torch = pytest.importorskip("torch")
SMALL = ["--device", "cpu", "--sequences", "8", "--pairs", "6", "--top-k", "4", "--rate", "1e-2"]
ONE_STEP = [*SMALL, "--dense", "1", "--warm-up", "1", "--sparse", "1"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return scripts.example("train_deepseek", monkeypatch)


def differences_in(said: str) -> list[float]:
    parts = " ".join(said.split()).split("relative difference of a gradient: ")[1:]
    return [float(part.split()[0]) for part in parts]


def test_the_layer_and_its_indexer_learn(script, capsys):
    assert script["main"]([*SMALL, "--dense", "120", "--warm-up", "60", "--sparse", "60"]) == 0
    assert max(differences_in(capsys.readouterr().out)) < 1e-5


@pytest.mark.parametrize("backend", ["eager", "numba", "reference"])
def test_gradients_are_those_of_the_formulas(script, capsys, backend):
    script["main"]([*ONE_STEP, "--sequences", "2", "--backend", backend])
    differences = differences_in(capsys.readouterr().out)
    assert len(differences) == 3
    assert max(differences) < 1e-5


@pytest.mark.parametrize("wrong", ["attention_target", "indexer_logits", "sparse_mla_prefill"])
def test_a_wrong_gradient_shows(script, capsys, wrong):
    names = script["main"].__globals__
    right = names[wrong]

    def changed(*given: Any, **named: Any) -> Any:
        result = right(*given, **named)
        return (1.01 * result[0], *result[1:]) if isinstance(result, tuple) else 1.01 * result

    names[wrong] = changed
    assert script["main"](ONE_STEP) == 1
    assert max(differences_in(capsys.readouterr().out)) > 1e-4


def test_an_indexer_that_does_not_learn_shows(script):
    assert script["main"]([*ONE_STEP, "--rate", "0"]) == 1


def test_questions_follow_pairs_and_have_their_values(script):
    arguments = script["main"].__globals__["argparse"].Namespace(sequences=3, pairs=5)
    batch = script["batch_of"](arguments, torch.Generator().manual_seed(0), "cpu")
    tokens, answers = batch.tokens.view(3, 20), batch.answers.view(3, 20)
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        values = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        assert wanted[:10] == [-100] * 10
        assert [answer + script["SYMBOLS"] for answer in wanted[10::2]] == [values[key] for key in row[10::2]]
    assert batch.stops.tolist() == list(range(1, 61))
    assert batch.starts.view(3, 20)[:, 0].tolist() == batch.starts.view(3, 20)[:, 19].tolist() == [0, 20, 40]
