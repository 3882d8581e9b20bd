"""The shipped test tools do what their documentation says."""

import contextlib
import dataclasses
import re
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_attention import dispatch
from ragged_attention.errors import InvalidInput, TooLarge
from ragged_attention.reference import merge_attention_states as merge_module
from ragged_attention.reference._kv_layout import FORMATS, format_values
from ragged_attention.reference.mla_decode import mla_decode
from ragged_attention.reference.sparse_mla_prefill import sparse_mla_prefill
from ragged_attention.testing import (
    CORNERS,
    DecodeSpec,
    GradientSpec,
    PrefillSpec,
    Spec,
    VarlenSpec,
    agrees,
    conformance,
    formats,
)
from ragged_attention.testing.compare import BOUNDS, EITHER, MANY, OF_FEW, identical
from ragged_attention.testing.drawing import PATHS, drawn, examples_of, on_every_path
from ragged_attention.testing.integers import garbage
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla import suite as mla_suite
from ragged_attention.testing.mla.cache_specs import SlotsSpec
from ragged_attention.testing.mla.oracle import check_slots
from ragged_attention.testing.mla.strategies import decode_specs, prefill_specs
from ragged_attention.testing.paged.corners import MERGE_CORNERS, WRITE_CORNERS
from ragged_attention.testing.paged.specs import pages_of, split
from ragged_attention.testing.paged.strategies import specs, write_batch
from ragged_attention.testing.runner import FRAMEWORKS, Absent, Declined, Runner, runner_for, runners
from ragged_attention.testing.selected import Selection, lists_of
from ragged_attention.testing.suite import checks
from ragged_attention.testing.varlen import corners as varlen_corners
from ragged_attention.testing.varlen import garbage as varlen_safety
from ragged_attention.testing.varlen import laws as varlen_laws
from ragged_attention.testing.varlen.gradients import GradientBatch, Gradients
from ragged_attention.testing.varlen.gradients import expected as expected_gradients
from ragged_attention.testing.varlen.oracle import gradients_agree, rows_without_gradient
from ragged_attention.testing.varlen.specs import VarlenBatch
from ragged_attention.testing.varlen.strategies import sparse_gradient_specs, varlen_gradient_specs
from tests.processes import run_python

MIXED = Spec(lens=((5, 5), (1, 37), (4, 21)), num_kv_heads=2, group=2, padding=2)


# The comparator.
@pytest.mark.parametrize("kind", BOUNDS)
def test_the_bound_is_the_contracts(kind: str) -> None:
    absolute, relative = BOUNDS[kind]
    want = np.linspace(-3, 3, 7)
    inside, outside = (want + np.sign(want + 0.1) * (absolute + relative * np.abs(want)) * f for f in (0.99, 1.01))
    if kind in ("float16", "bfloat16"):  # one element only: if all had this error, the direction would be wrong too
        inside, outside = (np.where(np.arange(7) == 3, changed, want) for changed in (inside, outside))
    assert agrees(inside, want, kind)
    with pytest.raises(AssertionError, match=r"out\[\d\]: expected .* within .*, got .*, 1.01 times the bound"):
        agrees(outside, want, kind)


def test_the_bounds_are_these_and_no_others() -> None:
    assert BOUNDS == {
        "float32": (2e-5, 2e-5),
        "float16": (8e-4, 2.01 / 128),
        "bfloat16": (8e-4, 2.01 / 128),
        "lse float32": (2e-5, 2e-5),
        "lse float16": (1e-5, 2e-4),
        "lse bfloat16": (1e-5, 2e-4),
    }


@pytest.mark.parametrize(("got", "want", "name"), [
    (np.nan, 1.0, "NaN"), (1.0, np.nan, "NaN"), (np.inf, 1.0, r"\+inf"), (-np.inf, np.inf, r"\+inf"),
    (1.0, -np.inf, "-inf"),
])  # fmt: skip
def test_places_of_nan_and_infinity_come_first(got: float, want: float, name: str) -> None:
    with pytest.raises(AssertionError, match=rf"lse\[1\]: expected .*; 1 of 2 elements are {name}"):
        agrees([5.0, got], [9.0, want], "float32", "lse")


def test_equal_nan_and_infinities_agree() -> None:
    special = [np.nan, np.inf, -np.inf, 0.0]
    assert agrees(special, special, "bfloat16")
    assert identical(special, special)


def test_a_common_tilt_is_caught_by_the_direction() -> None:
    want = np.random.default_rng(0).standard_normal(1000)
    tilted = want + np.random.default_rng(1).standard_normal(1000) * 4e-3
    tilted = np.clip(tilted, want - 8e-4 - 0.015 * np.abs(want), want + 8e-4 + 0.015 * np.abs(want))
    with pytest.raises(AssertionError, match="expected a cosine difference <= 5e-06, got"):
        agrees(tilted, want, "bfloat16")


def test_shapes_and_bits_are_compared_too() -> None:
    with pytest.raises(AssertionError, match=r"expected shape \(2,\), got \(1, 2\)"):
        agrees([[1, 2]], [1, 2], "float32")
    with pytest.raises(AssertionError, match=r"expected shape \(2,\), got \(3,\)"):
        identical([1, 2, 3], [1, 2])
    with pytest.raises(AssertionError, match=r"pages\[1\]: expected exactly 3, got 2; 1 of 2 elements differ"):
        identical([1, 2], [1, 3], "pages")
    assert agrees(np.empty((0, 3)), np.empty((0, 3)), "bfloat16")


@pytest.mark.parametrize("kind", EITHER)
def test_latent_attention_is_held_to_one_bound_of_two(kind: str) -> None:
    absolute, relative, _ = EITHER[kind]
    # An error in one of many elements hardly changes the direction.
    want = np.array([3.0, 1e-9, 50.0] + [40.0] * 1000)
    for index, error in ((0, relative * 3), (1, absolute), (2, relative * 50)):
        inside, outside = (want + np.where(np.arange(len(want)) == index, error * f, 0) for f in (0.99, 1.01))
        assert agrees(inside, want, kind)
        with pytest.raises(
            AssertionError, match=rf"out\[{index}\]: expected .* or .* \* \|value\|, got .*, 1.01 times"
        ):
            agrees(outside, want, kind)


@pytest.mark.parametrize("kind", EITHER)
def test_latent_attention_is_held_to_a_direction(kind: str) -> None:
    bound = EITHER[kind][2]
    want = np.ones(1000)
    near, far = (want + np.where(np.arange(1000) % 2, 1, -1) * np.sqrt(2 * bound * f) for f in (0.98, 1.05))
    if np.sqrt(2 * bound) < EITHER[kind][1]:  # otherwise the bound on elements is tighter than that on the direction
        assert agrees(near, want, kind)
        with pytest.raises(AssertionError, match=f"expected a cosine difference <= {bound:g}, got"):
            agrees(far, want, kind)


def test_the_latent_bounds_are_the_contracts() -> None:
    assert EITHER == {
        "decode out": (8e-4, 2.01 / 128, 5e-6),
        "decode lse": (1e-6, 8.01 / 65536, 1e-7),
        "prefill out": (8e-4, 2.01 / 128, 7e-6),
        "prefill max_logits": (1e-6, 2.01 / 65536, 1e-7),
        "prefill lse": (1e-6, 2.01 / 65536, 1e-7),
        "varlen out": (1e-3, 8.01 / 128, 7e-6),
        "varlen lse": (1e-6, 2.01 / 65536, 1e-7),
        "gradient": (1e-3, 8.01 / 128, 7e-6),
    }


@pytest.mark.parametrize("kind", OF_FEW)
def test_few_rows_may_have_roundings_of_one_sign(kind: str) -> None:
    """If fewer than MANY rows are not 0, the bound is wider: 2^-7 of a vector's length."""
    for rows, bound in ((MANY - 1, 2.0**-15), (MANY, 7e-6)):
        want = np.zeros((rows + 5, 2, 3))
        want[:rows, 1] = 1
        for share in (0.98, 1.05):
            got = want * (1 + np.sqrt(2 * bound * share) * np.where(np.arange(len(want)) % 2, 1, -1)[:, None, None])
            if share < 1:
                assert agrees(got, want, kind)
                continue
            with pytest.raises(AssertionError, match=f"expected a cosine difference <= {bound:g}, got"):
                agrees(got, want, kind)


def test_a_gradient_that_has_cancelled_has_no_direction() -> None:
    assert agrees(np.full(100, -9e-5), np.full(100, 9e-5), "gradient")
    with pytest.raises(AssertionError, match="expected a cosine difference <= 7e-06, got"):
        agrees(np.full(100, -1e-4), np.full(100, 1e-4), "gradient")
    with pytest.raises(AssertionError, match="expected a cosine difference <= 7e-06, got"):
        agrees(np.full(100, -9e-5), np.full(100, 9e-5), "varlen out")


# The batches.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_the_frameworks(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 65519.9, 1e-45]
    bits = np.random.default_rng(0).integers(0, 2**32, 20000, np.uint64).astype(np.uint32)
    numbers = np.concatenate([bits.view(np.float32), np.array(special, np.float32)])
    numbers = np.concatenate([numbers, formats.rounded(numbers, dtype), (bits & 0xFFFF8000).view(np.float32)])
    theirs = torch.from_numpy(numbers).to(getattr(torch, dtype)).to(torch.float32).numpy()
    np.testing.assert_array_equal(formats.rounded(numbers, dtype), theirs)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_poison_is_poisonous(dtype: str, kind: str) -> None:
    values = format_values(dtype)[formats.poison(kind, dtype, (50,), np.random.default_rng(0))]
    if kind == "nan":
        assert np.isnan(values).all()
    else:
        largest = {"float8_e4m3fn": 448, "float8_e5m2": np.inf, "float8_e4m3fnuz": 240}
        assert (np.abs(values) == largest[dtype]).all()


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(specs())
def test_a_spec_makes_the_same_valid_batch_again(spec: Spec) -> None:
    batch, again = spec.build(), eval(repr(spec)).build()  # a failure prints a spec that Python can evaluate
    for name, value in batch.arguments().items():
        parts = zip(pages_of(value), pages_of(again.arguments()[name]), strict=True) if name == "kv_pages" else ()
        for one, other in parts or [(value, again.arguments()[name])]:
            np.testing.assert_array_equal(one, other)
    out, lse = batch.expected()
    assert np.isfinite(out).all(), "the reference read a poisoned slot"
    assert not np.isnan(lse).any()


def test_poison_is_everywhere_but_where_it_is_read() -> None:
    batch = MIXED.build()
    poisoned = batch.poisoned("nan")
    read = batch.read_slots()[..., 0]
    assert read.sum() == 5 + 37 + 21
    assert np.array_equal(np.isnan(poisoned.kv_pages).all(axis=(2, 3)), ~read)
    assert np.array_equal(np.isnan(poisoned.kv_pages).any(axis=(2, 3)), ~read)
    assert np.array_equal(np.isnan(poisoned.q).any(axis=2), batch.fully_masked())
    assert batch.fully_masked().all(axis=1).sum() == 2


def test_poison_is_where_no_query_of_the_kv_head_reads() -> None:
    """A key that is listed for one KV head only is poisoned for the other KV head."""
    lists = np.array([[[0], [2]], [[-1], [2]]], np.int32)  # for two queries and two KV heads
    spec = Spec(lens=((2, 11),), num_kv_heads=2, group=2)
    for batch in (spec.build(), dataclasses.replace(spec, combined=False).build()):
        batch = batch.change(selected=lists, block_size=4)
        assert batch.read_slots().sum(axis=(0, 1)).tolist() == [4, 3]
        assert batch.fully_masked().tolist() == [[False] * 4, [True, True, False, False]]
        poisoned = batch.poisoned("nan")
        for pages in split(poisoned.kv_pages):
            assert np.array_equal(np.isnan(pages).all(axis=3), ~batch.read_slots())
            assert np.array_equal(np.isnan(pages).any(axis=3), ~batch.read_slots())
        assert np.array_equal(np.isnan(poisoned.q).all(axis=2), batch.fully_masked())
    packed = VarlenSpec(lens=((2, 11),), kv_heads=2, group=2).build().change(selected=lists, block_size=4)
    keys = np.arange(11)
    assert np.array_equal(packed.unseen().T, [keys >= 4, keys < 8])
    poisoned_keys = packed.poisoned("nan")
    assert np.array_equal(np.isnan(poisoned_keys.k).all(axis=2), packed.unseen())
    assert np.array_equal(np.isnan(poisoned_keys.q).all(axis=2), packed.fully_masked_heads())


def test_lists_of_blocks_are_of_the_kinds_that_they_are_said_to_be() -> None:
    def lists(kind: str, **fields: Any) -> Any:
        selection = Selection(kind=kind, size=4, **fields)
        return lists_of(np.random.default_rng(0), ((3, 3), (50, 90)), 60, 2, selection)

    every = lists("all")
    assert every.shape == (60, 2, 23)
    assert np.array_equal(np.sort(every[:53], axis=2), np.broadcast_to(np.arange(23), (53, 2, 23)))
    few = lists("few", length=9)[3:53]
    named = np.sort(np.where((few >= 0) & (few < 23), few, -1), axis=2)
    assert ((named[..., 1:] == named[..., :-1]) & (named[..., 1:] >= 0)).any(), "expected duplicates"
    assert (few == -1).any()
    assert (few.astype(np.int64) * 4 > 2**31 - 1).any()
    own = lists("own", shared=True)
    assert own.shape == (60, 1, 4)
    assert (own[3:53] == ((40 + np.arange(50)) // 4)[:, None, None]).any(axis=2).all()
    assert lists("none").shape == (60, 2, 0)
    assert np.abs(lists("any").astype(np.int64)).max() > 2**30


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(st.one_of(prefill_specs(), decode_specs()))
def test_a_latent_spec_makes_the_same_valid_batch_again(spec: PrefillSpec | DecodeSpec) -> None:
    batch, again = spec.build(), eval(repr(spec)).build()
    for name, value in batch.arguments().items():
        np.testing.assert_array_equal(value, again.arguments()[name])
    definition = sparse_mla_prefill if isinstance(spec, PrefillSpec) else mla_decode
    results, wide = definition(**batch.arguments()), definition(**batch.widened().arguments())
    assert np.isfinite(results[0]).all(), "the reference read a poisoned slot"
    for result, other in zip(results, wide, strict=True):
        np.testing.assert_allclose(other, result, atol=1e-6)


@pytest.mark.parametrize("name", latents.LAID_OUT)
def test_the_fields_of_a_cache_are_all_of_it(name: str) -> None:
    cache = np.zeros((2, 5, 1, latents.LAID_OUT[name].token_bytes), np.uint8)
    fields = latents.fields_of(cache, name)
    for field in (fields.values, fields.scales, fields.rotary, fields.spare):
        field += 1
    assert (cache == 1).all()


@pytest.mark.parametrize("name", [None, *latents.LAID_OUT])
def test_latent_poison_is_everywhere_but_where_it_is_read(name: str | None) -> None:
    batch = DecodeSpec(format=name or "plain", d_v=32, topk=5, page_size=3, kv_lens=(7, 4)).build()
    (selection,) = batch.selections()
    rows = latents.rows_of(batch.poisoned("nan").kv_cache, batch.format)
    assert 0 < selection.unread.sum() < selection.num_slots
    assert np.array_equal(np.isnan(rows).all(axis=(1, 2)), selection.unread)
    assert np.array_equal(np.isnan(rows).any(axis=(1, 2)), selection.unread)


@pytest.mark.parametrize("name", ["plain", *latents.LAID_OUT])
def test_a_repaged_cache_has_the_same_rows(name: str) -> None:
    cache = DecodeSpec(format=name, page_size=3, kv_lens=(7, 4)).build().kv_cache
    order = np.random.default_rng(0).permutation(cache.shape[0] * 3)
    again = latents.repaged(cache, name, order, 5)
    np.testing.assert_array_equal(latents.rows_of(again, name)[: len(order)], latents.rows_of(cache, name)[order])


def test_garbage_reaches_the_extremes() -> None:
    values = garbage(np.random.default_rng(0), 1000, 5)
    assert {np.iinfo(np.int32).min, np.iinfo(np.int32).max, 0, 5, 6, -6} <= set(values.tolist())


def test_every_corner_can_be_built() -> None:
    latent = [build for _, _, builders in mla_suite.CORNERS for build in builders.values()]
    gradients = [*varlen_corners.DENSE_GRADIENTS.values(), *varlen_corners.SPARSE_GRADIENTS.values()]
    for build in (*CORNERS.values(), *WRITE_CORNERS.values(), *MERGE_CORNERS.values(), *latent, *gradients):
        build()
    assert len(CORNERS) > 70
    assert len(latent) > 150
    assert len(gradients) > 50


@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
def test_slots_are_written_once_and_some_not_at_all(slot_dtype: type) -> None:
    spec = Spec(lens=((40, 40),), seed=3)
    batch = write_batch(spec, slot_dtype=slot_dtype)
    slots = batch.slot_mapping
    assert slots is not None
    num_slots = pages_of(batch.kv_pages)[0].shape[0] * spec.page_size
    inside = slots[(slots >= 0) & (slots < num_slots)]
    assert len(set(inside.tolist())) == len(inside) > 10
    assert len(inside) < len(slots)


# The suite.
def test_profiles_say_how_many_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [examples_of(name) for name in ("dev", "ci", "nightly")] == [25, 200, 2000]
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "ci")
    assert examples_of() == 200


def test_a_failure_shrinks_to_a_small_batch() -> None:
    def refuses_windows(spec: Spec) -> None:
        assert spec.sliding_window is None, "a window"

    with pytest.raises(AssertionError, match="a window") as caught:
        drawn(runner_for("reference", "torch"), specs(), refuses_windows, 50)
    notes = "".join(caught.value.__notes__)
    assert "sliding_window=1" in notes
    assert "soft_cap=None" in notes


def test_a_backend_that_declines_everything_has_shown_nothing() -> None:
    def decline(spec: Spec) -> None:
        raise Declined("head_dim = 16, and I take 128 alone")

    with pytest.raises(Declined, match="I take 128 alone"):
        drawn(runner_for("reference", "torch"), specs(), decline, 5)


class FewOptions(Runner):
    """A runner whose device has room only for `num_splits=1`. Without `fits`, even the default tile is too large."""

    fits: bool = True

    def tunables(self, operation: str) -> tuple[str, ...]:
        del operation
        return ("num_splits",)

    @property
    def front(self) -> Any:
        def attend(options: dict[str, int] | None, **arguments: object) -> str:
            if not self.fits or (options and options["num_splits"] > 1):
                raise TooLarge("expected options that fit this device")
            return "attended"

        operations = SimpleNamespace(mla_decode=attend)
        return SimpleNamespace(operations=operations, careful=contextlib.nullcontext)


def test_a_path_that_does_not_fit_is_left_out() -> None:
    def check(runner: Runner, batch: Any, options: Any) -> None:
        assert runner._call("mla_decode", batch, options) == "attended"

    batch = SimpleNamespace(arguments=dict)
    every_path = on_every_path("mla_decode", check, lambda: batch)
    runner = FewOptions(framework="torch", backend="few")
    assert len(PATHS["mla_decode"]) > 2
    assert every_path(runner, 1) == 1
    object.__setattr__(runner, "fits", False)
    with pytest.raises(Declined, match="fit this device"):
        every_path(runner, 1)
    with pytest.raises(TooLarge):  # without a requested option, the default tile is at fault
        check(runner, batch, {})


def test_an_operation_that_a_backend_has_not_is_absent() -> None:
    batch = SlotsSpec().build()
    with pytest.raises(Absent, match="does not offer page_indices_to_slots"):
        runner_for("triton", "torch").run("page_indices_to_slots", batch)
    with pytest.raises(Absent, match="does not offer page_indices_to_slots"):
        drawn(
            runner_for("triton", "torch"),
            st.just(batch),
            lambda given: check_slots(runner_for("triton", "torch"), given),
            2,
        )
    with pytest.raises(Absent, match="eager has no num_splits for mla_decode"):
        mla_suite.check_invariance(runner_for("eager", "torch"), DecodeSpec())


def test_a_gradient_of_another_backend_is_not_taken_for_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dispatch.load

    def load(operation: str, backend: str) -> object:
        return honest(operation, "pallas" if operation.endswith("_backward") else backend)

    monkeypatch.setattr(dispatch, "load", load)
    with pytest.raises(Absent, match="does not offer varlen_attention_backward"):
        runner_for("reference", "torch").gradients(GradientSpec(of=VarlenSpec()).build())


# Packed sequences and gradients.
@settings(deadline=None, derandomize=True)
@given(varlen_gradient_specs() | sparse_gradient_specs())
def test_poison_is_where_the_definition_does_not_read(spec: GradientSpec) -> None:
    batch = spec.build()
    out, lse = batch.results()
    poisoned = dataclasses.replace(batch, forward=batch.forward.poisoned("nan")).poisoned("nan")
    for name, want in expected_gradients(batch.backward(out, lse)).items():
        np.testing.assert_array_equal(expected_gradients(poisoned.backward(out, lse))[name], want)
        assert np.isfinite(want).all()
        if name in (where := rows_without_gradient(poisoned)):
            assert np.isnan(getattr(poisoned.forward, name)[where[name]]).all() or name == "q"
            assert (want[where[name]] == 0).all()


def test_the_parts_of_a_varlen_batch_are_its_sequences() -> None:
    batch = VarlenSpec(lens=((2, 3), (0, 4), (5, 0)), q_padding=1, kv_padding=2).build()
    last_first = batch.of([2, 0])
    assert last_first.cu_q_lens.tolist() == [0, 5, 7]
    assert last_first.cu_kv_lens.tolist() == [0, 0, 3]
    np.testing.assert_array_equal(last_first.q, batch.q[[2, 3, 4, 5, 6, 0, 1]])
    np.testing.assert_array_equal(last_first.v, batch.v[:3])
    assert batch.fully_masked_heads()[:, 0].tolist() == [False] * 2 + [True] * 6
    assert batch.unseen()[:, 0].tolist() == [False] * 3 + [True] * 6


def test_gradients_are_compared_by_name() -> None:
    with pytest.raises(AssertionError, match="expected gradients of q, k, got q"):
        gradients_agree({"q": np.zeros(2)}, {"q": np.zeros(2), "k": np.zeros(2)}, "float32")


def test_a_slope_that_is_not_the_gradients_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, spec = runner_for("reference", "torch"), GradientSpec(of=VarlenSpec())
    honest = type(runner).gradients

    def doubled(runner: Runner, batch: GradientBatch) -> Gradients:
        found = honest(runner, batch)
        return dataclasses.replace(found, of={name: 2 * array for name, array in found.of.items()})

    varlen_laws.gradients_are_slopes(runner, spec)
    monkeypatch.setattr(type(runner), "gradients", doubled)
    with pytest.raises(AssertionError, match=r"expected a slope of [\d.]+ from the gradients, got [\d.]+ from the res"):
        varlen_laws.gradients_are_slopes(runner, spec)


def _ascends(seed: int) -> bool:
    batch = varlen_safety.garbage_varlen(seed).forward
    return isinstance(batch, VarlenBatch) and varlen_safety.ascends(batch)


@pytest.mark.parametrize("example", [example for _, example in varlen_safety.EXAMPLES])
def test_garbage_must_not_make_numbers_that_are_none(monkeypatch: pytest.MonkeyPatch, example: Any) -> None:
    nothing = {"q": np.full(3, np.nan)}
    monkeypatch.setattr(Runner, "backward", lambda *_, **__: nothing)
    monkeypatch.setattr(Runner, "run", lambda *_, **__: (nothing["q"], np.zeros(3)))
    ascending = next(seed for seed in range(1, 100) if seed % 3 and _ascends(seed))
    with pytest.raises(AssertionError, match=r"expected finite (q|out) from finite inputs, got others"):
        example(runner_for("reference", "torch"), ascending, {})


def test_runners_know_what_is_absent() -> None:
    present, absent = runners("pallas", None, "cpu")
    assert present == []
    assert set(absent) == {"torch-pallas", "jax-pallas"}
    with pytest.raises(ValueError, match="expected framework to be one of torch, jax, got 'numpy'"):
        runner_for("reference", "numpy")


def test_a_backend_need_not_attend_to_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that offers only `merge_attention_states` counts as present, and its merge is judged."""
    package = types.ModuleType("merging_room")
    package.__path__ = []  # type: ignore[attr-defined]
    package.__spec__ = ModuleSpec("merging_room", None, is_package=True)
    monkeypatch.setitem(sys.modules, "merging_room", package)
    monkeypatch.setitem(sys.modules, "merging_room.merge_attention_states", merge_module)
    monkeypatch.setattr(dispatch, "third_party_packages", lambda: {"merging": "merging_room"})
    dispatch.load.cache_clear()
    try:
        present, absent = runners("merging", "torch", "cpu")
        assert (list(map(str, present)), absent) == (["torch-merging"], {})
        (check,) = [check for check in checks() if check.name == "merge, one part"]
        assert check.run(present[0], 1) == 1
    finally:
        dispatch.load.cache_clear()


def test_check_names_are_unique() -> None:
    names = [str(check) for check in checks()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_command_judges_a_backend(capsys: pytest.CaptureFixture[str], framework: str) -> None:
    pytest.importorskip(framework)
    arguments = ["--backend", "reference", "--framework", framework, "--examples", "3", "--only", "pages"]
    assert conformance.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "law: pages may move" in printed
    assert "0 FAILED" in printed


def test_the_command_has_a_line_for_each_reason_to_decline(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba")
    pytest.importorskip("torch")
    arguments = ["--backend", "numba", "--framework", "torch", "--only", "decode schedule, "]
    assert conformance.main(arguments) == 2  # all checks were declined
    printed = " ".join(re.sub("[│ \n]+", " ", capsys.readouterr().out).split())
    assert re.search(r"11 checks: numba: does not offer [0-9. ]*declined make_decode_schedule", printed)
    assert "0 passed, 11 declined, 0 FAILED" in printed


def test_the_command_refuses_a_name_that_no_check_has() -> None:
    pytest.importorskip("torch")
    with pytest.raises(InvalidInput, match=r"expected --only to be part of a check's name, .*, got 'nobody'"):
        conformance.main(["--backend", "reference", "--framework", "torch", "--only", "nobody"])


def test_the_command_reports_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from ragged_attention.reference import ragged_paged_attention as implementation

    pytest.importorskip("torch")
    honest = implementation.run
    monkeypatch.setattr(implementation, "run", lambda *given: [2 * part for part in honest(*given)])
    assert conformance.main(["--backend", "reference", "--framework", "torch", "--only", "attention, prefill"]) == 1
    printed = capsys.readouterr().out
    assert "corner: attention, prefill" in printed
    assert "times the bound" in printed
    assert "0 passed, 0 declined, 2 FAILED" in printed


def test_the_command_says_what_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main(["--backend", "pallas", "--framework", "torch"]) == 2
    assert "torch-pallas cannot run here:" in capsys.readouterr().out


SUITE = ("--pyargs", "ragged_attention.testing")


def run_pytest(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest from a directory outside this repository."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_pytest_runs_the_suite_by_name(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ended = run_pytest(tmp_path, *SUITE, "--backend", "reference", "--framework", "torch", "-k", "sinks and corner")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"\d passed, \d+ deselected", ended.stdout)


def test_pytest_fails_where_a_named_backend_is_absent(tmp_path: Path) -> None:
    ended = run_pytest(tmp_path, *SUITE, "--backend", "nobody", "--framework", "torch")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "--backend nobody cannot run here: torch-nobody: unknown backend 'nobody'; known are" in ended.stdout


def test_other_users_of_pytest_keep_their_options(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--device', default='mine')\n"
    )
    (tmp_path / "test_mine.py").write_text(
        "def test_it(pytestconfig): assert pytestconfig.getoption('device') == 'mine'\n"
    )
    ended = run_pytest(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("absent", ["hypothesis", "pytest"])
def test_a_missing_tool_is_named(absent: str) -> None:
    ended = run_python("-m", "tests.programs.testing_without", absent)
    assert f"ImportError: ragged_attention.testing needs {absent}: run pip install '.[testing]'" in ended.stderr


@pytest.mark.parametrize("module", ["runner", "paged.specs", "mla.ragged", "rounded_weights", "verdicts"])
def test_a_module_can_be_imported_before_all_others(module: str) -> None:
    ended = run_python("-c", f"import ragged_attention.testing.{module}")
    assert ended.returncode == 0, ended.stderr


def test_no_name_of_the_package_is_that_of_one_of_its_modules() -> None:
    """No module has the name of a lazily loaded object, because the imported module would hide the object."""
    import pkgutil

    import ragged_attention.testing
    from ragged_attention.testing import names

    modules = {module.name for module in pkgutil.iter_modules(ragged_attention.testing.__path__)}
    assert not modules & {name for name in vars(names) if not name.startswith("_")} - {"find_spec"}
