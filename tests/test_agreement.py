"""Every backend agrees with the reference, on named batches (one for each corner case) and on random batches."""

import pytest

from ragged_attention import dispatch
from ragged_attention.calls import CALLS
from ragged_attention.errors import BackendMissing
from ragged_attention.testing.drawing import Check
from ragged_attention.testing.runner import Absent, Runner, runner_for
from ragged_attention.testing.suite import agreement, corners

# The fraction of the random batches that slow runners run. They are slow because they compile or interpret each batch.
PACE = {"jax-xla": 0.12, "torch-triton": 0.12, "jax-triton": 0.12, "jax-reference": 0.4}


@pytest.mark.parametrize("check", list(corners()), ids=str)
def test_corner(runner: Runner, check: Check) -> None:
    try:
        check.run(runner, 1)
    except Absent as lack:
        pytest.skip(str(lack))


@pytest.mark.parametrize("check", list(agreement()), ids=str)
def test_agreement(runner: Runner, check: Check, examples: int) -> None:
    try:
        check.run(runner, max(3, int(examples * PACE.get(str(runner), 1.0))))
    except Absent as lack:
        pytest.skip(str(lack))


def test_backends_have_all_operations_but_these(runner: Runner) -> None:
    """Each backend lacks exactly the listed operations, so an operation that disappears by mistake is noticed."""
    lacking = {operation for operation in CALLS if not _has(runner.backend, operation)}
    known = {
        "triton": {"dequantize_mla_cache", "page_indices_to_slots", "quantize_kv", "dequantize_kv"},
        "numba": {"make_decode_schedule", "quantize_kv", "dequantize_kv"},
    }
    assert lacking == known.get(runner.backend, set())
    splits = {operation for operation in CALLS if "num_splits" in runner.tunables(operation)}
    attending = {name for name, record in CALLS.items() if record.ATTENDS}
    choosing = {"indexer_topk", "top_k_indices", "select_blocks", "top_k_blocks"}
    over_keys = {"varlen_attention", "ragged_paged_attention", "paged_attention", "prefill_attention"}
    known = {"triton": attending - {"varlen_attention"} | choosing, "numba": attending - over_keys}
    assert splits == known.get(runner.backend, set())
    segmented = {operation for operation in CALLS if "segment_kv" in runner.tunables(operation)}
    assert segmented == (over_keys if runner.backend in known else set())


def _has(backend: str, operation: str) -> bool:
    try:
        dispatch.load(operation, backend)
    except BackendMissing:
        return False
    return True


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("backend", dispatch.PACKAGES)
def test_a_backend_runs_here_or_says_why(backend: str, framework: str) -> None:
    reason = runner_for(backend, framework).absent()
    if reason is not None:
        assert len(reason) > 10
        pytest.skip(reason)
