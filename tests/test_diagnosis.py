"""A failure is told with its likely cause: each fault of the partial backend has the words that name it."""

import dataclasses
from collections.abc import Iterator

import pytest

from ragged_attention import dispatch
from ragged_attention.testing import Spec, diagnosis, judge
from ragged_attention.testing.drawing import Check, on_corner
from ragged_attention.testing.paged.oracle import check_attention
from ragged_attention.testing.suite import checks
from ragged_attention.testing.verdicts import verdict_of
from tests import partial_backend

pytest.importorskip("torch", reason="the backend runs through the torch front end")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN where a fault lets it through
SPEC = Spec(
    lens=((1, 37), (1, 21), (1, 5)), page_size=16, num_kv_heads=2, group=2, head_dim=64, dtype="bfloat16", seed=3
)
WINDOW, LONG = dataclasses.replace(SPEC, sliding_window=7), "it fails only for sequences of more than "
CAUSES = {
    "window one too wide": (WINDOW, ["the window is one key too wide", "it fails only with sliding_window=7"]),
    "window one too narrow": (WINDOW, ["the window is one key too narrow", "it fails only with sliding_window=7"]),
    "stale page": (SPEC, ["the last page of a sequence is a stale one: the page before it is read again", f"{LONG}16"]),
    "unscaled softmax": (SPEC, ["the logits are not scaled", diagnosis.WHATEVER]),
    "dropped tail": (SPEC, ["the last keys are dropped, after a multiple of 8"]),
    "first key dropped": (SPEC, ["key 0 is left out"]),
    "wrong head of a group": (SPEC, ["query heads read the wrong KV head", "only with num_kv_heads=2 and group=2"]),
    "NaN of unused slots": (
        dataclasses.replace(SPEC, poison="nan"), [diagnosis.NAN, "it fails only with poison='nan'"],
    ),
    "key counted twice": (SPEC, ["key 16 is counted twice", f"{LONG}16 keys"]),
    "page listed twice counted once": (
        dataclasses.replace(SPEC, sharing="repeat"),
        ["pages that the table lists twice are counted once", "it fails only with sharing='repeat'"],
    ),
    "lse in base 2": (SPEC, ["lse is in base 2", diagnosis.WHATEVER]),
    "wrong page of a long sequence": (
        SPEC,
        ["the wrong page is read in sequences of more than 2 pages", f"{LONG}32 keys, as many as 2 pages of 16 hold"],
    ),
    "soft cap forgotten": (
        dataclasses.replace(SPEC, soft_cap=0.5), ["soft_cap is ignored", "it fails only with soft_cap=0.5"],
    ),
    "length of another sequence": (SPEC, ["every sequence has the length of sequence 0"]),
    "output scaled": (SPEC, ["every out is 1.25 times the right one", diagnosis.WHATEVER]),
    "slots past the length": (SPEC, ["one slot past the length is read as a key", diagnosis.PAST]),
    "unlisted page": (SPEC, [diagnosis.UNLISTED]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_backend_stays() -> Iterator[None]:
    yield
    dispatch.load.cache_clear()


@pytest.mark.parametrize("fault", CAUSES)
def test_a_fault_is_told_by_its_cause(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    runner = partial_backend.plant(monkeypatch, fault)
    spec, wanted = CAUSES[fault]
    found = diagnosis.causes(runner, spec, lambda spec: check_attention(runner, spec.build()))
    for cause in wanted:
        assert any(cause in each for each in found), found


def test_every_fault_has_a_cause() -> None:
    assert set(CAUSES) == set(partial_backend.FAULTS)


def test_a_right_backend_has_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = partial_backend.plant(monkeypatch)
    for spec, _ in CAUSES.values():
        assert list(diagnosis.of_results(runner, spec.build(), {})) == []


def test_a_structure_is_printed_without_its_defaults() -> None:
    text = diagnosis.brief((WINDOW, {"num_splits": 3}))
    assert text.startswith("Spec(lens=((1, 37), (1, 21), (1, 5)), page_size=16, num_kv_heads=2, group=2, head_dim=64")
    assert text.endswith("sliding_window=7, seed=3), {'num_splits': 3}")
    assert eval(diagnosis.brief(WINDOW)) == WINDOW  # it is the expression that makes the structure


def test_a_verdict_has_the_smallest_batch_and_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = partial_backend.plant(monkeypatch, "soft cap forgotten")
    (check,) = [check for check in checks() if check.name == "attention without lse"]
    verdict = verdict_of(runner, check, 100)
    spec = eval(verdict.batch)
    assert (verdict.result, len(spec.lens), spec.soft_cap is None) == ("FAILED", 1, False)
    assert "dtype='bfloat16'" in verdict.batch
    assert "Failing test case" not in verdict.message
    assert verdict.causes[0] == "soft_cap is ignored"


def test_a_corner_is_told_by_its_cause_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = partial_backend.plant(monkeypatch, "lse in base 2")
    check = Check("corner", "a window", on_corner(check_attention, WINDOW.build))
    assert verdict_of(runner, check, 1).causes == ("lse is in base 2: multiply it by ln 2",)


def test_a_gradient_that_fails_in_a_corner_is_told() -> None:
    torch = pytest.importorskip("torch")

    def zeros(q, k, v, cu_q_lens, cu_kv_lens, causal=False):
        return torch.zeros(*q.shape[:2], v.shape[2]) + 0 * (q.sum() + k.sum() + v.sum())

    only = "corner: packed gradient, causal"
    (failure,) = judge(zeros, "varlen_attention", framework="torch", gradients=True, only=only).failures
    assert "expected" in failure.message
    assert not failure.batch  # it has no structure that could be printed
