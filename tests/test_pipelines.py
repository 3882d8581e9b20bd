"""Tests of the loop readers: against counts by hand, on planted loops, and on real kernels as compiled."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.compiled import gate, hopper, loops, sass, scoreboard, staging
from benchmarks.compiled.pipelines import Walk
from benchmarks.compiled.sass import Instruction
from benchmarks.roofline import model
from tests.processes import printed

ROOT = Path(__file__).parent.parent
NONE = 7  # the number that stands for no barrier


def line(text: str, stall: int = 1, sets: int = NONE, reads: int = NONE, waits: tuple[int, ...] = ()) -> str:
    """An instruction with its control bits, as cuobjdump lists it."""
    bits = stall | sets << 5 | reads << 8 | sum(1 << index for index in waits) << 11
    return f"        /*{{:04x}}*/  {text} ;  /* 0x{0:016x} */\n      /* 0x{bits << sass.CONTROL:016x} */\n"


def code(*lines: str) -> list[Instruction]:
    return sass.instructions_of("".join(text.format(16 * index) for index, text in enumerate(lines)))


COPY = line("LDGSTS.E.BYPASS.128 [R61], desc[UR14][R40.64]", 2, reads=1)
CLOSE = line("LDGDEPBAR", sets=0)
BARRIER = line("BAR.SYNC.DEFER_BLOCKING 0x0")
FETCH = line("LDSM.16.M88.4 R4, [R0]", sets=2)
PRODUCT = line("HMMA.16816.F32.BF16 R12, R4, R8, R12", 6, waits=(2,))
COMPUTE = (FETCH, *(PRODUCT,) * 40)


def wait(left: int) -> str:
    return line(f"DEPBAR.LE SB0, {left:#x}", 4)


# An iteration waits for the keys that the previous iteration requested at its end.
SINGLE = code(wait(0), BARRIER, *COMPUTE, BARRIER, COPY, COPY, CLOSE)
AHEAD = code(wait(1), BARRIER, *COMPUTE, COPY, COPY, CLOSE)  # requests keys two iterations ahead
FIRST = code(COPY, COPY, CLOSE, wait(1), BARRIER, *COMPUTE, BARRIER)  # requests the next block's keys before it waits


# ---- machine code


def test_the_bits_of_an_instruction() -> None:
    (read,) = code(line("LDSM.16.M88.4 R4, [R0]", 11, sets=2, reads=1, waits=(0, 3)))
    assert (read.name, read.operands) == ("LDSM.16.M88.4", "R4, [R0]")
    assert scoreboard.control_of(read.control or 0) == (11, 2, 1, (0, 3))
    (plain,) = sass.instructions_of("        /*0000*/  NOP ;\n")
    assert plain.control is None
    assert scoreboard.control_of(NONE << 5 | NONE << 8) == (1, None, None, ())


def test_a_loop_that_waits_for_what_it_has_just_asked_for() -> None:
    quick, slow = (scoreboard.turn(SINGLE, 4, latency) for latency in (0, 1000))
    assert scoreboard.copied(SINGLE, 4) == 2 * 512 * 4
    assert quick.least_wait == 0
    assert quick.in_flight == 2 * 512 * 4
    assert slow.cycles > 950 + 40 * 6  # the latency of memory, then the products


@pytest.mark.parametrize("lines", [AHEAD, FIRST], ids=["a turn ahead", "before the wait"])
def test_a_loop_that_asks_a_block_ahead(lines: list[Instruction]) -> None:
    quick, slow = (scoreboard.turn(lines, 4, latency) for latency in (0, 1000))
    assert quick.least_wait == 1
    assert quick.in_flight == 2 * 2 * 512 * 4
    assert slow.cycles < 1000  # the products of an iteration and the next copies fit under the latency


def test_what_a_unit_takes_is_waited_for() -> None:
    """An instruction waits until its unit is free.

    40 products take 6.3 cycles each, one after another. With twice as many warps, they take twice as long.
    """
    cycles = scoreboard.turn(code(*COMPUTE), 4, 1000).cycles
    assert 40 * 6.3 < cycles < 40 * 6.3 + 80
    assert scoreboard.turn(code(*COMPUTE), 8, 1000).cycles > 80 * 6.3


def test_products_of_warpgroups_are_settled_in_groups() -> None:
    product = line("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24, gsb0")
    rest = (line("FADD R1, R1, R1", 10),) * 10
    settled = scoreboard.turn(code(product, line("WARPGROUP.DEPBAR.LE gsb0, 0x0"), *rest), 4, 1000).cycles
    ahead = scoreboard.turn(code(product, line("WARPGROUP.DEPBAR.LE gsb0, 0x1"), *rest), 4, 1000).cycles
    assert settled > 64 + 100
    assert ahead == pytest.approx(100 + 2, abs=4)


def test_page_numbers_are_no_keys_and_answer_sooner() -> None:
    index = code(line("LDG.E R4, desc[UR16][R8.64]", sets=3), line("FADD R1, R4, R1", waits=(3,)))
    rows = code(line("LDG.E.128 R4, desc[UR16][R8.64]", sets=3), line("FADD R1, R4, R1", waits=(3,)))
    assert (scoreboard.copied(index, 4), scoreboard.copied(rows, 4)) == (0, 2048)
    times = [scoreboard.turn(lines, 4, 1000).cycles for lines in (index, rows)]
    assert times == [pytest.approx(scoreboard.L2_LATENCY, abs=10), pytest.approx(1000, abs=10)]


def test_conversions_keep_the_unit_for_special_functions_busy() -> None:
    busy = sass.cycles(code(line("F2F.BF16.F16 R1, R2"), line("F2FP.BF16.F32.PACK_AB R1, R2, R3")), 4)
    assert busy["special functions"] == 32 * 4 / 16


# ---- Triton's intermediate form

TTGIR = """
module {
  tt.func public @split(%arg0: !tt.ptr<bf16> {tt.divisibility = 16 : i32}) {
    %page = ttg.local_alloc : () -> !ttg.memdesc<2x64xi32, #shared1, #smem, mutable>
    %k = ttg.local_alloc : () -> !ttg.memdesc<STAGESx64x128xbf16, #shared, #smem, mutable>
    %v = ttg.local_alloc : () -> !ttg.memdesc<STAGESx64x128xbf16, #shared, #smem, mutable>
    %first = ttg.memdesc_index %v[%c0] : !ttg.memdesc<STAGESx64x128xbf16> -> !ttg.memdesc<64x128xbf16, mutable>
    %sum = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero, %kept = %first) -> (f32)  : i32 {
      %done = ttg.async_wait %token {num = WAIT : i32}
      %own = ttg.memdesc_index %k[%i] : !ttg.memdesc<STAGESx64x128xbf16> -> !ttg.memdesc<64x128xbf16, mutable>
      %products = tt.dot %q, %loaded, %acc : tensor<16x128xbf16> * tensor<128x64xbf16> -> tensor<16x64xf32>
      scf.yield %products, %kept : f32
    }
    %other = ttg.local_alloc : () -> !ttg.memdesc<3x32x128xi8, #shared, #smem, mutable>
    scf.while (%i = %c0) : (i32) -> i32 {
      %rows = ttg.memdesc_index %other[%i] : !ttg.memdesc<3x32x128xi8> -> !ttg.memdesc<32x128xi8, mutable>
      %logits:2 = ttng.warp_group_dot %q, %rows, %acc {inputPrecision = 0 : i32} : tensor<64x32xf32>
      %settled = ttng.warp_group_dot_wait %logits {pendings = 1 : i32} : tensor<64x32xf32>
      scf.yield %i : i32
    }
    scf.for %i = %c0 to %n step %c1  : i32 {
      tt.store %arg0, %i : !tt.ptr<bf16>
    }
    tt.return
  }
}
"""


@pytest.mark.parametrize(("stages", "left"), [(1, 0), (2, 3)])
def test_buffers_and_waits_of_each_loop(stages: int, left: int) -> None:
    first, second = staging.read(TTGIR.replace("STAGES", str(stages)).replace("WAIT", str(left)))
    assert list(map(str, first.buffers)) == [f"{stages} x 64x128 bf16"] * 2
    assert (first.stages, first.waits, first.settled) == (stages, (left,), ())
    assert list(map(str, second.buffers)) == ["3 x 32x128 i8"]
    assert (second.stages, second.waits, second.settled) == (3, (), (1,))


# ---- programs at once


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [(209, 72704, 4, 2), (150, 40000, 4, 3), (152, 56320, 4, 3), (80, 10000, 4, 6), (32, 0, 4, 16), (24, 0, 1, 32),
     (255, 200000, 8, 1), (168, 0, 8, 1), (128, 0, 8, 2), (40, 110000, 4, 2)],
)  # fmt: skip
def test_programs_at_once(registers: int, shared: int, warps: int, programs: int) -> None:
    assert hopper.programs_at_once(registers, shared, warps) == programs


def test_littles_law() -> None:
    assert hopper.in_flight_for(4.3e12, 1000) == pytest.approx(18615, abs=1)


def walk(**fields: object) -> Walk:
    """A loop of 1000 cycles, 100 of which keep a unit busy, with two blocks in flight and two resident programs."""
    found = Walk(
        kernel="split_kernel", loop=0, num_warps=4, num_stages=3, registers=128, spilled=0, shared=0, programs=2,
        buffers=(), stages=2, least_wait=2, copied=4096, in_flight=8192, chain=1000.0,
        turns=((0.0, 1000.0), (1000.0, 1000.0), (1500.0, 1200.0)), busy=(("matrices", 100.0), ("instructions", 60.0)),
    )  # fmt: skip
    return dataclasses.replace(found, **fields)  # type: ignore[arg-type]


def test_what_programs_at_once_can_reach() -> None:
    every = hopper.MULTIPROCESSORS * hopper.CLOCK
    assert walk().reachable(1000.0) == pytest.approx(2 * 4096 / 1000 * every)
    assert walk().reachable(1500.0) == pytest.approx(2 * 4096 / 1200 * every)
    assert walk().reachable(1000.0, 0.5) == pytest.approx(0.5 * 4096 / 1000 * every)
    assert walk(programs=20).reachable(1000.0) == pytest.approx(4096 / 100 * every)  # limited by the busiest unit


def test_a_kernel_ends_with_its_longest_program() -> None:
    even = model.Step("split_kernel", model.Work(), programs={(10.0,): 264})
    seconds = loops.seconds(even, [walk()], 1000.0)
    assert seconds == pytest.approx(10 * 1000 / hopper.CLOCK)
    skewed = model.Step("split_kernel", model.Work(), programs={(10.0,): 263, (500.0,): 1})
    assert loops.seconds(skewed, [walk()], 1000.0) == pytest.approx(500 * 1000 / hopper.CLOCK)
    few = model.Step("split_kernel", model.Work(), programs={(10.0,): 3})
    assert loops.seconds(few, [walk()], 1000.0) == pytest.approx(10 * 1000 / hopper.CLOCK)


# ---- the gate


def test_what_counts_as_ahead() -> None:
    assert walk().pipelined
    assert not walk(least_wait=0).pipelined
    assert not walk(least_wait=None).pipelined
    assert not walk(in_flight=4096).pipelined


def test_a_loop_must_be_known_or_ahead_and_no_longer_known_then() -> None:
    late, known = walk(least_wait=0), {("a", "split_kernel", 0)}
    assert gate.failures({"a": [walk()]}, set()) == []
    assert gate.failures({"a": [late]}, known) == []
    (wrong,) = gate.failures({"a": [walk(), dataclasses.replace(late, loop=1)]}, set())
    assert wrong.startswith("a, split_kernel, loop 1: wait 0, 2.0 blocks ahead; expected a wait above 0 and 2 blocks")
    (stale,) = gate.failures({"a": [walk()]}, known)
    assert stale == "a, split_kernel, loop 0: prefetches enough now; remove it from NOT_YET"
    (lost,) = gate.failures({"a": []}, known)
    assert lost == "a, split_kernel, loop 0: there is no such loop; remove it from NOT_YET"
    assert gate.failures({"a": [dataclasses.replace(late, kernel="tile_kernel")]}, set()) == []


def test_a_kernel_is_compiled_and_read(tmp_path: Path) -> None:
    """With fewer stages than in the heuristic's tile, a kernel has only one buffer and waits for it at once."""
    pytest.importorskip("triton")
    file = tmp_path / "loops.json"
    command = ("benchmarks.compiled.pipelines", "--cases", "decode_64x4k", "--kernels", "split_kernel", "--jobs", "1")
    lines = printed("-m", *command, "--tile", "split_num_stages=2", "--json", str(file))
    found = json.loads(file.read_text())
    assert lines.count("| decode_64x4k | split_kernel") == len(found) == 2
    for one in found:
        assert (one["stages"], one["least_wait"], one["num_stages"]) == (1, 0, 2)
        assert one["copied"] == one["in_flight"] == 2 * 64 * 128 * 2
        assert dict(map(tuple, one["turns"]))[1000.0] > one["chain"] + 500


def test_the_indexers_decoding_reaches_the_bandwidth() -> None:
    """The indexer's decode reaches at least 85 % of the bandwidth, with 8-bit and with 16-bit queries."""
    pytest.importorskip("triton")
    cases = ("indexer_decode_64x32k", "indexer_decode_bf16_queries")
    command = ("benchmarks.compiled.pipelines", "--cases", *cases, "--kernels", "walk_logits_kernel", "--jobs", "1")
    rows = [line.split("|") for line in printed("-m", *command).splitlines() if "walk_logits_kernel" in line]
    assert {row[1].strip() for row in rows} == set(cases)
    assert min(float(row[-2].split("-")[0]) for row in rows) >= 0.85 * model.H200.memory / 1e12


def test_decode_loops_keep_keys_ahead() -> None:
    """All decode loops prefetch keys, except those that the gate lists. Remove a fixed loop from the list."""
    pytest.importorskip("triton")
    printed("-m", "benchmarks.compiled.gate", "--jobs", "1")
