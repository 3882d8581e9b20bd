"""The measurements' own numbers: floors, inputs, gates, timings, and the plumbing of the device command."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import cases, device, gate, peers, run, timing
from ragged_attention.calls import NOWHERE
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention as definition

SMALL = ("mixed_2q2k_32q1s1k_small", "gpt_oss_window_64x4k_small", "fp8_64x4k_page64_small", "gemma2_prefill_4k_small")


def tiny(**fields: Any) -> cases.Case:
    plain = {"name": "tiny", "workload": "-", "q_lens": (1, 3), "kv_lens": (5, 4), "num_q_heads": 4, "num_kv_heads": 2}
    return cases.Case(**(plain | {"head_dim": 16, "page_size": 2} | fields))  # type: ignore[arg-type]


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


def test_the_larger_time_is_the_floor() -> None:
    case = tiny()
    assert case.floor_seconds(1.0, 1e12) == (case.needed_bytes(), "memory")
    assert case.floor_seconds(1e12, 1.0) == (case.flops(), "arithmetic")


def test_floors_of_the_named_workloads_on_an_h200() -> None:
    """The numbers that the targets are written in, at 4.3 TB/s and 700 TFLOP/s."""
    wanted = {
        "decode_64x4k": 250, "decode_1x32k": 31, "decode_1x128k": 125, "decode_8x32k": 250, "decode_70b_tp8_64x4k": 31,
        "prefill_2k": 49, "prefill_4k": 196, "prefill_8k": 785, "gpt_oss_window_64x4k": 4, "gpt_oss_full_64x4k": 125,
        "gemma2_32x4k": 250, "fp8_64x4k": 125,
    }  # fmt: skip
    for name, microseconds in wanted.items():
        assert cases.CASES[name].floor_seconds(4.3e12, 700e12)[0] * 1e6 == pytest.approx(microseconds, abs=0.6)


@pytest.mark.parametrize("name", [*cases.CASES, *cases.COMPILED_ONLY])
def test_every_case_is_lawful_whole_and_scaled_down(name: str) -> None:
    for case in (cases.find(name), cases.find(f"{name}_small")):
        for call in cases.calls_of(case, NOWHERE):
            assert call.argument_names()
        assert all(0 < q_len <= kv_len for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True))
    assert max(case.kv_lens) <= 77
    assert case.num_q_heads // case.num_kv_heads == cases.find(name).num_q_heads // cases.find(name).num_kv_heads


def test_an_unknown_case_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"expected a case among decode_64x4k, .*got 'nothing'"):
        cases.find("nothing")


def test_tables_use_each_page_once_and_leave_garbage_behind() -> None:
    case = tiny(kv_lens=(9, 4), q_lens=(1, 3))
    tables = cases.tables(case, 3)
    used = [page for seq, count in enumerate(case.pages_needed) for page in tables["page_indices"][seq, :count]]
    assert len(set(used)) == len(used) == 7
    assert all(0 <= page < case.num_pages for page in used)
    assert tables["cu_q_lens"].tolist() == [0, 1, 4]
    assert not np.array_equal(tables["page_indices"], cases.tables(case, 4)["page_indices"])


def pages_of(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("name", [*SMALL, "int8_mixed_small", "decode_64x4k_split_pages_small"])
def test_inputs_are_the_same_values_in_every_framework(name: str) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    del torch, jax
    from ragged_attention.jax.launcher import to_numpy as from_jax
    from ragged_attention.torch.launcher import to_numpy as from_torch

    case = cases.find(name)
    plain, ours, theirs = cases.numpy_inputs(case, 5), cases.torch_inputs(case, 5), cases.jax_inputs(case, 5)
    assert plain.keys() == ours.keys() == theirs.keys()
    for key, value in plain.items():
        if isinstance(value, np.ndarray | tuple):
            for one, two, three in zip(pages_of(value), pages_of(ours[key]), pages_of(theirs[key]), strict=True):
                assert np.array_equal(one, from_torch(two)), key
                assert np.array_equal(one, from_jax(three)), key
        else:
            assert value == ours[key] == theirs[key]


# ---- gate


@pytest.mark.parametrize("name", SMALL)
def test_the_gate_passes_the_definition_and_nothing_else(name: str) -> None:
    case = dataclasses.replace(cases.find(name), dtype="float32")
    inputs = cases.numpy_inputs(case, 1)
    out = definition(**inputs, cache_dtype=case.stored).astype(np.float32)
    gate.check(case, inputs, out, np.asarray)
    with pytest.raises(AssertionError, match=case.name):
        gate.check(case, inputs, out * 1.01, np.asarray)
    last = out.copy()
    last[-1, -1, -1] += 1
    with pytest.raises(AssertionError, match="rows"):
        gate.check(case, inputs, last, np.asarray)


# ---- timing


def test_a_ratio_is_taken_within_rounds() -> None:
    ours, theirs = timing.Timing((1.0, 2.0, 4.0)), timing.Timing((2.0, 4.0, 8.0))
    assert timing.ratio(ours, theirs) == 2.0
    assert timing.ratio(theirs, ours) == 0.5
    assert ours.median == 2.0
    assert timing.Timing((1.0, 1.0, 1.0, 1.0)).spread == 0.0


def test_every_candidate_runs_once_a_round() -> None:
    said: list[str] = []
    times = timing.on_cpu({"a": lambda: said.append("a"), "b": lambda: said.append("b")}, rounds=3, warm_up=1)
    assert "".join(said) == "ab" + "ab" * 3
    assert all(len(one.samples) == 3 for one in times.values())
    assert timing.host_seconds(lambda: None, calls=5) < 0.1


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


def test_bench_runs_from_jax(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    file = tmp_path / "out.json"
    arguments = ["decode_64x4k", "--framework", "jax", "--rounds", "2", "--length", "40", "--json", str(file)]
    assert run.main(arguments) == 0
    assert json.loads(file.read_text())[0]["who"] == "xla"


def test_no_speed_on_a_red_gate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    right = run.our_call
    monkeypatch.setattr(run, "our_call", lambda *arguments: lambda: right(*arguments)() * 1.5)
    machine = run.Machine("torch", False, "CPU")
    case = cases.find("decode_64x4k_small")
    (result,) = run.run_case(case, machine, ["eager"], with_peers=False, rounds=2)
    assert result.seconds is None
    assert result.why.startswith("gate: error ")
    assert run.is_red(result)
    assert run.main(["decode_64x4k", "--rounds", "2", "--length", "40"]) == 1
    assert "gate:" in capsys.readouterr().out


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert run.main(["nothing"]) == 2
    assert "expected a case among" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mixed_2q2k_32q1s1k_small", "gemma3_32x4k_small", "decode_64x4k_split_pages_small"])
def test_torchs_own_attention_is_a_fair_peer(name: str) -> None:
    """Peers get the case right, in float32, within the bounds that ours are held to."""
    pytest.importorskip("torch")
    case = dataclasses.replace(cases.find(name), dtype="float32")
    inputs = cases.torch_inputs(case, 2)
    (sdpa,) = (peer for peer in peers.PEERS if peer.name == "sdpa")
    gate.check(case, inputs, sdpa.prepare(case, inputs)(), run.to_numpy)


def test_jaxs_reference_is_a_fair_peer() -> None:
    pytest.importorskip("jax")
    case = dataclasses.replace(cases.find("mixed_2q2k_32q1s1k_small"), dtype="float32")
    inputs = cases.jax_inputs(case, 2)
    (peer,) = (peer for peer in peers.PEERS if peer.name == "jax-reference")
    assert peer.absent() is None
    import jax

    with jax.default_matmul_precision("float32"):
        gate.check(case, inputs, peer.prepare(case, inputs)(), run.to_numpy)


def test_every_peer_says_why_it_is_absent() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    for name, why in peers.presence().items():
        assert why is None or len(why) > 10, name
    for peer in peers.PEERS:
        for case in cases.CASES.values():
            assert peer.declines(case) is None or isinstance(peer.declines(case), str)


def test_a_carried_triton_peer_is_imported_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    (tmp_path / "triton_helper.py").write_text("FACTOR = 2\n")
    (tmp_path / "triton_unified_attention.py").write_text(
        "from vllm import envs\n"
        "from vllm.logger import init_logger\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.triton_utils import tl, triton\n"
        "from vllm.v1.attention.ops.triton_helper import FACTOR\n"
        "from vllm.v1.kv_cache_interface import KVQuantMode\n"
        "logger = init_logger(__name__)\n"
        "assert not envs.BATCH_INVARIANT and triton.jit and tl.load and not KVQuantMode.NONE.is_per_token_head\n"
        "kind = current_platform.fp8_dtype()\n"
        "def unified_attention(q, k, v, out, window_size, kv_quant_mode, block_table):\n"
        "    assert k.shape == v.shape and kv_quant_mode == 0 and block_table.min() >= 0\n"
        "    out.copy_(q * FACTOR + window_size[0])\n"
    )
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    case = cases.find("gpt_oss_window_64x4k_small")
    inputs = cases.torch_inputs(case)
    try:
        out = peers._vllm_triton(case, inputs)()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
    assert torch.equal(out, inputs["q"] * 2 + ((case.sliding_window or 0) - 1))


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
    case = cases.find("gpt_oss_window_64x4k_small")
    inputs = cases.torch_inputs(case)
    assert torch.equal(peers._fa3(case, inputs)(), inputs["q"] * 2)
    names = [part.split()[-1] for part in schema.split(", ")]
    told = dict(zip(names, given, strict=True))
    assert told["seqused_k"] is inputs["kv_lens"]
    assert told["max_k"] == max(case.kv_lens)
    assert (told["left"], told["right"], told["causal"]) == ((case.sliding_window or 0) - 1, 0, True)
    assert told["sinks"].dtype == torch.bfloat16
    assert told["page_table"].min() >= 0


# ---- device


def has_no_gpu() -> bool:
    return not device._has_gpu()


@pytest.mark.skipif("not has_no_gpu()", reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert device.main([]) == 2
    assert device.main(["--allow-no-gpu"]) == 0
    assert capsys.readouterr().out.splitlines() == ["no GPU: nothing to do"] * 2


def test_an_unknown_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        device.main(["--steps", "env,nothing"])
    assert "expected steps among env, conformance, checks, memcheck, bench, got nothing" in capsys.readouterr().err


def test_a_rehearsal_writes_both_reports_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    common = ["--rehearse", "--out", str(tmp_path)]
    assert device.main([*common, "--steps", "env,memcheck,bench"]) == 0
    (file,) = tmp_path.glob("*.json")
    report = json.loads(file.read_text())
    assert report["env"]["torch"] != "absent"
    assert report["memcheck"]["result"] == "cannot run"
    assert {row["who"] for rows in report["bench"].values() for row in rows} == {"eager"}
    page = file.with_suffix(".md").read_text()
    assert "## Environment" in page
    assert "decode_64x4k_small" in page

    def again(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("a case that is done was timed again")

    monkeypatch.setattr(device, "run_case", again)
    assert device.main([*common, "--steps", "checks,bench"]) == 0
    report = json.loads(file.read_text())
    assert report["env"]["torch"] != "absent"
    assert [check["passed"] for check in report["checks"]] == [True, True]


def test_a_failing_check_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchmarks import device_checks

    def wrong(case: Any, backend: str, where: str) -> None:
        raise AssertionError("expected a | b, got c")

    monkeypatch.setattr(device_checks, "ANYWHERE", (wrong,))
    assert device.main(["--rehearse", "--out", str(tmp_path), "--steps", "checks"]) == 1
    page = next(tmp_path.glob("*.md")).read_text()
    assert "FAILED: AssertionError: expected a / b, got c" in page
