"""The checks of machine code report planted hazards and accept code without hazards."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.compiled import chains, cuda_sass, flash_mla, hazards, sass
from ragged_attention.errors import BackendMissing

FREE = 7  # the code for "no barrier"


def control(stall: int = 1, sets: int = FREE, waits: Sequence[int] = ()) -> int:
    """The control bits of an instruction: its stall cycles, the barrier to set and the barriers to wait for."""
    return (stall | sets << 5 | FREE << 8 | sum(1 << barrier for barrier in waits) << 11) << sass.CONTROL


def listing(*lines: str | tuple[str, int]) -> list[sass.Instruction]:
    """The instructions of a listing; a line may give its control bits."""
    text = ""
    for number, line in enumerate(lines):
        code, bits = line if isinstance(line, tuple) else (line, control())
        text += f"        /*{number * 16:04x}*/                   {code} ;  /* 0x{0:016x} */\n"
        text += f"                                                          /* 0x{bits:016x} */\n"
    return sass.instructions_of(text)


ARRIVE = "WARPGROUP.ARRIVE"
LOGITS = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"  # registers 24 to 55
VALUES = "HGMMA.64x256x16.F32.BF16 R56, R8, gdesc[UR4], R56, gsb0"  # writes registers 56 to 183, reads 8 to 11
SETTLE = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


@pytest.mark.parametrize(
    "touch",
    ["FADD R55, R2, R3", "FADD R2, R24, R3", "LDS.128 R20, [R2]", "MOV R11, R2", "IMAD.WIDE R182, R2, R3, R4",
     "STG.E.64 desc[UR4][R2.64], R54"],
)  # fmt: skip
def test_registers_of_products_under_way_are_not_touched(touch: str) -> None:
    both = [ARRIVE, LOGITS, ARRIVE, VALUES]
    fault = listing(*both, "MOV R2, R3", touch, SETTLE)
    passes = listing(*both, "MOV R2, R3", SETTLE, touch)
    if touch.startswith("LDS"):
        assert hazards.found(listing(*both, "LDS.64 R20, [R2]", SETTLE)) == []
        fault = listing(*both, "LDS.128 R22, [R2]", SETTLE)
    name = sass.instructions_of(f"        /*0000*/                   {touch} ;")[0].name
    (found,) = hazards.found(fault)
    assert re.fullmatch(rf"{re.escape(name)} at 0x\w+ touches registers of a product in flight", found)
    assert hazards.found(passes) == []


def test_a_wait_settles_the_groups_before_it() -> None:
    begun = [ARRIVE, LOGITS, ARRIVE, VALUES]
    assert hazards.found(listing(*begun, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R30, R2")) == []
    assert len(hazards.found(listing(*begun, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R60, R2"))) == 1


def test_products_are_ordered_behind_writes() -> None:
    twice = LOGITS.replace(", gsb0", "")
    assert hazards.found(listing(ARRIVE, twice, LOGITS, SETTLE, ARRIVE, LOGITS, SETTLE)) == []
    assert hazards.found(listing(ARRIVE, LOGITS, SETTLE, LOGITS, SETTLE)) == [
        "HGMMA.64x64x16.F32.BF16 at 0x30 is not ordered after writes to shared memory"
    ]


def producer(*lines: str | tuple[str, int]) -> list[sass.Instruction]:
    """A producer's loop that waits for a barrier, runs `lines` and stores R4."""
    return listing("SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R2", *lines, "STS [R2], R4", "@P1 BRA 0x0", "EXIT")


LOADS = ("LDG.E R4, desc[UR4][R2.64]", "LDG.E R5, desc[UR4][R2.64+0x40]")
USE = "IMAD R6, R4, R5, R6"


def test_a_load_does_not_wait_for_a_load() -> None:
    first, second = ((load, control(sets=barrier)) for barrier, load in enumerate(LOADS))
    used = ((USE, control(waits=[0])), (USE, control(waits=[1])))
    assert hazards.found(producer(first, second, *used)) == []
    wrong = "1 loads of an iteration wait for the previous one, but should be in flight together"
    assert hazards.found(producer(first, used[0], second, used[1])) == [wrong]
    itself = (LOADS[1], control(sets=1, waits=[0]))
    assert hazards.found(producer(first, itself, *used)) == [wrong]


def test_a_load_that_was_issued_long_before_costs_nothing() -> None:
    first, second = ((load, control(sets=barrier)) for barrier, load in enumerate(LOADS))
    used = ((USE, control(waits=[0])), (USE, control(waits=[1])))
    meanwhile = [("MOV R8, R9", control(stall=15))] * (hazards.EXPOSED // 15 + 1)
    assert hazards.found(producer(first, *meanwhile, used[0], second, used[1])) == []
    # Each load follows its use, so the loop uses the value that the previous iteration loaded.
    assert hazards.found(producer(used[0], first, second, used[1])) == []


def test_what_is_found_fails_the_page() -> None:
    code = listing(ARRIVE, LOGITS, "MOV R30, R2", SETTLE)
    kernel = sass.Kernel("k", "Body", 168, 0, 0, 0, (72, 216), sass.count(code), (), tuple(code))
    assert "Body: MOV at 0x20 touches registers of a product in flight" in cuda_sass.failures([kernel], {})


def test_the_chain_is_read_round_the_loop() -> None:
    stalls = ((LOGITS, 9), (SETTLE, 2), (LOGITS, 9), (SETTLE, 3), ("FMUL R2, R2, R3", 5), ("MUFU.EX2 R2, R2", 7))
    lines = [ARRIVE, *((code, control(stall=stall)) for code, stall in (*stalls, (VALUES, 11))), SETTLE]
    for turn in range(len(lines)):
        assert chains.chain_of(listing(*lines[turn:], *lines[:turn])) == (15, 2, 0)
    assert chains.chain_of(listing(VALUES, SETTLE)) is None
    assert chains.chain_of(listing("MOV R2, R3")) is None


def test_what_a_branch_jumps_over_is_counted_by_itself() -> None:
    def lines(branch: str) -> list[sass.Instruction]:
        jumped = (("FMUL R2, R2, R3", 8), ("FMUL R3, R2, R3", 8))
        stalls = ((LOGITS, 1), (SETTLE, 2), (branch, 5), *jumped, ("MOV R2, R3", 4))
        return listing(*((code, control(stall=stall)) for code, stall in (*stalls, (VALUES, 1), (SETTLE, 1))))

    assert chains.chain_of(lines("@P1 BRA 0x50")) == (11, 1, 16)
    assert chains.chain_of(lines("BRA 0x50")) == (27, 1, 0)
    assert chains.chain_of(lines("@P1 BRA 0x200")) == (27, 1, 0)


def test_the_peer_s_lines_stay_where_it_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(cuda_sass, "DOCUMENT", page)
    assert cuda_sass.kept_peer() == [cuda_sass.NOT_READ]
    line = "| dense decode | FlashMLA `Traits<bf16, 576>` | consumer | 808 |\n"
    page.write_text(cuda_sass.document([], {}, "nvcc.", [line]))
    assert cuda_sass.kept_peer() == [line]
    monkeypatch.setattr(flash_mla, "library", lambda: tmp_path / "none.so")
    with pytest.raises(BackendMissing, match=r"expected FlashMLA's library at .*none\.so: python -m benchmarks\.peers"):
        cuda_sass.read_peer()
