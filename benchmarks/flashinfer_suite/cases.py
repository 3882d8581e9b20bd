"""A sample of FlashInfer's pytest cases, and what became of them."""

import collections
import hashlib
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.flashinfer_suite.substitute import OnCpu
from ragged_attention.errors import Unsupported

FILES = (
    "tests/attention/test_batch_decode_kernels.py",
    "tests/attention/test_batch_prefill_kernels.py",
    "tests/attention/test_single_prefill.py",
    "tests/attention/test_decode_prefill_lse.py",
    "tests/attention/test_shared_prefix_kernels.py",
    "tests/attention/test_sliding_window.py",
    "tests/attention/test_logits_cap.py",
    "tests/attention/test_tensor_cores_decode.py",
    "tests/attention/test_non_contiguous_decode.py",
    "tests/attention/test_non_contiguous_prefill.py",
    "tests/attention/test_decode_fp8_calibration_scale.py",
    "tests/attention/test_deepseek_mla.py",
    "tests/attention/test_fp8_prefill.py",
    "tests/attention/test_batch_invariant_fa2.py",
    "tests/attention/test_batch_prefill.py",
    "tests/attention/test_hopper_fp8_attention.py",
    "tests/attention/test_page.py",
    "tests/attention/test_mla_page.py",
    "tests/attention/test_alibi.py",
    "tests/utils/test_quantization.py",
    "tests/utils/test_topk.py",
    "tests/trace/test_append_paged_kv_cache_reference_correctness.py",
    "tests/trace/test_append_paged_mla_kv_cache_reference_correctness.py",
    "tests/trace/test_merge_state_reference_correctness.py",
    "tests/trace/test_merge_state_in_place_reference_correctness.py",
    "tests/trace/test_merge_states_reference_correctness.py",
    "tests/trace/test_mla_paged_decode_reference_correctness.py",
    "tests/trace/test_multi_level_cascade_run_reference_correctness.py",
    "tests/trace/test_single_decode_reference_correctness.py",
    "tests/trace/test_single_prefill_reference_correctness.py",
)
SIZES = ("batch_size", "num_qo_heads", "num_heads", "head_dim", "qo_len", "kv_len", "kv_len_2", "shared_kv_len",
         "unique_kv_len", "vocab_size", "seq_len", "num_rows", "max_len", "nnz_kv")  # fmt: skip

# Errors of a torch without CUDA: the case is about streams, graphs or several GPUs.
NEEDS_CUDA = ("Torch not compiled with CUDA", "requires CUDA support", "Expected a cuda device", "dummy base class")
# Tests that say nothing about results: they start processes with FlashInfer itself, or hold it to its own limits.
LEFT_OUT = {
    "test_single_decode_torch_compile_cuda_graph": "a process of FlashInfer's, for CUDA graphs",
    "test_single_prefill_torch_compile_cuda_graph": "a process of FlashInfer's, for CUDA graphs",
    "test_nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_cuda_graph_bad_scale": "a process of FlashInfer's",
    "test_batch_decode_rejects_unequal_kv_strides_nvfp4_contract": "a limit of a kernel of FlashInfer's",
    "test_fp8_kv_plan_rejects_fp16_q": "a limit of a kernel of FlashInfer's",
    "test_fp8_kv_requires_scales": "the words of FlashInfer's errors",
    "test_tensor_core_decode_rejects_mismatched_q_len": "the words of FlashInfer's errors",
}


class Sample:
    """A pytest plugin: keeps some small cases of each test, runs them on the CPU, counts outcomes.

    Args:
        cases: the number of cases per test.
        largest: the largest product of sizes among a case's parameters.
    """

    def __init__(self, cases: int, largest: float) -> None:
        self.cases, self.largest = cases, largest
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.reasons: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Keep a sample that is the same in every run."""
        by_test = collections.defaultdict(list)
        for item in items:
            if size_of(item) <= self.largest:
                by_test[item.nodeid.partition("[")[0]].append(item)
        items[:] = [
            item
            for group in by_test.values()
            for item in sorted(group, key=lambda each: hashlib.sha256(each.nodeid.encode()).digest())[: self.cases]
        ]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failures.append(f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        if reason := LEFT_OUT.get(item.originalname):
            pytest.skip(reason)
        with OnCpu():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        if call.when == "call" or (call.when == "setup" and report.outcome != "passed"):
            file = Path(str(item.path)).name
            outcome = report.outcome
            error = None if call.excinfo is None else call.excinfo.value
            text = (str(error).strip() or type(error).__name__).splitlines()[0][:150]
            if isinstance(error, Unsupported):
                outcome = "unsupported"
                self.reasons[text.partition(", got")[0]] += 1
            elif outcome == "failed" and any(words in text for words in NEEDS_CUDA):
                outcome = "skipped"
                self.reasons[f"skipped: {text}"] += 1
            elif outcome == "failed":
                self.failures.append(f"{item.nodeid}: {type(error).__name__}: {text}")
            elif outcome == "skipped":
                self.reasons[f"skipped: {text[:100]}"] += 1
            self.outcomes[file][outcome] += 1
        return report


def size_of(item: Any) -> float:
    """The product of the sizes among a case's parameters, which tells about how long it takes."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return math.prod(value for name, value in parameters.items() if name in SIZES and type(value) is int and value > 0)


def run(checkout: Path, only: str, cases: int, largest: float) -> Sample:
    """Run the sample of the files whose names contain `only`."""
    sample = Sample(cases, largest)
    files = [str(checkout / file) for file in FILES if only in file and (checkout / file).exists()]
    options = ["--noconftest", "--continue-on-collection-errors", f"--rootdir={checkout}", "-c", "/dev/null"]
    without = [f"-pno:{plugin}" for plugin in ("terminal", "cacheprovider", "xdist", "warnings")]
    if files:
        pytest.main([*options, *without, *files], plugins=[sample])
    return sample
