"""Tests of `batch_invariant`: the backends that refuse it, the ways to request it, and the faults that its laws catch.

The laws themselves are in the suite.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import ragged_attention as ra
from ragged_attention import InvalidInput, Unsupported, config, dispatch
from ragged_attention.testing.invariance import may_come_in_chunks, serves_what_is_trained
from ragged_attention.testing.paged.corners import CORNERS
from ragged_attention.testing.paged.oracle import check_attention
from ragged_attention.testing.paged.specs import Spec
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.varlen.specs import VarlenSpec

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
        explanation = ra.explain("ragged_paged_attention", q, pages, **tables())
    assert "eager      does not promise the same bits" in explanation


def test_files_and_variables_ask_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text("batch_invariant = true\n")
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(tmp_path / "ours.toml"))
    monkeypatch.setenv(config.BATCH_INVARIANT_VARIABLE, "0")
    ra.reload_config()
    assert ra.get_config().batch_invariant  # the file has priority over the environment
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


SMALL_SEGMENTS = {name: {"segment_kv": 64} for name in ("varlen_attention", "ragged_paged_attention")}
SERVED = VarlenSpec(lens=((70, 300), (1, 190), (20, 20)), causal=True, group=3, dtype="bfloat16", seed=1)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("backend", ["numba", "triton"])
@pytest.mark.parametrize(
    "change",
    [{}, {"sliding_window": 100}, {"dtype": "float32", "causal": False, "ranges": "few", "lens": ((17, 200),)}],
    ids=["causal", "window", "ranges"],
)
def test_many_segments_change_no_bit(backend: str, framework: str, change: dict[str, Any]) -> None:
    runner = Runner(framework=framework, backend=backend)
    if reason := runner.absent():
        pytest.skip(reason)
    with ra.use_backend(options=SMALL_SEGMENTS):
        serves_what_is_trained(runner, dataclasses.replace(SERVED, **change))


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_a_block_of_fewer_rows_than_a_short_sequence_has_segments(backend: str) -> None:
    runner = Runner(framework="torch", backend=backend)
    if reason := runner.absent():
        pytest.skip(reason)
    tokens = 2 if backend == "numba" else 16  # `triton` counts rows, which are tokens times heads
    check_attention(runner, CORNERS["speculative"](), {"segment_kv": 128, "block_q": tokens})


def test_the_laws_notice_tiles_that_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(framework="torch", backend="numba")
    if reason := runner.absent():
        pytest.skip(reason)
    for operation in ("varlen_attention", "ragged_paged_attention"):
        module = dispatch.load(operation, "numba")
        monkeypatch.setattr(module, "invariant_tile", module.heuristic)
    with pytest.raises(AssertionError, match="expected exactly"):
        serves_what_is_trained(runner, dataclasses.replace(SERVED, dtype="float32"))
    with pytest.raises(AssertionError, match="expected exactly"):
        may_come_in_chunks(runner, Spec(lens=((70, 300), (40, 40)), group=3))
