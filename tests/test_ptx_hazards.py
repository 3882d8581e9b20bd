"""Faults planted in small PTX texts are reported, and nothing is reported about the correct text."""

import re
from typing import Any

import numpy as np
import pytest

from ragged_attention.testing.ptx import Diverged, Misaligned, OutOfBounds, Race, Rounding
from ragged_attention.testing.ptx.machine import Fault, Outcome, launch
from ragged_attention.testing.ptx.memory import Memory
from ragged_attention.testing.ptx.operands import SHARED_BASE
from ragged_attention.testing.ptx.parsing import parse
from tests.ptx_texts import kernel_text, run_text, texts_of, without

THREADS = 256


def zeros(count: int = 1024) -> np.ndarray[Any, Any]:
    return np.zeros(count, np.uint32)


# Each thread has four bytes of shared memory at %r10 and four bytes of output at %d2. %r11 is the shared memory of a
# thread in another warp.
PLACES = """
    mul.wide.u32 %d1, %thread, 4;  add.s64 %d2, %p_out, %d1;  shl.b32 %r9, %thread, 2;  mov.b32 %r8, smem;
    add.s32 %r10, %r8, %r9;  xor.b32 %r7, %r9, 508;  add.s32 %r11, %r8, %r7;
"""


# ---- barriers

EXCHANGE = f"""{PLACES}
    st.shared.b32 [%r10], %thread;
    bar.sync 0;  // first
    ld.shared.b32 %r1, [%r11];
    bar.sync 0;  // second
    st.shared.b32 [%r10], %r1;
    bar.sync 0;  // third
    ld.shared.b32 %r2, [%r11];
    st.global.b32 [%d2], %r2;
"""


def exchange(body: str, **options: Any) -> tuple[Outcome, Any]:
    out = zeros(THREADS)
    return run_text(kernel_text(body, ["out"], THREADS), {"out": out}, shared=4 * THREADS, **options), out


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_barriers_order_what_warps_exchange(seed):
    outcome, out = exchange(EXCHANGE, seed=seed)
    assert not outcome.reports
    assert (out == np.arange(THREADS)).all()


@pytest.mark.parametrize(
    ("barrier", "report"),
    [
        ("first", "reads what another warp wrote, no barrier between"),
        ("second", "overwrites what another warp read, no barrier between"),
        ("third", "reads what another warp wrote, no barrier between"),
    ],
)
@pytest.mark.parametrize("seed", [None, 1])
def test_a_missing_barrier_is_reported_in_any_order(barrier, report, seed):
    assert report in texts_of(exchange(without(EXCHANGE, barrier), seed=seed)[0])


def test_a_barrier_of_the_warp_alone_is_not_enough():
    body = without(EXCHANGE, "first", "bar.warp.sync -1;")
    assert "reads what another warp wrote" in texts_of(exchange(body)[0])


def test_reports_name_the_line_and_count():
    body = ".loc 1 7 3\n" + without(EXCHANGE, "first")
    text = kernel_text(body, ["out"], THREADS) + '\n.file 1 "kernel.py"\n'
    outcome = run_text(text, {"out": zeros(THREADS)}, shared=4 * THREADS)
    line = next(n for n, one in enumerate(text.split("\n"), 1) if "ld.shared.b32 %r1" in one)
    (key, report), *_ = outcome.reports.items()
    assert key[0] == report.line == line
    assert report.source == "kernel.py:7"
    assert report.count == 1
    assert report.kind is Race
    assert report.thread == "CTA 0 thread 0"
    assert report.instruction == "ld.shared.b32 %r1, [%r11]"
    assert re.search(r"shared byte \d+, last written at line \d+; \d+ of 256 cells", report.text)
    assert line in outcome.lines


def test_two_warps_that_write_one_place():
    body = f"{PLACES}\nand.b32 %r1, %r9, 127;  add.s32 %r2, %r8, %r1;  st.shared.b32 [%r2], VALUE;"
    same = exchange(body.replace("VALUE", "7"))[0]
    assert not same.reports
    assert "two threads write different values" in texts_of(exchange(body.replace("VALUE", "%thread"))[0])


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("0f3F800000", "0f3F800001", Rounding),  # 1 and the next float32
        ("0f3F800000", "0f3F801000", Race),  # 1 and 1 + 2**-11
        ("0f3F800000", "0fBF800000", Race),
        ("0f3F800000", "0f7F800000", Race),
        ("0f3F800000", "0f7FC00000", Race),
        ("5000000", "5000001", Race),  # integers, not floats
    ],
)
@pytest.mark.parametrize("space", ["shared", "global"])
def test_values_that_differ_by_rounding_alone(space, one, other, kind):
    place = "%r2" if space == "shared" else "%p_out"
    body = f"""{PLACES}
        and.b32 %r1, %r9, 127;  add.s32 %r2, %r8, %r1;
        setp.lt.u32 %p1, %thread, 100;  mov.b32 %r3, {one};  mov.b32 %r4, {other};  selp.b32 %r3, %r3, %r4, %p1;
        st.{space}.b32 [{place}], %r3;
    """
    (report,) = exchange(body)[0].reports.values()
    assert report.kind is kind
    assert f"two threads write different values to one place of {space} memory" in report.text
    turns = f"""{PLACES}
        setp.lt.u32 %p1, %thread, 32;
        @%p1 st.shared.b32 [%r8], 1;
        bar.sync 0;  // between
        @!%p1 st.shared.b32 [%r8], 2;
    """
    assert not exchange(turns)[0].reports
    assert "overwrites what another warp wrote" in texts_of(exchange(without(turns, "between"))[0])


def test_what_nobody_wrote():
    outcome, out = exchange(f"{PLACES}\nld.shared.b32 %r1, [%r10];\nst.global.b32 [%d2], %r1;")
    assert "reads shared memory that nobody wrote" in texts_of(outcome)
    assert (out == 0xFFFFFFFF).all()
    body = "mul.wide.u32 %d1, %thread, 4;  add.s64 %d2, %p_a, %d1;  ld.global.b32 %r1, [%d2];"
    outcome = run_text(kernel_text(body, ["a"], 32), {"a": zeros(32)}, unwritten=["a"])
    assert re.search(r"reads what nobody wrote \(a\+0 of 128\)", texts_of(outcome))
    written = f"add.s64 %d3, %p_a, 0;  st.global.b32 [%d3], 1;  ld.global.b32 %r1, [%p_a];\n{body}"
    assert "a+4 of 128" in texts_of(run_text(kernel_text(written, ["a"], 32), {"a": zeros(32)}, unwritten=["a"]))


HALVES = """
    setp.lt.u32 %p1, %thread, 128;
    @%p1 bra FIRST;
    bar.sync 1, 128;
    bra.uni LAST;
    FIRST:
    bar.sync 2, 128;
    LAST:
    bar.sync 0;
"""


def test_deadlock():
    assert not exchange(HALVES)[0].reports
    with pytest.raises(Fault, match=r"line \d+: deadlock: 256 threads wait at barriers \(0, 1\)"):
        exchange(HALVES.replace("bar.sync 2, 128", "bar.sync 0").replace("bar.sync 1, 128", "bar.sync 1"))
    with pytest.raises(Fault, match=r"deadlock: 256 threads wait at barriers \(0, 1\)"):
        exchange(HALVES.replace("bar.sync 1, 128", "bar.sync 1, 160"))


def test_named_barriers_order_only_those_that_come():
    body = f"""{PLACES}
        setp.ge.u32 %p1, %thread, 128;
        st.shared.b32 [%r10], %thread;
        @%p1 bra OTHERS;
        bar.sync 1, 128;
        ld.shared.b32 %r1, [%r11];
        bra.uni END;
        OTHERS:
        ld.shared.b32 %r1, [%r11];
        END:
        st.global.b32 [%d2], %r1;
    """
    outcome, _ = exchange(body)
    assert len(outcome.reports) == 1  # the upper half reads without a barrier
    (line, text), *_ = outcome.reports
    assert "reads what another warp wrote" in text
    assert kernel_text(body, ["out"], THREADS).split("\n")[line - 2].strip() == "OTHERS:"


# The lower half of the threads writes and goes on; the upper half waits for it.
HANDED = f"""{PLACES}
    setp.ge.u32 %p1, %thread, 128;
    @%p1 bra TAKERS;
    st.shared.b32 [%r10], %thread;  // write
    bar.arrive 1, 256;  // arrive
    bra.uni END;
    TAKERS:
    bar.sync 1, 256;  // sync
    ld.shared.b32 %r1, [%r11+-512];
    st.global.b32 [%d2], %r1;
    END:
"""


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_arriving_without_waiting(seed):
    outcome, out = exchange(HANDED, seed=seed)
    assert not outcome.reports
    assert (out[128:] == np.arange(128) ^ 127).all()


@pytest.mark.parametrize(
    ("mark", "instead", "report"),
    [
        ("sync", "bar.sync 2, 128;", "reads what another warp wrote, no barrier between"),
        (
            "arrive",
            "bar.arrive 1, 256;\nst.shared.b32 [%r10], 0;",
            "overwrites what another warp|reads what another warp",
        ),
    ],
)
def test_what_an_arrival_does_not_order(mark, instead, report):
    assert any(re.search(report, texts_of(exchange(without(HANDED, mark, instead), seed=seed)[0])) for seed in range(4))


def test_barriers_whose_numbers_registers_hold():
    """One instruction, whose barrier number is in a register, gives each half of the threads its own barrier."""
    body = f"""{PLACES}
        shr.u32 %r4, %thread, 7;  add.s32 %r4, %r4, 3;  mov.b32 %r5, 128;
        st.shared.b32 [%r10], %thread;
        bar.sync %r4, %r5;  // barrier
        ld.shared.b32 %r1, [%r11];
        st.global.b32 [%d2], %r1;
    """
    for seed in (None, 1, 2):
        outcome, out = exchange(body, seed=seed)
        assert not outcome.reports
        assert (out == np.arange(THREADS) ^ 127).all()
    with pytest.raises(Fault, match=r"deadlock: 256 threads wait at barriers \(3, 4\)"):
        exchange(body.replace("mov.b32 %r5, 128", "mov.b32 %r5, 160"))
    for change in (("add.s32 %r4, %r4, 3", "add.s32 %r4, %r4, 15"), ("mov.b32 %r5, 128", "mov.b32 %r5, 100")):
        with pytest.raises(Fault, match="a barrier of number"):
            exchange(body.replace(*change))


def test_an_arrival_that_is_missing():
    with pytest.raises(Fault, match=r"deadlock: 128 threads wait at barriers \(1\) that nobody else comes to"):
        exchange(without(HANDED, "arrive"))


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        ("bar.sync 0;", "part of a warp executes an aligned barrier"),
        ("bar.arrive 1, 64;", "part of a warp executes an aligned barrier"),
        ("elect.sync _|%p2, -1;", "threads 0x0000ffff of a warp execute an instruction for 0xffffffff"),
        ("setmaxnreg.inc.sync.aligned.u32 64;", "part of a warp executes an aligned instruction"),
        ("barrier.sync.aligned 0;", "part of a warp executes an aligned barrier"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r8];", "part of a warp executes an aligned instruction"),
        (
            "shfl.sync.bfly.b32 %r1, %r9, 1, 31, -1;",
            "threads 0x0000ffff of a warp execute an instruction for 0xffffffff",
        ),
        ("vote.sync.any.pred %p2, %p1, -1;", "threads 0x0000ffff of a warp"),
        ("redux.sync.add.s32 %r1, %r9, -1;", "threads 0x0000ffff of a warp"),
        ("bar.warp.sync -1;", "threads 0x0000ffff of a warp"),
        ("trap;", "a trap, CTA 0 thread 0"),
    ],
)
def test_part_of_a_warp(instruction, text):
    body = f"{PLACES}\nsetp.ge.u32 %p1, %thread, 16;\n@%p1 bra OVER;\n{instruction}\nOVER:\nadd.s32 %r1, %r1, 1;"
    with pytest.raises(Fault if instruction == "trap;" else Diverged, match=rf"line \d+: {text}") as caught:
        exchange(body)
    assert caught.value.thread == "CTA 0 thread 0"
    if instruction.startswith(("shfl", "vote", "redux", "bar.warp", "elect")):
        assert not exchange(body.replace("-1", "65535"))[0].reports  # this mask has only the threads that execute it


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_threads_meet_where_the_text_goes_on_before_what_some_do(seed):
    """Threads at a barrier wait for threads of their warp that come from a block further down in the text."""
    body = f"""{PLACES}
        mov.b32 %r1, 0;
        and.b32 %r2, %thread, 3;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra BELOW;
        MEET:
        st.shared.b32 [%r10], %r1;
        bar.sync 0;
        ld.shared.b32 %r2, [%r11];
        st.global.b32 [%d2], %r2;
        ret;
        BELOW:
        add.s32 %r1, %r1, 1;
        setp.lt.u32 %p2, %r1, 3;
        @%p2 bra BELOW;
        bra.uni MEET;
    """
    outcome, out = exchange(body, seed=seed)
    assert not outcome.reports
    np.testing.assert_array_equal(out[:THREADS], np.where((np.arange(THREADS) ^ 127) % 4 == 0, 3, 0))


def test_registers_that_nobody_gave_back():
    """If 384 threads have 168 registers each, two warpgroups can take 232 only if the third goes down to 40."""
    body = """
        setp.lt.u32 %p1, %thread, 256;
        @%p1 bra MORE;
        setmaxnreg.dec.sync.aligned.u32 40;  // give
        bra.uni OVER;
        MORE:
        setmaxnreg.inc.sync.aligned.u32 232;
        OVER:
    """
    assert not run_text(kernel_text(body, [], 384), {}).reports
    with pytest.raises(Fault, match="a CTA requests 80896 registers by setmaxnreg, and has 64512"):
        run_text(kernel_text(without(body, "give"), [], 384), {})
    with pytest.raises(Fault, match="a CTA requests 64512 registers by setmaxnreg, and has 61440"):
        run_text(kernel_text(body, [], 384).replace(".reqntid 384", ".reqntid 384\n.maxnreg 160"), {})


def test_part_of_a_warpgroup_sets_its_registers():
    body = f"{PLACES}\nsetp.ge.u32 %p1, %thread, 64;\n@%p1 bra OVER;\nsetmaxnreg.dec.sync.aligned.u32 24;\nOVER:"
    with pytest.raises(Fault, match="part of a warpgroup executes setmaxnreg"):
        exchange(body)


def test_a_shuffle_from_a_thread_that_is_not_there():
    body = (
        f"{PLACES}\nsetp.ge.u32 %p1, %thread, 16;\n@%p1 bra OVER;\nshfl.sync.bfly.b32 %r1, %r9, 16, 31, 65535;\nOVER:"
    )
    assert "shuffles from a lane that does not take part" in texts_of(exchange(body)[0])


def test_a_fault_tells_what_was_reported_before():
    """If an index is read too early and causes an access out of bounds, the fault has a note about the early read."""
    body = f"""{PLACES}
        ld.shared.b32 %r1, [%r10];
        mul.wide.u32 %d3, %r1, 4;  add.s64 %d3, %p_out, %d3;  ld.global.b32 %r2, [%d3];
    """
    with pytest.raises(Fault, match="outside memory") as caught:
        exchange(body)
    assert "reads shared memory that nobody wrote" in caught.value.__notes__[0]


# ---- places


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (
            "ld.global.b32 %r1, [%p_out+1024];",
            r"read of 4 bytes outside memory: out\+1024 of 1024 \(256 threads\), CTA 0 thread 0",
        ),
        ("ld.global.b32 %r1, [%p_out+-4];", r"read of 4 bytes outside memory: out-4 of 1024"),
        ("st.global.b32 [%p_out+1024], %r1;", r"write of 4 bytes outside memory: out\+1024 of 1024"),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%p_out+1016];", "read of 16 bytes outside memory"),
        ("ld.global.b32 %r1, [%p_out+2];", r"read of 4 bytes unaligned: out\+2 of 1024"),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%p_out+8];", "read of 16 bytes unaligned"),
        ("atom.global.add.u32 %r1, [%p_out+1024], 1;", "atomic operation of 4 bytes outside memory"),
        ("mov.b64 %d3, 0;\nst.global.b32 [%d3], %r1;", "write of 4 bytes outside memory"),
        (
            "ld.shared.b32 %r1, [%r8+1024];",
            "an access outside shared memory: bytes 1024 to 1028 of 1024, CTA 0 thread 0",
        ),
        ("st.shared.b32 [%r8+-4], %r1;", "an access outside shared memory"),
        ("st.shared.b32 [%r8+2], %r1;", "an access of 4 bytes unaligned in shared memory"),
        ("ld.shared.v2.b32 {%r1, %r2}, [%r8+4];", "an access of 8 bytes unaligned in shared memory"),
        ("cp.async.cg.shared.global [%r8], [%p_out+1020], 16;", "copy of 16 bytes outside memory"),
        ("cp.async.ca.shared.global [%r8], [%p_out+4], 8;", "copy of 8 bytes unaligned"),
        ("cp.async.ca.shared.global [%r8+4], [%p_out], 8;", "an access of 8 bytes unaligned in shared memory"),
        ("cp.async.ca.shared.global [%r8], [%p_out], 4, 8;", "a copy of 8 bytes to 4"),
    ],
)
def test_accesses_outside_and_unaligned(instruction, text):
    with pytest.raises(Misaligned if "unaligned" in text else OutOfBounds if "outside" in text else Fault, match=text):
        exchange(f"{PLACES}\n{instruction}")


def test_faults_name_the_instruction_and_the_thread():
    body = f"{PLACES}\nsetp.eq.u32 %p1, %thread, 77;\n@%p1 ld.global.b32 %r1, [%p_out+1024];"
    with pytest.raises(OutOfBounds) as caught:
        exchange(body)
    assert caught.value.thread == "CTA 0 thread 77"
    assert caught.value.instruction == "ld.global.b32 %r1, [%p_out+1024]"
    assert str(caught.value).endswith("(1 threads), CTA 0 thread 77 [ld.global.b32 %r1, [%p_out+1024]]")


def test_threads_that_do_not_take_part_access_nothing():
    body = f"""{PLACES}
        setp.eq.u32 %p1, %thread, 999;
        @%p1 ld.global.b32 %r1, [%p_out+5000];
        @%p1 st.shared.b32 [%r8+5000], 1;
    """
    assert not exchange(body)[0].reports


# ---- CTAs


def over_two(body: str, **options: Any) -> Outcome:
    """The outcome of two CTAs, after a check that the order makes no difference to whether anything is reported.

    They run together and one after the other. %r1 is the CTA's number, and %d2 the address of its own four bytes.
    """
    setup = "mov.u32 %r1, %ctaid.x;  mul.wide.u32 %d1, %r1, 4;  add.s64 %d2, %p_out, %d1;\n"
    text = kernel_text(setup + body, ["out"], 32)
    together = run_text(text, {"out": zeros(32)}, grid=(2,), **options)
    apart = run_text(text, {"out": zeros(32)}, grid=(2,), lanes=32, **options)
    assert bool(together.reports) == bool(apart.reports)
    return apart


@pytest.mark.parametrize(
    ("body", "report"),
    [
        ("st.global.b32 [%p_out], %r1;", "two CTAs write different values to one place of global memory"),
        ("st.global.b32 [%d2], 1;\nld.global.b32 %r2, [%p_out];", "reads what another CTA of this launch wrote"),
        ("atom.global.add.u32 %r2, [%p_out], 1;\nld.global.b32 %r2, [%p_out];", "changes by atomic operations"),
        ("atom.global.add.u32 %r2, [%p_out], 1;\nst.global.b32 [%p_out], 1;", "changes by atomic operations"),
    ],
)
def test_two_ctas_at_one_place(body, report):
    assert report in texts_of(over_two(body))


@pytest.mark.parametrize(
    "body",
    [
        "st.global.b32 [%p_out], 7;",
        "st.global.b32 [%d2], %r1;\nld.global.b32 %r2, [%d2];",
        "ld.global.b32 %r2, [%p_out];",
        "red.global.add.u32 [%p_out], 1;\natom.global.max.u32 %r2, [%p_out], 1;",
    ],
)
def test_two_ctas_that_do_no_harm(body):
    assert not over_two(body).reports


def test_a_cta_that_writes_what_another_read():
    body = """
        mov.u32 %r1, %ctaid.x;  setp.eq.u32 %p1, %r1, 2;
        ld.global.b32 %r2, [%p_out];  @%p1 st.global.b32 [%p_out], 1;
    """
    outcome = run_text(kernel_text(body, ["out"], 32), {"out": zeros(32)}, grid=(3,))
    assert "writes what another CTA of this launch read" in texts_of(outcome)


def test_atomic_operations_and_plain_accesses_of_shared_memory():
    body = f"""{PLACES}
        st.shared.b32 [%r10], 0;
        bar.sync 0;  // made
        atom.shared.add.u32 %r1, [%r11], 1;
        atom.shared.add.u32 %r1, [%r10], 1;
        red.shared.add.u32 [%r11], 1;
        bar.sync 0;  // counted
        ld.shared.b32 %r2, [%r10];
        st.global.b32 [%d2], %r2;
    """
    outcome, out = exchange(body)
    assert not outcome.reports
    assert (out == 3).all()
    assert "changes what another warp wrote, no barrier between" in texts_of(exchange(without(body, "made"))[0])
    assert "reads what another warp wrote, no barrier between" in texts_of(exchange(without(body, "counted"))[0])
    unwritten = body.replace("st.shared.b32 [%r10], 0;", "")
    assert "changes shared memory that nobody wrote" in texts_of(exchange(unwritten)[0])


def test_memory_of_each_thread_that_it_did_not_write():
    body = f"{PLACES}\n.local .align 4 .b8 own[8];\nmov.b32 %r1, own;\nld.local.b32 %r2, [%r1];"
    assert "reads local memory that its thread did not write" in texts_of(exchange(body)[0])
    with pytest.raises(Fault, match="an access of 4 bytes outside local memory"):
        exchange(body.replace("[%r1]", "[%r1+8]"))


# CTA 0 writes a value for the others to out[1] and sets the flag out[0].
FLAG = """
    mov.u32 %r1, %ctaid.x;  setp.ne.u32 %p1, %r1, 0;
    @%p1 bra OTHERS;
    st.global.b32 [%p_out+4], 42;
    fence.acq_rel.gpu;  // before
    st.RELEASE.gpu.global.b32 [%p_out], 1;
    bra.uni END;
    OTHERS:
    ld.ACQUIRE.gpu.global.b32 %r2, [%p_out];
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra OTHERS;
    fence.acq_rel.gpu;  // after
    ld.global.b32 %r3, [%p_out+4];
    mul.wide.u32 %d1, %r1, 4;  add.s64 %d2, %p_out, %d1;  st.global.b32 [%d2+8], %r3;
    END:
"""


def flagged(release: str, acquire: str, fences: bool, **options: Any) -> Outcome:
    body = FLAG.replace("RELEASE", release).replace("ACQUIRE", acquire)
    body = body if fences else without(without(body, "before"), "after")
    out = zeros(6)
    outcome = run_text(kernel_text(body, ["out"], 32), {"out": out}, grid=(4,), **options)
    assert (out[3:] == 42).all()
    return outcome


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"seed": 2}])
def test_a_flag_orders_what_ctas_do(options):
    assert not flagged("release", "acquire", False, **options).reports
    assert not flagged("relaxed", "relaxed", True, **options).reports
    for release, acquire in (("relaxed", "acquire"), ("release", "relaxed"), ("relaxed", "relaxed")):
        report = texts_of(flagged(release, acquire, False, **options))
        assert "reads what another CTA of this launch wrote" in report


# Each CTA adds its number to out[1] by plain accesses, under a lock in out[0]. One thread takes the lock. After a
# barrier another thread adds, and after a second barrier the first thread releases the lock.
LOCKED = """
    mov.u32 %r1, %ctaid.x;  setp.eq.u32 %p1, %thread, 0;  setp.eq.u32 %p2, %thread, 40;  mov.b32 %r2, 1;
    TAKE:
    @%p1 atom.global.acq_rel.gpu.cas.b32 %r2, [%p_out], 0, 1;  // take
    setp.ne.and.b32 %p3, %r2, 0, %p1;
    @%p3 bra TAKE;
    bar.sync 0;  // taken
    @%p2 ld.global.b32 %r3, [%p_out+4];
    @%p2 add.s32 %r3, %r3, %r1;
    @%p2 st.global.b32 [%p_out+4], %r3;
    bar.sync 0;  // added
    @%p1 atom.global.acq_rel.gpu.exch.b32 %r4, [%p_out], 0;  // give
"""


def locked(body: str, **options: Any) -> tuple[Outcome, int]:
    out = zeros(2)
    outcome = run_text(kernel_text(body, ["out"], 64), {"out": out}, grid=(7,), **options)
    return outcome, int(out[1])


@pytest.mark.parametrize("options", [{}, {"lanes": 64}, {"lanes": 192}, {"seed": 1}, {"seed": 2}])
def test_a_lock_orders_what_ctas_do(options):
    outcome, total = locked(LOCKED, **options)
    assert not outcome.reports
    assert total == 21


@pytest.mark.parametrize(
    ("mark", "instead", "report"),
    [
        ("take", "mov.b32 %r2, 0;", "another CTA of this launch"),
        (
            "take",
            "@%p1 atom.global.relaxed.gpu.cas.b32 %r2, [%p_out], 0, 1;",
            "reads what another CTA of this launch wrote",
        ),
        (
            "give",
            "@%p1 atom.global.relaxed.gpu.exch.b32 %r4, [%p_out], 0;",
            "reads what another CTA of this launch wrote",
        ),
        ("taken", "", "another CTA of this launch"),
        ("added", "", "another CTA of this launch"),
    ],
)
def test_a_lock_that_does_not_hold(mark, instead, report):
    assert report in texts_of(locked(without(LOCKED, mark, instead))[0])


@pytest.mark.parametrize("seed", [None, 1])
def test_a_lock_that_nobody_gives_back(seed):
    with pytest.raises(Fault, match="deadlock: 6 threads wait in a loop: for other CTAs, which may not have begun"):
        locked(without(LOCKED, "give"), seed=seed)


# ---- asynchronous copies

# Two groups of copies. After each has arrived, a thread of another warp reads it.
COPIES = f"""{PLACES}
    mul.wide.u32 %d3, %thread, 4;  add.s64 %d4, %p_a, %d3;
    cp.async.ca.shared.global [%r10], [%d4], 4;
    cp.async.commit_group;  // commit
    cp.async.ca.shared.global [%r10+1024], [%d4+1024], 0x4, 4;
    cp.async.commit_group;
    cp.async.wait_group 1;  // one
    bar.sync 0;  // first
    ld.shared.b32 %r1, [%r11];
    cp.async.wait_group 0;  // none
    bar.sync 0;
    ld.shared.b32 %r2, [%r11+1024];
    add.s32 %r3, %r1, %r2;
    st.global.b32 [%d2], %r3;
"""


def copies(body: str) -> tuple[Outcome, Any]:
    a, out = np.arange(512, dtype=np.uint32), zeros(THREADS)
    text = kernel_text(body, ["a", "out"], THREADS)
    outcome = run_text(text, {"a": a, "out": out}, shared=2048)
    wanted = (a[:256] + a[256:])[np.arange(256) ^ 127]
    return outcome, (out == wanted).all()


def test_copies_that_are_waited_for():
    outcome, right = copies(COPIES)
    assert not outcome.reports
    assert right


@pytest.mark.parametrize(
    ("mark", "instead", "report"),
    [
        ("one", "", "reads shared memory before a copy to it was waited for"),
        ("one", "cp.async.wait_group 2;", "reads shared memory before a copy to it was waited for"),
        ("none", "", "reads shared memory before a copy to it was waited for"),
        ("none", "cp.async.wait_group 1;", "reads shared memory before a copy to it was waited for"),
        ("commit", "", "reads shared memory before a copy to it was waited for"),
        ("first", "", "reads what another warp wrote, no barrier between"),
        ("none", "", "the kernel ends before this copy was waited for"),
    ],
)
def test_copies_that_are_not_waited_for(mark, instead, report):
    outcome, right = copies(without(COPIES, mark, instead))
    assert report in texts_of(outcome)
    assert right == (mark == "first")  # without the barrier, the result happens to be right


@pytest.mark.parametrize(("hints", "policy"), [("", ""), (".L2::cache_hint.L2::256B", ", %d7")])
def test_copies_of_less_than_their_size_are_filled_up_with_zeros(hints, policy):
    body = f"""{PLACES}
        and.b32 %r1, %thread, 3;  mul.lo.s32 %r2, %r9, 4;  add.s32 %r3, %r8, %r2;
        mul.wide.u32 %d3, %thread, 16;  add.s64 %d4, %p_a, %d3;
        mul.lo.s32 %r4, %r1, 5;
        cp.async.cg.shared.global{hints} [%r3], [%d4], 16, %r4{policy};
        cp.async.wait_all;
        ld.shared.v4.b32 {{%r5, %r6, %r7, %r12}}, [%r3];
        add.s64 %d5, %p_out, %d3;  st.global.v4.b32 [%d5], {{%r5, %r6, %r7, %r12}};
    """
    a, out = np.full(4096, 7, np.uint8), np.zeros(4096, np.uint8)
    assert not run_text(kernel_text(body, ["a", "out"], THREADS), {"a": a, "out": out}, shared=4096).reports
    sizes = 5 * (np.arange(256) & 3)
    np.testing.assert_array_equal(out.reshape(256, 16), 7 * (np.arange(16) < sizes[:, None]))


def test_two_threads_that_copy_to_one_place():
    body = f"{PLACES}\nSETUP\nadd.s64 %d4, %p_out, %d1;\ncp.async.ca.shared.global [%r8], [%d4], 4;\ncp.async.wait_all;"
    assert not exchange(body.replace("SETUP", ""))[0].reports
    outcome = exchange(body.replace("SETUP", "st.global.b32 [%d2], %thread;"))[0]
    assert "two threads copy different values to one place" in texts_of(outcome)


def test_what_is_in_use_by_a_copy():
    issue = f"{PLACES}\nadd.s64 %d4, %p_out, %d1;\ncp.async.ca.shared.global [%r10], [%d4], 4;\n"
    end = "\ncp.async.wait_all;"
    outcome = exchange(f"{issue}st.shared.b32 [%r10], 1;{end}")[0]
    assert "writes shared memory before a copy to it was waited for" in texts_of(outcome)
    again = "cp.async.ca.shared.global [%r10], [%p_out+4], 4;"
    # Copying the same bytes again is allowed; copying other bytes is not.
    assert not exchange(f"{issue}{again}{end}")[0].reports
    different = issue.replace("cp.async", "st.global.b32 [%d2], %thread;\ncp.async")
    assert "copies to where another copy is in flight" in texts_of(exchange(f"{different}{again}{end}")[0])


# ---- products by warpgroups


def descriptor(offset: int) -> int:
    """The descriptor of a matrix of 16 columns without swizzle: 128-byte core matrices, columns 0 to 7 first."""
    return (SHARED_BASE + offset) >> 4 | (1024 >> 4) << 16 | (128 >> 4) << 32


SUMS = "{%r100, %r101, %r102, %r103}"
MULTIPLY = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {SUMS}, %d10, %d11, 0, 1, 1, 0, 0;"
FROM_REGISTERS = (
    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {SUMS}, {{%r110, %r111, %r112, %r113}}, %d11, 0, 1, 1, 0;"
)
# 128 threads write ones to shared memory, multiply [64, 16] by [16, 8], and store the sums, which are 16.
PRODUCT = f"""
    mul.wide.u32 %d1, %thread, 16;  add.s64 %d2, %p_out, %d1;  shl.b32 %r9, %thread, 4;  mov.b32 %r8, smem;
    add.s32 %r10, %r8, %r9;  mov.b32 %r1, 0x3F803F80;
    mov.b32 %r110, %r1;  mov.b32 %r111, %r1;  mov.b32 %r112, %r1;  mov.b32 %r113, %r1;
    st.shared.v4.b32 [%r10], {{%r1, %r1, %r1, %r1}};
    st.shared.v4.b32 [%r10+2048], {{%r1, %r1, %r1, %r1}};  // right
    fence.proxy.async.shared::cta;  // fence
    bar.sync 0;  // barrier
    mov.b64 %d10, {descriptor(0)};  mov.b64 %d11, {descriptor(2048)};
    wgmma.fence.sync.aligned;  // registers
    {MULTIPLY}  // multiply
    wgmma.commit_group.sync.aligned;  // commit
    nop_here
    wgmma.wait_group.sync.aligned 0;  // wait
    st.global.v4.b32 [%d2], {SUMS};  // store
""".replace("    nop_here\n", "    mov.b32 %r120, 0;  // middle\n")


def product(body: str, threads: int = 128) -> tuple[Outcome, bool]:
    out = np.zeros(4 * threads, np.float32)
    outcome = run_text(kernel_text(body, ["out"], threads), {"out": out}, shared=32 * threads)
    return outcome, bool((out == 16).all())


@pytest.mark.parametrize("multiply", [MULTIPLY, FROM_REGISTERS])
def test_products_that_are_waited_for(multiply):
    outcome, right = product(without(PRODUCT, "multiply", multiply))
    assert not outcome.reports
    assert right


def test_a_fence_behind_the_barrier_counts_too():
    body = without(without(PRODUCT, "fence"), "barrier", "bar.sync 0;\nfence.proxy.async;")
    outcome, right = product(body)
    assert not outcome.reports
    assert right


@pytest.mark.parametrize(
    ("mark", "instead", "report"),
    [
        ("fence", "", "a wgmma reads what was written without a proxy fence after it"),
        ("registers", "mov.b32 %r102, 0;", "a wgmma uses registers that were written without a wgmma.fence after it"),
        ("fence", "fence.proxy.async.global;", "a wgmma reads what was written without a proxy fence after it"),
        ("barrier", "", "a wgmma reads what another warp wrote, no barrier between"),
        ("right", "", "a wgmma reads what nobody wrote"),
        ("wait", "", "touches a register that a wgmma in flight writes"),
        ("wait", "wgmma.wait_group.sync.aligned 1;", "touches a register that a wgmma in flight writes"),
        ("wait", "", "the kernel ends before this wgmma was waited for"),
        ("commit", "", "touches a register that a wgmma in flight writes"),
        ("middle", "st.shared.b32 [%r10], 0;", "writes what a wgmma in flight reads"),
        ("middle", "mov.b32 %r101, 0;", "touches a register that a wgmma in flight writes"),
        ("middle", "add.f32 %r120, %r100, %r100;", "touches a register that a wgmma in flight writes"),
    ],
)
def test_products_that_are_disturbed(mark, instead, report):
    outcome, _ = product(without(PRODUCT, mark, instead))
    assert report in texts_of(outcome)


def test_what_is_written_between_a_fence_and_a_product():
    """Registers may be written after a fence, because the assembler moves the fence to the product.

    This does not hold if there is a branch between them.
    """
    text = "a wgmma uses registers that were written without a wgmma.fence after it"
    body = without(PRODUCT, "registers", "wgmma.fence.sync.aligned;  BRANCH\nmov.b32 %r102, 0;")
    assert not product(body.replace("BRANCH", ""))[0].reports
    branch = "setp.eq.u32 %p1, %thread, 1000;  @%p1 bra NEXT;  NEXT:"
    assert text in texts_of(product(body.replace("BRANCH", branch))[0])


def test_registers_that_a_product_in_flight_reads():
    body = without(PRODUCT, "multiply", FROM_REGISTERS)
    assert not product(without(body, "middle", "add.s32 %r120, %r110, 1;"))[0].reports  # a read is allowed
    outcome, _ = product(without(body, "middle", "mov.b32 %r112, 0;"))
    assert "overwrites a register that a wgmma in flight reads" in texts_of(outcome)
    outcome, _ = product(without(body, "registers"))
    assert "a wgmma uses registers that were written without a wgmma.fence after it" in texts_of(outcome)
    late = f"{body}\nmov.b32 %r112, 0;"
    assert not product(late)[0].reports
    chained = without(body, "middle", FROM_REGISTERS.replace("{%r100", "{%r130").replace("%r110", "%r100"))
    assert "a wgmma uses registers of another in flight" in texts_of(product(chained)[0])


def test_products_that_add_to_the_same_registers():
    again = MULTIPLY.replace("%d11, 0,", "%d11, 1,")
    body = without(PRODUCT, "middle", f"{again}\nwgmma.commit_group.sync.aligned;")
    out = np.zeros(512, np.float32)
    assert not run_text(kernel_text(body, ["out"], 128), {"out": out}, shared=4096).reports
    assert (out == 32).all()
    early = body.replace("wait_group.sync.aligned 0", "wait_group.sync.aligned 1")
    assert "touches a register that a wgmma in flight writes" in texts_of(product(early)[0])


def test_another_warpgroup_needs_its_own_order():
    """If two warpgroups multiply what the first warpgroup wrote, both need the barrier and the fence."""
    body = PRODUCT.replace("st.shared.v4", "@%p1 st.shared.v4").replace("bar.sync 0;", "bar.sync 0;  // all")
    body = f"setp.lt.u32 %p1, %thread, 128;\n{body}"
    outcome, right = product(body, 256)
    assert not outcome.reports
    assert right
    alone = body.replace("bar.sync 0;  // all", "@!%p1 bra OVER;\nbar.sync 1, 128;\nOVER:")
    assert "no barrier between" in texts_of(product(alone, 256)[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ((f"mov.b64 %d10, {descriptor(0)}", f"mov.b64 %d10, {descriptor(3072)}"), "wgmma outside shared memory"),
        (("wgmma.fence", "setp.lt.u32 %p1, %thread, 64;\n@%p1 bra LAST;\nwgmma.fence"), "part of a warpgroup executes"),
        (("wgmma.wait", "setp.lt.u32 %p1, %thread, 64;\n@%p1 bra LAST;\nwgmma.wait"), "part of a warpgroup waits"),
    ],
)
def test_products_that_cannot_be(change, text):
    with pytest.raises(Fault, match=text):
        product(PRODUCT.replace(*change) + "\nLAST:")


def test_a_copy_that_a_product_reads():
    """A wgmma may read the bytes of a cp.async after its wait, a fence and a barrier, but not without the wait."""
    copy = "cp.async.cg.shared.global [%r10+2048], [%d3], 16;\ncp.async.wait_all;"
    body = "mul.wide.u32 %d4, %thread, 16;  add.s64 %d3, %p_a, %d4;\n" + without(PRODUCT, "right", copy)
    arrays = {"a": np.full(512, 0x3F803F80, np.uint32), "out": np.zeros(512, np.float32)}
    assert not run_text(kernel_text(body, list(arrays), 128), arrays, shared=4096).reports
    assert (arrays["out"] == 16).all()
    outcome = run_text(kernel_text(body.replace("cp.async.wait_all;", ""), list(arrays), 128), arrays, shared=4096)
    assert "a wgmma reads before a copy was waited for" in texts_of(outcome)


def test_a_copy_that_arrives_at_an_mbarrier_and_that_a_product_reads():
    """A fence before a copy has arrived does not cover its bytes. The threads that waited for the copy need a fence."""
    copy = """
        setp.eq.u32 %p1, %thread, 0;
        @%p1 mbarrier.init.shared::cta.b64 [%r8+4096], 128;
        bar.sync 0;
        cp.async.cg.shared.global [%r10+2048], [%d3], 16;
        cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r8+4096];
    """
    wait = """
        bar.sync 0;
        WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r8+4096], 0;
        @!%p2 bra WAIT;
        fence.proxy.async.shared::cta;  // late
    """
    body = without(without(PRODUCT, "right", copy), "barrier", wait)
    body = "mul.wide.u32 %d4, %thread, 16;  add.s64 %d3, %p_a, %d4;\n" + body
    arrays = {"a": np.full(512, 0x3F803F80, np.uint32), "out": np.zeros(512, np.float32)}
    assert not run_text(kernel_text(body, list(arrays), 128), arrays, shared=8192).reports
    assert (arrays["out"] == 16).all()
    outcome = run_text(kernel_text(without(body, "late"), list(arrays), 128), arrays, shared=8192)
    assert texts_of(outcome).startswith("a wgmma reads what was written without a proxy fence after it")


def test_copies_that_arrive_and_are_waited_for_by_their_thread():
    """A thread may read its own copies after it has waited for them, even if they also arrive at an mbarrier."""
    body = f"""{PLACES}
        setp.eq.u32 %p1, %thread, 0;
        @%p1 mbarrier.init.shared::cta.b64 [%r8+1024], {THREADS};
        bar.sync 0;
        cp.async.ca.shared.global [%r10], [%d2], 4;
        cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r8+1024];
        setp.lt.u32 %p2, %thread, 32;
        @!%p2 bra OWN;
        WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r8+1024], 0;  // by the first warp
        @!%p3 bra WAIT;
        OWN:
        cp.async.wait_all;  // own
        ld.shared.b32 %r1, [%r10];
        add.s32 %r1, %r1, 1;  st.global.b32 [%d2], %r1;
    """
    out = zeros(THREADS)
    for text, right in ((body, True), (without(body, "own"), False)):
        outcome = run_text(kernel_text(text, ["out"], THREADS), {"out": out}, shared=2048)
        assert bool(outcome.reports) != right, texts_of(outcome)


# ---- a launch that begins before the previous one has ended

WRITER = "st.global.b32 [%p_a], 7;  ld.global.b32 %r1, [%p_b];"
WAIT = "griddepcontrol.wait;"


def after_a_writer(body: str, *, overlapping: bool = True) -> str:
    """The reports of a launch of `body` after a launch that writes `a` and reads `b`."""
    memory = Memory()
    addresses = {name: np.uint64(memory.add(np.zeros(64, np.uint8), name)) for name in "ab"}
    outcomes = []
    for text, later in ((WRITER, False), (body, overlapping)):
        memory.seal(overlapping=later)
        outcomes.append(launch(parse(kernel_text(text, ["a", "b"], 32)), memory, addresses, (1,), 32, 0))
        memory.back()
    assert not outcomes[0].reports
    return texts_of(outcomes[1])


@pytest.mark.parametrize(
    ("touch", "report"),
    [
        ("ld.global.b32 %r1, [%p_a];", "reads what the launch before writes, and did not wait for it"),
        ("st.global.b32 [%p_a], 8;", "writes what the launch before touches, and did not wait for it"),
        ("st.global.b32 [%p_b], 8;", "writes what the launch before touches, and did not wait for it"),
        ("red.global.add.u32 [%p_b], 8;", "writes what the launch before touches, and did not wait for it"),
        ("ld.global.b32 %r1, [%p_b];", ""),
        ("st.global.b32 [%p_a+4], 8;", ""),
    ],
)
def test_a_launch_waits_for_the_one_before(touch, report):
    reports = after_a_writer(touch)
    assert report in reports
    assert bool(report) == bool(reports)
    assert not after_a_writer(f"{WAIT}\n{touch}")
    assert not after_a_writer(touch, overlapping=False)
    almost_all = f"setp.lt.u32 %p1, %thread, 31;\n@%p1 {WAIT}\n"  # one thread does not wait
    assert after_a_writer(almost_all + touch) == reports


def test_loads_of_constants_meet_no_writes():
    report = "reads by ld.nc what this launch or the one before it writes"
    constant = "ld.global.nc.b32 %r1, [%p_a];"
    assert report in after_a_writer(f"{WAIT}\n{constant}")  # ld.nc may not read these bytes even after a wait
    assert not after_a_writer(constant, overlapping=False)
    assert report in after_a_writer(f"st.global.b32 [%p_a], 1;\n{constant}", overlapping=False)
    assert not after_a_writer(f"st.global.b32 [%p_a+4], 1;\n{constant}", overlapping=False)
