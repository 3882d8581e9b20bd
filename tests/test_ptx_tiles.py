"""mbarriers, bulk copies and tensor maps follow the PTX ISA, and faults planted in their use are reported."""

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ragged_attention.testing.ptx.launcher import Tiles
from ragged_attention.testing.ptx.machine import Fault, Outcome, Unknown
from ragged_attention.testing.ptx.tensor_maps import TensorMap
from tests.ptx_texts import kernel_text, run_text, texts_of, without

THREADS = 128
HALF, FLOAT = 6, 7  # the element types f16 and f32
SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}  # swizzle modes, by the bytes of a row
BARRIER = 16384  # the byte offset of the first mbarrier in shared memory, after the tiles


def run(body: str, arrays: Mapping[str, NDArray[Any]], maps: Any = None, shared: int = BARRIER + 64, **options: Any):
    text = kernel_text(body, list(arrays), THREADS, list(maps or ()))
    return run_text(text, arrays, shared=shared, maps=maps, **options)


def map_of(array: NDArray[Any], box: tuple[int, ...], swizzle: int = 0, **fields: Any) -> TensorMap:
    """The map of a whole array. `box` has the outermost dimension first, like the array's shape."""
    width = array.itemsize
    return TensorMap(
        address=0,
        dims=array.shape[::-1],
        strides=tuple(step for step in array.strides[-2::-1]) if array.ndim > 1 else (),
        box=box[::-1],
        elemtype={2: HALF, 4: FLOAT}[width],
        swizzle=swizzle,
        **fields,
    )


def tile_of(array: NDArray[Any], corner: tuple[int, ...], box: tuple[int, ...], outside: float) -> NDArray[Any]:
    """The box at a corner, copied element by element. Elements outside the array get the value `outside`."""
    tile = np.full(box, outside, array.dtype)
    for index in np.ndindex(*box):
        place = tuple(c + i for c, i in zip(corner, index, strict=True))
        if all(0 <= p < n for p, n in zip(place, array.shape, strict=True)):
            tile[index] = array[place]
    return tile


def laid_out(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """Rows [n, bytes] as they lie in shared memory under a swizzle of their width, which moves chunks by the row."""
    count, span = rows.shape
    image = np.zeros((count, span), np.uint8)
    for row in range(count):
        step = {16: 0, 32: row // 4 % 2, 64: row // 2 % 4, 128: row % 8}[span]
        for chunk in range(span // 16):
            image[row, 16 * (chunk ^ step) : 16 * (chunk ^ step) + 16] = rows[row, 16 * chunk : 16 * chunk + 16]
    return image.ravel()


# ---- one tile, loaded and stored

# %r8 is the tile and %r9 the mbarrier. Thread 0 copies, and all threads wait.
LOAD = """
    setp.eq.u32 %p1, %thread, 0;  mov.b32 %r8, smem;  add.s32 %r9, %r8, 16384;
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 1;  // init
    bar.sync 0;  // made
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], BYTES;  // expect
    @%p1 cp.async.bulk.tensor.DIM.shared::cta.global.mbarrier::complete_tx::bytes [%r8], [%p_map, {CORNER}], [%r9];
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 0;  // wait
    @!%p2 bra WAIT;  // again
"""
# Store the tile to `out` as it lies in shared memory, four bytes per thread at a time.
SHOW = """
    shl.b32 %r10, %thread, 2;  add.s32 %r11, %r8, %r10;  cvt.u64.u32 %d1, %r10;  add.s64 %d2, %p_out, %d1;
    mov.b32 %r12, 0;
    MORE:
    add.s32 %r13, %r12, %r10;  setp.lt.u32 %p3, %r13, BYTES;
    @%p3 ld.shared.b32 %r1, [%r11];
    @%p3 st.global.b32 [%d2], %r1;
    add.s32 %r11, %r11, 512;  add.s64 %d2, %d2, 512;  add.s32 %r12, %r12, 512;
    setp.lt.u32 %p6, %r12, BYTES;
    @%p6 bra MORE;
"""


def filled(body: str, one: TensorMap, corner: tuple[int, ...]) -> str:
    coordinates = ", ".join(map(str, corner[::-1]))
    return body.replace("BYTES", str(one.bytes)).replace("DIM", f"{len(one.dims)}d").replace("CORNER", coordinates)


def loaded(array: NDArray[Any], one: TensorMap, corner: tuple[int, ...], body: str = LOAD + SHOW) -> Any:
    """Load a tile: (outcome, the bytes of the tile in shared memory)."""
    out = np.zeros(one.bytes, np.uint8)
    return run(filled(body, one, corner), {"a": array, "out": out}, {"map": ("a", one)}), out


def numbered(*shape: int, dtype: Any = np.float16) -> NDArray[Any]:
    return (np.arange(np.prod(shape)) % 2000 + 1).reshape(shape).astype(dtype)


@pytest.mark.parametrize("corner", [(0, 0), (8, 8), (-3, 0), (0, -8), (30, 24), (35, 56), (-20, -80), (3, 5), (38, 61)])
@pytest.mark.parametrize("span", [16, 32, 64, 128])
def test_a_tile_is_copied_and_what_lies_outside_is_zero(corner, span):
    array, box = numbered(40, 64), (16, span // 2)
    outcome, found = loaded(array, map_of(array, box, SWIZZLES[span]), corner)
    assert not outcome.reports
    wanted = laid_out(tile_of(array, corner, box, 0).view(np.uint8))
    np.testing.assert_array_equal(found, wanted)


def test_what_lies_outside_may_be_nan():
    array = numbered(20, 32, dtype=np.float32)
    _, found = loaded(array, map_of(array, (16, 32), 3, nan=True), (10, 20))
    values = np.sort(found.view(np.float32))
    wanted = tile_of(array, (10, 20), (16, 32), np.nan)
    np.testing.assert_array_equal(values, np.sort(wanted.ravel()))


@pytest.mark.parametrize(
    ("shape", "box", "corner"),
    [((1000,), (256,), (900,)), ((5, 6, 64), (2, 4, 64), (3, 4, 8)), ((3, 4, 5, 32), (2, 2, 2, 32), (2, -1, 4, 0))],
)
def test_tiles_of_other_dimensions_without_swizzle(shape, box, corner):
    array = numbered(*shape)
    outcome, found = loaded(array, map_of(array, box), corner)
    assert not outcome.reports
    np.testing.assert_array_equal(found.view(np.float16), tile_of(array, corner, box, 0).ravel())


def test_a_tile_of_a_part_of_an_array():
    """A map may begin inside an array, and its rows may be further apart than they are long."""
    whole = numbered(40, 128)
    part = whole[4:20, 32:72]
    one = dataclasses.replace(map_of(part, (8, 64), 3), address=4 * 256 + 64)
    _, found = loaded(whole, one, (3, 0))
    np.testing.assert_array_equal(found, laid_out(tile_of(part, (3, 0), (8, 64), 0).view(np.uint8)))


# Threads write the tile, already laid out, to shared memory, and one of them copies it to global memory.
STORE = """
    setp.eq.u32 %p1, %thread, 0;  mov.b32 %r8, smem;
    shl.b32 %r10, %thread, 2;  add.s32 %r11, %r8, %r10;  cvt.u64.u32 %d1, %r10;  add.s64 %d2, %p_tile, %d1;
    mov.b32 %r12, 0;
    MORE:
    add.s32 %r13, %r12, %r10;  setp.lt.u32 %p3, %r13, BYTES;
    @%p3 ld.global.b32 %r1, [%d2];
    @%p3 st.shared.b32 [%r11], %r1;
    add.s32 %r11, %r11, 512;  add.s64 %d2, %d2, 512;  add.s32 %r12, %r12, 512;
    setp.lt.u32 %p6, %r12, BYTES;
    @%p6 bra MORE;
    fence.proxy.async.shared::cta;  // fence
    bar.sync 0;  // barrier
    @%p1 cp.async.bulk.tensor.DIM.global.shared::cta.bulk_group [%p_map, {CORNER}], [%r8];
    cp.async.bulk.commit_group;  // commit
    cp.async.bulk.wait_group.read 0;  // wait
"""


def stored(one: TensorMap, corner: tuple[int, ...], array: NDArray[Any], body: str = STORE) -> tuple[Outcome, Any]:
    """Store a tile: (outcome, the values that the box must have)."""
    box = one.box[::-1]
    values = -numbered(*box)
    tile = laid_out(values.view(np.uint8)) if one.swizzle else values.ravel().view(np.uint8)
    outcome = run(filled(body, one, corner), {"a": array, "tile": tile}, {"map": ("a", one)})
    return outcome, values


@pytest.mark.parametrize("corner", [(0, 0), (-3, 0), (0, -8), (30, 24), (35, 61), (-20, -80)])
@pytest.mark.parametrize("span", [16, 32, 64, 128])
def test_a_tile_is_stored_and_what_lies_outside_is_dropped(corner, span):
    array, before, box = numbered(40, 64), numbered(40, 64), (16, span // 2)
    outcome, values = stored(map_of(array, box, SWIZZLES[span]), corner, array)
    assert not outcome.reports
    for index in np.ndindex(*box):
        place = tuple(c + i for c, i in zip(corner, index, strict=True))
        if all(0 <= p < n for p, n in zip(place, array.shape, strict=True)):
            before[place] = values[index]
    np.testing.assert_array_equal(array, before)


def test_tiles_that_are_added_to_what_is_there():
    """Two CTAs add their tiles to the same elements, and both sums count."""
    array, before, box, corner = numbered(40, 64), numbered(40, 64), (16, 64), (30, 8)
    body = STORE.replace("cp.async.bulk.tensor.DIM", "cp.reduce.async.bulk.tensor.DIM").replace(
        "shared::cta.bulk_group", "shared::cta.add.bulk_group"
    )
    one = map_of(array, box, 3)
    tile = laid_out((-numbered(*box)).view(np.uint8))
    outcome = run(filled(body, one, corner), {"a": array, "tile": tile}, {"map": ("a", one)}, grid=(2,))
    assert not outcome.reports
    before[30:, 8:] -= 2 * numbered(*box)[:10, :56]
    np.testing.assert_array_equal(array, before)
    with pytest.raises(Unknown, match=r"\.max on elements of the kind 6"):
        run(filled(body.replace(".add.", ".max."), one, corner), {"a": array, "tile": tile}, {"map": ("a", one)})


def test_bulk_copies_of_bytes():
    body = """
        setp.eq.u32 %p1, %thread, 0;  mov.b32 %r8, smem;  add.s32 %r9, %r8, 16384;
        @%p1 mbarrier.init.shared.b64 [%r9], 1;
        bar.sync 0;
        @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r9], 1008;
        @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
            [%r8], [%p_a+16], 1008, [%r9], %d9;
        @%p1 mbarrier.arrive.shared::cta.b64 %d8, [%r9];
        WAIT:
        mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r9], 0;
        @!%p2 bra WAIT;
        fence.proxy.async;
        @%p1 cp.async.bulk.global.shared::cta.bulk_group [%p_out], [%r8+16], 992;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    """
    a, out = np.random.default_rng(0).integers(0, 256, 1024).astype(np.uint8), np.zeros(1024, np.uint8)
    assert not run(body, {"a": a, "out": out}).reports
    np.testing.assert_array_equal(out, np.concatenate([a[32:], np.zeros(32, np.uint8)]))


# ---- mbarriers alone

SETUP = """
    setp.eq.u32 %p1, %thread, 0;  mov.b32 %r8, smem;  add.s32 %r9, %r8, 16384;
    mul.wide.u32 %d1, %thread, 4;  add.s64 %d2, %p_out, %d1;
    shl.b32 %r1, %thread, 2;  add.s32 %r10, %r8, %r1;  xor.b32 %r2, %r1, 508;  add.s32 %r11, %r8, %r2;
    @%p1 mbarrier.init.shared::cta.b64 [%r9], COUNT;
    bar.sync 0;
"""


def exchanged(body: str, count: int = THREADS, **options: Any) -> tuple[Outcome, NDArray[np.uint32]]:
    out = np.zeros(THREADS, np.uint32)
    return run(SETUP.replace("COUNT", str(count)) + body, {"out": out}, **options), out


TURN = """
    st.shared.b32 [%r10], %thread;
    mbarrier.arrive.shared::cta.b64 %d3, [%r9];  // arrive
    WAIT:
    mbarrier.test_wait.shared::cta.b64 %p2, [%r9], %d3;
    @!%p2 bra WAIT;  // again
    ld.shared.b32 %r3, [%r11];
    st.global.b32 [%d2], %r3;
"""


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_phase_orders_what_threads_exchange(seed):
    outcome, out = exchanged(TURN, seed=seed)
    assert not outcome.reports
    assert (out == np.arange(THREADS) ^ 127).all()


def test_arrivals_that_order_nothing():
    relaxed = without(TURN, "arrive", "mbarrier.arrive.relaxed.cta.shared::cta.b64 %d3, [%r9];")
    assert "reads what another warp wrote, no barrier between" in texts_of(exchanged(relaxed)[0])
    impatient = [exchanged(without(TURN, "again"), seed=seed)[0] for seed in range(3)]
    assert any("reads what another warp wrote, no barrier between" in texts_of(outcome) for outcome in impatient)


def test_arrivals_of_several_and_phases_one_after_the_other():
    """One thread arrives for ten, and all threads wait by parity, for five phases one after another."""
    body = """
        mov.b32 %r4, 0;
        LOOP:
        @%p1 mbarrier.arrive.shared::cta.b64 _, [%r9], 7;
        @%p1 mbarrier.arrive.shared::cta.b64 _, [%r9], 3;
        and.b32 %r5, %r4, 1;
        WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], %r5, 1000;
        @!%p2 bra WAIT;
        bar.sync 0;
        add.s32 %r4, %r4, 1;
        setp.lt.u32 %p3, %r4, 5;
        @%p3 bra LOOP;
        mbarrier.test_wait.parity.shared::cta.b64 %p4, [%r9], 0;
        mbarrier.test_wait.parity.shared::cta.b64 %p5, [%r9], 1;
        selp.b32 %r6, 100, 0, %p4;  selp.b32 %r7, 10, 0, %p5;  add.s32 %r6, %r6, %r7;
        st.global.b32 [%d2], %r6;
    """
    outcome, out = exchanged(body, 10)
    assert not outcome.reports
    assert (out == 100).all()  # phase 4, of parity 0, is complete, and phase 5, of parity 1, is not


def test_bytes_count_as_arrivals_do():
    body = """
        @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r9], 48;
        @%p1 mbarrier.arrive.shared::cta.b64 %d3, [%r9];
        @%p1 mbarrier.test_wait.shared::cta.b64 %p2, [%r9], %d3;
        @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r9], 48;
        @%p1 mbarrier.test_wait.shared::cta.b64 %p3, [%r9], %d3;
        selp.b32 %r6, 100, 0, %p2;  selp.b32 %r7, 10, 0, %p3;  add.s32 %r6, %r6, %r7;
        st.global.b32 [%d2], %r6;
    """
    outcome, out = exchanged(body, 1)
    assert not outcome.reports
    assert out[0] == 10


def test_memory_of_an_mbarrier_that_was_invalidated_is_memory():
    again = """
        bar.sync 0;  // all
        @%p1 mbarrier.inval.shared::cta.b64 [%r9];  // inval
        @%p1 st.shared.b32 [%r9], 5;  // write
        @%p1 ld.shared.b32 %r3, [%r9];
    """
    assert not exchanged(TURN + again)[0].reports
    early = texts_of(exchanged(TURN + without(again, "all"))[0])
    assert "invalidates an mbarrier that another warp uses, no barrier between" in early
    written = texts_of(exchanged(TURN + without(again, "inval"))[0])
    assert "writes over an mbarrier that was not invalidated" in written
    assert "reads an mbarrier as if it were data" in written
    made = without(again, "inval", "@%p1 mbarrier.init.shared::cta.b64 [%r9], 1;")
    assert "initialises an mbarrier that was not invalidated" in texts_of(exchanged(TURN + made)[0])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "mbarrier.arrive.shared::cta.b64 _, [%r9], 3;",
            "3 arrive at the mbarrier at shared byte 16384, which expects",
        ),
        ("@%p1 mbarrier.arrive.shared::cta.b64 _, [%r9], 0;", "0 arrive at the mbarrier"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r9+8];", "no mbarrier at shared byte 16392, CTA 0 thread 0"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r9+4];", "unaligned in shared memory"),
        ("mbarrier.init.shared::cta.b64 [%r9+8], 0;", "an mbarrier for 0 arrivals"),
        ("@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r9], 1048576;", "more than it can count"),
    ],
)
def test_what_no_mbarrier_allows(body, text):
    with pytest.raises(Fault, match=text):
        exchanged(body, 200)


@pytest.mark.parametrize("seed", [None, 1])
def test_waiting_for_an_arrival_that_never_comes(seed):
    with pytest.raises(Fault, match=r"deadlock: 128 threads wait in a loop: .* of CTA 0 lacks 1 arrivals and 0 bytes"):
        exchanged(TURN, THREADS + 1, seed=seed)


# ---- copies by each thread that arrive at an mbarrier

# There are two buffers, each with an mbarrier. All threads copy to both, and wait for the second one first.
ARRIVING = """
    add.s32 %r12, %r9, 8;
    @%p1 mbarrier.init.shared::cta.b64 [%r12], 128;
    bar.sync 0;
    mul.wide.u32 %d4, %thread, 4;  add.s64 %d5, %p_a, %d4;
    cp.async.ca.shared.global [%r10], [%d5], 4;
    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r9];  // first
    cp.async.ca.shared.global [%r10+512], [%d5+512], 4;
    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r12];  // second
    NEXT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r12], 0;  // wait for the second
    @!%p3 bra NEXT;
    ld.shared.b32 %r4, [%r11+512];
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 0;  // wait for the first
    @!%p2 bra WAIT;
    ld.shared.b32 %r3, [%r11];
    add.s32 %r3, %r3, %r4;
    st.global.b32 [%d2], %r3;
"""


def arriving(body: str, count: int = THREADS, **options: Any) -> tuple[Outcome, bool]:
    a, out = np.arange(256, dtype=np.uint32), np.zeros(THREADS, np.uint32)
    outcome = run(SETUP.replace("COUNT", str(count)) + body, {"a": a, "out": out}, **options)
    return outcome, bool((out == 2 * (np.arange(THREADS) ^ 127) + 128).all())


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_copies_that_arrive(seed):
    outcome, right = arriving(ARRIVING, seed=seed)
    assert not outcome.reports
    assert right
    counted = ARRIVING.replace("arrive.noinc", "arrive")  # without .noinc, each arrival also adds one expected arrival
    waited = "mbarrier.arrive.shared::cta.b64 _, [%r9];\nmbarrier.arrive.shared::cta.b64 _, [%r12];\n    NEXT:"
    outcome, right = arriving(counted.replace("    NEXT:", waited), seed=seed)
    assert not outcome.reports
    assert right


def test_copies_that_arrive_and_are_not_waited_for():
    report = "reads shared memory before a copy to it was waited for"
    assert report in texts_of(arriving(without(ARRIVING, "wait for the second", "setp.eq.u32 %p3, 0, 0;"))[0])
    # An arrival at the second mbarrier covers both copies of its thread, and an arrival at the first mbarrier covers
    # only the first copy.
    late = without(ARRIVING, "wait for the first", "setp.eq.u32 %p2, 0, 0;")
    assert not arriving(late)[0].reports
    other = without(late, "wait for the second", "mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r9], 0;")
    assert report in texts_of(arriving(other)[0])


def test_copies_that_arrive_too_early_or_never():
    early = ARRIVING.replace("cp.async.ca.shared.global [%r10+512]", "LATE\ncp.async.ca.shared.global [%r10+512]")
    early = without(early, "second").replace("LATE", "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r12];")
    assert "reads shared memory before a copy to it was waited for" in texts_of(arriving(early)[0])
    with pytest.raises(Fault, match=r"deadlock: .* lacks 1 arrivals"):
        arriving(ARRIVING, THREADS + 1)


def test_copies_that_arrive_when_a_phase_is_over():
    """If a phase expects one arrival fewer than there are threads, the wait does not cover one thread's copy."""
    first = without(without(ARRIVING, "second"), "wait for the second", "setp.eq.u32 %p3, 0, 0;")
    first = first.replace("cp.async.ca.shared.global [%r10+512], [%d5+512], 4;", "")
    first = first.replace("ld.shared.b32 %r4, [%r11+512];", "mov.b32 %r4, 0;")
    assert not arriving(first)[0].reports
    assert "reads shared memory before a copy to it was waited for" in texts_of(arriving(first, THREADS - 1)[0])


# ---- faults in copies


@pytest.mark.parametrize(
    ("mark", "instead", "report"),
    [
        ("again", "", ""),
        ("wait", "setp.eq.u32 %p2, 0, 0;", "reads shared memory before a copy to it was waited for"),
        ("wait", "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 1;", "before a copy to it was waited for"),
        ("made", "", "uses an mbarrier that another warp initialised, no barrier between"),
    ],
)
def test_a_tile_that_is_read_too_early(mark, instead, report):
    array = numbered(40, 64)
    outcome, _ = loaded(array, map_of(array, (16, 64), 3), (0, 0), without(LOAD, mark, instead) + SHOW)
    assert report in texts_of(outcome)


def test_warps_that_do_not_wait_themselves():
    """If only one warp waits for a copy, the other warps need a barrier after its wait."""
    array = numbered(40, 64)
    alone = "setp.ge.u32 %p5, %thread, 32;\n@%p5 bra OVER;\nWAIT:"
    body = LOAD.replace("WAIT:", alone) + "OVER:\nbar.sync 0;  // barrier\n" + SHOW
    one = map_of(array, (16, 64), 3)
    assert not loaded(array, one, (0, 0), body)[0].reports
    # Without the barrier the bytes happen to be there, but no order guarantees it.
    early = texts_of(loaded(array, one, (0, 0), without(body, "barrier"))[0])
    assert "reads what another warp wrote, no barrier between" in early


@pytest.mark.parametrize("bytes_", [1024, 4096])
def test_bytes_that_were_not_expected_or_never_come(bytes_):
    array = numbered(40, 64)
    one = map_of(array, (16, 64), 3)
    expect = f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], {bytes_};"
    with pytest.raises(Fault, match=rf"deadlock: .* lacks 0 arrivals and {bytes_ - 2048} bytes"):
        loaded(array, one, (0, 0), without(LOAD, "expect", expect) + SHOW)


TWO = LOAD.replace("BYTES", "4096") + SHOW.replace("BYTES", "4096")
SECOND = """
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r8+2048], [%p_map, {0, 16}], [%r9];
    WAIT:"""


def test_a_phase_that_is_complete_before_all_copies_came():
    array, out = numbered(40, 64), np.zeros(4096, np.uint8)
    maps = {"map": ("a", map_of(array, (16, 64), 3))}
    body = filled(TWO.replace("    WAIT:", SECOND), maps["map"][1], (0, 0))
    assert not run(body, {"a": array, "out": out}, maps).reports
    np.testing.assert_array_equal(out, laid_out(array[:32].view(np.uint8)))
    few = without(body, "expect", "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 2048;")
    assert "reads shared memory before a copy to it was waited for" in texts_of(
        run(few, {"a": array, "out": out}, maps)
    )


def test_copies_that_are_never_waited_for():
    array = numbered(40, 64)
    body = without(without(LOAD, "wait"), "again").replace("    WAIT:", "")
    outcome, _ = loaded(array, map_of(array, (16, 64), 3), (0, 0), body)
    assert "the kernel ends before this copy was waited for" in texts_of(outcome)


AGAIN = """
    BETWEEN
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], BYTES;
    @%p1 cp.async.bulk.tensor.DIM.shared::cta.global.mbarrier::complete_tx::bytes [%r8], [%p_map, {0, 8}], [%r9];
    NEXT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 1;
    @!%p2 bra NEXT;
"""


@pytest.mark.parametrize(
    ("between", "report"),
    [
        ("bar.sync 0;", None),
        ("", "overwrites what another warp read, no barrier between"),
        ("st.shared.b32 [%r8+2044], 1;\nbar.sync 0;", "overwrites what was written without a proxy fence after it"),
        ("st.shared.b32 [%r8+2044], 1;\nfence.proxy.async;\nbar.sync 0;", None),
    ],
)
def test_a_tile_that_is_overwritten(between, report):
    array = numbered(40, 64)
    body = LOAD + SHOW + "bar.sync 0;\n" + AGAIN.replace("BETWEEN", between)
    if not between:
        body = body.replace("bar.sync 0;\n\n", "")
    outcome, _ = loaded(array, map_of(array, (16, 64), 3), (0, 0), body)
    assert (report in texts_of(outcome)) if report else not outcome.reports


@pytest.mark.parametrize(
    ("mark", "instead", "report"),
    [
        ("fence", "", "a bulk copy reads what was written without a proxy fence after it"),
        ("barrier", "", "a bulk copy reads what another warp wrote, no barrier between"),
        (
            "wait",
            "st.shared.b32 [%r8], 1;\ncp.async.bulk.wait_group.read 0;",
            "writes what a bulk copy in flight reads",
        ),
        ("commit", "", "the kernel ends before the reading of this bulk copy was waited for"),
        ("wait", "cp.async.bulk.wait_group.read 1;", "the kernel ends before the reading of this bulk copy"),
        (
            "wait",
            "cp.async.bulk.wait_group.read 0;\n@!%p1 st.shared.b32 [%r8], 1;",
            "overwrites what another warp read",
        ),
    ],
)
def test_a_tile_that_is_stored_too_early(mark, instead, report):
    array = numbered(40, 64)
    assert report in texts_of(stored(map_of(array, (16, 64), 3), (0, 0), array, without(STORE, mark, instead))[0])


def test_what_was_stored_is_there_when_more_than_the_reading_was_waited_for():
    array = numbered(40, 64)
    look = "\n@%p1 ld.global.b16 %h1, [%p_a];\n@%p1 st.global.b16 [%p_a+5118], %h1;"
    for wait, there in (("cp.async.bulk.wait_group 0;", True), ("cp.async.bulk.wait_group.read 0;", False)):
        array[:] = 1
        stored(map_of(array, (16, 64), 3), (0, 0), array, without(STORE, "wait", wait) + look)
        assert (array[-1, -1] == -1) == there


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"strides": (136,)}, "strides of a multiple of 16 bytes"),
        ({"address": 8}, "an address and strides of a multiple of 16 bytes"),
        ({"box": (128, 16)}, "rows of at most 128 bytes for the swizzle, got 256"),
        ({"box": (64, 512)}, "boxes of at most 256 elements"),
        ({"dims": (64, 0)}, "none of them empty"),
        ({"box": (6, 16), "swizzle": 0}, "rows of a multiple of 16 bytes in shared memory, got 12"),
        ({"dims": (64, 80)}, r"copy of a tile of 16 bytes outside memory: a\+5120 of 5120"),
    ],
)
def test_maps_that_no_copy_may_use(fields, text):
    array = numbered(40, 64)
    with pytest.raises(Fault, match=text):
        loaded(array, dataclasses.replace(map_of(array, (16, 64), 3), **fields), (32, 0))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("[%r8], [%p_map", "[%r8+64], [%p_map"), "shared byte 64 is not aligned to 128"),
        (("[%r8], [%p_map", "[%r9+-512], [%p_map"), "a bulk copy outside shared memory: bytes 15872 to 17920 of 16448"),
        (("tensor.DIM", "tensor.1d"), "a tile at 1 coordinates of a tensor of 2 dimensions"),
        (("[%p_map,", "[%p_map+32,"), "not aligned to 64 bytes"),
    ],
)
def test_tiles_that_no_copy_may_make(change, text):
    array = numbered(40, 64)
    body = LOAD.replace(*change)
    body = body.replace("{CORNER}", "{0}") if "1d" in change[1] else body
    with pytest.raises(Fault, match=text):
        loaded(array, map_of(array, (16, 64), 3), (0, 0), body)


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"elemtype": 11}, "elements 11"), ({"swizzle": 4}, "swizzle 4"), ({"box": (32, 16)}, "shorter than its swizzle")],
)
def test_maps_that_are_not_known(fields, text):
    array = numbered(40, 64)
    one = map_of(array, (16, 64), 3)
    body = filled(LOAD, one, (0, 0))
    with pytest.raises(Unknown, match=text):
        run(body, {"a": array}, {"map": ("a", dataclasses.replace(one, **fields))})


def test_descriptors_that_are_not_known():
    asked = {"fp4_padded": False, "elem_size": 4, "elem_type": FLOAT, "swizzle": 3, "block_size": [8, 32]}
    given = {"shape": [64, 48], "strides": [96, 1], "padding": "nan", "round_f32_to_tf32": False, "base": "an operand"}
    tiles = Tiles.of(SimpleNamespace(**given), asked)
    assert tiles.map == TensorMap(0, (48, 64), (384,), (32, 8), FLOAT, 3, nan=True)
    for change in ({"fp4_padded": True}, {"is_im2col": True}):
        with pytest.raises(Unknown, match="4-bit elements, for convolutions"):
            Tiles.of(SimpleNamespace(**given), asked | change)
    with pytest.raises(Unknown, match="rounds to tf32"):
        Tiles.of(SimpleNamespace(**(given | {"round_f32_to_tf32": True})), asked)


# ---- maps that the kernel writes

REPLACE = "@%p1 tensormap.replace.tile"
MADE = f"""
    setp.eq.u32 %p1, %thread, 0;  setp.lt.u32 %p4, %thread, 32;  mov.b32 %r8, smem;  cvt.u64.u32 %d10, %r8;
    shl.b32 %r1, %thread, 2;  add.s32 %r2, %r8, %r1;
    @%p4 st.shared.b32 [%r2], 0;
    bar.warp.sync -1;
    {REPLACE}.global_address.shared::cta.b1024.b64 [%d10], %p_a;
    {REPLACE}.rank.shared::cta.b1024.b32 [%d10], 1;
    {REPLACE}.box_dim.shared::cta.b1024.b32 [%d10 + 0], 0, 64;
    {REPLACE}.box_dim.shared::cta.b1024.b32 [%d10], 1, 16;
    {REPLACE}.global_dim.shared::cta.b1024.b32 [%d10], 0x0, 64;
    {REPLACE}.global_dim.shared::cta.b1024.b32 [%d10], 0x1, 40;
    {REPLACE}.global_stride.shared::cta.b1024.b64 [%d10], 0, 128;
    {REPLACE}.element_stride.shared::cta.b1024.b32 [%d10], 0, 1;
    {REPLACE}.element_stride.shared::cta.b1024.b32 [%d10], 1, 1;
    {REPLACE}.elemtype.shared::cta.b1024.b32 [%d10], 6;
    {REPLACE}.swizzle_mode.shared::cta.b1024.b32 [%d10], 3;
    {REPLACE}.interleave_layout.shared::cta.b1024.b32 [%d10], 0;
    {REPLACE}.fill_mode.shared::cta.b1024.b32 [%d10], 0;
    bar.warp.sync -1;
    @%p4 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [%p_made], [%d10], 128;
    @%p4 fence.proxy.tensormap::generic.acquire.gpu [%p_made], 128;  // acquire
    fence.proxy.async.shared::cta;
    bar.sync 0;
"""


def test_a_map_that_the_kernel_writes():
    array, out, made = numbered(40, 64), np.zeros(2048, np.uint8), np.zeros(128, np.uint8)
    arrays = {"a": array, "out": out, "made": made}
    body = filled(MADE + (LOAD + SHOW).replace("%p_map", "%p_made"), map_of(array, (16, 64)), (30, 8))
    assert not run(body, arrays).reports
    np.testing.assert_array_equal(out, laid_out(tile_of(array, (30, 8), (16, 64), 0).view(np.uint8)))
    outcome = run(without(body, "acquire"), arrays)
    assert "uses a tensor map without a proxy fence after it was written" in texts_of(outcome)


@pytest.mark.parametrize(
    "code",
    [
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r1], [%d1, {%r2, %r3}], [%r4], %h1;",
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes "
        "[%r1], [%d1, {%r2, %r3, %r4}], [%r4], {%h1};",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {%r2}], [%r1];",
        "cp.async.bulk.tensor.2d.global.shared::cta [%d1, {%r2, %r3}], [%r1];",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r2], 16, [%r3];",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.mul.tile.bulk_group [%d1, {%r2, %r3}], [%r1];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d1], [%r2], 16;",
        "mbarrier.arrive.shared::cluster.b64 _, [%r1];",
        "mbarrier.arrive.noComplete.shared::cta.b64 %d1, [%r1], 1;",
        "mbarrier.arrive_drop.shared::cta.b64 %d1, [%r1];",
        "mbarrier.pending_count.b64 %r1, %d1;",
        "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p1, [%r1], 0;",
        "mbarrier.init.b64 [%d1], 1;",
        "tensormap.replace.tile.box_dim.global.b1024.b32 [%d1], 0, 64;",
        "tensormap.replace.tile.atomicity.shared::cta.b1024.b32 [%d1], 0;",
        "fence.proxy.tensormap::generic.release.gpu;",
    ],
)
def test_what_is_not_known_is_refused(code):
    opcode = code.split()[0].rstrip(";")
    with pytest.raises(Unknown, match=rf"^line \d+: {opcode.replace('.', '[.]')}"):
        run(code, {})
