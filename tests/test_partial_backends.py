"""A backend that supports few kinds of batches is judged on as many batches as a backend that supports all."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from ragged_attention import dispatch
from ragged_attention.testing import drawing
from ragged_attention.testing.drawing import Check
from ragged_attention.testing.mla.ragged import RaggedLatentSpec
from ragged_attention.testing.mla.specs import DecodeSpec, PrefillSpec
from ragged_attention.testing.paged.specs import Contradiction, Spec
from ragged_attention.testing.paged.strategies import specs
from ragged_attention.testing.suite import checks
from ragged_attention.testing.verdicts import verdict_of
from tests import partial_backend

pytest.importorskip("torch", reason="the backend runs through the torch front end")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a fault may let NaN through
EXAMPLES = drawing.PROFILES["dev"]


@pytest.fixture(autouse=True)
def _no_backend_stays() -> Iterator[None]:
    yield
    dispatch.load.cache_clear()


def check_named(name: str) -> Check:
    (found,) = [check for check in checks() if check.name == name]
    return found


def test_a_partial_backend_is_judged_by_the_asked_number(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = partial_backend.plant(monkeypatch)
    assert runner.absent() is None
    verdict = verdict_of(runner, check_named("attention on drawn batches"), EXAMPLES)
    assert (verdict.result, verdict.taken, verdict.message) == ("passed", EXAMPLES, "")
    assert verdict.declined > 10
    assert any(reason.startswith("does not honour num_seqs (") for reason in verdict.reasons)


def test_drawn_batches_catch_the_faults_of_a_partial_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "PHASES", (drawing.Phase.generate,))  # no search for small failures
    check, caught = check_named("attention on drawn batches"), []
    for fault in partial_backend.FAULTS:
        try:
            check.run(partial_backend.plant(monkeypatch, fault), EXAMPLES)
        except AssertionError:
            caught.append(fault)
    assert len(partial_backend.FAULTS) >= 10
    assert len(caught) >= 0.9 * len(partial_backend.FAULTS), caught


def test_a_backend_that_tells_no_reason_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not = partial_backend.why_not
    monkeypatch.setattr(partial_backend, "why_not", lambda call: why_not(call) and "unsupported")
    verdict = verdict_of(partial_backend.plant(monkeypatch), check_named("attention without lse"), EXAMPLES)
    assert (verdict.result, verdict.taken) == ("passed", EXAMPLES // 5)


@pytest.mark.parametrize(("name", "reason"), [
    ("write on drawn batches", "does not offer write_kv_pages"),
    ("indexer, pages are but where keys lie", "does not offer indexer_logits"),
    ("sinks take their share and leave the lse", "does not honour sinks"),
    ("attention, window of 1", "takes bfloat16"),
])  # fmt: skip
def test_what_could_not_be_judged_has_not_passed(monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    verdict = verdict_of(partial_backend.plant(monkeypatch), check_named(name), 5)
    assert (verdict.result, verdict.taken) == ("declined", 0)
    assert reason in verdict.message


def test_a_check_that_asks_nothing_of_the_backend_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check("law", "of nothing", drawing.on_drawn(lambda runner, spec: None, specs()))
    verdict = verdict_of(partial_backend.plant(monkeypatch), check, 5)
    assert (verdict.result, verdict.message) == ("declined", "nothing was judged")


def test_a_write_that_takes_slots_only_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = importlib.import_module("ragged_attention.reference.write_kv_pages")

    def why_not(call: Any) -> str | None:
        return None if str(call.k.dtype).endswith("float16") else "takes 16 bits only"

    names = {"FEATURES": frozenset({"slot_mapping"}), "run": honest.run, "why_not": why_not}
    runner = partial_backend.announce(monkeypatch, "write_kv_pages", **names)
    assert runner.absent() is None
    assert verdict_of(runner, check_named("write on drawn batches"), 5).taken == 5


def test_a_batch_that_a_search_makes_invalid_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch counts as declined, not as failed, if a search for supported batches makes it unfit for a law."""
    honest = importlib.import_module("ragged_attention.reference.mla_decode")

    def why_not(call: Any) -> str | None:
        return None if call.indices is not None else "takes lists only"

    runner = partial_backend.announce(
        monkeypatch, "mla_decode", FEATURES=honest.FEATURES, run=honest.run, why_not=why_not
    )
    assert runner.absent() is None
    assert verdict_of(runner, check_named("decode, a list of all keys is the dense call"), 4).result == "declined"


@pytest.mark.parametrize("spec", [
    DecodeSpec(format="fp8_v32", topk=0, kv_heads=2, heads=2),
    DecodeSpec(kv_heads=2, heads=2),
    PrefillSpec(d_v=512),
    RaggedLatentSpec(tables=Spec(lens=((1, 1),)), d_v=512),
])  # fmt: skip
def test_fields_that_contradict_each_other_make_no_batch(spec: Any) -> None:
    """Contradictory fields are refused. Otherwise a search, which changes single fields, could judge such a batch."""
    with pytest.raises(Contradiction, match=r"one head|columns"):
        spec.build()


OPERATIONS = {
    "paged_attention": "paged decode on drawn batches",
    "prefill_attention": "chunked prefill on drawn batches",
    "varlen_attention": "packed on drawn batches",
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_operation_in_one_dtype_is_judged(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """A backend of one operation is judged without related operations and without a gradient."""
    honest = importlib.import_module(f"ragged_attention.reference.{operation}")

    def why_not(call: Any) -> str | None:
        return None if str(call.q.dtype).endswith("bfloat16") else "takes bfloat16 only"

    names = {"FEATURES": honest.FEATURES, "run": honest.run, "why_not": why_not}
    runner = partial_backend.announce(monkeypatch, operation, **names)
    assert runner.absent() is None
    verdict = verdict_of(runner, check_named(OPERATIONS[operation]), 5)
    assert (verdict.result, verdict.answered) == ("passed", (operation,))
    assert verdict.taken >= 1
