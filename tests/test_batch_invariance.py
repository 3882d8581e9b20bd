"""`batch_invariant`: who refuses it, where it is asked for, and prompts in chunks. Its laws are the suite's."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention import InvalidInput, Unsupported, config
from ragged_attention.testing.compare import identical
from ragged_attention.testing.paged.specs import Batch, Spec
from ragged_attention.testing.runner import Runner

torch = pytest.importorskip("torch")
TABLES = {"kv_lens": [3], "page_indices": [[0]], "cu_q_lens": [0, 1]}


def tables() -> dict[str, Any]:
    return {name: torch.tensor(values, dtype=torch.int32) for name, values in TABLES.items()}


def decode(backend: str | None) -> Any:
    from ragged_attention.torch import ragged_paged_attention

    return ragged_paged_attention(torch.ones(1, 1, 16), torch.ones(1, 4, 2, 16), **tables(), backend=backend)


def test_a_backend_that_does_not_promise_it_refuses() -> None:
    with ra.use_backend(batch_invariant=True):
        with pytest.raises(Unsupported, match=r"eager: does not promise the same bits in every batch"):
            decode("eager")
        assert decode(None).shape == (1, 1, 16)
        with ra.use_backend(batch_invariant=False):
            assert decode("eager").shape == (1, 1, 16)
    assert decode("eager").shape == (1, 1, 16)


def test_writes_and_merges_are_not_asked() -> None:
    from ragged_attention.torch import merge_attention_states

    with ra.use_backend("eager", batch_invariant=True):
        assert merge_attention_states(torch.ones(2, 1, 1, 16), torch.zeros(2, 1, 1))[0].shape == (1, 1, 16)


def test_explain_says_so() -> None:
    q, pages = torch.ones(1, 1, 16), torch.ones(1, 4, 2, 16)
    with ra.use_backend(batch_invariant=True):
        said = ra.explain("ragged_paged_attention", q, pages, **tables())
    assert "eager      does not promise the same bits" in said


def test_files_and_variables_ask_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text("batch_invariant = true\n")
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(tmp_path / "ours.toml"))
    monkeypatch.setenv(config.BATCH_INVARIANT_VARIABLE, "0")
    ra.reload_config()
    assert ra.get_config().batch_invariant  # a file is asked before the environment
    monkeypatch.delenv(config.CONFIG_VARIABLE)
    ra.reload_config()
    assert not ra.get_config().batch_invariant
    monkeypatch.setenv(config.BATCH_INVARIANT_VARIABLE, "1")
    ra.reload_config()
    assert ra.get_config().batch_invariant


@pytest.mark.parametrize("wrong", [1, "yes"])
def test_anything_but_true_or_false_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected batch_invariant to be True or False"):
        ra.use_backend(batch_invariant=wrong)  # type: ignore[arg-type]


def test_a_variable_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.BATCH_INVARIANT_VARIABLE, "yes")
    ra.reload_config()
    with pytest.raises(InvalidInput, match="BATCH_INVARIANT to be 0 or 1, got 'yes'"):
        ra.get_config()


def chunk(batch: Batch, first: int, last: int) -> Batch:
    """The queries [first, last) of a batch of one prompt, with the keys that are there by then."""
    edges, kv_lens = np.array([0, last - first], np.int32), np.array([last], np.int32)
    return batch.change(q=batch.q[first:last], cu_q_lens=edges, kv_lens=kv_lens)


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of Triton's interpreter whose bits do not depend on where in a block a row stands.

    They are NumPy's, and the libraries behind that may sum the last rows of a matrix in another order; in float64 that
    is lost when the sums are rounded. A GPU's matrix units treat all rows alike.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        del self, rest
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(
    "change",
    [{}, {"sliding_window": 50}, {"dtype": "float32"}, {"cache_dtype": "float8_e4m3fn", "soft_cap": 30.0}],
    ids=str,
)
def test_a_prompt_may_come_in_chunks(framework: str, change: dict[str, object]) -> None:
    """Of the Triton kernels; each chunk is long enough for the one that takes prompts."""
    runner = Runner(framework=framework, backend="triton")
    if reason := runner.absent():
        pytest.skip(reason)
    spec = Spec(lens=((150, 150),), page_size=4, num_kv_heads=1, group=2, dtype="bfloat16")
    batch = dataclasses.replace(spec, **change).build()
    with ra.use_backend(batch_invariant=True):
        whole = runner.run("ragged_paged_attention", batch, return_lse=True)
        parts = [
            runner.run("ragged_paged_attention", chunk(batch, first, last), return_lse=True)
            for first, last in ((0, 67), (67, 90), (90, 150))
        ]
    for result, *pieces in zip(whole, *parts, strict=True):
        identical(np.concatenate(pieces), result)
