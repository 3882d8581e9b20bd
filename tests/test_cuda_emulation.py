"""The code of the CUDA kernels agrees with the reference in the GPU emulation, in each of its modes.

In the default profile, each check of latent attention runs through torch in one of the modes, and a fourth of the
checks also run through jax. In the larger profiles all checks run through both frameworks in every mode.
tests/test_cuda_mutants.py tests that these checks catch faults.
"""

import itertools

import numpy as np
import pytest

from ragged_attention import kernels_cuda
from ragged_attention.testing import conformance, cuda_emulator, verdicts
from ragged_attention.testing.cuda_emulator import EmulatedRunner
from ragged_attention.testing.drawing import PROFILES, Check, examples_of
from ragged_attention.testing.mla import suite as mla_suite
from ragged_attention.testing.suite import memory

if reason := cuda_emulator.missing():
    pytest.skip(f"the emulation cannot be built: {reason}", allow_module_level=True)

RUNNERS = cuda_emulator.runners("cuda", None, "cpu")
DEV = examples_of() == PROFILES["dev"]
EXAMPLES = {"torch": examples_of() // 5, "jax": 1 if DEV else examples_of() // 20}
EVERY = {"torch": 3 if DEV else 1, "jax": 12 if DEV else 1}  # n, if each mode runs every n-th check
OTHERS = ("quantize", "dequantize", "write latents", "latents,", "slots")  # checks of operations without a CUDA kernel
CHECKS = [
    check
    for check in itertools.chain(mla_suite.corners(), mla_suite.agreement(), mla_suite.laws())
    if not check.name.startswith(OTHERS)
]


def judged(runner: EmulatedRunner, checks: list[Check]) -> int:
    """The number of batches that the kernels accepted, after an assertion that all results are right."""
    found = [verdicts.verdict_of(runner, check, EXAMPLES[runner.framework]) for check in checks]
    wrong = [f"{verdict.check}: {verdict.message}" for verdict in found if verdict.result == "FAILED"]
    assert not wrong, "\n".join(wrong)
    return sum(verdict.taken for verdict in found)


@pytest.mark.parametrize("kind", ["corner", "agreement", "law"])
@pytest.mark.parametrize("emulated", RUNNERS, ids=str)
def test_the_kernels_agree_with_the_definition(emulated: EmulatedRunner, kind: str) -> None:
    of_kind = [check for check in CHECKS if check.kind == kind]
    every = EVERY[emulated.framework]
    first = list(cuda_emulator.MODES).index(emulated.mode) if every > 1 else 0
    assert judged(emulated, of_kind[first::every])


@pytest.mark.parametrize(
    "some",
    [
        "prefill, 576",
        "prefill, fp8_v32",
        "dense, 576",
        "decode, fp8_v32",
        "decode, fp8_v41",
        "decode, fp4_v41",
        "decode schedule",
    ],
)
def test_every_operation_is_judged(some: str) -> None:
    """The kernels of each operation accept some batches, so no check passes only because all are declined."""
    assert judged(EmulatedRunner(framework="torch"), [check for check in CHECKS if some in check.name])


@pytest.mark.parametrize("emulated", RUNNERS[:: 2 if DEV else 1], ids=str)
def test_no_index_makes_them_touch_what_is_not_theirs(emulated: EmulatedRunner) -> None:
    (check,) = memory()
    assert check.run(emulated, EXAMPLES[emulated.framework])


@pytest.mark.parametrize("heads", [64, 8])
@pytest.mark.parametrize("num_keys", [1, 3, 70])
@pytest.mark.parametrize("exponent", [-60, -9, 122, 125])
def test_sums_of_fp8_rows_are_exact_whatever_their_scales(exponent: int, num_keys: int, heads: int) -> None:
    """Sums are exact whatever the scales of the rows.

    The kernels sum weights without their scales. Whatever the scales, the sums must stay within the range of float32.
    With scales of the usual size, an lse near 0 must keep its digits.
    """
    torch = pytest.importorskip("torch")
    from ragged_attention.torch import mla_decode

    rng = np.random.default_rng(0)
    codes = torch.from_numpy(rng.standard_normal((2, 64, 1, 512))).float().to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.from_numpy(2.0**exponent * rng.uniform(1, 2, (2, 64, 1, 4))).float().view(torch.uint8)
    cache = torch.cat([codes, scales, torch.zeros(2, 64, 1, 128, dtype=torch.uint8)], -1)
    q = torch.from_numpy(rng.standard_normal((1, 1, heads, 576)) * 2.0**-exponent / 12).bfloat16()
    indices = torch.from_numpy(rng.permutation(128)[:num_keys]).int()[None, None]
    with kernels_cuda.emulating():
        _, lse = mla_decode(q, cache, indices=indices, backend="cuda")
    _, want = mla_decode(q, cache, indices=indices, backend="reference")
    assert float((lse - want).abs().max()) < (1e-6 if exponent == -9 else 4e-6)


def test_the_command_judges_cuda_kernels_in_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--backend", "cuda", "--framework", "torch", "--only", "latent decode, dense, 576/512"]
    assert conformance.main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "No GPU is used: an emulation of sm_90 runs the kernels' own code" in printed
    for mode in cuda_emulator.MODES:
        assert f"torch-cuda, emulated, {mode} on cpu" in printed
    assert printed.count("1 passed, 0 declined, 0 FAILED") == 3


def test_only_cuda_on_a_cpu_is_emulated() -> None:
    assert cuda_emulator.runners("triton", None, "cpu") == []
    assert cuda_emulator.runners("cuda", None, "cuda") == []
    names = [str(runner) for runner in cuda_emulator.runners("cuda", "jax", None)]
    assert names == [f"jax-cuda, emulated, {mode}" for mode in ("eager", "late", "crossed")]
