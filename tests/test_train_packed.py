"""The example that trains on packed documents has the same losses as on padded documents, and draws its picture."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import pytest

from tests import scripts

torch = pytest.importorskip("torch")
SHORT = ["--device", "cpu", "--steps", "3", "--tokens", "120", "--length", "50"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return scripts.training_example("train_packed", monkeypatch)


def largest_difference(said: str) -> float:
    return float(said.partition("largest difference of the losses of a step: ")[2].split()[0])


def test_packed_and_padded_training_have_the_same_losses(script, tmp_path, capsys):
    picture = tmp_path / "losses.svg"
    assert script["main"]([*SHORT, "--plot", str(picture)]) == 0
    assert largest_difference(capsys.readouterr().out) < 1e-5
    curves = ElementTree.parse(picture).findall("{http://www.w3.org/2000/svg}polyline")
    first, second = ([float(number) for point in curve.attrib["points"].split() for number in point.split(",")]
                     for curve in curves)  # fmt: skip
    assert len(first) == 2 * 3
    assert first == pytest.approx(second, abs=0.2)


def test_documents_that_see_each_other_show(script, capsys):
    main: Callable[..., int] = script["main"]
    right = main.__globals__["varlen_attention"]

    def mixing(q: Any, k: Any, v: Any, edges: Any, *others: Any, **named: Any) -> Any:
        whole = torch.tensor([0, len(q)], dtype=torch.int32)
        return right(q, k, v, whole, whole, causal=True)

    main.__globals__["varlen_attention"] = mixing
    assert main(SHORT) == 0
    assert largest_difference(capsys.readouterr().out) > 1e-3


def test_a_backend_can_be_named(script, capsys):
    assert script["main"]([*SHORT, "--steps", "1", "--backend", "reference"]) == 0
    assert largest_difference(capsys.readouterr().out) < 1e-5


def test_documents_are_cut_and_fill_a_step(script):
    arguments = script["main"].__globals__["argparse"].Namespace(seed=0, length=10, tokens=25)
    steps = script["batches"](["a" * 30, "bc" * 4], arguments, "cpu")
    for _ in range(3):
        documents = next(steps)
        assert sorted({len(document) for document in documents}) in ([8, 11], [11], [8])
        assert sum(map(len, documents)) >= 25


def test_the_text_is_that_of_pages_and_docstrings(monkeypatch):
    paragraphs = scripts.example("train_demo", monkeypatch)["corpus"]()
    assert len(paragraphs) > 1000
    assert all(paragraph.find("\n") == len(paragraph) - 1 >= 24 for paragraph in paragraphs)
    assert not [paragraph for paragraph in paragraphs if paragraph.startswith(("|", "```", "<!--"))]
    assert any("paged KV cache" in paragraph for paragraph in paragraphs)
