"""The whole suite on compiled Triton kernels in the PTX emulator, on every architecture.

It runs under the oldest and the newest Triton that we support. It takes hours, so `make test` runs
tests/test_ptx_calls.py instead. tests/test_ptx_hazards.py and `make ptx-faults` test the emulator itself.
"""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from ragged_attention.testing import ptx, ptx_runner
from ragged_attention.testing.runner import ANSWERED
from ragged_attention.testing.suite import checks

ROOT = Path(__file__).parent.parent
EARLIEST = ROOT / ".triton36"  # from `make .triton36`
TRITONS = {"newest": None, "earliest": str(EARLIEST)}
PIECE = 28  # the most checks in one test
# Checks that run a product with 16 keys and 4-bit values, at least on one architecture under one of the Tritons.
FEW_KEYS = [
    f"corner: {batch}"
    for batch in (
        "latent decode, fp4_v41",
        "latent decode, fp4_v41, page",
        "latent decode, extra cache fp4_v41 beside fp8_v41",
        "latent decode, extra cache fp4_v41 beside fp8_v41, page",
        "latent decode, extra cache fp8_v41 beside fp4_v41",
        "attention over scale pages, nvfp4, a long decode",
        "attention over scale pages, mxfp4, lists of blocks",
    )
]


def pieces_of(*kinds: str) -> list[list[str]]:
    """The names of the suite's checks of these kinds, in lists of at most PIECE that each mix different checks."""
    names = [str(check) for check in checks() if check.kind in kinds]
    count = -(-len(names) // PIECE)
    return [names[first::count] for first in range(count)]


def numbered(pieces: list[list[str]]) -> list[object]:
    return [pytest.param(piece, id=str(number)) for number, piece in enumerate(pieces)]


def expect_agreement(arch: str, names: list[str], triton: str | None = None, framework: str = "torch") -> None:
    if triton is not None and not Path(triton).is_dir():
        pytest.skip(
            f"the earliest Triton is missing: make {EARLIEST.name} installs it, as do make test-all and make test-shard"
        )
    wrong = []
    for verdict in ptx_runner.judged(arch, names, triton=triton, framework=framework):
        ANSWERED.update((operation, "ptx") for operation in verdict.answered)  # the checks ran in another process
        if verdict.result == "FAILED":
            wrong.append(f"{verdict.check}: {verdict.message}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("names", numbered(pieces_of("corner")))
@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("arch", ptx.ARCHITECTURES)
def test_named_batches(arch: str, triton: str, names: list[str]) -> None:
    expect_agreement(arch, names, TRITONS[triton])


@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_four_bits_in_steps_of_few_keys(arch: str, triton: str) -> None:
    """Products with few keys and 4-bit values are right.

    If single bytes were loaded, Triton 3.6 would assign more neighbouring keys to a thread than a block has.
    """
    expect_agreement(arch, FEW_KEYS, TRITONS[triton])


@pytest.mark.parametrize("names", numbered(pieces_of("agreement", "law", "memory")))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_drawn_batches_and_garbage(arch: str, names: list[str]) -> None:
    expect_agreement(arch, names)


@pytest.mark.parametrize("names", numbered(pieces_of("corner")))
def test_named_batches_from_jax(names: list[str]) -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    expect_agreement("sm_90", names, framework="jax")
