"""The recipe that runs FlashInfer's tests, on a fake checkout, because FlashInfer's is not part of the repository."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent
CASES = """
import pytest
import torch
import flashinfer
from flashinfer.utils import get_compute_capability
from tests.test_helpers.jit_utils import gen_decode_attention_modules

@pytest.fixture(autouse=True, scope="module")
def compiled():
    flashinfer.jit.build_jit_specs(gen_decode_attention_modules([torch.float16]))
    yield

@pytest.mark.parametrize("kv_len", [1, 7, 10**9])
def test_right(kv_len):
    assert get_compute_capability(torch.device("cuda:0")) == (9, 0)
    assert torch.zeros(1, device=0).is_cpu
    k = torch.randn(kv_len, 2, 64, device="cuda:0", generator=torch.Generator("cuda")).to(0)
    out = flashinfer.decode.single_decode_with_kv_cache(torch.randn(4, 64).cuda(), k, k)
    torch.cuda.synchronize()
    assert out.shape == (4, 64)

def test_wrong():
    assert flashinfer.page.get_seq_lens(torch.tensor([0, 2]), torch.tensor([3]), 4).tolist() == [8]

def test_absent(value: flashinfer.xqa | None = None):
    flashinfer.xqa(1)

def test_refused():
    q = torch.randn(4, 64)
    flashinfer.single_decode_with_kv_cache(q, q[None], q[None], pos_encoding_mode="ROPE_LLAMA")

def test_streams():
    torch.cuda.Stream()

def test_skipped():
    pytest.skip("for once")
"""


def test_outcomes_are_told_apart(tmp_path: Path) -> None:
    for folder in ("tests/attention", "tests/test_helpers", "flashinfer/trace"):
        (tmp_path / folder).mkdir(parents=True)
    for package in ("tests", "tests/attention", "tests/test_helpers", "flashinfer/trace"):
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "tests/attention/test_single_prefill.py").write_text(CASES)
    command = [sys.executable, "-m", "benchmarks.flashinfer_suite", "--only", "tests/", "--checkout", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert "| test_single_prefill.py | 2 | 2 | 2 | 1 |" in done.stdout, done.stdout
    assert "1 x compat.flashinfer has no xqa" in done.stdout
    assert "1 x expected pos_encoding_mode='NONE'" in done.stdout
    assert "1 x skipped: for once" in done.stdout
    assert "test_wrong: AssertionError" in done.stdout
