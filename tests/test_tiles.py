"""GPU tiles, which the heuristics do not choose on a CPU, give the right results in Triton's interpreter."""

import dataclasses
import importlib
from typing import Any

import pytest

from benchmarks.cases import catalogue
from ragged_attention import dispatch
from ragged_attention.tools.samples import device_of

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

HALF = {"dtype": "float16"}  # float16 weights have one term, so tiles have unmasked blocks
# (case, its changes, a number of keys that gives each loop of a kernel some iterations, the GPU's architecture)
CASES: list[tuple[str, dict[str, Any], int, str]] = [
    ("prefill_4k", HALF, 300, "sm_90"),
    ("prefill_4k", {}, 200, "sm_90"),
    ("gpt_oss_prefill_4k", HALF, 300, "sm_90"),
    ("gemma2_prefill_4k", HALF | {"sliding_window": 100}, 200, "sm_90"),
    ("gemma4_global_prefill_4k", HALF, 130, "sm_90"),
    ("fp8_prefill_4k", {}, 150, "sm_90"),
    ("mha_128_4k", HALF, 300, "sm_90"),
    ("mla_dense_h128_128q2s4k", {}, 200, "sm_90"),
    ("mla_dense_h128_128q2s4k", {}, 200, "sm_80"),
    ("mla_dense_fp8_h128_128x4k", {}, 200, "sm_90"),
    ("mla_dense_fp8_h128_128x4k", {}, 200, "sm_86"),
    ("mla_sparse_h16_b8", {}, 300, "sm_90"),
    ("mla_sparse_h32_b8", {}, 300, "sm_90"),
    ("mla_sparse_v4_h64_128q2", {}, 200, "sm_90"),
    ("mla_sparse_v4_h64_128q2", {}, 200, "sm_80"),
    ("mla_sparse_v4_h16", {}, 200, "sm_90"),
    ("mla_sparse_v41_pages_h64", {}, 200, "sm_90"),
    ("mla_sparse_v41_h64_128q2", {}, 200, "sm_90"),
    ("mla_float16_fp8_h16", {}, 200, "sm_90"),
    ("mla_prefill_fp8_h128_32k", {}, 200, "sm_90"),
    ("mla_prefill_v4_h64_32k", {}, 200, "sm_90"),
    ("two_ranges_4k", HALF, 300, "sm_90"),
    ("mha_two_ranges_128", HALF, 300, "sm_80"),
    ("mla_ragged_two_ranges", {}, 200, "sm_90"),
    ("mla_ragged_two_ranges_fp8", {}, 200, "sm_80"),
]


@pytest.mark.parametrize(
    ("name", "changed", "length", "arch"),
    CASES,
    ids=["-".join([name, *map(str, changed.values()), arch]) for name, changed, _, arch in CASES],
)
def test_the_tiles_of_gpus_agree_with_the_definition(
    name: str, changed: dict[str, Any], length: int, arch: str
) -> None:
    whole = catalogue.find(name)
    call = whole.attention_call(device_of("torch", arch))
    fields = dataclasses.asdict(dispatch.load(call.OPERATION, "triton").heuristic(call))
    if "split_weights_below" in fields:
        fields["split_weights_below"] = min(fields["split_weights_below"], 120)
    case = dataclasses.replace(whole, **changed).scaled_down(length=length, sequences=2)
    inputs = case.torch_inputs()
    run = getattr(importlib.import_module("ragged_attention.torch"), case.operation)
    out = case.judged(run(**inputs, backend="triton", options=fields))
    case.check(inputs, out, importlib.import_module("ragged_attention.torch._launcher").to_numpy)


@pytest.mark.parametrize("name", ["mla_ragged_4k", "mla_sparse_bf16_h128_32q2", "mla_prefill_h16_32k"])
def test_rows_of_which_no_tile_fits_a_device_are_declined(name: str) -> None:
    case = catalogue.find(name)
    wide = dataclasses.replace(case, dtype="float32", d_qk=1024)

    def reason(case: Any, arch: str) -> str | None:
        call = case.attention_call(device_of("torch", arch))
        return dispatch.load(call.OPERATION, "triton").why_not(call)

    assert reason(case, "sm_86") is None
    assert reason(wide, "sm_80") is None
    assert (reason(wide, "sm_86") or "").endswith("got d_qk 1024 in float32, which take 132096 bytes")
