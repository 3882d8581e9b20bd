"""Tests of `compat.flash_mla` and `compat.quant`: FlashMLA's test cases, its call forms, conventions and tables."""

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ragged_attention as ra
from benchmarks import flash_mla_matrix
from benchmarks.cases import flash_mla_data
from benchmarks.cases.flash_mla import (
    LISTS,
    Case,
    DecodeCase,
    Lists,
    MhaCase,
    PrefillCase,
    cases_of,
    covering,
)
from benchmarks.cases.flash_mla_data import (
    NO_INDEX,
    check,
    close,
    decode_inputs,
    decode_oracle,
    metadata,
    mha_inputs,
    mha_oracle,
    prefill_inputs,
    prefill_oracle,
)
from ragged_attention import kernels_cuda
from ragged_attention.compat import flash_mla, quant
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.reference.make_decode_schedule import make_decode_schedule
from ragged_attention.testing import cuda_emulator
from ragged_attention.testing.drawing import PROFILES, examples_of

BACKENDS = ("eager", "triton")
DENSE = DecodeCase(form="e0", b=2, s_q=2, s_k=80, h_q=4, varlen=True, seed=5)
SPARSE = DecodeCase(form="e0", b=2, s_q=2, s_k=100, h_q=4, topk=40, seed=6)
SECOND = Lists(s_k=90, topk=33, page_size=7, lengths=True)
V4 = DecodeCase(
    form="e2", b=2, s_q=2, s_k=60, h_q=3, d_qk=512, page_size=5, varlen=True, topk=37, topk_lens=True, sinks=True,
    extra=SECOND, seed=7,
)  # fmt: skip
V41 = DecodeCase(
    form="e4", b=2, s_q=2, s_k=60, h_q=3, d_qk=512, page_size=5, varlen=True, topk=37, topk_lens=True, sinks=True,
    extra=dataclasses.replace(SECOND, fp4=True), seed=7,
)  # fmt: skip
PREFILL = PrefillCase(form="e2", s_q=5, s_kv=70, topk=50, h_q=4, sinks=True, topk_lens=True, seed=8)
MHA = MhaCase(s_q=12, s_k=15, h_q=4, h_kv=2, d_qk=24, d_v=16, varlen=True, causal=True, seed=9)


@pytest.fixture(autouse=True)
def one_thread():
    """Run torch with one thread: tests run in parallel, and more threads than processors slow them down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest):
    if request.param == "triton":
        pytest.importorskip("triton")
    with ra.use_backend(request.param):
        yield request.param


def replace(case: Any, **changes: Any) -> Any:
    return dataclasses.replace(case, **changes)


def decode(case: DecodeCase, form: str = "e2", **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of a case with some arguments changed, after a comparison with the oracle."""
    arguments = decode_inputs(case, "cpu") | changes
    out, lse = flash_mla.flash_mla_with_kvcache(**arguments, **metadata(case, arguments, form))
    want_out, want_lse = decode_oracle(**arguments)
    close(out, want_out, "decode out")
    close(lse, want_lse, "decode lse")
    return out, lse


# FlashMLA's lists of test cases


def test_the_lists_are_as_long_as_flash_mlas():
    counts = {function.__name__: len(list(function())) for function in LISTS["all"]}
    later = {"e2_dense": 2352, "e2_sparse": 4748, "e2_prefill": 617, "e4_sparse": 1590, "e4_prefill": 316}
    assert counts == {"e0_decode": 319, "e0_prefill": 34, **later, "mha": 32}
    assert {name: len(functions) for name, functions in LISTS.items()}["all"] == 8


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("e0", {"correctness": 308, "corner": 11, "performance": 34}),
        ("e2-dense", {"correctness": 2304, "corner": 32, "performance": 16}),
        ("e2-sparse", {"correctness": 3680, "corner": 1036, "performance": 32}),
        ("e2-prefill", {"correctness": 120, "features": 448, "corner": 36, "performance": 13}),
        ("e4-sparse", {"correctness": 1120, "corner": 450, "performance": 20}),
        ("e4-prefill", {"correctness": 60, "features": 224, "corner": 26, "performance": 6}),
        ("mha", {"correctness": 32}),
    ],
)
def test_each_list_has_its_kinds_and_no_case_twice(name, kinds):
    cases = cases_of(name)
    assert {kind: sum(case.kind == kind for case in cases) for kind in kinds} == kinds
    assert len(set(cases)) == len(cases)


PARTS = 8


@functools.cache
def whole_first_list() -> list[Case]:
    return [case.scaled_down(heads=2, max_tokens=4096) for case in cases_of("e0")]


@functools.cache
def covering_part(name: str, heads: int, max_tokens: int) -> list[Case]:
    functions = LISTS[name]
    return [
        case
        for cases in functions
        for case in covering([case.scaled_down(heads=heads, max_tokens=max_tokens) for case in cases()])
    ]


def tiny(case: Any) -> Case:
    """A case that is small enough for the interpreter."""
    if isinstance(case, MhaCase):
        return replace(case, s_q=20, s_k=20)
    if isinstance(case, DecodeCase):
        few, most = min(case.h_kv, 3), 1 if case.form != "e0" and case.lists else 2
        return replace(
            case,
            b=min(case.b, most),
            s_q=min(case.s_q, 2),
            h_kv=few,
            h_q=few if case.h_q == case.h_kv else case.h_q // few * few,
        )
    return replace(case, s_q=min(case.s_q, 3))


def judge(cases: list[Case]) -> None:
    for case in cases:
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("part", range(PARTS))
def test_the_whole_list_of_2025_on_eager(part):
    with ra.use_backend("eager"):
        judge(whole_first_list()[part::PARTS])


@pytest.mark.parametrize("name", ["e2-dense", "e2-sparse", "e2-prefill", "e4-sparse", "e4-prefill", "mha"])
def test_a_covering_part_of_2026_on_eager(name):
    with ra.use_backend("eager"):
        judge(covering_part(name, 4, 1000))


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("name", ["e0", "e2-dense", "e2-sparse", "e2-prefill", "e4-sparse", "e4-prefill", "mha"])
def test_a_covering_part_on_the_interpreter(name, part, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(flash_mla_data, "REPEATS", 0)
    step = 4 if examples_of() == PROFILES["dev"] else 2  # the dev profile runs half of the cases
    with ra.use_backend("triton"):
        judge([tiny(case) for case in covering_part(name, 2, 150)][part::step])


@pytest.mark.skipif(cuda_emulator.missing() is not None, reason=str(cuda_emulator.missing()))
@pytest.mark.parametrize("heads", [64, 16])
@pytest.mark.parametrize("name", ["e0", "e2-dense", "e2-sparse", "e2-prefill", "e4-sparse", "e4-prefill"])
def test_a_covering_part_on_the_hopper_kernels(name, heads):
    """The Hopper kernels support every case. Cases with 16 heads use a kernel for few heads, if the format has it."""
    every = 4 if examples_of() == PROFILES["dev"] else 1
    with kernels_cuda.emulating(), ra.use_backend(flash_mla_matrix.requested("cuda")):
        judge(covering_part(name, heads, 256)[::every])


def test_a_covering_part_has_all_pairs_of_values():
    cases = [Lists(s_k=s_k, topk=topk, page_size=page) for s_k in (1, 2, 3) for topk in (1, 2) for page in (1, 2)]
    chosen = covering(cases)  # type: ignore[arg-type]
    assert 6 <= len(chosen) < len(cases)
    for names in (("s_k", "topk"), ("s_k", "page_size"), ("topk", "page_size")):
        met = {tuple(getattr(case, name) for name in names) for case in chosen}
        assert met == {tuple(getattr(case, name) for name in names) for case in cases}


# The checks themselves


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda out: out.masked_fill(out == out[0, 0, 0], math.inf), r"1 of 8 are \+inf in only one array"),
        (lambda out: out.masked_fill(out == out[0, 0, 0], -math.inf), "1 of 8 are -inf in only one array"),
        (lambda out: out.masked_fill(out == out[0, 0, 0], math.nan), "1 of 8 are NaN in only one array"),
        (lambda out: out * 1.02, "8 of 8 elements are out of bounds"),
        (lambda out: out * 1.003, None),
        (lambda out: out * 1.015, "expected a cosine difference <= 7e-06, got 0.000111"),
        (lambda out: out.half(), "expected torch.float32"),
        (lambda out: out[:, :1], r"expected torch.float32 \[1, 2, 4\]"),
    ],
)
def test_the_comparator_sees(wrong, message):
    want = torch.arange(1.0, 9.0).view(1, 2, 4)
    if message is None:
        return close(wrong(want), want, "prefill out")
    with pytest.raises(AssertionError, match=message):
        close(wrong(want), want, "prefill out")


def test_the_data_rules():
    """Unreferenced slots are NaN, each array is a view of a larger one, and lists also hold invalid indices."""
    for case in (DENSE, SPARSE, V4):
        found = decode_inputs(case, "cpu")
        for name in ("q", "k_cache", "block_table", "indices"):
            assert found[name] is None or not found[name].is_contiguous()
    dense = decode_inputs(DENSE, "cpu")
    seen = ~dense["k_cache"].isnan().any(-1)
    assert int(seen.sum()) == int(dense["cache_seqlens"].sum())
    assert int((dense["block_table"] == 2147480000).sum()) > 0
    shuffled = decode_inputs(replace(SPARSE, s_k=20), "cpu")["indices"]
    assert bool((shuffled[..., :20] == -1).any())
    lists = prefill_inputs(PrefillCase(form="e2", s_q=40, s_kv=32, topk=64), "cpu")["indices"]
    assert set(lists[:, 0, 32:].flatten().tolist()) == {32 if value == 0 else value for value in NO_INDEX}


def test_the_matrix_command_reports(monkeypatch, capsys):
    arguments = ["--device", "cpu", "--backend", "eager", "--list", "e0", "--heads", "1", "--max-tokens", "100"]
    arguments += ["--covering", "--stride", "9", "--limit", "5"]
    assert flash_mla_matrix.main(arguments) == 0
    assert "e0 prefill, correctness" in capsys.readouterr().out
    right = flash_mla.mla_decode
    monkeypatch.setattr(flash_mla, "mla_decode", lambda *values, **named: (right(*values, **named)[0] * 2, None))
    assert flash_mla_matrix.main(arguments) == 1
    assert "DecodeCase(" in capsys.readouterr().out


def test_what_a_backend_for_some_calls_declines_is_told_and_no_failure(monkeypatch, capsys):
    def check(case, *arguments, **named):
        if isinstance(case, PrefillCase):
            raise Unsupported("no backend takes it\n  cuda: takes d_v 512, got 64")

    monkeypatch.setattr(flash_mla_matrix, "check", check)
    monkeypatch.setattr(flash_mla_matrix, "emulation", lambda options: contextlib.nullcontext())
    arguments = ["--device", "cpu", "--list", "e0", "--covering", "--backend"]
    assert flash_mla_matrix.main([*arguments, "cuda"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"declined \d+: cuda: takes d_v 512, got 64", output)
    assert flash_mla_matrix.main([*arguments, "eager"]) == 1
    monkeypatch.setattr(flash_mla_matrix, "check", lambda case, *arguments, **named: check(PREFILL))
    assert flash_mla_matrix.main([*arguments, "cuda"]) == 1  # fails, because the backend declines every case
    assert flash_mla_matrix.requested("eager") == "eager"
    assert not flash_mla_matrix.chosen_cases(flash_mla_matrix.parse(["--list", "mha", "--backend", "cuda"]))
    assert flash_mla_matrix.requested("cuda") == {"mla_decode": "cuda", "sparse_mla_prefill": "cuda", "*": "auto"}


def test_bits_that_change_are_seen(monkeypatch):
    right, count = flash_mla.varlen_attention, iter(range(100))

    def wrong(*values: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*values, **named)
        return out * (1 + 0.01 * (next(count) == 3)), lse

    monkeypatch.setattr(flash_mla, "varlen_attention", wrong)
    with pytest.raises(AssertionError, match="mha out: expected the same bits in every run"):
        check(MHA)


# Call forms

ARGUMENTS = {
    "get_mla_metadata": "cache_seqlens num_q_tokens_per_head_k num_heads_k num_heads_q is_fp8_kvcache topk",
    "flash_mla_with_kvcache": "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits "
    "softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length "
    "extra_topk_length enable_batch_invariant cache_layout",
    "flash_mla_sparse_fwd": "q kv indices sm_scale d_v attn_sink topk_length convention",
    "flash_attn_varlen_func": "q k v cu_seqlens_qo cu_seqlens_kv max_seqlen_qo max_seqlen_kv dropout_p softmax_scale "
    "causal deterministic is_varlen",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen head_dim_qk dropout_p softmax_scale causal "
    "deterministic is_varlen",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_qo cu_seqlens_kv max_seqlen_qo max_seqlen_kv head_dim_qk "
    "dropout_p softmax_scale causal deterministic is_varlen",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_names_and_order_of_arguments(name):
    assert " ".join(inspect.signature(getattr(flash_mla, name)).parameters) == ARGUMENTS[name]
    ours = {"set_convention", "use_convention"}  # names that FlashMLA does not have
    assert sorted({*ARGUMENTS, *ours}) == sorted(flash_mla.__all__)


@pytest.mark.parametrize(
    "case",
    [DENSE, replace(DENSE, causal=True), SPARSE, V4, V41, replace(V41, layout="page")],
    ids=["dense", "causal", "fp8", "v4", "v41", "v41, page"],
)
def test_both_call_forms(case, backend):
    """Both call forms give equal results, and the older form accepts the newer form's keywords."""
    out, lse = decode(case, "e0")
    again, lse_again = decode(case, "e2")
    close(out, again, "decode out")
    close(lse, lse_again, "decode lse")


@pytest.mark.parametrize("case", [DENSE, SPARSE], ids=["dense", "fp8"])
@pytest.mark.parametrize("said", [{}, {"is_fp8_kvcache": None}])
def test_the_dtype_tells_whether_a_cache_is_quantised(case, said):
    """Whether a cache is quantised follows from its dtype, so the defaults of every release work."""
    arguments = decode_inputs(case, "cpu")
    with ra.use_backend("eager"):
        want = flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=flash_mla.get_mla_metadata()[0])
        del arguments["is_fp8_kvcache"]
        got = flash_mla.flash_mla_with_kvcache(
            **arguments, **said, tile_scheduler_metadata=flash_mla.get_mla_metadata()[0]
        )
    assert all(map(torch.equal, got, want))


def test_batch_invariance_is_asked_for_by_name():
    """`enable_batch_invariant` gives a sequence the same bits alone and in a batch.

    A metadata object that was filled without this option is refused. A backend without batch invariance refuses the
    call.
    """
    arguments = decode_inputs(V41, "cpu")
    names = ("q", "block_table", "cache_seqlens", "indices", "extra_indices_in_kvcache", "topk_length")

    def run(given: dict[str, Any], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        named = {"tile_scheduler_metadata": META(), "enable_batch_invariant": True} | more
        return flash_mla.flash_mla_with_kvcache(**given, **named)

    with ra.use_backend({"mla_decode": "numba"}):
        both = run(arguments)
        for seq in range(2):
            own = arguments | {name: arguments[name][seq : seq + 1] for name in (*names, "extra_topk_length")}
            assert all(torch.equal(one[0], all_[seq]) for one, all_ in zip(run(own), both, strict=True))
        used = META()
        run(arguments, tile_scheduler_metadata=used, enable_batch_invariant=False)
        with pytest.raises(InvalidInput, match=r"made for enable_batch_invariant=True, got one made for .*=False"):
            run(arguments, tile_scheduler_metadata=used)
    with ra.use_backend("eager"), pytest.raises(Unsupported, match="does not promise the same bits in every batch"):
        run(arguments)


@pytest.fixture
def hopper(monkeypatch):
    """A fake device with as many multiprocessors as an H100."""
    facts = flash_mla.device_facts(torch.device("cpu"))
    monkeypatch.setattr(flash_mla, "device_facts", lambda device: replace(facts, num_multiprocessors=132))


LENS = torch.tensor([300, 0, 5000, 64, 65, 1, 20000], dtype=torch.int32)


@pytest.mark.parametrize(
    ("s_q", "h_q", "h_kv", "topk", "num_parts"),
    [
        (1, 128, 1, None, 66), (2, 128, 1, None, 33), (1, 64, 1, None, 132), (1, 16, 1, None, 132),
        (4, 126, 3, None, 14), (2, 128, 8, None, 16), (99, 128, 1, None, 1),
        (1, 128, 1, 2048, 66), (2, 128, 1, 2048, 33), (1, 64, 1, 128, 66), (3, 256, 1, 100, 11), (70, 128, 1, 64, 1),
    ],
)  # fmt: skip
def test_tables_are_those_of_2025(hopper, s_q, h_q, h_kv, topk, num_parts):
    parts, num_splits = flash_mla.get_mla_metadata(LENS, s_q * h_q // h_kv, h_kv, h_q, topk is not None, topk)
    assert parts.dtype == num_splits.dtype == torch.int32
    assert parts.shape == (num_parts, 8)
    lens = LENS.numpy() if topk is None else np.full(len(LENS), topk, np.int32)
    want_parts, want_splits = make_decode_schedule(lens, None, topk is not None, num_parts)
    assert parts.tolist() == want_parts.tolist()
    assert num_splits.tolist() == want_splits.tolist()


def test_tables_worked_out_by_hand(hopper):
    parts, num_splits = flash_mla.get_mla_metadata(torch.zeros(2, dtype=torch.int32), 128, 1, 128, True, 2048)
    # A sequence of 32 blocks counts as 37, because of an overhead of 5. A part has a payload of 7, which is 2 blocks
    # and the overhead.
    assert num_splits.tolist() == [0, 16, 32]
    assert parts[:2].tolist() == [[0, 0, 0, 2, 0, 0, 0, 0], [0, 2, 0, 4, 1, 0, 0, 0]]
    assert int((parts[:, 0] < 2).sum()) == 32
    parts, num_splits = flash_mla.get_mla_metadata(torch.zeros(128, dtype=torch.int32), 256, 1, 128, True, 2048)
    assert parts.shape == (33, 8)
    assert num_splits.tolist() == list(range(129))


def test_the_lazy_object_is_filled_once_and_serves_all_layers(backend):
    meta, nothing = flash_mla.get_mla_metadata()
    assert nothing is None
    assert not meta.have_initialized
    arguments = decode_inputs(V4, "cpu")
    first = flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=meta)
    assert meta.have_initialized
    schedule = meta.schedule
    second = flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=meta)
    assert meta.schedule is schedule
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("b=1", {"b": 1}), ("s_q=3", {"s_q": 3}), ("h_q=5", {"h_q": 5}), ("page_block_size=6", {"page_size": 6}),
        ("topk=38", {"topk": 38}), ("topk=None", {"topk": None, "extra": None, "topk_lens": False, "fp8": True}),
        ("extra_page_block_size=None", {"extra": None}),
        ("extra_page_block_size=8", {"extra": replace(SECOND, page_size=8)}),
        ("extra_topk=34", {"extra": replace(SECOND, topk=34)}),
        ("is_fp8_kvcache=False", {"fp8": False}),
    ],
)  # fmt: skip
def test_the_lazy_object_is_for_one_shape(field, change):
    meta, _ = flash_mla.get_mla_metadata()
    flash_mla.flash_mla_with_kvcache(**decode_inputs(V4, "cpu"), tile_scheduler_metadata=meta)
    with pytest.raises(InvalidInput, match=f"expected tile_scheduler_metadata made for {field}, got one made for "):
        flash_mla.flash_mla_with_kvcache(**decode_inputs(replace(V4, **change), "cpu"), tile_scheduler_metadata=meta)


def test_a_dense_object_tells_heads_and_causality_apart():
    meta, _ = flash_mla.get_mla_metadata()
    flash_mla.flash_mla_with_kvcache(**decode_inputs(DENSE, "cpu"), tile_scheduler_metadata=meta)
    for field, change in (("h_k=2", {"h_kv": 2}), ("causal=True", {"causal": True})):
        arguments = decode_inputs(replace(DENSE, **change), "cpu")
        with pytest.raises(InvalidInput, match=f"tile_scheduler_metadata made for {field}"):
            flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=meta)


def test_lengths_of_a_used_object_are_checked_on_request(backend):
    """Changed lengths are refused with `validate="full"`. Otherwise they cost only speed, and results stay right."""
    meta, _ = flash_mla.get_mla_metadata()
    arguments: dict[str, Any] = decode_inputs(DENSE, "cpu")
    flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=meta)
    arguments["cache_seqlens"] = arguments["cache_seqlens"] - 1
    out, lse = flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=meta)
    want_out, want_lse = decode_oracle(**arguments)
    close(out, want_out, "decode out")
    close(lse, want_lse, "decode lse")
    with (
        ra.use_backend(backend, validate="full"),
        pytest.raises(InvalidInput, match=r"expected a schedule made for these cache_seqlens, got one made for"),
    ):
        flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=meta)


def test_a_failed_call_leaves_the_object_empty():
    meta, _ = flash_mla.get_mla_metadata()
    arguments: dict[str, Any] = decode_inputs(DENSE, "cpu")
    wrong: dict[str, Any] = arguments | {"head_dim_v": 500}
    with pytest.raises(InvalidInput, match="expected head_dim_v to be a multiple of 16"):
        flash_mla.flash_mla_with_kvcache(**wrong, tile_scheduler_metadata=meta)
    assert not meta.have_initialized
    flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=meta)


@pytest.mark.parametrize("form", ["e0", "e2"])
def test_torch_compile_follows_both_forms(form):
    arguments = decode_inputs(replace(DENSE, causal=True), "cpu")

    def layer(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        made = metadata(DENSE, arguments, form)
        flash_mla.flash_mla_with_kvcache(**arguments, **made)
        return flash_mla.flash_mla_with_kvcache(**arguments, **made)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(arguments), layer(arguments), strict=True):
        assert torch.equal(got, want)


def test_torch_compile_follows_prefill():
    arguments = prefill_inputs(PREFILL, "cpu")
    compiled = torch.compile(flash_mla.flash_mla_sparse_fwd, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**arguments), flash_mla.flash_mla_sparse_fwd(**arguments), strict=True):
        assert torch.equal(got, want)


# Conventions


def test_a_fully_masked_query_of_decode_has_lse_plus_infinity(backend):
    out, lse = decode(replace(DENSE, zero_lens=True, seed=1))
    fully_masked = torch.isposinf(lse)
    assert bool(fully_masked.any())
    assert not bool(fully_masked.all())
    assert float(out.transpose(1, 2)[fully_masked].abs().max()) == 0


def prefill_pair(convention: str) -> tuple[Any, Any]:
    """Prefill arguments in which one query selects nothing, and the results of the call."""
    arguments = prefill_inputs(PREFILL, "cpu")
    arguments["indices"][1] = -1
    return arguments, flash_mla.flash_mla_sparse_fwd(**arguments, convention=convention)


@pytest.mark.parametrize("convention", flash_mla.CONVENTIONS)
def test_conventions_of_prefill(convention, backend):
    arguments, results = prefill_pair(convention)
    wanted = prefill_oracle(**arguments, convention=convention)
    for name, got, want in zip(("out", "max_logits", "lse"), results, wanted, strict=True):
        close(got.float(), want, f"prefill {name}")
    assert bool(torch.isneginf(results[1]).any())
    assert bool((torch.isposinf if convention == "natural" else torch.isneginf)(results[2]).any())


def test_the_default_convention_is_chosen_process_wide_or_for_a_block(request):
    request.addfinalizer(lambda: flash_mla.set_convention("base2"))
    arguments, base2 = prefill_pair("base2")
    natural = flash_mla.flash_mla_sparse_fwd(**arguments, convention="natural")

    def default_is(wanted: tuple[torch.Tensor, ...]) -> bool:
        return all(map(torch.equal, flash_mla.flash_mla_sparse_fwd(**arguments), wanted))

    assert default_is(base2)
    with flash_mla.use_convention("natural"):
        assert default_is(natural)
        with flash_mla.use_convention("base2"), flash_mla.use_convention("natural"):
            assert default_is(natural)
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(default_is(base2)))
        thread.start()
        thread.join()
        assert seen == [True]
    assert default_is(base2)
    block = flash_mla.use_convention("natural")
    assert default_is(base2)
    with block:
        assert default_is(natural)
    flash_mla.set_convention("natural")
    assert default_is(natural)
    with flash_mla.use_convention("base2"):
        assert default_is(base2)
    with pytest.warns(DeprecationWarning, match=r"use_convention\(\.\.\.\) outside of .*: call set_convention\("):
        flash_mla.use_convention("base2")
    assert default_is(base2)
    for choose in (flash_mla.set_convention, flash_mla.use_convention):
        with pytest.raises(InvalidInput, match="expected convention to be one of base2, natural, got 'e'"):
            choose("e")


# Cases that FlashMLA's own tests leave out


@pytest.mark.parametrize("h_q", [1, 3, 7, 16, 128])
def test_any_number_of_heads(h_q, backend):
    decode(replace(DENSE, b=1, s_q=1, h_q=h_q))
    decode(replace(SPARSE, b=1, s_q=1, h_q=h_q))
    judge([replace(PREFILL, s_q=1, h_q=h_q)])


@pytest.mark.parametrize("topk", [1, 3, 63, 65, 131])
def test_any_top_k(topk, backend):
    decode(replace(SPARSE, b=1, topk=topk))
    decode(replace(V4, b=1, topk=topk))
    judge([replace(PREFILL, s_q=2, topk=topk, form=form) for form in ("e0", "e2")])


@pytest.mark.parametrize("page_size", [1, 3, 61, 128])
def test_any_page_size(page_size, backend):
    for case in (DENSE, SPARSE, V4):
        decode(replace(case, page_size=page_size, b=1))


@pytest.mark.parametrize("fp8", [False, True])
def test_every_format_serves_dense_and_sparse(fp8, backend):
    for case in (DENSE, SPARSE, V4, replace(DENSE, d_qk=512, form="e2")):
        decode(replace(case, fp8=fp8, b=1))


def test_duplicates_count_as_often_as_they_are_listed(backend):
    indices = decode_inputs(SPARSE, "cpu")["indices"].clone()
    indices[:, :, 1::2] = indices[:, :, ::2]
    indices[:, :, -5:] = indices[:, :, :1]
    decode(SPARSE, indices=indices)


def test_no_index_anywhere_in_newer_lists(backend):
    """Lists may contain -1, or other values that are not slots, anywhere between their valid entries."""
    arguments = decode_inputs(replace(V4, topk_lens=False), "cpu")
    for name in ("indices", "extra_indices_in_kvcache"):
        lists = arguments[name].clone()
        slots = arguments["k_cache" if name == "indices" else "extra_k_cache"].shape[:2].numel()
        for index, value in enumerate((-1, -2, -(2**31), slots, slots + 1, 2147480000, 2**31 - 1)):
            lists[:, :, index * 3 + 1] = value
        arguments[name] = lists
    decode(replace(V4, topk_lens=False), **arguments)


@pytest.mark.parametrize("length", [-5, 0, 37, 10**9])
def test_lengths_beyond_the_list(length, backend):
    lengths = torch.tensor([length, 20], dtype=torch.int32)
    decode(replace(V4, topk_lens=False), topk_length=lengths)
    # A length for each query token also works.
    decode(replace(V4, topk_lens=False), topk_length=torch.stack([lengths, lengths.flip(0)]))


def test_garbage_pages_behind_the_lengths_and_empty_caches(backend):
    decode(replace(DENSE, zero_lens=True, b=4))
    arguments = prefill_inputs(PREFILL, "cpu")
    arguments |= {"kv": arguments["kv"][:0]}
    out, highest, lse = flash_mla.flash_mla_sparse_fwd(**arguments)
    assert float(out.abs().max()) == 0
    assert bool(torch.isneginf(highest).all())
    assert bool(torch.isneginf(lse).all())


def test_float16(backend):
    for case in (DENSE, SPARSE, replace(SPARSE, fp8=False), PREFILL):
        check(case, dtype=torch.float16)


def test_scales_of_any_value_in_the_newer_form(backend):
    """The call form of 2026 takes caches of 2025, whose scales are not powers of two, with sinks and lengths."""
    lengths = torch.tensor([40, 11], dtype=torch.int32)
    decode(replace(SPARSE, sinks=True), "e2", topk_length=lengths)


def test_a_sequences_bits_depend_on_nothing_else(backend):
    """With one split, a sequence has the same bits in every batch and in every run."""
    arguments = decode_inputs(V4, "cpu")
    options = {"mla_decode": {"num_splits": 1}} if backend == "triton" else {}

    def run(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=flash_mla.get_mla_metadata()[0])

    with ra.use_backend(backend, options=options):
        both, again = run(arguments), run(arguments)
        assert all(map(torch.equal, both, again))
        by_sequence = ("q", "block_table", "cache_seqlens", "indices", "extra_indices_in_kvcache")
        names = (*by_sequence, "topk_length", "extra_topk_length")
        for seq in range(2):
            alone = run(arguments | {name: arguments[name][seq : seq + 1] for name in names})
            assert all(torch.equal(one[0], all_[seq]) for one, all_ in zip(alone, both, strict=True))


# The cache helpers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_k_cache_by_its_rule(dtype):
    """A scale is the largest magnitude divided by 448 in the input's dtype, not rounded to a power of two."""
    cache = (torch.randn(3, 5, 1, 576, generator=torch.Generator().manual_seed(0)) / 10).to(dtype)
    stored = quant.quantize_k_cache(cache, 512)
    assert stored.shape == (3, 5, 1, 656)
    assert stored.dtype == torch.float8_e4m3fn
    codes = stored.view(torch.uint8)
    scales = codes[..., 512:528].contiguous().view(torch.float32)
    for tile in range(4):
        values = cache[..., tile * 128 : (tile + 1) * 128]
        want = (values.abs().amax(-1) / 448).float()
        assert torch.equal(scales[..., tile], want)
        values_stored = stored[..., tile * 128 : (tile + 1) * 128].float()
        assert torch.equal(values_stored, (values.float() / want[..., None]).to(torch.float8_e4m3fn).float())
    assert bool((scales.log2() % 1 != 0).any())
    assert torch.equal(codes[..., 528:].contiguous().view(torch.bfloat16), cache[..., 512:].to(torch.bfloat16))


def test_quantize_and_dequantize_agree_with_the_definition():
    cache = torch.randn(2, 3, 1, 576, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    stored = quant.quantize_k_cache(cache, 512)
    back = quant.dequantize_k_cache(stored)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, ra_dequantize(stored))
    assert torch.equal(back[..., 512:], cache[..., 512:])
    assert float(((back - cache).abs() - cache.abs() / 16).max()) < 0.01


def ra_dequantize(stored: torch.Tensor) -> torch.Tensor:
    from ragged_attention.torch import dequantize_mla_cache

    return dequantize_mla_cache(stored)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_tile_without_a_scale_is_zero(dtype):
    cache = torch.ones(1, 1, 1, 576, dtype=dtype)
    cache[..., :128] = 0
    cache[..., 128:256] = (
        torch.finfo(dtype).smallest_normal / 2**8
    )  # divided by 448 this underflows to 0, except in float32
    back = quant.dequantize_k_cache(quant.quantize_k_cache(cache, 512)).flatten().float()
    assert back[:128].abs().max() == 0
    assert not back.isnan().any()
    assert back[256:].tolist() == [1.0] * 320


def test_other_widths_and_tiles():
    cache = torch.randn(2, 3, 1, 96, generator=torch.Generator().manual_seed(2), dtype=torch.bfloat16)
    stored = quant.quantize_k_cache(cache, 64, tile_size=32)
    assert stored.shape == (2, 3, 1, 64 + 2 * 4 + 2 * 32)
    back = quant.dequantize_k_cache(stored, dv=64, tile_size=32, d=96)
    assert float((back - cache).abs().max()) < 0.15


def test_not_a_number_stays_in_its_tile():
    cache = torch.ones(1, 1, 1, 576)
    cache[..., 5] = math.nan
    back = quant.dequantize_k_cache(quant.quantize_k_cache(cache, 512)).flatten()
    assert bool(back[:128].isnan().all())
    assert back[128:].tolist() == [1.0] * 448


CACHE = torch.zeros(1, 2, 1, 576)
STORED = torch.zeros(1, 2, 1, 656, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quant.quantize_k_cache([1], 512), TypeError, "expected input_k_cache to be a torch.Tensor, got list"),  # type: ignore[arg-type]
        (lambda: quant.quantize_k_cache(CACHE[0], 512), InvalidInput, r"input_k_cache.shape to be \[num_blocks"),
        (lambda: quant.quantize_k_cache(CACHE, 500), InvalidInput, "dv to be a positive multiple of tile_size=128, go"),
        (lambda: quant.quantize_k_cache(CACHE.int(), 512), InvalidInput, "input_k_cache.dtype to be of 16 or 32 bits"),
        (lambda: quant.quantize_k_cache(CACHE, 640), InvalidInput, r"input_k_cache.shape\[3\] >= dv=640, got 576"),
        (lambda: quant.dequantize_k_cache(CACHE), InvalidInput, "quant_k_cache to have rows of 656 bytes with dv=512"),
        (lambda: quant.dequantize_k_cache(STORED, d=512), InvalidInput, "rows of 528 bytes .* got 656 of torch.uint8"),
        (lambda: quant.dequantize_k_cache(STORED[:, :, 0]), InvalidInput, r"quant_k_cache.shape to be \[num_blocks"),
    ],
)
def test_quant_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Refusals

META = flash_mla.FlashMLASchedMeta
PARTS_OF_2, SPLITS_OF_2 = torch.zeros(4, 8, dtype=torch.int32), torch.arange(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("case", "changes", "error", "message"),
    [
        (DENSE, {"q": [1]}, TypeError, "expected q to be a torch.Tensor, got list"),
        (DENSE, {"q": torch.zeros(2, 3, 576)}, InvalidInput, "expected q to have 4 dimensions, got 3"),
        (DENSE, {"k_cache": None}, TypeError, "expected k_cache to be a torch.Tensor, got NoneType"),
        (DENSE, {"k_cache": torch.zeros(2, 3)}, InvalidInput, "expected k_cache to have 4 dimensions, got 2"),
        (DENSE, {"is_fp8_kvcache": True}, InvalidInput, "k_cache.dtype to be float8_e4m3fn or .* is_fp8_kvcache=True"),
        (SPARSE, {"is_fp8_kvcache": False}, InvalidInput, "k_cache.dtype to be that of q with is_fp8_kvcache=False"),
        (SPARSE, {"k_cache": torch.zeros(2, 64, 1, 600, dtype=torch.uint8)}, InvalidInput, r"k_cache.shape\[3\] to be"),
        (DENSE, {"k_cache": torch.zeros(2, 64, 1, 576)}, InvalidInput, "k_cache.dtype to be that of q, bfloat16"),
        (DENSE, {"block_table": None}, InvalidInput, "expected block_table with a dense call"),
        (DENSE, {"cache_seqlens": None}, InvalidInput, "expected cache_seqlens with a dense call"),
        (DENSE, {"cache_seqlens": torch.zeros(2)}, InvalidInput, "expected cache_seqlens.dtype to be int32"),
        (DENSE, {"tile_scheduler_metadata": None}, TypeError, "tile_scheduler_metadata to be what .* got NoneType"),
        (DENSE, {"num_splits": SPLITS_OF_2}, InvalidInput, "expected num_splits=None with a FlashMLASchedMeta"),
        (DENSE, {"tile_scheduler_metadata": PARTS_OF_2}, TypeError, "expected num_splits to be the tensor .* NoneType"),
        (DENSE, {"tile_scheduler_metadata": PARTS_OF_2[0], "num_splits": SPLITS_OF_2}, InvalidInput,
         r"expected tile_scheduler_metadata to be int32 \[8, 8\] with b=2, got int32 \[8\]"),
        (DENSE, {"tile_scheduler_metadata": PARTS_OF_2, "num_splits": SPLITS_OF_2[1:]}, InvalidInput,
         r"expected num_splits to be int32 \[3\] with b=2, got int32 \[2\]"),
        (SPARSE, {"causal": True}, InvalidInput, "expected causal=False with indices"),
        (SPARSE, {"indices": [1]}, TypeError, "expected indices to be a torch.Tensor, got list"),
        (SPARSE, {"indices": torch.zeros(2, 2, dtype=torch.int32)}, InvalidInput, "indices to have 3 dimensions"),
        (SPARSE, {"indices": torch.zeros(2, 2, 8)}, InvalidInput, "expected indices.dtype to be int32, got float32"),
        (V4, {"extra_k_cache": None}, InvalidInput, "extra_k_cache and extra_indices_in_kvcache together, got extra"),
        (V4, {"extra_indices_in_kvcache": None}, InvalidInput, "together, got extra_indices_in_kvcache=None"),
        (V4, {"topk_length": torch.zeros(2)}, InvalidInput, "expected topk_length.dtype to be int32, got float32"),
        (V4, {"extra_topk_length": torch.zeros(2)}, InvalidInput, "expected extra_topk_length.dtype to be int32"),
        (V4, {"attn_sink": torch.zeros(9)}, InvalidInput, r"expected attn_sink.shape to be \[H\] = \[3\], got \[9\]"),
        (V41, {"cache_layout": "row"}, InvalidInput, "expected cache_layout to be one of token, page, got 'row'"),
        (V4, {"cache_layout": "token"}, InvalidInput, "expected cache_layout='page' with cache_format='fp8_v4'"),
        (V41, {"extra_k_cache": torch.zeros(2, 64, 1, 584, dtype=torch.uint8)}, InvalidInput,
         "expected extra_k_cache in the format of k_cache, fp8_v41 or fp4_v41, got fp8_v4"),
        (V41, {"enable_batch_invariant": 1}, TypeError, "expected enable_batch_invariant to be a bool, got int"),
        (V4, {"softmax_scale": "1"}, TypeError, "expected softmax_scale to be a number, got str"),
    ],
)  # fmt: skip
def test_decode_refuses(case, changes, error, message):
    arguments = decode_inputs(case, "cpu") | {"tile_scheduler_metadata": META()} | changes
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_with_kvcache(**arguments)


def test_more_than_one_kv_head_in_a_sparse_call():
    arguments = decode_inputs(replace(SPARSE, fp8=False), "cpu")
    arguments["k_cache"] = arguments["k_cache"].expand(-1, -1, 2, -1)
    with pytest.raises(InvalidInput, match="expected k_cache to have num_kv_heads = 1 with indices, got 2"):
        flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=META())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((LENS,), TypeError, "expected num_q_tokens_per_head_k and num_heads_k with cache_seqlens, got None"),
        ((LENS, 128, 1, None, True, 64), InvalidInput, "expected num_heads_q with topk, got None"),
        (([1], 128, 1), TypeError, "expected cache_seqlens to be a torch.Tensor, got list"),
        ((LENS[:, None], 128, 1), InvalidInput, "expected cache_seqlens to have 1 dimensions, got 2"),
        ((LENS.long(), 128, 1), InvalidInput, "expected cache_seqlens.dtype to be int32, got int64"),
        ((LENS, 0, 1), InvalidInput, "expected num_q_tokens_per_head_k >= 1, got 0"),
        ((LENS, 128, 0), InvalidInput, "expected num_heads_k >= 1, got 0"),
        ((LENS, 128, 1, 0), InvalidInput, "expected num_heads_q >= 1, got 0"),
    ],
)
def test_metadata_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        flash_mla.get_mla_metadata(*arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"convention": "base10"}, InvalidInput, "expected convention to be one of base2, natural, got 'base10'"),
        ({"attn_sink": torch.zeros(9)}, InvalidInput, r"expected attn_sink.shape to be \[H\] = \[4\], got \[9\]"),
        ({"topk_length": torch.zeros(5)}, InvalidInput, "expected topk_length.dtype to be int32, got float32"),
        ({"indices": torch.zeros(5, 1, 9)}, InvalidInput, "expected indices.dtype to be int32, got float32"),
    ],
)
def test_prefill_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_sparse_fwd(**prefill_inputs(PREFILL, "cpu") | changes)


DENSE_FORMS: dict[str, Callable[..., Any]] = {
    "q, k, v": flash_mla.flash_attn_varlen_func,
    "q, kv": flash_mla.flash_attn_varlen_kvpacked_func,
    "qkv": flash_mla.flash_attn_varlen_qkvpacked_func,
}


def dense_call(form: str, **changes: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A call of one of the three functions on two sequences, 5 and 7 long, and the leaves of its gradients."""
    generator = torch.Generator().manual_seed(3)
    widths = ((4, 24), (4 if form == "qkv" else 2, 24), (4 if form == "qkv" else 2, 10))
    given = [torch.randn(12, *width, generator=generator) for width in widths]
    if form == "q, kv":
        given = [given[0], torch.cat(given[1:], -1)]
    if form == "qkv":
        given = [torch.cat(given, -1)]
    names = [name.strip() for name in form.split(",")]
    arguments: dict[str, Any] = dict(zip(names, given, strict=True))
    edges = torch.tensor([0, 5, 12], dtype=torch.int32)
    if form == "qkv":
        arguments |= {"cu_seqlens": edges, "max_seqlen": 7}
    else:
        arguments |= {"cu_seqlens_qo": edges, "cu_seqlens_kv": edges, "max_seqlen_qo": 7, "max_seqlen_kv": 7}
    if form != "q, k, v":
        arguments["head_dim_qk"] = 24
    arguments |= changes
    leaves = [arguments[name].clone().requires_grad_() for name in names]
    call = functools.partial(DENSE_FORMS[form], **arguments | dict(zip(names, leaves, strict=True)))
    return call, leaves


@pytest.mark.parametrize(("form", "causal"), [("q, k, v", True), ("q, kv", False), ("qkv", True)])
def test_dense_attention_in_three_forms(form, causal, backend):
    """Dense attention agrees with plain torch, in values and in gradients.

    The gradients pass through packed tensors, grouped heads and the log-sum-exp.
    """
    call, leaves = dense_call(form, causal=causal, softmax_scale=0.3)
    packed = torch.cat(leaves if form == "qkv" else leaves[1:], -1)
    q, k, v = packed.split((24, 24, 10), -1) if form == "qkv" else (leaves[0], *packed.split((24, 10), -1))
    wanted = []
    for rows in (slice(0, 5), slice(5, 12)):
        some_k, some_v = (array[rows].repeat_interleave(4 // array.shape[1], 1) for array in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[rows], some_k) * 0.3
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
        wanted.append((torch.einsum("hqk,khd->qhd", logits.softmax(-1), some_v), logits.logsumexp(-1).T))
    want = [torch.cat(parts) for parts in zip(*wanted, strict=True)]
    got = call()
    asked = [torch.randn(result.shape, generator=torch.Generator().manual_seed(4)) for result in want]
    grads = (torch.autograd.grad(results, leaves, asked) for results in (got, want))
    for one, other in zip((*got, *next(grads)), (*want, *next(grads)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert got[1].shape == (12, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_of_dense_attention(dtype, backend, monkeypatch):
    monkeypatch.setattr(flash_mla_data, "REPEATS", 1)
    check(replace(MHA, h_q=2, h_kv=1, s_q=8, s_k=10), dtype=dtype)


def test_the_rules_of_dense_data():
    """There are at least as many keys as queries, each array is a view of a larger one, and the oracle's causal mask is
    aligned to the end.
    """
    arguments, d_out = mha_inputs(MHA, "cpu", torch.float32)
    q_lens, kv_lens = (arguments[f"cu_seqlens_{name}"].diff() for name in ("qo", "kv"))
    assert bool((kv_lens >= q_lens).all())
    assert not any(arguments[name].is_contiguous() for name in "qkv")
    first, offset = 0, int(kv_lens[0] - q_lens[0])
    out, lse, *_ = mha_oracle(**arguments, d_out=d_out)
    logits = arguments["q"][first, 0] @ arguments["k"][: offset + 1, 0].T * arguments["softmax_scale"]
    torch.testing.assert_close(out[first, 0], logits.softmax(-1) @ arguments["v"][: offset + 1, 0])
    torch.testing.assert_close(lse[first, 0], logits.logsumexp(-1))


@pytest.mark.parametrize("form", DENSE_FORMS)
def test_equal_lengths_need_no_edges(form):
    """If all lengths are equal, only the number of edges counts, not their values."""
    edges, garbage = torch.tensor([0, 6, 12], dtype=torch.int32), torch.full((3,), 99, dtype=torch.int32)
    names = [name for name in dense_call(form)[0].keywords if name.startswith("cu_seqlens")]  # type: ignore[attr-defined]
    want = dense_call(form, **dict.fromkeys(names, edges))[0]()
    got = dense_call(form, **dict.fromkeys(names, garbage), is_varlen=False)[0]()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_fully_masked_query_of_dense_attention(backend):
    """With fewer keys than queries, a query before the first key is fully masked."""
    edges = torch.tensor([0, 2, 2], dtype=torch.int32)
    call, leaves = dense_call("q, k, v", cu_seqlens_kv=edges, causal=True)
    out, lse = call()
    fully_masked = torch.ones(12, dtype=torch.bool)
    fully_masked[3:5] = False
    assert torch.equal(lse == -torch.inf, fully_masked[:, None].expand(12, 4))
    grads = torch.autograd.grad((out.sum() + lse[3:5].sum()), leaves)
    assert not out[fully_masked].any()
    assert not grads[0][fully_masked].any()
    assert not any(grad[2:].any() for grad in grads[1:])


def test_deterministic_gradients_are_offered():
    call, leaves = dense_call("qkv", deterministic=True)
    first, second = (torch.autograd.grad(call()[0].sum(), leaves) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_torch_compile_follows_dense_attention():
    def loss(qkv: torch.Tensor, is_varlen: bool) -> torch.Tensor:
        edges = torch.tensor([0, 6, 12], dtype=torch.int32)
        out, lse = flash_mla.flash_attn_varlen_qkvpacked_func(qkv, edges, 6, 24, causal=True, is_varlen=is_varlen)
        return out.sum() + lse.sum()

    for is_varlen in (True, False):
        qkv = dense_call("qkv")[1][0]
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(qkv, is_varlen)
        (got,), (want,) = (torch.autograd.grad(value, qkv) for value in (compiled, loss(qkv, is_varlen)))
        torch.testing.assert_close(got, want)


def test_sparse_prefill_is_differentiable(backend):
    """Gradients pass through out and through lse of either base; FlashMLA's function has no gradient."""
    arguments = prefill_inputs(replace(PREFILL, h_q=2, d_qk=32, topk=20), "cpu", torch.float32)
    arguments["d_v"] = 32
    grads = []
    for convention in ("natural", "base2"):
        leaves = [arguments[name].detach().requires_grad_() for name in ("q", "kv")]
        found = arguments | dict(zip(("q", "kv"), leaves, strict=True))
        out, _, lse = flash_mla.flash_mla_sparse_fwd(**found, convention=convention)
        seen = lse[lse.isfinite()].sum() / (math.log2(math.e) if convention == "base2" else 1)
        grads.append(torch.autograd.grad(out.sum() + seen, leaves))
    for one, other in zip(*grads, strict=True):
        assert bool(one.isfinite().all())
        assert bool(one.any())
        torch.testing.assert_close(one, other)


EDGES = torch.tensor([0, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize(
    ("form", "changes", "error", "message"),
    [
        ("q, k, v", {"dropout_p": 0.1}, InvalidInput, "expected dropout_p=0, got 0.1"),
        ("q, k, v", {"softmax_scale": "1"}, TypeError, "expected softmax_scale to be a number, got str"),
        ("q, k, v", {"cu_seqlens_qo": EDGES.long()}, InvalidInput, "expected cu_seqlens_qo.dtype to be int32"),
        ("q, k, v", {"cu_seqlens_kv": EDGES[:2]}, InvalidInput, r"expected cu_seqlens_kv.shape to be .* got \[2\]"),
        ("q, k, v", {"max_seqlen_qo": -1}, InvalidInput, "expected max_seqlen_qo >= 0, got -1"),
        ("q, k, v", {"max_seqlen_kv": "7"}, TypeError, "expected max_seqlen_kv to be an int, got str"),
        ("q, k, v", {"causal": 1}, TypeError, "expected causal to be a bool, got int"),
        ("q, k, v", {"v": torch.zeros(12, 2, 600)}, InvalidInput, r"expected v.shape\[2\] from 1 to 512, got 600"),
        ("q, k, v", {"is_varlen": False, "cu_seqlens_kv": EDGES[:1]}, InvalidInput,
         r"expected k.shape\[0\] to be a multiple of b=0 with is_varlen=False, got 12"),
        ("q, k, v", {"is_varlen": False, "cu_seqlens_qo": torch.zeros(6)}, InvalidInput,
         r"expected q.shape\[0\] to be a multiple of b=5 with is_varlen=False, got 12"),
        ("q, kv", {"is_varlen": False, "cu_seqlens_qo": [0, 5]}, TypeError, "cu_seqlens_qo to be a torch.Tensor"),
        ("q, kv", {"kv": torch.zeros(12, 2)}, InvalidInput, "expected kv to have 3 dimensions, got 2"),
        ("q, kv", {"kv": torch.zeros(12, 3, 30)}, InvalidInput, "num_q_heads to be a multiple of num_kv_heads=3"),
        ("q, kv", {"kv": torch.zeros(12, 2, 600)}, InvalidInput,
         r"expected kv\[..., head_dim_qk:\].shape\[2\] from 1 to 512, got 576"),
        ("q, kv", {"head_dim_qk": 34}, InvalidInput,
         r"expected kv.shape\[2\] > 1 \* head_dim_qk >= 1, got width=34, head_dim_qk=34"),
        ("q, kv", {"head_dim_qk": 10}, InvalidInput,
         r"expected kv\[..., :head_dim_qk\].shape to be .* 24\], got \[12, 2, 10\]"),
        ("qkv", {"head_dim_qk": 0}, InvalidInput, r"expected qkv.shape\[2\] > 2 \* head_dim_qk >= 2, got width=58"),
        ("qkv", {"head_dim_qk": 29}, InvalidInput, "got width=58, head_dim_qk=29"),
        ("qkv", {"head_dim_qk": 24.0}, TypeError, "expected head_dim_qk to be an int, got float"),
        ("qkv", {"cu_seqlens": EDGES.long()}, InvalidInput, "expected cu_seqlens.dtype to be int32, got int64"),
        ("qkv", {"qkv": torch.zeros(12, 4, 58, dtype=torch.int32)}, InvalidInput,
         r"expected qkv\[..., :head_dim_qk\].dtype to be"),
    ],
)  # fmt: skip
def test_dense_attention_refuses(form, changes, error, message):
    arguments = dense_call(form)[0].keywords | changes  # type: ignore[attr-defined]
    with pytest.raises(error, match=message):
        DENSE_FORMS[form](**arguments)
