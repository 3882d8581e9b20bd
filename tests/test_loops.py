"""The estimated cycles of loops equal counts by hand, those of one compiled kernel, and the document's tables."""

from pathlib import Path

import pytest

from benchmarks import roofline
from benchmarks.cases import catalogue
from benchmarks.compiled import document
from benchmarks.compiled.sass import WARPWISE, cycles, instructions_of
from ragged_attention.tools.samples import device_of
from tests.processes import printed

ROOT = Path(__file__).parent.parent
HOPPER = device_of("torch", "sm_90")

CODE = """
        /*0000*/  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, !UPT ;
        /*0010*/  HGMMA.64x64x16.F32.BF16 R88, R4, gdesc[UR12], R88 ;
        /*0020*/  HMMA.16816.F32.BF16 R12, R4, R8, R12 ;
        /*0030*/  LDSM.16.M88.4 R4, [R0] ;
        /*0040*/  LDSM.16.M88 R4, [R0] ;
        /*0050*/  STS.128 [R0], R4 ;
        /*0060*/  LDGSTS.E.BYPASS.128 [R0], [R2.64] ;
        /*0070*/  LDS R4, [R0] ;
        /*0080*/  MUFU.EX2 R4, R4 ;
        /*0090*/  FMUL R4, R4, R5 ;
        /*00a0*/  NOP ;
"""


def test_cycles_by_hand() -> None:
    got = cycles(instructions_of(CODE), num_warps=8)
    products = 2 * (64 * 128 * 16 + 64 * 64 * 16) + 8 * 16 * 8 * 16 / WARPWISE
    assert got["matrices"] == pytest.approx(products / 2048)
    # The operands of two warpgroups (the first product reads both from shared memory), then the traffic of eight warps.
    assert got["shared memory"] == pytest.approx((2 * 2 * 16 * 256 + 8 * (512 + 128 + 512 + 512 + 128)) / 128)
    assert got["instructions"] == 10 * 8 / 4
    assert got["special functions"] == 8 * 32 / 16


def test_turns_by_hand() -> None:
    """A decode's loop has one iteration per block of keys. A prefill's masked blocks are counted separately."""
    case = catalogue.find("decode_64x4k")
    step = next(roofline.steps(case, "triton", HOPPER))
    assert step.turns == (64 * 8 * 4096 / 64, 0.0)
    case = catalogue.find("prefill_8k")
    (step,) = roofline.steps(case, "triton", HOPPER)
    whole, masked = step.turns
    # blocks of 32 tokens, and the blocks among them that see fewer than 1024 keys
    rows, careful = 8 * 1024 // 32, 1024 // 32
    edge = sum(-(-(32 * block + 32) // 64) for block in range(careful))
    edge += sum(-(-(32 * block + 32 - (32 * block + 1) // 128 * 128) // 64) for block in range(careful, rows))
    assert masked == pytest.approx(8 * edge)
    assert whole == pytest.approx(8 * sum((32 * block + 1) // 128 for block in range(careful, rows)))


def test_a_prediction_is_made() -> None:
    lines = printed("-m", "benchmarks.compiled.loops", "--jobs", "1", "--case", "mla_sparse_h16_b64").splitlines()
    (line,) = [line.split(" | ") for line in lines if "mla_sparse_h16_b64" in line]
    assert line in [text.split(" | ") for text in document.part("loops").splitlines()]
    assert float(line[6]) >= float(line[3]) >= float(line[2])
    assert float(line[8].split(" - ")[0]) >= float(line[6])  # with waits, at least the time of the busiest unit


def test_the_document_has_the_plans_of_today() -> None:
    written = [line.split(" | ")[1:4] for line in document.part("loops").splitlines() if line.startswith("| W")]
    plans = [plan for plan in roofline.plans(catalogue.CASES.values(), HOPPER) if plan.backend == "triton"]
    assert written == [[plan.case.name, f"{plan.floor * 1e6:.1f}", f"{plan.exact * 1e6:.1f}"] for plan in plans]


def test_the_document_has_the_launches_of_today() -> None:
    rows = [line.strip("| ").split(" | ") for line in document.part("loops").splitlines() if line.startswith("| W")]
    plans = [plan for plan in roofline.plans(catalogue.CASES.values(), HOPPER) if plan.backend == "triton"]
    want = [[plan.case.name, ", ".join(map(str, plan.launches)), f"{plan.skew:.1f}"] for plan in plans]
    assert [[row[1], *row[-2:]] for row in rows] == want


@pytest.mark.parametrize("part", ["loops", "pipelines", "peers"])
def test_every_part_of_the_document_is_written(part: str) -> None:
    lines = document.part(part).splitlines()
    assert len(lines) > 20
    assert len({line.count(" | ") for line in lines[2:]}) == 1


def test_a_part_is_replaced_alone() -> None:
    text = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n<!-- y -->\n<!-- end of y -->\n"
    new = document.written(text, "x", "new\n")
    assert new == text.replace("old\n", "\nnew\n\n")
    assert document.part("x", new) == "new"
    assert document.part("y", new) == ""
    with pytest.raises(ValueError, match=r"expected a part z in predictions\.md, got none"):
        document.written(text, "z", "new")
