"""The CUDA kernels become the default where a run on a device has proven them, by its report and nothing else."""

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.mla import CASES
from benchmarks.device import proven
from ragged_attention.kernels_cuda import _latent, make_decode_schedule, mla_decode
from ragged_attention.samples import device_of

CASE = "mla_dense_h128_128x4k"
DEVICE = "NVIDIA H200"
REPORT: dict[str, Any] = {
    "device": DEVICE, "commit": "abc", "date": "2026-12-01",
    "conformance": {"torch-cuda": {"result": "passed"}, "torch-triton": {"result": "failed"}},
    "bench": {
        CASE: [{"who": "cuda", "seconds": 3e-4}, {"who": "triton", "seconds": 4e-4}],
        "decode_64x4k": [{"who": "triton", "seconds": 3e-4}],
        "no such case": [{"who": "cuda", "seconds": 1.0}, {"who": "triton", "seconds": 2.0}],
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(_latent, "PROVEN", tmp_path / "proven")
    _latent._proven.cache_clear()
    yield tmp_path / "proven"
    _latent._proven.cache_clear()


def call_on(device: str) -> Any:
    return CASES[CASE].attention_call(dataclasses.replace(device_of("torch", "sm_90"), name=device))


def test_what_a_report_proves_is_the_default_there(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    assert proven.main([str(tmp_path / "report.json"), "--folder", str(folder)]) == 0
    assert mla_decode.why_not_by_default(call_on(DEVICE)) is None
    assert mla_decode.why_not_by_default(call_on("NVIDIA H100 80GB HBM3")) == _latent.NOT_BY_DEFAULT
    other = dataclasses.replace(CASES[CASE], name="other", num_q_heads=8).attention_call(call_on(DEVICE).device)
    assert mla_decode.why_not_by_default(other) == _latent.NOT_BY_DEFAULT
    assert make_decode_schedule.why_not_by_default(call_on(DEVICE)) == _latent.NOT_BY_DEFAULT


def changed(path: tuple[Any, ...], value: object) -> dict[str, Any]:
    report = copy.deepcopy(REPORT)
    *inner, last = path
    found: Any = report
    for step in inner:
        found = found[step]
    found[last] = value
    return report


@pytest.mark.parametrize(
    "report",
    [
        changed(("conformance", "torch-cuda", "result"), "failed"),
        changed(("conformance", "jax-cuda"), {"result": "cannot run"}),
        changed(("conformance",), {}),
        changed(("bench", CASE, 0, "seconds"), 4e-4),
        changed(("bench", CASE, 0), {"who": "cuda", "why": "declined"}),
        changed(("bench",), {}),
    ],
    ids=["suite failed", "suite did not run", "no suite", "not faster", "no time", "no case"],
)
def test_what_a_report_does_not_prove(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert proven.main([str(tmp_path / "report.json"), "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("nothing is proven: expected the suite passed on cuda, and cases")


def test_a_slower_case_of_the_same_kind_speaks_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(proven.CASES, "again", dataclasses.replace(CASES[CASE], name="again"))
    slower = [{"who": "cuda", "seconds": 5e-4}, {"who": "triton", "seconds": 4e-4}]
    assert proven.proven(changed(("bench", "again"), slower)) == {}
    faster = [{"who": "cuda", "seconds": 3.5e-4}, {"who": "triton", "seconds": 4e-4}]
    ((entry,),) = (entries.values() for entries in proven.proven(changed(("bench", "again"), faster)).values())
    assert entry["case"] == "again"
