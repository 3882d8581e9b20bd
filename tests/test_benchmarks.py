"""Tests of the measurements: the floors, inputs and checks of cases, timings, peers and replays."""

import dataclasses
import functools
import importlib.util
import json
import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import run, timing
from benchmarks.cases import catalogue
from benchmarks.cases import mla as mla_cases
from benchmarks.cases import paged as paged_cases
from benchmarks.cases import ragged_mla as ragged_cases
from benchmarks.peers import mla as mla_peers
from benchmarks.peers import registry
from ragged_attention.calls import NOWHERE
from ragged_attention.reference.mla_decode import mla_decode
from ragged_attention.reference.ragged_mla_attention import ragged_mla_attention
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention as definition
from ragged_attention.reference.sparse_mla_prefill import sparse_mla_prefill

SMALL = ("mixed_2q2k_32q1s1k_small", "gpt_oss_window_64x4k_small", "fp8_64x4k_page64_small", "gemma2_prefill_4k_small")
LATENT = (
    "mla_dense_h128_128q2s4k_small", "mla_sparse_h16_b8_small", "mla_sparse_v4_h64_128q2_small",
    "mla_prefill_h128_8k_small", "mla_prefill_fp8_h128_32k_small",
)  # fmt: skip


def tiny(**fields: Any) -> paged_cases.PagedCase:
    plain = {"name": "tiny", "workload": "-", "q_lens": (1, 3), "kv_lens": (5, 4), "num_q_heads": 4, "num_kv_heads": 2}
    return paged_cases.PagedCase(**(plain | {"head_dim": 16, "page_size": 2} | fields))  # type: ignore[arg-type]


# ---- cases


def test_needed_work_is_counted_by_hand() -> None:
    case = tiny()
    assert case.needed_keys() == 9
    assert case.visible_pairs() == 5 + 2 + 3 + 4
    assert case.flops() == 4 * 14 * 4 * 16
    assert case.needed_bytes() == 2 * (4 * 4 * 16) * 2 + 9 * (2 * 2 * 16 * 2) + 4 * (5 + 2 * 2 + 1)


def test_a_window_needs_less() -> None:
    case = tiny(sliding_window=2)
    assert case.needed_keys() == 2 + 4
    assert case.visible_pairs() == 2 + 2 + 2 + 2
    assert tiny(sliding_window=100).flops() == tiny().flops()


def test_ranges_of_keys_show_every_second_part_of_the_keys() -> None:
    case = tiny(q_lens=(1, 3), kv_lens=(10, 4), key_ranges=2)
    seen = [[[0, 3], [6, 10]], [[0, 0], [1, 2]], [[0, 1], [2, 3]], [[0, 1], [2, 4]]]
    assert case.tables()["key_ranges"].tolist() == seen
    assert case.visible_pairs() == 7 + 1 + 2 + 3
    assert case.needed_keys() == 7 + 4
    assert case.needed_bytes() == 2 * (4 * 4 * 16) * 2 + 11 * (2 * 2 * 16 * 2) + 4 * (6 + 2 * 2 + 1 + 2 * 2 * 4)
    causal, one = tiny(), tiny(key_ranges=1)
    assert (one.visible_pairs(), one.needed_keys()) == (causal.visible_pairs(), causal.needed_keys())
    latent = ragged_cases.batch("tiny", [(1, 10), (3, 4)], 2, key_ranges=2, page_size=2)
    assert (latent.visible_pairs(), latent.needed_keys()) == (case.visible_pairs(), case.needed_keys())


def test_the_larger_time_is_the_floor() -> None:
    case = tiny()
    assert case.floor_seconds(1.0, 1e12) == (case.needed_bytes(), "memory")
    assert case.floor_seconds(1e12, 1.0) == (case.flops(), "arithmetic")


def test_floors_of_the_named_workloads_on_an_h200() -> None:
    """The floors in microseconds equal the numbers in the targets, at 4.3 TB/s and 700 TFLOP/s."""
    wanted = {
        "decode_64x4k": 250, "decode_1x32k": 31, "decode_1x128k": 125, "decode_8x32k": 250, "decode_70b_tp8_64x4k": 31,
        "prefill_2k": 49, "prefill_4k": 196, "prefill_8k": 785, "gpt_oss_window_64x4k": 4, "gpt_oss_full_64x4k": 125,
        "gemma2_32x4k": 250, "fp8_64x4k": 125,
    }  # fmt: skip
    for name, microseconds in wanted.items():
        assert paged_cases.CASES[name].floor_seconds(4.3e12, 700e12)[0] * 1e6 == pytest.approx(microseconds, abs=0.6)


@pytest.mark.parametrize("name", [*paged_cases.CASES, *paged_cases.COMPILED_ONLY])
def test_every_case_is_valid_whole_and_scaled_down(name: str) -> None:
    whole, case = catalogue.find(name), catalogue.find(f"{name}_small")
    for each in (whole, case):
        for call in each.calls(NOWHERE):
            assert call.argument_names()
        assert all(0 < q_len <= kv_len for q_len, kv_len in zip(each.q_lens, each.kv_lens, strict=True))
    assert max(case.kv_lens) <= 77
    assert (
        case.num_q_heads // case.num_kv_heads == catalogue.find(name).num_q_heads // catalogue.find(name).num_kv_heads
    )


@pytest.mark.parametrize("name", [*mla_cases.CASES, *mla_cases.COMPILED_ONLY])
def test_every_latent_case_is_valid_whole_and_scaled_down(name: str) -> None:
    for case in (catalogue.find(name), catalogue.find(f"{name}_small")):
        operations = [call.OPERATION for call in case.calls(NOWHERE)]
        assert operations[0] == case.operation
        assert "write_mla_cache" in operations
        assert ("quantize_mla_cache" in operations) == (case.cache_format != "plain")
    assert case.max_len <= 77


@pytest.mark.parametrize("name", [*ragged_cases.CASES, *ragged_cases.COMPILED_ONLY])
def test_every_case_of_ragged_latents_is_valid_whole_and_scaled_down(name: str) -> None:
    for case in (catalogue.find(name), catalogue.find(f"{name}_small")):
        assert [call.OPERATION for call in case.calls(NOWHERE)] == [case.operation, "write_mla_cache"]
        assert all(0 < q_len <= kv_len for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True))
        assert case.needed_bytes() > 0
    assert case.max_len <= 77
    out = ragged_mla_attention(**case.numpy_inputs(), code_dtype=case.stored)
    case.check(case.numpy_inputs(), out, np.asarray)
    with pytest.raises(AssertionError, match=case.name):
        case.check(case.numpy_inputs(), np.roll(out, 1, 2), np.asarray)


def test_floors_of_latent_attention_on_an_h200() -> None:
    wanted = {
        "mla_dense_h128_128x4k": 209, "mla_dense_h128_128q2s4k": 417, "mla_dense_h64_128x4k": 144.6,
        "mla_dense_h16_128x4k": 141.5, "mla_sparse_h128_128q2": 209, "mla_sparse_h8_b8": 2.5,
        "mla_prefill_h128_32k": 3338,
    }  # fmt: skip
    for name, microseconds in wanted.items():
        floor, _ = mla_cases.CASES[name].floor_seconds(4.3e12, 700e12)
        assert floor * 1e6 == pytest.approx(microseconds, abs=0.6)


def latents(**fields: Any) -> mla_cases.LatentCase:
    plain = {"num_q_heads": 4, "num_q_tokens": 3, "max_len": 10, "d_qk": 32, "d_v": 16, "page_size": 4}
    return mla_cases.batch("tiny", "-", 2, **(plain | fields))  # type: ignore[arg-type]


def test_needed_work_of_latents_is_counted_by_hand() -> None:
    queries = 2 * 3 * 4 * (32 + 16) * 2
    dense = latents(causal=True)
    assert dense.needed_rows() == (2 * 10, 0)
    assert dense.visible_pairs() == 2 * (8 + 9 + 10)
    assert dense.flops() == 2 * 2 * (8 + 9 + 10) * 4 * (32 + 16)
    assert dense.needed_bytes() == queries + 20 * 32 * 2 + 4 * 2 * (3 + 1)
    sparse = latents(topk=2, extra_topk=5, cache_format="fp8_v4", d_qk=512, d_v=512)
    assert sparse.needed_rows() == (2 * 6, 2 * 10)
    assert sparse.visible_pairs() == 2 * 3 * 7
    assert sparse.row_bytes == 584


@pytest.mark.parametrize("topk", [2, 3, 4, 12])
def test_lists_overlap_as_little_as_they_can(topk: int) -> None:
    case = latents(topk=topk)
    for lists in case.tables(5)["indices"]:
        chosen = lists[lists >= 0]
        assert len(np.unique(chosen)) == min(case.max_len, 3 * topk)
        assert all(len(np.unique(one[one >= 0])) == min(topk, case.max_len) for one in lists)


def test_an_unknown_case_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"expected a case among decode_64x4k, .*got 'nothing'"):
        catalogue.find("nothing")


def test_tables_use_each_page_once_and_leave_garbage_behind() -> None:
    case = tiny(kv_lens=(9, 4), q_lens=(1, 3))
    tables = case.tables(3)
    used = [page for seq, count in enumerate(case.pages_needed) for page in tables["page_indices"][seq, :count]]
    assert len(set(used)) == len(used) == 7
    assert all(0 <= page < case.num_pages for page in used)
    assert tables["cu_q_lens"].tolist() == [0, 1, 4]
    assert not np.array_equal(tables["page_indices"], case.tables(4)["page_indices"])


def pages_of(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.parametrize(
    "name", [*SMALL, *LATENT, "int8_mixed_small", "decode_64x4k_split_pages_small", "two_ranges_4k_small"]
)
def test_inputs_are_the_same_values_in_every_framework(name: str) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    del torch, jax
    from ragged_attention.jax._launcher import to_numpy as from_jax
    from ragged_attention.torch._launcher import to_numpy as from_torch

    case = catalogue.find(name)
    plain, ours, theirs = (make(5) for make in (case.numpy_inputs, case.torch_inputs, case.jax_inputs))
    assert plain.keys() == ours.keys() == theirs.keys()
    for key, value in plain.items():
        if isinstance(value, np.ndarray | tuple):
            for one, two, three in zip(pages_of(value), pages_of(ours[key]), pages_of(theirs[key]), strict=True):
                assert np.array_equal(one, from_torch(two)), key
                assert np.array_equal(one, from_jax(three)), key
        else:
            assert value == ours[key] == theirs[key]


# ---- correctness


@pytest.mark.parametrize("name", [*SMALL, "two_ranges_4k_small"])
def test_the_check_passes_the_definition_and_nothing_else(name: str) -> None:
    case = dataclasses.replace(catalogue.find(name), dtype="float32")
    inputs = case.numpy_inputs(1)
    out = definition(**inputs, **case.formats).astype(np.float32)
    case.check(inputs, out, np.asarray)
    with pytest.raises(AssertionError, match=case.name):
        case.check(inputs, out * 1.01, np.asarray)
    last = out.copy()
    last[-1, -1, -1] += 1
    with pytest.raises(AssertionError, match="rows"):
        case.check(inputs, last, np.asarray)


@pytest.mark.parametrize("name", ["two_ranges_4k_small", "mla_ragged_two_ranges_small"])
def test_the_check_notices_that_ranges_of_keys_are_ignored(name: str) -> None:
    case = dataclasses.replace(catalogue.find(name), dtype="float32")
    inputs = case.numpy_inputs(1)
    function = definition if isinstance(case, paged_cases.PagedCase) else ragged_mla_attention
    case.check(inputs, function(**inputs), np.asarray)
    with pytest.raises(AssertionError, match=case.name):
        case.check(inputs, function(**inputs | {"key_ranges": None}), np.asarray)


@pytest.mark.parametrize("name", LATENT)
def test_the_check_passes_the_definition_of_latent_attention_and_nothing_else(name: str) -> None:
    case = catalogue.find(name)
    inputs = case.numpy_inputs(1)
    out = (sparse_mla_prefill if case.prefill else mla_decode)(**inputs)[0]
    case.check(inputs, out, np.asarray)
    with pytest.raises(AssertionError, match=case.name):
        case.check(inputs, out * 1.02, np.asarray)
    last = out.copy()
    last[..., -1, -1] += 1  # an error in the last head of every query
    with pytest.raises(AssertionError, match="query"):
        case.check(inputs, last, np.asarray)


# ---- timing


def test_a_ratio_is_taken_within_rounds() -> None:
    ours, theirs = timing.Timing((1.0, 2.0, 4.0)), timing.Timing((2.0, 4.0, 8.0))
    assert timing.ratio(ours, theirs) == 2.0
    assert timing.ratio(theirs, ours) == 0.5
    assert ours.median == 2.0
    assert timing.Timing((1.0, 1.0, 1.0, 1.0)).spread == 0.0


def test_every_ratio_on_a_cpu_has_a_column() -> None:
    from benchmarks.cpu import cases, page

    ratios = dict.fromkeys((cases.DENSE, cases.EAGER, cases.NAMED), 2.0)
    row = {"name": "C11", "what": "", "milliseconds": {"ours": 1.0}, "ratios": ratios}
    case = row | {"share_of_copy": 0, "share_of_product": 0}
    assert page.table({"cases": [case]}).count("2.00") == len(ratios)
    assert set(page.PEERS) == set(page.TITLES)


def test_a_peer_is_timed_on_a_cpu_if_it_is_right_where_a_query_sees() -> None:
    torch = pytest.importorskip("torch")
    from rich.console import Console

    from benchmarks.cpu import __main__ as cpu
    from benchmarks.cpu import cases

    class Logits(cases.Case):
        def contenders(self) -> cases.Contenders:
            results = {cases.OURS: (0.01, -torch.inf), cases.EAGER: (0.01, -torch.inf), "vllm": (0.01, 5.0)}
            results |= {"sdpa": (0.0, -torch.inf), "openvino": (torch.nan, -torch.inf)}
            return {name: functools.partial(torch.tensor, result) for name, result in results.items()}

    case = Logits(name="C", what="", dtype=torch.float32)
    row = cpu.measured(case, {"copy": 1.0, "product": 1.0}, 2, Console(quiet=True))
    assert sorted(row["wrong"]) == ["openvino", "sdpa"]
    assert row["ratios"].keys() == {cases.EAGER, "vllm"}


def test_a_cpu_is_told_from_others_of_its_name(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from benchmarks.cpu import page

    info = tmp_path / "cpuinfo"
    info.write_text("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n")
    assert page.machine(info).startswith("AMD EPYC (family 25, model 17), ")
    info.write_text("CPU part\t: 0xd40\n")
    assert "family" not in page.machine(info)


def test_each_kind_of_cpu_has_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchmarks.cpu import page

    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "replace", lambda *_: None)

    def record(cpu: str, date: str, *ratios: float) -> dict[str, Any]:
        rows = [
            {"name": f"C{number}", "what": "", "milliseconds": {"ours": 1.0}, "share_of_copy": 0, "share_of_product": 0,
             "ratios": {"vllm": ratio, "dense": 0.1}}
            for number, ratio in enumerate(ratios)
        ]  # fmt: skip
        run = {"threads": 1, "bytes_per_second": 1.0, "flops": 1.0, "cases": rows}
        return {"cpu": cpu, "date": date, "commit": "", "torch": "", "runs": [run]}

    page.save(record("Zen (2 CPUs)", "2030-01-01", 0.5))
    page.save(record("Core", "2030-02-01", 2.0))
    page.save(record("Zen (2 CPUs)", "2030-03-01", 3.0, 0.9))
    assert [file.name for file in page.records()] == ["cpu_2030-02-01_core.json", "cpu_2030-03-01_zen_2_cpus.json"]
    lines = page.summary(list(page.records().values())).splitlines()
    assert lines[-1] == "| Zen (2 CPUs) | 2030-03-01 | 1 | 1.95 | 0.90: C1 beside vLLM |"


def test_growth_on_a_cpu_is_planned_as_kernels_divide_work() -> None:
    growth = pytest.importorskip("benchmarks.cpu.growth")
    assert growth.programs_of([100], 1) == [100] * growth.NUM_KV_HEADS
    assert growth.programs_of([100] * 16, 2) == [100 * growth.NUM_KV_HEADS] * 16
    assert growth.programs_of([100] * 16, 3) == [50 * growth.NUM_KV_HEADS] * 32
    assert sum(growth.programs_of([300, 5000], 1)) == 5300 * growth.NUM_KV_HEADS
    assert max(growth.programs_of([300, 5000], 64)) < 600
    assert growth.filled([1024], 1) == growth.filled([1024], 16) == 1.0
    assert growth.filled([1024], 64) == 0.25


def test_load_on_a_cpu_is_told_as_shares_of_an_idle_machine() -> None:
    load = pytest.importorskip("benchmarks.cpu.load")
    rows = [
        {"what": what, "milliseconds": {case.name: {"ours": time} for case in load.CASES}, "others": 0.25}
        for what, time in (("nothing", 2.0), ("all", 5.0))
    ]
    assert load.table(rows).splitlines()[-1] == "| all | 5.00 | 2.5 | 5.00 | 2.5 | 0.25 |"


@pytest.mark.parametrize("name", ["idle", "busy", "thread"])
def test_a_load_ends_with_its_measurement(name: str) -> None:
    load = pytest.importorskip("benchmarks.cpu.load")
    chosen = next(each for each in load.LOADS if each.name == name)
    threads = threading.active_count()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "STARTING", 0.0)
        with load.running(chosen, 1) as process:
            assert (process is not None) == (name == "busy")
            assert load.mean_of(lambda: None, None, 0.01) < 1
    assert threading.active_count() == threads
    if process is not None:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_every_candidate_runs_once_a_round_in_any_order() -> None:
    said: list[str] = []
    times = timing.on_cpu({"a": lambda: said.append("a"), "b": lambda: said.append("b")}, rounds=20, warm_up=1)
    orders = {"".join(said[start : start + 2]) for start in range(2, len(said), 2)}
    assert orders == {"ab", "ba"}
    assert len(said) == 2 * 21
    assert all(len(one.samples) == 20 for one in times.values())
    assert timing.host_seconds(lambda: None, calls=5) < 0.1
    slow: list[None] = []

    def sleep() -> None:
        slow.append(time.sleep(0.2))

    assert timing.host_seconds(sleep) > 0.19
    assert len(slow) <= 4


# ---- run and peers


def test_bench_prints_times_of_a_backend_that_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "out.json"
    status = run.main(["gpt_oss_window_64x4k", "--rounds", "2", "--length", "40", "--peers", "--json", str(file)])
    assert status == 0
    rows = {row["who"]: row for row in json.loads(file.read_text())}
    assert rows["eager"]["seconds"] > 0
    assert rows["sdpa"]["why"] == "does not take sinks"
    assert "peer fa3: absent, " in capsys.readouterr().out


def test_bench_times_latent_attention_beside_its_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "out.json"
    status = run.main(["mla_sparse_h16_b8", "--rounds", "2", "--length", "40", "--peers", "--json", str(file)])
    assert status == 0
    rows = {row["who"]: row for row in json.loads(file.read_text())}
    assert set(rows) == {"eager", "sdpa-mla"}
    assert all(row["seconds"] > 0 for row in rows.values())
    assert "peer flashmla: absent, needs a CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mla_dense_h16_128x4k", "mla_prefill_v4_h64_32k"])
def test_bench_runs_latent_attention_from_jax(name: str, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    file = tmp_path / "out.json"
    assert run.main([name, "--framework", "jax", "--rounds", "2", "--length", "40", "--json", str(file)]) == 0
    assert json.loads(file.read_text())[0]["who"] == "xla"


def test_bench_runs_from_jax(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    file = tmp_path / "out.json"
    arguments = ["decode_64x4k", "--framework", "jax", "--rounds", "2", "--length", "40", "--json", str(file)]
    assert run.main(arguments) == 0
    assert json.loads(file.read_text())[0]["who"] == "xla"


def test_no_speed_of_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    right = run.our_call
    monkeypatch.setattr(run, "our_call", lambda *arguments: lambda: right(*arguments)() * 1.5)
    machine = run.Machine("torch", False, "CPU")
    case = catalogue.find("decode_64x4k_small")
    (result,) = run.run_case(case, machine, ["eager"], with_peers=False, rounds=2)
    assert result.seconds is None
    assert result.why.startswith("wrong: error ")
    assert run.is_red(result)
    assert run.main(["decode_64x4k", "--rounds", "2", "--length", "40"]) == 1
    assert "wrong:" in capsys.readouterr().out


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert run.main(["nothing"]) == 2
    assert "expected a case among" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mixed_2q2k_32q1s1k_small", "gemma3_32x4k_small", "decode_64x4k_split_pages_small"])
def test_torchs_own_attention_is_a_fair_peer(name: str) -> None:
    """torch's SDPA gives the right result in float32, within the bounds for our own backends."""
    pytest.importorskip("torch")
    case = dataclasses.replace(catalogue.find(name), dtype="float32")
    inputs = case.torch_inputs(2)
    (sdpa,) = (peer for peer in registry.PEERS if peer.name == "sdpa")
    case.check(inputs, sdpa.prepare(case, inputs)(), run.to_numpy)


PEERS_OF_LATENTS = ("mla_dense_h128_128q2s4k_small", "mla_sparse_h16_b8_small", "mla_prefill_h128_8k_small")


@pytest.mark.parametrize("name", PEERS_OF_LATENTS)
def test_torchs_own_attention_over_latents_is_a_fair_peer(name: str) -> None:
    pytest.importorskip("torch")
    case = catalogue.find(name)
    inputs = case.torch_inputs(2)
    case.check(inputs, mla_peers.sdpa(case, inputs)(), run.to_numpy)
    assert mla_peers.sdpa_declines(dataclasses.replace(case, sinks=True)) == "does not take sinks"


def test_a_second_cache_is_gathered_too() -> None:
    pytest.importorskip("torch")
    case = dataclasses.replace(catalogue.find("mla_sparse_v4_h64_128q2_small"), sinks=False)
    inputs = case.torch_inputs(2)
    case.check(inputs, mla_peers.sdpa(case, inputs)(), run.to_numpy)


class FlashMla:
    """A stand-in for FlashMLA's functions: their positional arguments and requirements, with our arithmetic."""

    def sparse_decode_fwd(self, *given: Any) -> Any:
        from ragged_attention import torch as ra

        q, cache, indices, lens, sinks, *schedule, extra, extra_indices, extra_lens, d_v, scale = given
        assert schedule in ([None, None], ["metadata", "splits"])
        assert q.shape[2] in (64, 128)
        out, lse = ra.mla_decode(
            q, cache, indices=indices, topk_lens=lens, sinks=sinks, extra_kv_cache=extra, d_v=d_v, sm_scale=scale,
            extra_indices=extra_indices, extra_topk_lens=extra_lens,
        )  # fmt: skip
        return out, lse, "metadata", "splits"

    def dense_decode_fwd(self, *given: Any) -> Any:
        from ragged_attention import torch as ra

        q, cache, d_v, lens, table, scale, causal, *schedule = given
        assert schedule in ([None, None], ["metadata", "splits"])
        out, lse = ra.mla_decode(q, cache, table, lens, d_v=d_v, sm_scale=scale, causal=causal)
        return out, lse, "metadata", "splits"

    def sparse_prefill_fwd(self, q: Any, kv: Any, indices: Any, scale: float, d_v: int, sinks: Any, lens: Any) -> Any:
        from ragged_attention import torch as ra

        assert q.shape[1] in (64, 128)
        return ra.sparse_mla_prefill(q, kv, indices, sm_scale=scale, d_v=d_v, sinks=sinks, topk_lens=lens)


@pytest.mark.parametrize("name", [*PEERS_OF_LATENTS, "mla_sparse_v4_h64_128q2_small"])
def test_flash_mla_gets_its_arguments_by_position(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(mla_peers, "_flash_mla_functions", lambda folder: FlashMla())
    case = catalogue.find(name)
    inputs = case.torch_inputs(2)
    call = mla_peers.flash_mla(case, inputs, tmp_path)
    for _ in range(2):  # the second call reuses the schedule of the first
        case.check(inputs, call(), run.to_numpy)


def test_arguments_without_a_default_that_an_operator_has_at_the_end_are_none() -> None:
    torch: Any = pytest.importorskip("torch")
    library = torch.library.Library("ragged_attention_peers", "DEF")
    library.define("forward(Tensor q, float scale, Tensor(a!)? out_) -> Tensor")
    library.impl("forward", lambda q, scale, out: q * scale if out is None else out, "CPU")
    forward: Any = mla_peers.allocating(torch.ops.ragged_attention_peers.forward.default)
    assert forward(torch.ones(2), 3.0).tolist() == [3.0, 3.0]


def test_what_flash_mla_declines() -> None:
    taken = [case.name for case in mla_cases.CASES.values() if mla_peers.flash_mla_declines(case) is None]
    for name in ("mla_dense_h16_128x4k", "mla_sparse_h8_b1", "mla_sparse_v4_h64_128q2", "mla_prefill_h16_32k"):
        assert name in taken
    for name in ("mla_dense_fp8_h128_128x4k", "mla_sparse_bf16_h128_32q2", "mla_prefill_fp8_h128_32k"):
        assert name not in taken
    declined = [
        mla_peers.flash_mla_declines(latents(**fields))
        for fields in ({}, {"d_v": 512, "topk": 64, "num_q_heads": 200}, {"d_v": 512, "d_qk": 512})
    ]
    assert declined == [
        "takes bfloat16 and values of 512",
        "takes at most 128 heads over one KV head",
        "takes dense calls over a plain cache of 576 columns in pages of 64 only",
    ]


def test_what_flash_attention_3_declines_of_latents() -> None:
    assert mla_peers.fa3_declines(mla_cases.CASES["mla_sparse_h8_b1"]) is None
    assert mla_peers.fa3_declines(latents()) == "takes values of 512 and 64 columns beside them"
    wide = {"d_qk": 576, "d_v": 512}
    assert mla_peers.fa3_declines(latents(**wide, topk=3, extra_topk=2)) == "takes one cache and one KV head"
    assert mla_peers.fa3_declines(latents(**wide, dtype="float32")) == "has no float32"
    assert mla_peers.sdpa_declines(latents(topk=3, num_kv_heads=2)) == "takes lists of one KV head here"


@pytest.mark.parametrize("name", PEERS_OF_LATENTS)
def test_flash_attention_3_gets_latents_in_two_parts(name: str) -> None:
    torch = pytest.importorskip("torch")
    case = catalogue.find(name)
    inputs = case.torch_inputs(2)

    def forward(*given: Any) -> Any:
        q, k, v, _, _, q_v = given[:6]
        lens, table, scale, causal = given[11], given[14], given[23], given[24]
        keys, queries = torch.cat([v, k], 3), torch.cat([q_v, q], 2)
        tokens = given[12]
        assert given[7].tolist() == list(range(0, len(queries) + 1, tokens))
        from ragged_attention.torch import mla_decode

        queries = queries.view(-1, tokens, *queries.shape[1:])
        out, _ = mla_decode(queries, keys, table, lens, sm_scale=scale, causal=causal)
        return [out.flatten(0, 1)]

    schema = types.SimpleNamespace(arguments=range(37))
    forward.default = types.SimpleNamespace(_schema=schema)  # type: ignore[attr-defined]
    case.check(inputs, mla_peers.fa3(case, inputs, forward)(), run.to_numpy)


def test_jaxs_reference_is_a_fair_peer() -> None:
    pytest.importorskip("jax")
    case = dataclasses.replace(catalogue.find("mixed_2q2k_32q1s1k_small"), dtype="float32")
    inputs = case.jax_inputs(2)
    (peer,) = (peer for peer in registry.PEERS if peer.name == "jax-reference")
    assert peer.absent() is None
    import jax

    with jax.default_matmul_precision("float32"):
        case.check(inputs, peer.prepare(case, inputs)(), run.to_numpy)


def test_every_peer_says_why_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    absent = {peer.name: f"{peer.framework} is not installed" for peer in registry.PEERS}
    assert registry.presence() == absent


def test_every_peer_takes_some_cases_and_says_why_not_others() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    said = {}
    for peer in registry.PEERS:
        every = {peer.declines(case) for case in catalogue.CASES.values() if isinstance(case, peer.kind)}
        assert None in every, peer.name
        said[peer.name] = every - {None}
    assert said["sdpa"] == {"does not take a quantised cache", "does not take sinks", "does not take soft_cap"}
    assert said["vllm-triton"] == {"page_size must be a multiple of 16"}
    assert said["fa3-mla"] == {"takes values of 512 and 64 columns beside them"}
    assert said["sdpa-flash"] == said["sdpa-cudnn"] == {"sequences must have one length here"}
    assert said["fa3-varlen"] == {"as vLLM ships it, it has no gradient"}
    assert said["jax-reference"] == {"does not take sinks", "has only the combined layout"}
    assert said["fa2"] == said["fa3-train"] == set()


CARRIED = """
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.triton_helper import FACTOR
from vllm.v1.kv_cache_interface import KVQuantMode
logger = init_logger(__name__)
assert not envs.BATCH_INVARIANT and triton.jit and tl.load and not KVQuantMode.NONE.is_per_token_head
kind = current_platform.fp8_dtype()
def unified_attention(q, k, v, out, window_size, kv_quant_mode, block_table):
    assert k.shape == v.shape and kv_quant_mode == 0 and block_table.min() >= 0
    out.copy_(q * FACTOR + window_size[0])
"""
# vLLM 0.33 added quantisation modes, reads the device's properties, and needs a scratch row per token of short queries.
CARRIED_0_33 = """
import torch
import vllm.envs as envs
from vllm.platforms import current_platform
from vllm.v1.attention.ops.triton_helper import FACTOR
from vllm.v1.kv_cache_interface import KVQuantMode
is_batch_invariant = envs.VLLM_BATCH_INVARIANT
float8_info = torch.finfo(current_platform.fp8_dtype())
def unified_attention(q, out, max_seqlen_q, window_size, softmax_segm_output, softmax_segm_max, softmax_segm_expsum,
                      rswa_window=None, kv_quant_mode: KVQuantMode = KVQuantMode.NONE, use_td=False):
    assert not kv_quant_mode == KVQuantMode.INT4_PER_TOKEN_HEAD
    assert kv_quant_mode not in (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD)
    assert kv_quant_mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR) and isinstance(kv_quant_mode, int)
    assert not (kv_quant_mode.is_nvfp4 or kv_quant_mode.is_turboquant or kv_quant_mode.is_per_token_head)
    assert not current_platform.is_device_capability_family(100) and not is_batch_invariant
    for scratch in (softmax_segm_output, softmax_segm_max, softmax_segm_expsum):
        assert max_seqlen_q > 8 or len(scratch) >= len(q)
    out.copy_(q * FACTOR + window_size[0])
"""


@pytest.mark.parametrize("source", [CARRIED, CARRIED_0_33], ids=["0.26", "0.33"])
@pytest.mark.parametrize("name", ["gpt_oss_window_64x4k_small", "speculative_4"])
def test_a_carried_triton_peer_is_imported_without_its_package(
    name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    (tmp_path / "triton_helper.py").write_text("FACTOR = 2\n")
    (tmp_path / "triton_unified_attention.py").write_text(source)
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    case = catalogue.find("gpt_oss_window_64x4k_small")
    if name != case.name:  # there are more tokens than sequences, and their keys are split
        case = dataclasses.replace(case, num_kv_heads=case.num_q_heads, q_lens=(4,) * 4, kv_lens=(40,) * 4)
    inputs = case.torch_inputs()
    try:
        out = registry._vllm_triton(case, inputs)()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
    assert torch.equal(out, inputs["q"] * 2 + ((case.sliding_window or 0) - 1))


def test_a_carried_peer_may_ask_for_any_mode() -> None:
    assert registry._Quantisation.NONE != registry._Quantisation.SOME_MODE
    assert not hasattr(registry._Quantisation, "some_mode")
    assert not hasattr(registry._Quantisation.NONE, "shape")


def test_flash_attention_3_gets_its_arguments_by_position() -> None:
    torch = pytest.importorskip("torch")
    schema = (
        "Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_q, int? max_k, "
        "Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? cos, Tensor? sin, Tensor? rotary, "
        "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float scale, bool causal, int left, int right, "
        "float softcap, bool interleaved, Tensor? metadata, int num_splits, bool? pack, int sm_margin, Tensor? sinks"
    )
    given: list[Any] = []

    def forward(*arguments: Any) -> list[Any]:
        given.extend(arguments)
        return [arguments[0] * 2]

    library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
    library.define(f"fwd({schema}) -> Tensor[]")
    library.impl("fwd", forward, "CPU")
    case = catalogue.find("gpt_oss_window_64x4k_small")
    inputs = case.torch_inputs()
    assert torch.equal(registry._fa3(case, inputs)(), inputs["q"] * 2)
    names = [part.split()[-1] for part in schema.split(", ")]
    named = dict(zip(names, given, strict=True))
    assert named["seqused_k"] is inputs["kv_lens"]
    assert named["max_k"] == max(case.kv_lens)
    assert (named["left"], named["right"], named["causal"]) == ((case.sliding_window or 0) - 1, 0, True)
    assert named["sinks"].dtype == torch.bfloat16
    assert named["page_table"].min() >= 0


# ---- replays


@pytest.mark.parametrize("name", ["decode_64x4k_small", "two_ranges_4k_small", *LATENT[:3]])
def test_a_replay_is_checked_on_other_lengths_or_lists_and_then_on_its_own(name: str) -> None:
    case = catalogue.find(name)
    inputs = case.numpy_inputs(2)
    (other, changed), (same, back) = case.changed()
    assert same == case
    for now, tables in ((other, changed), (same, back)):
        assert any(not np.array_equal(inputs[name], table) for name, table in tables.items())
        for key, table in tables.items():
            np.copyto(inputs[key], table)
        if isinstance(case, mla_cases.LatentCase):
            now.check(inputs, mla_decode(**inputs)[0], np.asarray)
        else:
            now.check(inputs, definition(**inputs, **case.formats), np.asarray)
    assert all(np.array_equal(inputs[key], table) for key, table in case.numpy_inputs(2).items()
               if key in back)  # fmt: skip
