"""The examples of DeepSeek's sparse attention agree with dense attention and notice mistakes."""

import re
import runpy
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from tests.processes import printed
from tests.scripts import EXAMPLES


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let examples import their neighbours, as they do when they are run as scripts."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def loaded(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_sparse_attention_agrees_with_dense_attention(capsys):
    assert loaded("deepseek_sparse_attention")["main"]([]) == 0
    prefill, *decodes = capsys.readouterr().out.splitlines()
    assert prefill.startswith("prefill of 96 and 64 tokens: 1 to 32 keys per token, error ")
    assert len(decodes) == 4
    assert decodes[-1].startswith("decode step 4: 32 to 32 keys per token, error ")


@pytest.mark.parametrize("example", ["deepseek_sparse_attention", "deepseek_v4_attention"])
def test_the_examples_run_without_the_tools_of_tests(example):
    tools = "hypothesis,pytest,ml_dtypes"
    arguments = ["--prompt", "9", "--new-tokens", "1"]
    printed("-W", "error", "-m", "tests.programs.without", tools, str(EXAMPLES / f"{example}.py"), *arguments)


def test_sparse_attention_runs_on_triton(capsys):
    pytest.importorskip("triton")
    arguments = ["--topk", "20", "--prompt", "9", "--new-tokens", "1", "--backend", "triton"]
    assert loaded("deepseek_sparse_attention")["main"](arguments) == 0
    assert "prefill of 9 and 6 tokens: 1 to 9 keys per token, error " in capsys.readouterr().out


@pytest.mark.parametrize("heads", ["12", "64"])
def test_compressed_attention_agrees_with_dense_attention(heads, capsys):
    assert loaded("deepseek_v4_attention")["main"](["--heads", heads]) == 0
    prefill, decode = capsys.readouterr().out.splitlines()
    assert prefill.startswith("prefill of 150 tokens in 2 sequences; compressed rows per token: 0 to 8; ")
    assert decode.startswith("decode of 9 tokens in 2 sequences; compressed rows per token: 8; ")


def test_compressed_attention_with_rows_to_spare(capsys):
    """The example works if its lists are longer than the available rows and its window longer than the prompt."""
    arguments = ["--topk", "40", "--window", "128", "--prompt", "30"]
    assert loaded("deepseek_v4_attention")["main"](arguments) == 0
    assert "prefill of 50 tokens in 2 sequences; compressed rows per token: 0 to 7; " in capsys.readouterr().out


def test_compressed_attention_runs_on_triton(capsys):
    pytest.importorskip("triton")
    arguments = ["--topk", "3", "--window", "5", "--prompt", "21", "--new-tokens", "2", "--backend", "triton"]
    assert loaded("deepseek_v4_attention")["main"](arguments) == 0
    assert "prefill of 35 tokens in 2 sequences; compressed rows per token: 0 to 3; " in capsys.readouterr().out


def without(right: Any, argument: str) -> Any:
    """A version of the operation `right` that ignores an argument."""

    def wrong(*args: Any, **named: Any) -> Any:
        named.pop(argument, None)
        return right(*args, **named)

    return wrong


LAYER_OFF = r"expected the layer's output within 0.0078125 of its norm, got 0\."
OFF = r"out of sequence 0\[.*times the bound"


@pytest.mark.parametrize(
    ("example", "planted", "stage", "message"),
    [
        ("deepseek_sparse_attention", ("sparse_mla_prefill", "sm_scale"), "", LAYER_OFF),
        ("deepseek_sparse_attention", ("mla_decode", "sm_scale"), "prefill of", LAYER_OFF),
        ("deepseek_v4_attention", ("mla_decode", "sinks"), "", OFF),
        ("deepseek_v4_attention", ("mla_decode", "extra_indices"), "", OFF),
    ],
)
def test_an_ignored_argument_is_noticed(example, planted, stage, message, capsys, monkeypatch):
    main = loaded(example)["main"]
    names, (operation, argument) = main.__globals__, planted
    wrong = without(names[operation], argument)
    if argument == "extra_indices":
        wrong = without(wrong, "extra_kv_cache")
    monkeypatch.setitem(names, operation, wrong)
    failed(main, stage, message, capsys)


@pytest.mark.parametrize(
    ("example", "factor", "bound"),
    [("deepseek_sparse_attention", 1.02, "0.0078125"), ("deepseek_v4_attention", 1.1, "0.0625")],
)
def test_a_layer_that_is_off_is_noticed(example, factor, bound, capsys, monkeypatch):
    found = loaded(example)
    right = found["Layer"].output

    def wrong(self: Any, attended: Any, *positions: Any) -> Any:
        """The layer's output, multiplied by `factor`, except in float64, which the example uses for its reference."""
        return right(self, attended, *positions) * (1 if str(attended.dtype) == "torch.float64" else factor)

    monkeypatch.setattr(found["Layer"], "output", wrong)
    failed(found["main"], "", rf"expected the layer's output within {bound} of its norm, got 0\.", capsys)


@pytest.mark.parametrize("example", ["deepseek_sparse_attention", "deepseek_v4_attention"])
@pytest.mark.parametrize("argument", ["weights", "top_k"])
def test_a_wrong_choice_is_noticed(example, argument, capsys, monkeypatch):
    main = loaded(example)["main"]
    names = main.__globals__
    right = names["indexer_topk"]

    def wrong(q: Any, keys: Any, weights: Any, top_k: int, **named: Any) -> Any:
        if argument == "weights":
            return right(q, keys, -weights, top_k, **named)
        chosen = right(q, keys, weights, top_k - 1, **named)
        return torch.nn.functional.pad(chosen, (0, 1), value=-1)

    monkeypatch.setitem(names, "indexer_topk", wrong)
    expected = {
        "weights": "expected no logit above .* to be left out",
        "top_k": r"expected \d+ columns in ascending order",
    }
    failed(main, "", expected[argument], capsys)


def test_a_compressed_row_in_a_wrong_place_is_noticed(capsys, monkeypatch):
    main = loaded("deepseek_v4_attention")["main"]
    names = main.__globals__
    right = names["recent_tokens"]
    # The fault affects the cache, which holds several sequences, but not the reference of a single sequence.
    monkeypatch.setitem(names, "recent_tokens", lambda hidden, *args: right(hidden.roll(len(hidden) - 1, 1), *args))
    failed(main, "", "expected the layer's output within 0.0625 of its norm, got 0", capsys)


def failed(main: Any, stage: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that the example fails after a stage, with a matching message."""
    assert main(["--prompt", "40", "--new-tokens", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(stage)
    assert len(printed.out.splitlines()) == bool(stage)
    assert re.search(message, printed.err)
