"""A failure is reported with its likely cause, which is right for each fault of the partial backend."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from ragged_attention import dispatch
from ragged_attention.testing import DecodeSpec, PagedSpec, PrefillSpec, Spec, VarlenSpec, diagnosis, judge, steering
from ragged_attention.testing.diagnosis import candidates, forms, numbers, results
from ragged_attention.testing.diagnosis.fields import WHATEVER
from ragged_attention.testing.drawing import Check, on_corner
from ragged_attention.testing.expanded import expand
from ragged_attention.testing.heads_first import suite as heads_first_suite
from ragged_attention.testing.heads_first.specs import ChunkSpec, check_chunk, check_paged
from ragged_attention.testing.mla import corners as mla_corners
from ragged_attention.testing.mla import ragged
from ragged_attention.testing.mla.oracle import check_decode, check_prefill
from ragged_attention.testing.mla.ragged import RaggedLatentSpec
from ragged_attention.testing.paged import corners as paged_corners
from ragged_attention.testing.paged.oracle import check_attention
from ragged_attention.testing.suite import checks
from ragged_attention.testing.varlen import corners as varlen_corners
from ragged_attention.testing.varlen.oracle import check_varlen
from ragged_attention.testing.verdicts import verdict_of
from tests import faulty_attentions, partial_backend

pytest.importorskip("torch", reason="the backend runs through the torch front end")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # faults may produce NaN
SPEC = Spec(
    lens=((1, 37), (1, 21), (1, 5)), page_size=16, num_kv_heads=2, group=2, head_dim=64, dtype="bfloat16", seed=3
)
WINDOW, LONG = dataclasses.replace(SPEC, sliding_window=7), "it fails only for sequences of more than "
CAUSES = {
    "window one too wide": (WINDOW, ["the window is one key too wide", "it fails only with sliding_window=7"]),
    "window one too narrow": (WINDOW, ["the window is one key too narrow", "it fails only with sliding_window=7"]),
    "stale page": (SPEC, ["the last page of a sequence is a stale one: the page before it is read again", f"{LONG}16"]),
    "unscaled softmax": (SPEC, ["the logits are not scaled", WHATEVER]),
    "dropped tail": (SPEC, ["the last keys are dropped, after a multiple of 8"]),
    "first key dropped": (SPEC, ["key 0 is left out"]),
    "wrong head of a group": (SPEC, ["query heads read the wrong KV head", "only with num_kv_heads=2 and group=2"]),
    "NaN of unused slots": (
        dataclasses.replace(SPEC, poison="nan"), [numbers.NAN, "it fails only with poison='nan'"],
    ),
    "key counted twice": (SPEC, ["key 16 is counted twice", f"{LONG}16 keys"]),
    "page listed twice counted once": (
        dataclasses.replace(SPEC, sharing="repeat"),
        ["pages that the table lists twice are counted once", "it fails only with sharing='repeat'"],
    ),
    "lse in base 2": (SPEC, ["lse is in base 2", WHATEVER]),
    "wrong page of a long sequence": (
        SPEC,
        ["the wrong page is read in sequences of more than 2 pages", f"{LONG}32 keys, as many as 2 pages of 16 hold"],
    ),
    "soft cap forgotten": (
        dataclasses.replace(SPEC, soft_cap=0.5), ["soft_cap is ignored", "it fails only with soft_cap=0.5"],
    ),
    "length of another sequence": (SPEC, ["every sequence has the length of sequence 0"]),
    "output scaled": (SPEC, ["every out is 1.25 times the right one", WHATEVER]),
    "slots past the length": (SPEC, ["one slot past the length is read as a key", numbers.PAST]),
    "unlisted page": (SPEC, [numbers.UNLISTED]),
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
        assert list(numbers.of_results(runner, spec.build(), {})) == []


def test_a_full_sink_and_what_a_law_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """If sinks of +inf make a corner fail, they are the reported cause.

    A law adds such sinks to a batch itself, so even the plainest batch fails. The reported cause is then that the law
    changes the batch.
    """
    honest = dispatch.load("ragged_paged_attention", "reference")

    def full_sinks_give_nan(call: Any, *given: Any) -> Any:
        results = honest.run(call, *given)
        if call.sinks is not None:
            results[0][:, call.sinks == np.inf] = np.nan
        return results

    runner = partial_backend.announce(
        monkeypatch, "ragged_paged_attention", FEATURES=honest.FEATURES, run=full_sinks_give_nan
    )
    corner, law = (
        verdict_of(runner, each, 4)
        for each in checks()
        if str(each) in ("corner: attention, sinks +inf", "law: sinks take their share and leave the lse")
    )
    assert corner.causes[0] == numbers.FULL_SINK
    assert law.causes == (diagnosis.CHANGED,)


def decode_without_maximum(q, kv_pages, kv_lens, page_indices):
    out = np.zeros_like(q, np.float32)
    for seq, kv_len in enumerate(kv_lens):
        used = page_indices[seq, : -(-kv_len // kv_pages[0].shape[1])]
        k, v = (np.concatenate(pages[used])[:kv_len].astype(np.float32) for pages in kv_pages)
        k, v = (np.repeat(each, q.shape[1] // each.shape[1], axis=1) for each in (k, v))
        weights = np.exp(np.einsum("hd,nhd->hn", q[seq].astype(np.float32), k) * q.shape[2] ** -0.5)
        out[seq] = np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    return out


def test_a_softmax_without_its_maximum_fails_where_logits_are_large() -> None:
    """A softmax without its maximum is found even if the kernel declines all corners with large logits."""
    unpromised = ("invalid indices", "non-finite values", "combined pages", "other value sizes", "empty sequences")
    report = judge(
        decode_without_maximum, decode_only=True, dtypes=["bfloat16"], declines=unpromised, only="agreement: attention",
        examples=5,
    )  # fmt: skip
    (failure,) = report.failures
    assert failure.check == "agreement: attention, large logits"
    assert failure.causes[0] == numbers.OVERFLOW


def test_a_structure_is_printed_without_its_defaults() -> None:
    text = steering.brief((WINDOW, {"num_splits": 3}))
    assert text.startswith("Spec(lens=((1, 37), (1, 21), (1, 5)), page_size=16, num_kv_heads=2, group=2, head_dim=64")
    assert text.endswith("sliding_window=7, seed=3), {'num_splits': 3}")
    assert eval(steering.brief(WINDOW)) == WINDOW  # the text is an expression that evaluates to the structure


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
    assert not failure.batch  # the check has no structure to print


# ---- plain kernels of each family

HEADS: dict[str, Any] = {"num_kv_heads": 2, "group": 3, "head_dim": 64, "dtype": "bfloat16", "page_size": 16}
TABLES = Spec(lens=((5, 37), (1, 21), (3, 70)), page_size=16, group=3, dtype="bfloat16")
LATENTS: dict[str, Any] = {"heads": 4, "dtype": "bfloat16"}
LISTS: dict[str, Any] = {**LATENTS, "topk": 40, "lens": "inside", "sinks": "normal"}
DENSE = {"topk": 0, "kv_lens": (37, 21, 70), "page_size": 16, "q_tokens": 2, **LATENTS}
SPARSE = {**LISTS, "kv_lens": (37, 21, 70), "q_tokens": 2, "extra_topk": 20, "extra_slots": 40, "extra_lens": "inside"}
ATTENTIONS: dict[str, tuple[str, Callable[..., Any], Any]] = {  # each family's operation, check and structure
    "decode": ("ragged_paged_attention", check_attention, Spec(lens=((1, 37), (1, 21), (1, 70)), **HEADS)),
    "prefill": ("ragged_paged_attention", check_attention, Spec(lens=((5, 37), (3, 21), (9, 70)), **HEADS)),
    "heads first": ("paged_attention", check_paged, PagedSpec(spec=Spec(lens=((1, 37), (1, 21), (1, 70)), **HEADS))),
    "chunk": ("prefill_attention", check_chunk, ChunkSpec(spec=Spec(lens=(), **HEADS), length=70, chunk=20)),
    "ragged latents": ("ragged_mla_attention", check_attention, RaggedLatentSpec(tables=TABLES)),
    "latent decode": ("mla_decode", check_decode, DecodeSpec(**DENSE)),
    "lists": ("mla_decode", check_decode, DecodeSpec(**SPARSE)),
    "sparse prefill": ("sparse_mla_prefill", check_prefill, PrefillSpec(tokens=4, rows=60, **LISTS)),
    "packed": (
        "varlen_attention", check_varlen,
        VarlenSpec(lens=((5, 37), (3, 21), (9, 70)), kv_heads=2, group=3, d=64, d_v=64, dtype="bfloat16"),
    ),
}  # fmt: skip
PAGED = ("decode", "prefill", "heads first", "chunk", "ragged latents", "latent decode")
MASKED = ("decode", "prefill", "chunk", "ragged latents", "latent decode", "packed")
CAUSAL = ("prefill", "chunk", "ragged latents", "latent decode", "packed")
OF_LATENTS = ("ragged latents", "latent decode", "lists", "sparse prefill")
OF_LISTS = ("lists", "sparse prefill")
GROUPED = ("decode", "prefill", "heads first", "chunk", "packed")
ALL = tuple(ATTENTIONS)
WITH_LSE = tuple(family for family in ALL if family not in ("heads first", "chunk"))
WITH_EMPTY = tuple(family for family in ALL if family != "chunk")
# For each fault: the families in which it is planted, the fields that reveal it, and words of its reported cause.
FAULTS: dict[str, tuple[Sequence[str], dict[str, Any], str]] = {
    "unscaled": (ALL, {}, "the logits are not scaled"),
    "exp2": (ALL, {}, "exp2 is taken of logits that are not multiplied by log2(e)"),
    "soft cap": (("decode", "prefill", "latent decode", "packed"), {"soft_cap": 0.5}, "soft_cap is ignored"),
    "cap before scale": (("decode", "packed"), {"soft_cap": 0.5}, "the soft cap is applied before the scale"),
    "sinks": (WITH_LSE, {"sinks": "normal"}, "sinks is ignored"),
    "slopes": (("decode", "prefill", "packed"), {"alibi": "usual"}, "alibi_slopes is ignored"),
    "slope sign": (("decode", "prefill", "packed"), {"alibi": "usual"}, "alibi_slopes have the wrong sign"),
    "base 2": (WITH_LSE, {}, "lse is in base 2"),
    "sum not rescaled": (ALL, {}, numbers.RESCALE),
    "accumulator not rescaled": (ALL, {}, numbers.RESCALE),
    "nothing rescaled": (ALL, {}, numbers.RESCALE),
    "0 / 0": (WITH_EMPTY, {"empty": True}, numbers.OF_NO_KEYS),
    "+inf": (tuple(each for each in WITH_LSE if each != "lists"), {"empty": True}, "lse is +inf where no key is seen"),
    "NaN": (MASKED, {"poison": "nan", "sliding_window": 7}, numbers.NAN),
    "zeros in a tail": (
        ("decode", "heads first", "latent decode", *OF_LISTS, "packed"), {}, "keys past the length are counted as zeros"
    ),
    "dropped tail of a block": (
        ("decode", "prefill", "heads first", "ragged latents", "latent decode", "sparse prefill", "packed"), {},
        "the last keys are dropped, after a multiple of",
    ),
    "dropped tail of a page": (PAGED, {}, "the last keys are dropped, after a multiple of"),
    "one past": ((*PAGED, "packed"), {}, "one slot past the length is read as a key"),
    "stale page": (PAGED, {}, "the last page of a sequence is a stale one"),
    "table one late": (PAGED, {}, "the next page is read in place of a page"),
    "table one early": (PAGED, {}, "the previous page is read in place of a page"),
    "page once": (("decode", "prefill", "heads first"), {"sharing": "repeat"}, "pages that the table lists twice are"),
    "window too wide": (MASKED, {"sliding_window": 7}, "the window is one key too wide"),
    "window too narrow": (MASKED, {"sliding_window": 7}, "the window is one key too narrow"),
    "not causal": (CAUSAL, {"causal": True}, "the causal mask is wrong"),
    "top left": (CAUSAL, {"causal": True}, "the causal mask is aligned to the first keys"),
    "later key": (CAUSAL, {"causal": True}, "the causal mask shows a query the key after its own"),
    "own key hidden": (CAUSAL, {"causal": True}, "the causal mask hides a query's own key"),
    "h % num_kv_heads": (GROUPED, {}, "query heads read the wrong KV head"),
    "h // num_kv_heads": (GROUPED, {}, "query heads read the wrong KV head"),
    "last columns": (OF_LATENTS, {}, "values are the last columns of a row"),
    "no rope": (OF_LATENTS, {}, "the columns after d_v, such as the rotary ones, are left out of the logits"),
    "-1 read": (OF_LISTS, {}, "an index that selects nothing, such as -1, is read as row 0"),
    "-1 is a key of zeros": (OF_LISTS, {}, "an index that selects nothing, such as -1, is counted as a key of zeros"),
    "list ends": (OF_LISTS, {}, "a list ends at its first index that selects nothing"),
    "index once": (OF_LISTS, {}, "an index that is listed twice is counted once"),
    "topk_lens ignored": (OF_LISTS, {}, "topk_lens is ignored"),
    "extra_topk_lens ignored": (("lists",), {}, "extra_topk_lens is ignored"),
    "extra ignored": (("lists",), {}, "the extra cache is ignored"),
    "edges of q": (("packed",), {}, "keys are found by cu_q_lens"),
    "align": (("chunk",), {"align": "end"}, "align is ignored"),
    "one early": (("packed",), {}, "the keys of a sequence are read one row too early"),
}  # fmt: skip


def with_fields(spec: Any, fields: dict[str, Any]) -> Any:
    """The structure with new values for the fields that it has. `empty` adds sequences or lists without keys."""
    if isinstance(spec, ChunkSpec) and "align" in fields:
        return dataclasses.replace(spec, **fields)
    if isinstance(spec, (PagedSpec, ChunkSpec)):
        return dataclasses.replace(spec, spec=with_fields(spec.spec, fields))
    if isinstance(spec, RaggedLatentSpec):
        return dataclasses.replace(spec, tables=with_fields(spec.tables, fields))
    if "empty" in fields:
        of_lists = {"lens": "zero", "extra_lens": "zero"}
        fields = {"lens": ((1, 9), (1, 0)), "kv_lens": (9, 0)} if not getattr(spec, "topk", 0) else of_lists
    known = {field.name for field in dataclasses.fields(spec)}
    return dataclasses.replace(spec, **{name: value for name, value in fields.items() if name in known})


@pytest.mark.parametrize(("fault", "family"), [(fault, each) for fault, told in FAULTS.items() for each in told[0]])
def test_a_fault_of_a_plain_kernel_is_told_first(fault: str, family: str) -> None:
    operation, check, spec = ATTENTIONS[family]
    _, fields, wanted = FAULTS[fault]
    runner, spec = faulty_attentions.runner_of(operation, fault), with_fields(spec, fields)
    with pytest.raises(AssertionError):
        check(runner, spec.build())
    found = diagnosis.causes(runner, spec, lambda other: check(runner, other.build()))
    assert any(wanted in cause for cause in found[:2]), found


@pytest.mark.parametrize("family", ATTENTIONS)
def test_a_right_kernel_has_no_cause(family: str) -> None:
    operation, check, spec = ATTENTIONS[family]
    runner = faulty_attentions.runner_of(operation)
    for fields in ({}, *(fields for families, fields, _ in FAULTS.values() if family in families)):
        batch = with_fields(spec, fields).build()
        check(runner, batch)
        assert list(numbers.of_results(runner, batch, {})) == []


SMALL = 2000  # the most elements of q in a small batch
CORNERS: dict[str, Mapping[str, Callable[[], Any]]] = {
    "ragged": paged_corners.CORNERS,
    "paged": heads_first_suite.PAGED_CORNERS,
    "chunk": heads_first_suite.CHUNK_CORNERS,
    "sparse prefill": mla_corners.PREFILL_CORNERS,
    "latent decode": mla_corners.DECODE_CORNERS,
    "ragged latents": ragged.CORNERS,
    "packed": {name: spec.build for name, spec in varlen_corners.VARLENS.items()},
}


@pytest.mark.parametrize("family", CORNERS)
def test_the_form_of_a_batch_has_the_results_of_the_definition(family: str) -> None:
    """The form of a batch, from which causes are derived, gives the reference results.

    Other values in the slots that no query reads do not change the results.
    """
    for name, build in CORNERS[family].items():
        batch = build()
        form = forms.form_of(batch)
        assert form is not None
        found, want = forms.attended(form), results.expected(batch)
        assert results.agree({name: found[name] for name in want}, want, batch), name
        other = results.with_other_values(batch, form, ~form.read())
        assert results.agree(results.expected(other), want, batch), name


@pytest.mark.parametrize("family", CORNERS)
def test_known_faults_are_computed_for_any_small_batch(family: str) -> None:
    """The known faults can be computed for every small batch, even one with empty caches or lists."""
    for name, build in CORNERS[family].items():
        batch = build()
        form = forms.form_of(batch)
        assert form is not None
        if form.q.size <= SMALL:
            shapes = {result: array.shape for result, array in results.expected(batch).items()}
            for cause, other in candidates.candidates(batch, form):
                found = numbers.computed(other)
                assert {result: found[result].shape for result in shapes} == shapes, (name, cause)


def test_strides_of_0_are_no_second_cause() -> None:
    """Strides of 0 are not reported as a second cause.

    The diagnosis changes slots that are not read. It copies them to their own memory first, so slots that are read stay
    unchanged.
    """
    spec = Spec(lens=((1, 21), (1, 9)), page_size=4, dtype="bfloat16", seed=9)
    batch = expand(spec.build(), {"kv_pages": 0})
    assert not batch.read_slots()[0].any()  # the one page in memory, which all pages share
    found = set(numbers.of_results(faulty_attentions.runner_of("ragged_paged_attention", "unscaled"), batch, {}))
    assert any("the logits are not scaled" in cause for cause in found)
    assert not found & {numbers.UNLISTED, numbers.PAST}


def test_a_kernel_that_fails_with_strides_of_0_is_told() -> None:
    def decode(kv_pages, **given):
        right = faulty_attentions.ragged_paged_attention({"kv_pages": kv_pages.astype(np.float64), **given}, "")
        return right if kv_pages.strides[0] else (right[0] + 1, right[1])

    runner = faulty_attentions.runner_around("ragged_paged_attention", decode)
    batch = expand(Spec(lens=((1, 21), (1, 9)), page_size=4).build(), {"kv_pages": 0})
    assert list(numbers.of_results(runner, batch, {})) == [numbers.STRIDES]
