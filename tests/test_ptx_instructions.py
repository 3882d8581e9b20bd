"""Each PTX instruction alone follows the PTX ISA: edge values, modes and modifiers."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ragged_attention.testing.ptx import numbers
from ragged_attention.testing.ptx.machine import Fault, Unknown
from ragged_attention.testing.ptx.operands import PARAM_BASE, SHARED_BASE
from ragged_attention.testing.ptx.parsing import parse
from ragged_attention.testing.ptx.tensor_maps import TensorMap
from tests.ptx_texts import evaluate, kernel_text, run_text


def f32(values: Any) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def f16(values: Any) -> NDArray[np.float16]:
    return np.array(values, np.float16)


def u16(values: Any) -> NDArray[np.uint16]:
    return np.array(values, np.uint16)


def u32(values: Any) -> NDArray[np.uint32]:
    return np.array(values, np.uint32)


def i32(values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)


NAN, INF, TINY = math.nan, math.inf, 2.0**-149
EDGES = np.array([0, 1, 2, 31, 32, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF], np.uint32)
PAIRS = tuple(x.ravel() for x in np.meshgrid(EDGES, EDGES))  # all pairs
SIGNED_PAIRS = tuple(x.view(np.int32) for x in PAIRS)
FLOATS = np.array([0.0, -0.0, 1.0, -1.5, TINY, -TINY, 2.0**-126, 3e38, -3e38, INF, -INF, NAN, 1 / 3], np.float32)
FLOAT_PAIRS = tuple(x.ravel() for x in np.meshgrid(FLOATS, FLOATS))


def random_floats(count: int, seed: int, spread: int = 10) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=count) * 2.0 ** rng.integers(-spread, spread, count)).astype(np.float32)


def same(found: NDArray[Any], wanted: Any) -> None:
    """Assert that arrays are equal in every bit; all NaNs count as equal."""
    wanted = np.broadcast_to(np.asarray(wanted, found.dtype), found.shape)
    if found.dtype.kind == "f":
        assert (np.isnan(found) == np.isnan(wanted)).all()
        integer = f"u{found.dtype.itemsize}"
        found, wanted = np.nan_to_num(found, nan=1).view(integer), np.nan_to_num(wanted, nan=1).view(integer)
    np.testing.assert_array_equal(found, wanted)


def nearest(table: NDArray[Any], x: Any) -> NDArray[np.int64]:
    """The index of the number in the ascending `table` that is nearest to each |x|; a tie goes to the even index."""
    size = np.abs(np.asarray(x, np.float64))
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = size - table[above - 1], table[above] - size
    return np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)


# ---- integers


def wrapped(function: Any, *arguments: NDArray[Any]) -> NDArray[np.uint32]:
    """A function whose results are computed with Python's integers and then truncated to 32 bits."""
    lists = [argument.tolist() for argument in arguments]
    return np.array([function(*row) & 0xFFFFFFFF for row in zip(*lists, strict=True)], np.uint32)


def towards_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("add.s32", lambda a, b: a + b),
        ("sub.s32", lambda a, b: a - b),
        ("add.sat.s32", lambda a, b: max(-(2**31), min(2**31 - 1, a + b))),
        ("sub.sat.s32", lambda a, b: max(-(2**31), min(2**31 - 1, a - b))),
        ("mul.lo.s32", lambda a, b: a * b),
        ("mul.hi.s32", lambda a, b: a * b >> 32),
        ("mul.hi.u32", lambda a, b: (a % 2**32) * (b % 2**32) >> 32),
        ("min.s32", min),
        ("max.s32", max),
        ("min.u32", lambda a, b: min(a % 2**32, b % 2**32)),
        ("max.relu.s32", lambda a, b: max(a, b, 0)),
        ("min.relu.s32", lambda a, b: max(min(a, b), 0)),
        ("and.b32", lambda a, b: a & b),
        ("or.b32", lambda a, b: a | b),
        ("xor.b32", lambda a, b: a ^ b),
        ("shl.b32", lambda a, b: a << min(b % 2**32, 32)),
        ("shr.u32", lambda a, b: (a % 2**32) >> min(b % 2**32, 32)),
        ("shr.s32", lambda a, b: a >> min(b % 2**32, 32)),
    ],
)
def test_integers_of_two_operands(code, function):
    same(evaluate(f"{code} %out, %a, %b;", *SIGNED_PAIRS, result="u4"), wrapped(function, *SIGNED_PAIRS))


def test_division_is_towards_zero():
    a, b = (x[(SIGNED_PAIRS[1] != 0)] for x in SIGNED_PAIRS)
    same(evaluate("div.s32 %out, %a, %b;", a, b, result="u4"), wrapped(towards_zero, a, b))
    rest = wrapped(lambda a, b: a - towards_zero(a, b) * b, a, b)
    same(evaluate("rem.s32 %out, %a, %b;", a, b, result="u4"), rest)
    a, b = (x.view(np.uint32) for x in (a, b))
    same(evaluate("div.u32 %out, %a, %b;", a, b, result="u4"), a // b)
    same(evaluate("rem.u32 %out, %a, %b;", a, b, result="u4"), a % b)
    same(evaluate("div.u64 %out, %a, %b;", np.uint64(2**63 + 5), np.uint64(7), result="u8"), (2**63 + 5) // 7)


def test_products_that_are_wider():
    a, b = SIGNED_PAIRS
    same(evaluate("mul.wide.s32 %out, %a, %b;", a, b, result="i8"), a.astype(np.int64) * b)
    x, y = PAIRS
    same(evaluate("mul.wide.u32 %out, %a, %b;", x, y, result="u8"), x.astype(np.uint64) * y)
    c = np.uint64(2**63)
    same(evaluate("mad.wide.u32 %out, %a, %b, %c;", x, y, c, result="u8"), x.astype(np.uint64) * y + c)
    same(evaluate("mad.lo.s32 %out, %a, %b, %c;", a, b, b, result="u4"), wrapped(lambda a, b: a * b + b, a, b))
    same(evaluate("mul.wide.u16 %out, %a, %b;", np.uint16(65535), np.uint16(3), result="u4"), 65535 * 3)
    same(evaluate("mul.hi.u16 %out, %a, 2731;", np.uint16(60000), result="u2"), 60000 * 2731 >> 16)
    big = [0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    p, q = (np.array(x.ravel()) for x in np.meshgrid(np.array(big, np.uint64), np.array(big, np.uint64)))
    high = [i * j >> 64 for i, j in zip(p.tolist(), q.tolist(), strict=True)]
    same(evaluate("mul.hi.u64 %out, %a, %b;", p, q, result="u8"), np.array(high, np.uint64))
    s, t = p.view(np.int64), q.view(np.int64)
    high = [i * j >> 64 for i, j in zip(s.tolist(), t.tolist(), strict=True)]
    same(evaluate("mul.hi.s64 %out, %a, %b;", s, t, result="i8"), np.array(high, np.int64))


def test_carries():
    """Carries give exact sums and differences of 96 bits, and a product of 64 by 32 bits as compilers write it."""
    words = [int(word) for word in EDGES]
    a = [x | y << 32 | 0xFFFFFFFF << 64 for x in words for y in words]
    b = [y | x << 32 | 5 << 64 for x in words for y in words]
    halves = [np.array([n >> 32 * i & 0xFFFFFFFF for n in number], np.uint32) for number in (a, b) for i in (0, 1)]
    code = """
        {name}.cc.u32 %r1, %a, %c;
        {name}c.cc.u32 %r2, %b, %e;
        {name}c.u32 %r3, -1, 5;
        mov.b32 %out, {part};
    """
    for name, sign in (("add", 1), ("sub", -1)):
        for index in range(3):
            found = evaluate(code.format(name=name, part=f"%r{index + 1}"), *halves, result="u4")
            same(found, [(x + sign * y) >> 32 * index & 0xFFFFFFFF for x, y in zip(a, b, strict=True)])
    code = """
        mad.lo.cc.u32 %r1, %a, %c, %e;
        madc.hi.u32 %r2, %a, %c, 0;
        mov.b64 %out, {%r1, %r2};
    """
    x, _, y, z = (half.tolist() for half in halves)
    wanted = [(p * q + r) % 2**64 for p, q, r in zip(x, y, z, strict=True)]
    same(evaluate(code, *halves, result="u8"), np.array(wanted, np.uint64))


def test_shifts_by_the_width_and_more():
    by = np.array([0, 1, 15, 16, 17, 63, 64, 65, 2**31, 2**32 - 1], np.uint32)
    amounts = by.tolist()
    a = np.uint64(0x8000000000000001)
    wanted = np.array([(int(a) << n) % 2**64 if n < 64 else 0 for n in amounts], np.uint64)
    same(evaluate("shl.b64 %out, %a, %b;", a, by, result="u8"), wanted)
    wanted = np.array([(int(a) - 2**64) >> min(n, 64) for n in amounts], np.int64)
    same(evaluate("shr.s64 %out, %a, %b;", a.view(np.int64), by, result="i8"), wanted)
    same(evaluate("shr.u16 %out, %a, %b;", np.uint16(0x8001), by, result="u2"), [0x8001 >> min(n, 16) for n in amounts])
    two = np.uint32(0x12345678), np.uint32(0x9ABCDEF0)
    both = 0x9ABCDEF012345678
    left = [(both << (n & 31)) >> 32 & 0xFFFFFFFF for n in amounts]
    same(evaluate("shf.l.wrap.b32 %out, %a, %b, %c;", *two, by, result="u4"), left)
    right = [both >> min(n, 32) & 0xFFFFFFFF for n in amounts]
    same(evaluate("shf.r.clamp.b32 %out, %a, %b, %c;", *two, by, result="u4"), right)


def test_pairs_of_integers():
    a, b = u32([0x7FFF8000, 0x0001FFFF]), u32([0x0001FFFF, 0xFFFF0002])
    same(evaluate("add.s16x2 %out, %a, %b;", a, b, result="u4"), u32([0x80007FFF, 0x00000001]))
    same(evaluate("min.s16x2 %out, %a, %b;", a, b, result="u4"), u32([0x00018000, 0xFFFFFFFF]))
    same(evaluate("max.u16x2 %out, %a, %b;", a, b, result="u4"), u32([0x7FFFFFFF, 0xFFFFFFFF]))
    same(evaluate("min.relu.s16x2 %out, %a, %b;", a, b, result="u4"), u32([0x00010000, 0]))


def extracted(a: int, position: int, length: int, signed: bool, width: int = 32) -> int:
    """The result of bfe, by the loop in the ISA."""
    position, length, top = position & 255, length & 255, width - 1
    sign = (a >> min(position + length - 1, top)) & 1 if signed and length else 0
    bits = [(a >> position + i) & 1 if i < length and position + i <= top else sign for i in range(width)]
    return sum(bit << i for i, bit in enumerate(bits))


def inserted(field: int, a: int, position: int, length: int) -> int:
    """The result of bfi, by the loop in the ISA."""
    for i in range(length & 255):
        if (at := (position & 255) + i) < 32:
            a = a & ~(1 << at) | ((field >> i) & 1) << at
    return a


def test_bit_fields():
    places = np.array([0, 1, 5, 30, 31, 32, 40, 255, 256, 259], np.uint32)
    position, length = (x.ravel() for x in np.meshgrid(places, places))
    for word in (0x80000001, 0x6DB6DB6D, 0xFFFFFFFF):
        rows = list(zip(position.tolist(), length.tolist(), strict=True))
        for code, signed in (("bfe.u32", False), ("bfe.s32", True)):
            found = evaluate(f"{code} %out, %a, %b, %c;", np.uint32(word), position, length, result="u4")
            same(found, [extracted(word, p, n, signed) for p, n in rows])
        found = evaluate(
            "bfi.b32 %out, %a, %e, %b, %c;", np.uint32(word), position, length, np.uint32(0xA5A5A5A5), result="u4"
        )
        same(found, [inserted(word, 0xA5A5A5A5, p, n) for p, n in rows])
    found = evaluate("bfe.s64 %out, %a, %b, 9;", np.uint64(0x8F00000000000001), u32([56, 0, 60]), result="u8")
    same(found, np.array([extracted(0x8F00000000000001, p, 9, True, 64) for p in (56, 0, 60)], np.uint64))


def test_counting_bits():
    same(evaluate("popc.b32 %out, %a;", EDGES, result="u4"), [x.bit_count() for x in EDGES.tolist()])
    same(evaluate("clz.b32 %out, %a;", EDGES, result="u4"), [32 - x.bit_length() for x in EDGES.tolist()])
    same(evaluate("brev.b32 %out, %a;", EDGES, result="u4"), [int(f"{x:032b}"[::-1], 2) for x in EDGES.tolist()])
    same(evaluate("not.b32 %out, %a;", EDGES, result="u4"), ~EDGES)
    same(evaluate("neg.s32 %out, %a;", EDGES, result="u4"), -EDGES)
    same(evaluate("abs.s32 %out, %a;", i32([-5, 5, -(2**31)]), result="u4"), u32([5, 5, 2**31]))


@pytest.mark.parametrize("table", [0xF0, 0xCC, 0xAA, 0x80, 0xFE, 0x1A, 0x96, 0x2D])
def test_lop3(table):
    a, b, c = (np.random.default_rng(i).integers(0, 2**32, 32, np.uint32) for i in range(3))
    bits = [[(x >> np.uint32(i)) & 1 for i in range(32)] for x in (a, b, c)]
    wanted = sum(
        ((table >> (4 * x + 2 * y + z).astype(int)) & 1) << i for i, (x, y, z) in enumerate(zip(*bits, strict=True))
    )
    same(evaluate(f"lop3.b32 %out, %a, %b, %c, {table};", a, b, c, result="u4"), wanted)


def test_lop3_names_its_operands_as_the_isa_does():
    """In lop3, the table 0xF0 selects the first operand, 0xCC the second and 0xAA the third."""
    words = [np.uint32(1), np.uint32(2), np.uint32(4)]
    for table, wanted in ((0xF0, 1), (0xCC, 2), (0xAA, 4), (0x80 | 0x40 | 0x20 | 0x10 | 0xCC | 0xAA, 7)):
        same(evaluate(f"lop3.b32 %out, %a, %b, %c, {table};", *words, result="u4"), wanted)


@pytest.mark.parametrize(
    ("mode", "selector", "wanted"),
    [
        ("", 0x3210, 0x33221180),
        ("", 0x7654, 0x77665584),
        ("", 0x0008, 0x808080FF),
        ("", 0xC9D4, 0xFF000084),
        (".f4e", 1, 0x84332211),
        (".f4e", 3, 0x66558433),
        (".b4e", 1, 0x66778011),
        (".rc8", 2, 0x22222222),
        (".ecl", 1, 0x33221111),
        (".ecr", 2, 0x22221180),
        (".rc16", 1, 0x33223322),
    ],
)
def test_prmt(mode, selector, wanted):
    a, b = np.uint32(0x33221180), np.uint32(0x77665584)
    found = evaluate(f"prmt.b32{mode} %out, %a, %b, %c;", a, b, np.uint32(selector), result="u4")
    same(found, wanted)


# ---- floats


@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("add.f32", np.add),
        ("sub.rn.f32", np.subtract),
        ("mul.f32", np.multiply),
        ("div.rn.f32", np.divide),
        ("copysign.f32", lambda a, b: np.copysign(b, a)),
    ],
)
def test_floats_of_two_operands(code, function):
    with np.errstate(all="ignore"):
        same(evaluate(f"{code} %out, %a, %b;", *FLOAT_PAIRS, result="f4"), function(*FLOAT_PAIRS))


def flushed(x: Any) -> NDArray[np.float32]:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def test_subnormals_are_flushed_before_and_after():
    a, b = f32([TINY, -TINY, 2.0**-126, -(2.0**-126), 1.0]), f32([1.0, 1.0, 0.5, 0.75, TINY])
    same(evaluate("mul.ftz.f32 %out, %a, %b;", a, b, result="f4"), f32([0, -0.0, 0, -0.0, 0]))
    same(evaluate("mul.f32 %out, %a, %b;", a, b, result="f4"), a * b)
    same(evaluate("add.ftz.f32 %out, %a, %b;", a, -a, result="f4"), 0)
    same(evaluate("abs.ftz.f32 %out, %a;", a, result="f4"), np.abs(flushed(a)))
    same(evaluate("max.ftz.f32 %out, %a, 0f00000000;", a, result="f4"), f32([0, 0, 2.0**-126, 0, 1]))
    found = evaluate("setp.gt.ftz.f32 %p1, %a, 0f00000000;\nselp.b32 %out, 1, 0, %p1;", a, result="u4")
    same(found, [0, 0, 1, 0, 1])
    same(
        evaluate("ex2.approx.ftz.f32 %out, %a;", f32([-126, -127, -140]), result="f4"),
        f32([2.0**-126, 0, 0]),
    )


def test_saturation_of_floats():
    a = f32([-1, 0.25, 7, NAN, INF])
    same(evaluate("add.sat.f32 %out, %a, 0f00000000;", a, result="f4"), f32([0, 0.25, 1, 0, 1]))


def test_minimum_and_maximum_of_nans_and_zeros():
    a, b = f32([NAN, 1, NAN, -0.0, 0.0, 2]), f32([1, NAN, NAN, 0.0, -0.0, 3])
    same(evaluate("min.f32 %out, %a, %b;", a, b, result="f4"), f32([1, 1, NAN, -0.0, -0.0, 2]))
    same(evaluate("max.f32 %out, %a, %b;", a, b, result="f4"), f32([1, 1, NAN, 0.0, 0.0, 3]))
    same(evaluate("max.NaN.f32 %out, %a, %b;", a, b, result="f4"), f32([NAN, NAN, NAN, 0.0, 0.0, 3]))
    same(evaluate("min.NaN.f32 %out, %a, %b;", a, b, result="f4"), f32([NAN, NAN, NAN, -0.0, -0.0, 2]))


def rounded(exact: Fraction) -> np.float32:
    """The float32 nearest to a fraction, ties to even: the best of a guess and its neighbours."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-INF)), guess, np.nextafter(guess, np.float32(INF))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def test_fma_rounds_once():
    a, b, c = (random_floats(200, seed, spread) for seed, spread in ((0, 4), (1, 4), (2, 12)))
    # Exact sums midway between two float32 numbers, or so close to the midpoint that float64 would round to it.
    a[:3], b[:3], c[:3] = 1 + 2.0**-23, 1 + 2.0**-23, f32([2.0**30, -(2.0**30), 2.0**-70])
    a[3:6], b[3:6], c[3:6] = 2.0**-40, f32([2.0**-40, -(2.0**-40), 0]), 1 + 2.0**-23
    a[6:9], b[6:9], c[6:9] = 2.0**-24 * (1 + 2.0**-23), 1, f32([1, -1, 1 + 2.0**-23])
    a[9], b[9], c[9] = 2.0**-24, np.float32(1 - 2.0**-24), 1
    a[10:12], b[10:12], c[10:12] = 2.0**-75, 2.0**-75, f32([TINY, 0])
    found = evaluate("fma.rn.f32 %out, %a, %b, %c;", a, b, c, result="f4")
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    same(found, [rounded(x) for x in exact])


def test_fma_of_float64_rounds_once():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 128))
    c = -a * b  # the result is the rounding error of the product
    found = evaluate("fma.rn.f64 %out, %a, %b, %c;", a, b, c, result="f8")
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    same(found, [float(x) for x in exact])
    assert found.any()


def test_fma_of_what_is_not_finite():
    a, b, c = f32([INF, 0, NAN, 1, 3e38]), f32([1, INF, 1, 1, 10]), f32([-INF, 1, 1, INF, 0])
    same(evaluate("fma.rn.f32 %out, %a, %b, %c;", a, b, c, result="f4"), f32([NAN, NAN, NAN, INF, INF]))


def test_sums_that_are_rounded_to_odd_round_right():
    """A sum rounds to the right side even if float64 cannot distinguish it from a tie between two float32 numbers."""
    tie = np.float64(1 + 2.0**-24)
    for small, wanted in ((2.0**-80, 1 + 2.0**-23), (-(2.0**-80), 1.0), (0.0, 1.0)):
        assert numbers.odd_sum(tie, small).astype(np.float32) == np.float32(wanted)
    assert numbers.round_to_odd(np.float64(1 + 2.0**-30)) == np.float32(1 + 2.0**-23)
    assert numbers.round_to_odd(np.float64(-(2.0**-160))) == np.float32(-TINY)


@pytest.mark.parametrize(
    ("code", "function", "inputs"),
    [
        ("ex2.approx.f32", np.exp2, np.linspace(-120, 120, 96)),
        ("lg2.approx.f32", np.log2, np.geomspace(1e-30, 1e30, 96)),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), np.geomspace(1e-30, 1e30, 96)),
        ("rcp.approx.f32", lambda x: 1 / x, np.linspace(-9, 9, 96)),
        ("rcp.rn.f32", lambda x: 1 / x, np.linspace(-9, 9, 96)),
        ("sqrt.rn.f32", np.sqrt, np.geomspace(1e-30, 1e30, 96)),
        ("sqrt.approx.ftz.f32", np.sqrt, np.geomspace(1e-30, 1e30, 96)),
        ("tanh.approx.f32", np.tanh, np.linspace(-4, 4, 96)),
        ("sin.approx.f32", np.sin, np.linspace(-3, 3, 96)),
        ("cos.approx.f32", np.cos, np.linspace(-3, 3, 96)),
    ],
)
def test_functions(code, function, inputs):
    a = inputs.astype(np.float32)
    found = evaluate(f"{code} %out, %a;", a, result="f4")
    np.testing.assert_allclose(found, function(a.astype(np.float64)), rtol=2**-22, atol=2**-22)


def test_functions_at_their_ends():
    with np.errstate(all="ignore"):
        same(
            evaluate("ex2.approx.f32 %out, %a;", f32([-INF, INF, NAN, 200, 0]), result="f4"),
            [0, INF, NAN, INF, 1],
        )
        same(evaluate("lg2.approx.f32 %out, %a;", f32([0, INF, -1, 1]), result="f4"), [-INF, INF, NAN, 0])
        same(evaluate("div.full.f32 %out, %a, %b;", f32([1, 0]), f32([0, 0]), result="f4"), [INF, NAN])


COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@pytest.mark.parametrize("name", [*COMPARED, *(f"{one}u" for one in COMPARED), "num", "nan"])
def test_comparisons_of_floats(name):
    """With a NaN, an ordered comparison is false, even `ne`, and an unordered comparison is true."""
    code = f"setp.{name}.f32 %p1, %a, %b;\nselp.b32 %out, 1, 0, %p1;"
    a, b = FLOAT_PAIRS
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        wanted = unordered == (name == "nan")
    else:
        compared = eval(f"a {COMPARED[name[:2]]} b", {"a": a, "b": b})
        wanted = np.where(unordered, name.endswith("u"), compared)
    same(evaluate(code, a, b, result="u4"), wanted)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"])
def test_comparisons_of_integers(name):
    unsigned = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
    kinds = ["u"] if name in unsigned else ["s", "u"]
    for kind in kinds:
        a, b = SIGNED_PAIRS if kind == "s" else PAIRS
        code = f"setp.{name}.{kind}32 %p1, %a, %b;\nselp.b32 %out, 1, 0, %p1;"
        same(evaluate(code, a, b, result="u4"), eval(f"a {(COMPARED | unsigned)[name]} b", {"a": a, "b": b}))


def test_setp_with_a_second_target_and_a_predicate():
    a = u32([0, 1, 2, 3])
    code = """
        setp.lt.u32 %p3, %a, 1;
        setp.eq.and.u32 %p1|%p2, %a, 2, !%p3;
        selp.b32 %r1, 1, 0, %p1;
        selp.b32 %r2, 2, 0, %p2;
        or.b32 %out, %r1, %r2;
    """
    same(evaluate(code, a, result="u4"), [0, 2, 1, 2])  # the second target is `a != 2` combined with the predicate


def test_predicates():
    a = u32([0, 1, 2, 3])
    setup = "and.b32 %r1, %a, 1;\nsetp.ne.b32 %p1, %r1, 0;\nsetp.gt.u32 %p2, %a, 1;\n"
    for operation, wanted in (("and", [0, 0, 0, 1]), ("or", [0, 1, 1, 1]), ("xor", [0, 1, 1, 0])):
        code = f"{setup}{operation}.pred %p3, %p1, %p2;\nselp.b32 %out, 1, 0, %p3;"
        same(evaluate(code, a, result="u4"), wanted)
    code = f"{setup}not.pred %p3, %p1;\nmov.pred %p4, -1;\nand.pred %p3, %p3, %p4;\nselp.b32 %out, 1, 0, %p3;"
    same(evaluate(code, a, result="u4"), [1, 0, 1, 0])
    same(
        evaluate(f"{setup}mov.b32 %out, 5;\n@%p1 mov.b32 %out, 6;\n@!%p2 add.s32 %out, %out, 1;", a, result="u4"),
        [6, 7, 5, 6],
    )


# ---- 16-bit and 8-bit floats


BF16 = numbers.bf16_value(np.arange(0x7F81, dtype=np.uint16)).astype(np.float64)  # from 0 to infinity
F16 = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)


def nearest_bits(x: NDArray[np.float32], kind: str) -> NDArray[np.uint16]:
    """The bits of x rounded to nearest even, by a search in a table of all numbers from 0 up.

    In the table, infinity is replaced by the largest finite number plus one more step.
    """
    table = (BF16 if kind == "bf16" else F16).copy()
    table[-1] = table[-2] + (table[-2] - table[-3])
    code = nearest(table, np.where(np.isnan(x), 0, np.minimum(np.abs(x), table[-1])))
    return np.where(np.isnan(x), 0x7FFF, code | np.signbit(x) * 0x8000).astype(np.uint16)


HALF_INPUTS = np.concatenate([
    random_floats(150, 5, 30), FLOATS,
    f32([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519, 65520, 2.0**-25]),
    f32([2.0**-24, 3 * 2.0**-25, 3.39e38, 3.4e38, 2.0**-134, 3 * 2.0**-134]),
])  # fmt: skip


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_rounding_to_16_bits(kind):
    x = HALF_INPUTS
    wanted = nearest_bits(x, kind)
    same(evaluate(f"cvt.rn.{kind}.f32 %out, %a;", x, result="u2"), wanted)
    pair = evaluate(f"cvt.rn.{kind}x2.f32 %out, %a, %b;", x, x[::-1].copy(), result="u4")
    same(pair & 0xFFFF, wanted[::-1])  # the first operand goes to the upper half
    same(pair >> 16, wanted)
    back = evaluate(f"cvt.f32.{kind} %out, %a;", wanted, result="f4")
    with np.errstate(all="ignore"):
        same(back, wanted.view(np.float16) if kind == "f16" else (wanted.astype(np.uint32) << 16).view(np.float32))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_arithmetic_of_16_bits(kind):
    a, b, c = (nearest_bits(random_floats(160, seed, 6), kind) for seed in (1, 2, 3))
    x, y, z = ([Fraction(v) for v in numbers.VALUES[kind](bits).tolist()] for bits in (a, b, c))
    wanted = {
        f"add.{kind} %out, %a, %b;": [p + q for p, q in zip(x, y, strict=True)],
        f"sub.rn.{kind} %out, %a, %b;": [p - q for p, q in zip(x, y, strict=True)],
        f"mul.{kind} %out, %a, %b;": [p * q for p, q in zip(x, y, strict=True)],
        f"fma.rn.{kind} %out, %a, %b, %c;": [p * q + r for p, q, r in zip(x, y, z, strict=True)],
        f"min.{kind} %out, %a, %b;": [min(p, q) for p, q in zip(x, y, strict=True)],
    }
    table = BF16 if kind == "bf16" else F16
    for code, exact in wanted.items():
        found = numbers.VALUES[kind](evaluate(code, a, b, c, result="u2"))
        below = np.searchsorted(table, np.abs(found)) - 1
        for value, number, index in zip(found.tolist(), exact, below.tolist(), strict=True):
            around = [table[index], table[index + 1], table[index + 2]]
            distances = [abs(Fraction(float(one)) - abs(number)) for one in around]
            assert distances[1] == min(distances)
            assert distances.count(distances[1]) == 1 or (index + 1) % 2 == 0
            assert value == 0 or (value > 0) == (number > 0)


def test_pairs_of_16_bits():
    a, b = u32([0x3F804000, 0xBF80C000]), u32([0x40003F80, 0x3F803F80])
    same(evaluate("sub.bf16x2 %out, %a, %b;", a, b, result="u4"), u32([0xBF803F80, 0xC000C040]))
    same(evaluate("max.bf16x2 %out, %a, %b;", a, b, result="u4"), u32([0x40004000, 0x3F803F80]))
    same(evaluate("neg.bf16x2 %out, %a;", a, result="u4"), a ^ np.uint32(0x80008000))
    same(evaluate("abs.f16x2 %out, %a;", a, result="u4"), a & np.uint32(0x7FFF7FFF))
    same(evaluate("fma.rn.relu.bf16x2 %out, %a, %b, %b;", a, b, result="u4"), u32([0x40804040, 0x00000000]))
    same(evaluate("ex2.approx.ftz.bf16x2 %out, %a;", a, result="u4"), u32([0x40004080, 0x3F003E80]))


def test_subnormal_16_bits_are_flushed():
    """With .ftz, a result of 2^-130, which is subnormal in bfloat16, becomes 0."""
    a = nearest_bits(f32([-130, -126, 2]), "bf16")
    found = evaluate("ex2.approx.ftz.bf16 %out, %a;", a, result="u2")
    same(numbers.bf16_value(found), f32([0, 2.0**-126, 4]))


def test_between_the_16_bit_formats():
    """float16 -> bfloat16 rounds to nearest, with `.rn` and in the form without it that compilers write."""
    a = f16([1.5, -2, 65504, 2.0**-24, NAN]).view(np.uint16)
    wanted = nearest_bits(a.view(np.float16).astype(np.float32), "bf16")
    same(evaluate("cvt.rn.bf16.f16 %out, %a;", a, result="u2"), wanted)
    same(evaluate("cvt.bf16.f16 %out, %a;", a, result="u2"), wanted)


@pytest.mark.parametrize(("kind", "last"), [("e4m3", 126), ("e5m2", 123)])
def test_8_bit_floats(kind, last):
    values = numbers.FP8[kind][: last + 1].astype(np.float64)
    assert values[-1] == {"e4m3": 448, "e5m2": 57344}[kind]
    assert values[1] == {"e4m3": 2.0**-9, "e5m2": 2.0**-16}[kind]
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate([HALF_INPUTS, middle, -middle, np.nextafter(middle, np.float32(INF))])
    code = nearest(values, np.minimum(np.abs(np.where(np.isnan(x), 0, x)), values[-1]))
    wanted = np.where(np.isnan(x), 0x7F, code | np.signbit(x) * 128).astype(np.uint16)
    pair = evaluate(f"cvt.rn.satfinite.{kind}x2.f32 %out, %a, %b;", x, x[::-1].copy(), result="u2")
    same(pair >> 8, wanted)
    same(pair & 0xFF, wanted[::-1])
    codes = np.arange(0, 65536, 257, dtype=np.uint16)  # each code twice
    back = evaluate(f"cvt.rn.f16x2.{kind}x2 %out, %a;", codes, result="u4").view(np.float16).reshape(-1, 2)
    for half in back.T:
        same(half.astype(np.float32), numbers.FP8[kind])
    halves = f16([1.0, 1.0625]).view(np.uint32)
    pair = evaluate(f"cvt.rn.satfinite.{kind}x2.f16x2 %out, %a;", halves, result="u2")
    same(pair, {"e4m3": 0x3838, "e5m2": 0x3C3C}[kind])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_of_halves_towards_zero(kind):
    bits, value = numbers.BITS[kind], numbers.VALUES[kind]
    x = np.concatenate([HALF_INPUTS, f32([1.0009, -1.0009, 65519, 1e-8, 1 / 3, -2 / 3, INF, -INF, np.nan])])
    found = evaluate(f"cvt.rz.{kind}x2.f32 %out, %a, %b;", x, -x, result="u4")
    same(evaluate(f"cvt.rz.{kind}.f32 %out, %a;", x, result="u2"), (found >> 16).astype(np.uint16))
    for half, source in ((found >> 16, x), (found & 0xFFFF, -x)):
        half = half.astype(np.uint16)
        down, number = value(half), ~np.isnan(source)
        above = value((half + 1).astype(np.uint16))
        assert (np.abs(down[number]) <= np.abs(source[number])).all()
        assert ((np.abs(above) > np.abs(source)) | np.isinf(source) | np.isnan(above))[number].all()
        same(np.isnan(down), np.isnan(source))
        with np.errstate(over="ignore"):
            exact = value(bits(source)) == source
        same(down[exact], source[exact])


def test_float32_towards_zero():
    """add, sub, mul and fma with .rz agree with exact fractions, rounded towards zero."""
    rng = np.random.default_rng(0)
    a, b, c = (f32(rng.standard_normal(64) * 2.0 ** rng.integers(-40, 40, 64)) for _ in range(3))
    b[:8] = -a[:8] * f32(1 + 2.0**-20)  # these sums cancel
    exact = [[Fraction(float(x)) for x in array] for array in (a, b, c)]
    for code, wanted in (
        ("add.rz.f32 %out, %a, %b;", [x + y for x, y, _ in zip(*exact, strict=True)]),
        ("sub.rz.ftz.f32 %out, %a, %b;", [x - y for x, y, _ in zip(*exact, strict=True)]),
        ("mul.rz.f32 %out, %a, %b;", [x * y for x, y, _ in zip(*exact, strict=True)]),
        ("fma.rz.f32 %out, %a, %b, %c;", [x * y + z for x, y, z in zip(*exact, strict=True)]),
    ):
        found = evaluate(code, a, b, c, result="f4")
        beyond = np.nextafter(found, np.copysign(f32([INF]), found))
        for value, next_one, right in zip(found, beyond, wanted, strict=True):
            assert abs(Fraction(float(value))) <= abs(right) < abs(Fraction(float(next_one))), (code, value)
            assert right == 0 or (right < 0) == bool(np.signbit(value))
    largest = f32([np.finfo("f4").max])
    same(evaluate("add.rz.f32 %out, %a, %a;", largest, result="f4"), largest)
    same(evaluate("add.rz.f32 %out, %a, %a;", f32([INF, -INF]), result="f4"), f32([INF, -INF]))


def test_sizes_with_the_sign_of_a_product():
    a, b = f32([1, -2, 3, -4, 0, NAN]), f32([2, 1, -1, -5, -1, -7])
    same(evaluate("min.xorsign.abs.f32 %out, %a, %b;", a, b, result="f4"), f32([1, -1, -1, 4, -0.0, -7]))
    same(evaluate("max.xorsign.abs.f32 %out, %a, %b;", a, b, result="f4")[:5], f32([2, -2, -3, 5, -1]))


def test_set_of_halves():
    a, b = (f16(x).view(np.uint32) for x in ([1, 2, NAN, 0], [1, 3, 1, NAN]))
    for comparison, wanted in (
        ("nan", [0, 0, 1, 1]),
        ("eq", [1, 0, 0, 0]),
        ("lt", [0, 1, 0, 0]),
        ("neu", [0, 1, 1, 1]),
    ):
        found = evaluate(f"set.{comparison}.f16x2.f16x2 %out, %a, %b;", a, b, result="u4")
        same(found.view(np.float16), f16(wanted))


def test_inline_assembly_has_the_line_that_it_stands_at():
    body = """
        .loc 1 7 3
        // begin inline asm
        .loc 1 7 3
        mov.b32 %r1, 0;
        .loc 1 8 3
        trap;
        // end inline asm
    """
    with pytest.raises(Fault, match=r"\(kernel.py:7\): a trap"):
        run_text(kernel_text(body, [], 32) + '\n.file 1 "kernel.py"\n', {})


def test_tf32():
    x = f32([1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-11), 1 / 3, INF])
    away, even = (numbers.tf32_value(evaluate(f"cvt.{m}.tf32.f32 %out, %a;", x, result="u4")) for m in ("rna", "rn"))
    same(away, f32([1 + 2.0**-10, 1 + 2.0**-9, -(1 + 2.0**-10), 1365 / 4096, INF]))
    same(even, f32([1, 1 + 2.0**-9, -1, 1365 / 4096, INF]))


# ---- conversions


def test_integers_from_floats_saturate():
    x = f32([2.5, 3.5, -2.5, -0.5, 3e9, -3e9, 1e20, INF, -INF, NAN])
    for mode, function in (("rzi", math.trunc), ("rni", round), ("rmi", math.floor), ("rpi", math.ceil)):
        for kind, low, high, dtype in (("s32", -(2**31), 2**31 - 1, "i4"), ("u32", 0, 2**32 - 1, "u4")):
            limited = [
                0 if math.isnan(v) else low if v < low else high if v > high else function(v) for v in x.tolist()
            ]
            wanted = np.array([max(one, low) for one in limited], dtype)
            same(evaluate(f"cvt.{mode}.{kind}.f32 %out, %a;", x, result=dtype), wanted)
    found = evaluate("cvt.rzi.s64.f32 %out, %a;", x, result="i8")
    whole = [2, 3, -2, 0, 3 * 10**9, -3 * 10**9, 2**63 - 1, 2**63 - 1, -(2**63), -(2**63)]
    same(found, np.array(whole, np.int64))  # NaN becomes -2**63
    same(evaluate("cvt.rzi.s8.f32 %out, %a;", f32([-200, 100.9]), result="i2"), np.array([-128, 100], np.int16))


def test_floats_from_integers():
    a = i32([2**24 + 1, -(2**24) - 3, 2**31 - 1, -5])
    same(evaluate("cvt.rn.f32.s32 %out, %a;", a, result="f4"), a.astype(np.float32))
    same(evaluate("cvt.rn.f32.u32 %out, %a;", a.view(np.uint32), result="f4"), a.view(np.uint32).astype(np.float32))
    same(evaluate("cvt.rn.f32.s8 %out, %a;", u16([0x1FF, 0x80, 0x7F]), result="f4"), f32([-1, -128, 127]))
    same(evaluate("cvt.rn.f16.s32 %out, %a;", i32([2049, 2051, 7]), result="u2").view(np.float16), [2048, 2052, 7])
    bits = evaluate("cvt.rn.bf16.s32 %out, %a;", i32([257, 259, -(2**24) - 2**16 - 1]), result="u2")
    same(numbers.bf16_value(bits), f32([256, 260, -(2**24 + 2**17)]))
    same(evaluate("cvt.f64.f32 %out, %a;", np.float32(1 / 3), result="f8"), np.float64(np.float32(1 / 3)))
    same(evaluate("cvt.rn.f32.f64 %out, %a;", np.array([1 / 3, 1e300], np.float64), result="f4"), f32([1 / 3, INF]))


def test_integers_from_integers():
    a = u32([0x80, 0x1FF, 0xFFFFFFFF, 0x7FFFFFFF])
    same(evaluate("cvt.s64.s32 %out, %a;", a, result="i8"), a.view(np.int32).astype(np.int64))
    same(evaluate("cvt.u64.u32 %out, %a;", a, result="u8"), a)
    same(evaluate("cvt.u16.u32 %out, %a;", a, result="u2"), a.astype(np.uint16))
    same(evaluate("cvt.s32.s8 %out, %a;", a, result="i4"), a.astype(np.int8).astype(np.int32))
    same(evaluate("cvt.u32.u8 %out, %a;", a, result="u4"), a & 255)
    same(evaluate("cvt.sat.s8.s32 %out, %a;", a.view(np.int32), result="i2"), np.array([127, 127, -1, 127], np.int16))
    same(evaluate("cvt.sat.u8.s32 %out, %a;", a.view(np.int32), result="u2"), [128, 255, 0, 255])


def test_floats_rounded_to_whole_ones():
    x = f32([2.5, -2.5, 3.5, -0.4, INF])
    with np.errstate(all="ignore"):
        for mode, function in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
            same(evaluate(f"cvt.{mode}.f32.f32 %out, %a;", x, result="f4"), function(x))
    same(evaluate("cvt.sat.f32.f32 %out, %a;", x, result="f4"), [1, 0, 1, 0, 1])


def test_moves_and_parts():
    a = np.array([0x123456789ABCDEF0], np.uint64)
    same(evaluate("mov.b64 {%r1, %r2}, %a;\nmov.b64 %out, {%r2, %r1};", a, result="u8"), np.uint64(0x9ABCDEF012345678))
    same(evaluate("mov.b64 {_, %out}, %a;", a, result="u4"), 0x12345678)
    code = "mov.b64 {%h1, %h2, %h3, %h4}, %a;\nmov.b32 %out, {%h4, %h1};"
    same(evaluate(code, a, result="u4"), np.uint32(0xDEF01234))
    same(evaluate("mov.b32 %out, 0f3F800000;", a, result="f4"), 1)
    same(evaluate("mov.b32 %out, -2;", a, result="i4"), -2)
    same(evaluate("mov.b32 %out, smem;", a, result="u4"), SHARED_BASE)


def test_special_registers():
    found = evaluate(
        "mov.u32 %r1, %laneid;\nmov.u32 %r2, %warpid;\nmad.lo.s32 %out, %r2, 100, %r1;", np.zeros(64), result="u4"
    )
    same(found, [i // 32 * 100 + i % 32 for i in range(64)])
    body = """
        mov.u32 %r1, %ctaid.x;  mov.u32 %r2, %ctaid.y;  mov.u32 %r3, %nctaid.x;  mov.u32 %r4, %ntid.x;
        mad.lo.s32 %r5, %r2, %r3, %r1;  mad.lo.s32 %r6, %r5, %r4, %thread;
        mul.wide.u32 %d1, %r6, 4;  add.s64 %d2, %p_out, %d1;  st.global.b32 [%d2], %r6;
    """
    out = np.zeros(3 * 2 * 32, np.uint32)
    run_text(kernel_text(body, ["out"], 32), {"out": out}, grid=(3, 2))
    same(out, np.arange(192))


# ---- memory


def test_vectors_and_widths_of_memory():
    source = np.random.default_rng(0).integers(0, 256, 512).astype(np.uint8)
    body = """
        mul.wide.u32 %d1, %thread, 16;  add.s64 %d2, %p_a, %d1;  add.s64 %d3, %p_out, %d1;
        ld.global.L1::evict_last.v4.b32 {%r1, %r2, %r3, %r4}, [%d2];
        ld.global.nc.v2.b64 {%d4, %d5}, [%d2];
        ld.global.s8 %r5, [%d2+3];
        ld.global.u8 %h1, [%d2 + 3];
        ld.global.s16 %r6, [%d2+14];
        shl.b32 %r7, %thread, 4;  mov.b32 %r8, smem;  add.s32 %r8, %r8, %r7;
        st.shared.v2.b32 [%r8], {%r1, %r2};
        st.shared.b64 [%r8+8], %d5;
        ld.shared.v2.b32 {%r9, _}, [%r8+8];
        ld.shared.b8 %h2, [%r8];
        mov.b32 %r10, {%h1, %h2};
        st.global.v4.b32 [%d3], {%r5, %r6, %r9, %r10};
    """
    out = np.zeros(512, np.uint8)
    outcome = run_text(kernel_text(body, ["a", "out"], 32), {"a": source, "out": out}, shared=512)
    rows, words = source.reshape(32, 16), out.view(np.uint32).reshape(32, 4)
    assert not outcome.reports
    same(words[:, 0].view(np.int32), rows[:, 3].view(np.int8).astype(np.int32))
    same(words[:, 1].view(np.int32), rows[:, 14:].copy().view(np.int16)[:, 0].astype(np.int32))
    same(words[:, 2], rows[:, 8:12].copy().view(np.uint32)[:, 0])
    same(words[:, 3], rows[:, 3].astype(np.uint32) | rows[:, 0].astype(np.uint32) << 16)


def atomic(code: str, start: Any, values: NDArray[Any], threads: int = 64) -> tuple[Any, NDArray[Any]]:
    """The final value of an element that two CTAs change by `code`, and the old value that each thread gets."""
    size = values.itemsize
    body = f"""
        mov.u32 %r1, %ctaid.x;  mov.u32 %r2, %ntid.x;  mad.lo.s32 %r3, %r1, %r2, %thread;
        mul.wide.u32 %d1, %r3, {size};  add.s64 %d2, %p_values, %d1;  add.s64 %d3, %p_found, %d1;
        ld.global.b32 %r4, [%d2];
        {code.replace("%to", "[%p_place]").replace("%with", "%r4")}
        st.global.b32 [%d3], %r5;
    """
    place, found = np.array([start], values.dtype), np.zeros_like(values)
    arrays = {"place": place, "values": values, "found": found}
    outcome = run_text(kernel_text(body, list(arrays), threads // 2), arrays, grid=(2,))
    assert not outcome.reports
    return place[0], found


def test_atomic_operations_on_integers():
    values = np.random.default_rng(0).integers(0, 1000, 64).astype(np.uint32)
    before = np.concatenate([[5], 5 + np.cumsum(values)[:-1]])
    last, found = atomic("atom.global.gpu.relaxed.add.u32 %r5, %to, %with;", 5, values)
    assert last == 5 + values.sum()
    same(found, before)
    assert atomic("atom.global.max.u32 %r5, %to, %with;", 5, values)[0] == values.max()
    assert atomic("atom.global.min.u32 %r5, %to, %with;", 2000, values)[0] == values.min()
    assert atomic("atom.global.exch.b32 %r5, %to, %with;", 2000, values)[0] == values[-1]
    assert atomic("atom.global.or.b32 %r5, %to, %with;", 0, values)[0] == np.bitwise_or.reduce(values)
    assert atomic("atom.global.and.b32 %r5, %to, %with;", 1023, values)[0] == np.bitwise_and.reduce(values)
    assert atomic("atom.global.inc.u32 %r5, %to, 10;", 0, values)[0] == 64 % 11
    assert atomic("atom.global.acq_rel.gpu.cas.b32 %r5, %to, 7, %with;", 7, values)[0] == values[0]
    signed = values.view(np.int32) - 500
    assert atomic("atom.global.min.s32 %r5, %to, %with;", 0, signed)[0] == signed.min()
    assert atomic("red.global.gpu.relaxed.add.s32 %to, %with;\nmov.b32 %r5, 0;", 0, signed)[0] == signed.sum()


def test_atomic_operations_on_floats():
    values = random_floats(64, 1, 3)
    total = np.float32(0.5)
    for value in values:
        total += value
    last, _ = atomic("atom.global.gpu.relaxed.add.f32 %r5, %to, %with;", 0.5, values)
    assert last == total
    assert atomic("red.global.add.f32 %to, %with;\nmov.b32 %r5, 0;", TINY, np.zeros(64, np.float32))[0] == 0  # flushed
    ones = np.full(64, 0x3C003C00, np.uint32)
    assert atomic("atom.global.gpu.relaxed.add.noftz.f16x2 %r5, %to, %with;", 0, ones)[0] == 0x54005400
    ones = np.full(64, 0x3F803F80, np.uint32)
    assert atomic("atom.global.gpu.relaxed.add.noftz.bf16x2 %r5, %to, %with;", 0, ones)[0] == 0x42804280


def test_accesses_that_others_may_meet():
    """Relaxed, acquire, release and volatile accesses may run at the same time in several CTAs."""
    code = """
        ld.relaxed.gpu.global.b32 %r5, %to;
        st.release.gpu.global.b32 %to, 7;
        ld.acquire.gpu.global.b32 %r5, %to;
        st.volatile.global.b32 %to, 9;
        ld.volatile.global.b32 %r6, %to;
        add.s32 %r5, %r5, %r6;
    """
    last, found = atomic(code, 5, np.zeros(64, np.uint32))
    assert last == 9
    same(found, 16)


def test_atomic_operations_on_shared_memory():
    body = """
        mov.b32 %r8, smem;  setp.eq.u32 %p1, %thread, 0;  and.b32 %r9, %thread, 3;
        @%p1 st.shared.v4.b32 [%r8], {%r1, %r1, %r1, %r1};
        bar.sync 0;
        shl.b32 %r10, %r9, 2;  add.s32 %r10, %r10, %r8;
        atom.shared::cta.relaxed.cta.add.u32 %r2, [%r10], %thread;
        red.shared.max.u32 [%r8+16], %thread;
        bar.sync 0;
        ld.shared.b32 %r3, [%r10];
        mul.wide.u32 %d1, %thread, 8;  add.s64 %d2, %p_out, %d1;
        st.global.v2.b32 [%d2], {%r2, %r3};
    """
    body = body.replace("bar.sync 0;", "@%p1 st.shared.b32 [%r8+16], 3;\n bar.sync 0;", 1)
    out = np.zeros((128, 2), np.uint32)
    assert not run_text(kernel_text(body, ["out"], 128), {"out": out}, shared=32).reports
    threads = np.arange(128)
    same(out[:, 1], [sum(other for other in range(128) if other % 4 == n % 4) for n in threads])
    # Atomic operations take effect in the order of threads.
    same(out[:, 0], [sum(other for other in range(n) if other % 4 == n % 4) for n in threads])


def test_memory_of_each_thread():
    code = """
        .local .align 8 .b8 depot[24];
        mov.b32 %r1, depot;
        shl.b32 %r2, %a, 2;  add.s32 %r3, %r1, %r2;
        st.local.v2.b32 [%r1+8], {%a, %a};
        st.local.b32 [%r3], 77;
        ld.local.b32 %r4, [%r1+8];
        ld.local.u16 %r5, [%r1+12];
        mad.lo.s32 %out, %r4, 1000, %r5;
    """
    same(evaluate(code, u32([0, 2, 3, 5]), result="u4"), [0, 77002, 3077, 5005])


def test_generic_addresses_of_own_and_of_global_memory():
    """One generic load may read local memory in some lanes and global memory in others, as in LLVM's spills."""
    body = """
        .local .align 8 .b8 depot[8];
        mov.b32 %r1, depot;  cvt.u64.u32 %d1, %r1;  cvta.local.u64 %d1, %d1;
        st.b16 [%d1+2], 7;  st.b8 [%d1+1], 5;  st.b8 [%d1], 3;
        mul.wide.u32 %d2, %thread, 4;  add.s64 %d2, %p_out, %d2;
        st.b32 [%d2], 1000;
        setp.lt.u32 %p1, %thread, 4;  selp.b64 %d3, %d1, %d2, %p1;
        ld.b32 %r2, [%d3];
        st.global.b32 [%d2], %r2;
    """
    out = np.zeros(32, np.uint32)
    assert not run_text(kernel_text(body, ["out"], 32), {"out": out}).reports
    same(out, [7 << 16 | 5 << 8 | 3] * 4 + [1000] * 28)
    with pytest.raises(Fault, match="an access of 4 bytes outside local memory"):
        run_text(kernel_text(body.replace("[%d3]", "[%d3+8]"), ["out"], 32), {"out": out})


def test_arrays_of_constants():
    text = kernel_text(
        """
        mov.b64 %d1, table;  and.b32 %r1, %thread, 3;  mul.wide.u32 %d2, %r1, 2;  add.s64 %d1, %d1, %d2;
        ld.global.nc.s16 %r2, [%d1];  mul.wide.u32 %d3, %thread, 4;  add.s64 %d3, %p_out, %d3;
        st.global.b32 [%d3], %r2;
        """, ["out"], 32,
    ).replace(".visible", ".global .align 4 .b16 table[4] = {1, 200, 30000, -4};\n.visible")  # fmt: skip
    out = np.zeros(32, np.int32)
    assert not run_text(text, {"out": out}).reports
    same(out, np.tile([1, 200, 30000, -4], 8))
    with pytest.raises(Unknown, match="the operand table"):
        run_text(text.replace("1, 200, 30000, -4", "0f3F800000"), {"out": out})


# ---- warps


def shuffled(mode: str, lane: int, by: int, limit: int) -> tuple[int, bool]:
    """The results of shfl by the ISA: the lane that is read, and whether the requested lane is in the segment."""
    by, clamp, segment = by & 31, limit & 31, (limit >> 8) & 31
    last = (lane & segment) | (clamp & ~segment & 31)
    first = lane & segment
    source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment & 31)}[mode]
    valid = source >= last if mode == "up" else source <= last
    return (source, True) if valid else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles_within_segments(mode):
    lanes = np.arange(64, dtype=np.uint32)
    for segment in (0, 0x10, 0x18):  # segments of 32, 16 and 8 lanes
        limit = segment << 8 | (0 if mode == "up" else 31)
        for by in (1, 2, 5, 13, 40):
            shuffle = f"shfl.sync.{mode}.b32 %r1|%p1, %a, {by}, {limit}, -1;"
            code = f"{shuffle}\nselp.b32 %r2, 1000, 0, %p1;\nadd.s32 %out, %r1, %r2;"
            found = evaluate(code, lanes * 3, result="u4")
            wanted = [shuffled(mode, lane, by, limit) for lane in range(32)] * 2
            same(found, [3 * (n // 32 * 32 + source) + 1000 * valid for n, (source, valid) in enumerate(wanted)])


def test_shuffles_to_lanes_that_each_lane_says():
    by = np.random.default_rng(0).integers(0, 32, 32).astype(np.uint32)
    same(evaluate("shfl.sync.idx.b32 %out, %a, %b, 31, -1;", np.arange(32, dtype=np.uint32), by, result="u4"), by)


def test_votes_and_reductions():
    a = u32([*range(32), *[5] * 32])
    code = "setp.gt.u32 %p1, %a, 3;\nvote.sync.{}.{} {}, %p1, -1;\n{}"
    ballot = evaluate(code.format("ballot", "b32", "%out", ""), a, result="u4")
    same(ballot, np.repeat(u32([0xFFFFFFF0, 0xFFFFFFFF]), 32))
    for mode, wanted in (("any", [1, 1]), ("all", [0, 1]), ("uni", [0, 1])):
        same(
            evaluate(code.format(mode, "pred", "%p2", "selp.b32 %out, 1, 0, %p2;"), a, result="u4"),
            np.repeat(wanted, 32),
        )
    signed = a.view(np.int32) - 10
    table = signed.reshape(2, 32)
    for mode, wanted in (("add", table.sum(1)), ("min", table.min(1)), ("max", table.max(1))):
        same(evaluate(f"redux.sync.{mode}.s32 %out, %a, -1;", signed, result="i4"), np.repeat(wanted, 32))
    words = a.reshape(2, 32)
    for mode, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        same(
            evaluate(f"redux.sync.{mode}.b32 %out, %a, -1;", a, result="u4"),
            np.repeat(function.reduce(words, axis=1), 32),
        )


def test_a_leader_is_elected():
    """elect.sync makes the lowest lane in each warp's member mask the leader."""
    lanes = np.arange(64, dtype=np.uint32)
    code = "elect.sync %r1|%p1, -1;\nselp.b32 %r2, 100, 0, %p1;\nadd.s32 %out, %r1, %r2;"
    same(evaluate(code, lanes, result="u4"), np.where(lanes % 32 == 0, 100, 0))
    some = f"mov.b32 %out, 9;\nsetp.lt.u32 %p2, %laneid, 5;\n@%p2 bra REST;\n{code.replace('-1', '-32')}\nREST:"
    same(evaluate(some, lanes, result="u4"), np.where(lanes % 32 < 5, 9, np.where(lanes % 32 == 5, 105, 5)))
    same(evaluate("elect.sync _|%p1, -1;\nselp.b32 %out, 1, 0, %p1;", lanes, result="u4"), lanes % 32 == 0)


def test_part_of_a_warp_votes_for_itself():
    code = """
        mov.b32 %out, 9;
        setp.lt.u32 %p1, %a, 4;
        @!%p1 bra REST;
        setp.gt.u32 %p2, %a, 1;
        vote.sync.ballot.b32 %out, %p2, 15;
        REST:
    """
    same(evaluate(code, np.arange(32, dtype=np.uint32), result="u4"), [12] * 4 + [9] * 28)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_to_registers_and_back(count, trans):
    """ldmatrix and stmatrix give a lane two elements of a row, or with .trans of a column, of each 8 x 8 matrix."""
    source = np.arange(count * 64, dtype=np.uint16)
    registers = ", ".join(f"%r{20 + i}" for i in range(count))
    stores = "".join(f"st.global.b32 [%d3+{128 * i}], %r{20 + i};\n" for i in range(count))
    copies = "".join(
        f"ld.global.b32 %r3, [%d2+{128 * i}];\nst.shared.b32 [%r2+{128 * i}], %r3;\n" for i in range(count)
    )
    back = "".join(
        f"ld.shared.b32 %r3, [%r2+{1024 + 128 * i}];\nst.global.b32 [%d4+{128 * i}], %r3;\n" for i in range(count)
    )
    body = f"""
        mul.wide.u32 %d1, %thread, 4;  add.s64 %d2, %p_a, %d1;  add.s64 %d3, %p_out, %d1;  add.s64 %d4, %p_back, %d1;
        mov.b32 %r1, smem;  shl.b32 %r2, %thread, 2;  add.s32 %r2, %r2, %r1;
        {copies}
        bar.sync 0;
        and.b32 %r4, %thread, {8 * count - 1};  shl.b32 %r4, %r4, 4;  add.s32 %r4, %r4, %r1;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r4];
        {stores}
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r4+1024], {{{registers}}};
        bar.sync 0;
        {back}
    """
    arrays = {"a": source, "out": np.zeros_like(source), "back": np.zeros_like(source)}
    outcome = run_text(kernel_text(body, list(arrays), 32), arrays, shared=2048)
    assert not outcome.reports
    matrices, found = source.reshape(count, 8, 8), arrays["out"].reshape(count, 32, 2)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4) + np.arange(2)
        same(found[:, lane], matrices[:, column, row] if trans else matrices[:, row, column])
    same(arrays["back"], source)


EIGHT_BITS = ("e4m3", "e5m2", "s8", "u8")


def left_place(kind: str, k: int, lane: int, i: int) -> tuple[int, int]:
    """The (row, k) of element i of a lane's left operand, by the ISA's formulas."""
    group, thread = divmod(lane, 4)
    if kind == "tf32":
        return group + 8 * (i & 1), thread + 4 * (i >> 1)
    if kind in EIGHT_BITS:
        return group + 8 * ((i >> 2) & 1), 4 * thread + (i & 3) + 16 * (i >> 3)
    return group + 8 * ((i >> 1) & 1), 2 * thread + (i & 1) + 8 * (i >> 2)


def right_place(kind: str, lane: int, i: int) -> tuple[int, int]:
    """The (k, column) of element i of a lane's right operand, by the ISA's formulas."""
    group, thread = divmod(lane, 4)
    if kind == "tf32":
        return thread + 4 * i, group
    if kind in EIGHT_BITS:
        return 4 * thread + (i & 3) + 16 * (i >> 2), group
    return 2 * thread + (i & 1) + 8 * (i >> 1), group


def encoded(x: NDArray[np.float32], kind: str) -> NDArray[Any]:
    if kind in ("s8", "u8"):
        return np.clip(np.rint(100 * x), -128 * (kind == "s8"), 127 + 128 * (kind == "u8")).astype(
            f"{kind[0].replace('s', 'i')}1"
        )
    if kind == "tf32":
        return x.view(np.uint32)
    if kind in numbers.FP8:
        return np.abs(x[..., None] - numbers.FP8[kind][:120]).argmin(-1).astype(np.uint8)
    return nearest_bits(x, kind).reshape(x.shape)


def decoded(bits: NDArray[Any], kind: str) -> NDArray[np.float64]:
    if kind in ("s8", "u8"):
        return bits.astype(np.float64)
    if kind == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return (numbers.FP8[kind][bits] if kind in numbers.FP8 else numbers.VALUES[kind](bits)).astype(np.float64)


@pytest.mark.parametrize(
    ("k", "kind"),
    [
        *[(16, "bf16"), (8, "bf16"), (16, "f16"), (8, "f16"), (8, "tf32"), (4, "tf32"), (32, "e4m3"), (32, "e5m2")],
        *[(16, "s8"), (32, "s8"), (32, "u8")],
    ],
)
def test_mma(k, kind):
    rng = np.random.default_rng(k)
    a, b = (encoded(rng.normal(size=shape).astype(np.float32), kind) for shape in ((16, k), (k, 8)))
    sums = "s32" if kind in ("s8", "u8") else "f32"
    c = (1000 * rng.normal(size=(16, 8))).astype(np.int32 if sums == "s32" else np.float32)
    each = 4 // a.itemsize
    lefts, rights = 16 * k // 32, 8 * k // 32
    left = np.array([[a[left_place(kind, k, lane, i)] for i in range(lefts)] for lane in range(32)])
    right = np.array([[b[right_place(kind, lane, i)] for i in range(rights)] for lane in range(32)])
    at = [(lane // 4 + 8 * (i >> 1), 2 * (lane % 4) + (i & 1)) for lane in range(32) for i in range(4)]
    words = {"a": left, "b": right, "c": np.array([c[place] for place in at]), "out": np.zeros(128, c.dtype)}
    counts = {"a": lefts // each, "b": rights // each, "c": 4}
    loads, first = "", {}
    for base, (name, count) in zip((20, 30, 40), counts.items(), strict=True):
        loads += f"mul.wide.u32 %d1, %thread, {4 * count};  add.s64 %d2, %p_{name}, %d1;\n"
        loads += "".join(f"ld.global.b32 %r{base + i}, [%d2+{4 * i}];\n" for i in range(count))
        first[name] = "{" + ", ".join(f"%r{base + i}" for i in range(count)) + "}"
    body = f"""
        {loads}
        mma.sync.aligned.m16n8k{k}.row.col.{sums}.{kind}.{kind}.{sums}
            {{%r1, %r2, %r3, %r4}}, {first["a"]}, {first["b"]}, {first["c"]};
        mul.wide.u32 %d1, %thread, 16;  add.s64 %d2, %p_out, %d1;
        st.global.v4.b32 [%d2], {{%r1, %r2, %r3, %r4}};
    """
    assert not run_text(kernel_text(body, list(words), 32), words).reports
    found = np.zeros((16, 8))
    for place, value in zip(at, words["out"].tolist(), strict=True):
        found[place] = value
    np.testing.assert_allclose(found, decoded(a, kind) @ decoded(b, kind) + c, rtol=1e-5, atol=2e-4)


def test_mma_with_sums_of_16_bits():
    """A register holds two 16-bit sums, in the order of 32-bit sums. Here each product is 32, plus the addend."""
    ones, twos = 0x3C003C00, 0x40004000
    code = f"""
        mov.b32 %r1, {ones};  mov.b32 %r2, {twos};
        mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16
            {{%r5, %r6}}, {{%r1, %r1, %r1, %r1}}, {{%r2, %r2}}, {{%a, %b}};
        mov.b64 %out, {{%r5, %r6}};
    """
    addend = f16(np.arange(128) / 8).reshape(32, 4)
    found = evaluate(
        code, *(np.ascontiguousarray(addend[:, i : i + 2]).view(np.uint32)[:, 0] for i in (0, 2)), result="u8"
    )
    same(found.view(np.float16).reshape(32, 4), addend + np.float16(32))


def test_sums_of_integers_wrap_or_stop():
    code = """
        mov.b32 %r1, 2139062143;  mov.b32 %r2, 2147483000;
        mma.sync.aligned.m16n8k32.row.colLIMIT.s32.s8.s8.s32
            {%out, %r6, %r7, %r8}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r2, %r2, %r2, %r2};
    """
    total = 2147483000 + 32 * 127 * 127
    same(evaluate(code.replace("LIMIT", ""), np.zeros(32), result="i4"), total - 2**32)
    same(evaluate(code.replace("LIMIT", ".satfinite"), np.zeros(32), result="i4"), 2**31 - 1)


# ---- warpgroups

SWIZZLES = {"none": (0, 16), "128": (1, 128), "64": (2, 64), "32": (3, 32)}  # (descriptor mode, bytes per row)


def swizzled(row: int, byte: int, span: int) -> int:
    """The position of a byte in row `row` under a swizzle, which permutes 16-byte chunks depending on the row."""
    step = {16: 0, 32: (row // 4) % 2, 64: (row // 2) % 4, 128: row % 8}[span]
    return (byte // 16 ^ step) * 16 + byte % 16


def lay_out(matrix: NDArray[Any], span: int, transposed: bool) -> tuple[NDArray[np.uint16], tuple[int, int]]:
    """The image of a matrix [rows, 16] in shared memory, and the descriptor's two strides in bytes."""
    rows, columns = matrix.shape
    # The numbers of elements along the contiguous dimension and along the other one.
    along, across = (rows, columns) if transposed else (columns, rows)
    image: Any = np.zeros(8192, np.uint16)
    per_row = span // 2
    atom = 8 * span  # the bytes of eight rows of the swizzle's span
    stride_across, stride_along = atom, atom * (across // 8)
    for i in range(along):
        for j in range(across):
            value = matrix[i, j] if transposed else matrix[j, i]
            block = (i // per_row) * stride_along + (j // 8) * stride_across
            image[(block + (j % 8) * span + swizzled(j % 8, 2 * (i % per_row), span)) // 2] = value
    steps = stride_along, stride_across
    return image, (steps[1], steps[0]) if span == 16 and transposed else steps


def descriptor(offset: int, steps: tuple[int, int], mode: int) -> int:
    leading, stride = steps
    return (SHARED_BASE + offset) >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62


def product(n: int, kind: str, left: str, right: int, order: str, more: str = "") -> str:
    """A kernel body that copies 32 KiB to shared memory, multiplies, and stores the sums as each thread holds them."""
    loads = "".join(
        f"ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d2+{2048 * i}];\n"
        f"st.shared.v4.b32 [%r6+{2048 * i}], {{%r1, %r2, %r3, %r4}};\n"
        for i in range(16)
    )
    sums = [f"%r{100 + i}" for i in range(n // 2)]
    return f"""
        mul.wide.u32 %d1, %thread, 16;  add.s64 %d2, %p_image, %d1;
        shl.b32 %r5, %thread, 4;  mov.b32 %r6, smem;  add.s32 %r6, %r6, %r5;
        {loads}
        fence.proxy.async.shared::cta;
        bar.sync 0;
        {"".join(f"mov.b32 {one}, 0f3F800000;" for one in sums)}
        mov.b64 %d11, {right};
        {left}
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{", ".join(sums)}}}, LEFT, %d11, 1, 1, 1{order};
        {more}
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        mul.wide.u32 %d3, %thread, {2 * n};  add.s64 %d4, %p_out, %d3;
        {"".join(f"st.global.b32 [%d4+{4 * i}], {one};" for i, one in enumerate(sums))}
    """


def gathered(out: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """The matrix [64, n] whose elements 128 threads hold, by the ISA's formula."""
    found = np.zeros((64, n), np.float32)
    for thread in range(128):
        for i in range(n // 2):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * ((i >> 1) & 1)
            found[row, 8 * (i // 4) + 2 * (thread % 4) + (i & 1)] = out[thread * n // 2 + i]
    return found


@pytest.mark.parametrize(
    ("swizzle", "transposed"),
    [(swizzle, order) for swizzle in SWIZZLES for order in ((0, 0), (0, 1), (1, 0), (1, 1))],
)
def test_wgmma_by_descriptors(swizzle, transposed):
    mode, span = SWIZZLES[swizzle]
    n, kind = 64, "bf16" if sum(transposed) % 2 else "f16"
    a, b = (
        nearest_bits(random_floats(rows * 16, rows + sum(transposed), 1), kind).reshape(rows, 16) for rows in (64, n)
    )
    (left, left_steps), (right, right_steps) = (
        lay_out(matrix, span, bool(order)) for matrix, order in zip((a, b), transposed, strict=True)
    )
    setup = f"mov.b64 %d10, {descriptor(0, left_steps, mode)};"
    order = f", {transposed[0]}, {transposed[1]}"
    body = product(n, kind, setup, descriptor(16384, right_steps, mode), order).replace("LEFT", "%d10")
    arrays = {"image": np.concatenate([left, right]), "out": np.zeros(128 * n // 2, np.float32)}
    outcome = run_text(kernel_text(body, list(arrays), 128), arrays, shared=32768)
    assert not outcome.reports
    wanted = decoded(a, kind) @ decoded(b, kind).T + 1
    np.testing.assert_allclose(gathered(arrays["out"], n), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kinds", "sums"),
    [
        *[(("tf32", "tf32"), "f32"), (("e4m3", "e4m3"), "f32"), (("e5m2", "e4m3"), "f32"), (("s8", "s8"), "s32")],
        *[(("u8", "s8"), "s32"), (("f16", "f16"), "f16"), (("e4m3", "e4m3"), "f16")],
    ],
)
@pytest.mark.parametrize("swizzle", ["none", "128"])
def test_wgmma_on_other_kinds(kinds, sums, swizzle):
    """A wgmma has 32 bytes along k for every element type, and sums of three types. A register holds two f16 sums."""
    mode, span = SWIZZLES[swizzle]
    n, width = 16, encoded(f32([0]), kinds[0]).itemsize
    rng = np.random.default_rng(n)
    a, b = (
        encoded(rng.normal(size=(rows, 32 // width)).astype(np.float32), kind)
        for rows, kind in zip((64, n), kinds, strict=True)
    )
    (left, left_steps), (right, right_steps) = (
        lay_out(np.ascontiguousarray(matrix).view(np.uint16), span, False) for matrix in (a, b)
    )
    setup = f"mov.b64 %d10, {descriptor(0, left_steps, mode)};"
    order = "" if width != 2 else ", 0, 0"
    body = product(n, "f16", setup, descriptor(16384, right_steps, mode), order).replace("LEFT", "%d10")
    one = {"f32": "0f3F800000", "s32": "1", "f16": "1006648320"}[sums]  # for f16, 0x3C003C00: two ones
    body = body.replace("0f3F800000", one).replace("k16.f32.f16.f16", f"k{32 // width}.{sums}.{kinds[0]}.{kinds[1]}")
    if sums == "s32":
        body = body.replace("%d11, 1, 1, 1", "%d11, 1")
    if sums == "f16":
        used = ", ".join(f"%r{100 + i}" for i in range(n // 4))
        body = body.replace("{" + ", ".join(f"%r{100 + i}" for i in range(n // 2)) + "}", "{" + used + "}")
    arrays = {"image": np.concatenate([left, right]), "out": np.zeros(128 * n // 2, np.uint32)}
    outcome = run_text(kernel_text(body, list(arrays), 128), arrays, shared=32768)
    assert not outcome.reports
    words = arrays["out"].reshape(128, n // 2)
    if sums == "f16":
        words = np.ascontiguousarray(words[:, : n // 4]).view(np.float16)
    found = words.view(np.float32) if sums == "f32" else words.view(np.int32) if sums == "s32" else words
    wanted = decoded(a, kinds[0]) @ decoded(b, kinds[1]).T + 1
    tolerance = 2e-3 if sums == "f16" else 1e-5
    np.testing.assert_allclose(gathered(found.astype(np.float32).ravel(), n), wanted, rtol=tolerance, atol=tolerance)


def test_wgmma_from_registers():
    n = 16
    a, b = (nearest_bits(random_floats(rows * 16, rows, 1), "bf16").reshape(rows, 16) for rows in (64, n))
    words = np.zeros((128, 8), np.uint16)
    for thread in range(128):
        for i in range(8):
            row, k = left_place("bf16", 16, thread % 32, i)
            words[thread, i] = a[16 * (thread // 32) + row, k]
    right, steps = lay_out(b, 128, False)
    setup = "mul.wide.u32 %d5, %thread, 16;  add.s64 %d6, %p_a, %d5;  ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d6];"
    body = product(n, "bf16", setup, descriptor(16384, steps, 1), ", 0").replace("LEFT", "{%r20, %r21, %r22, %r23}")
    image = np.concatenate([np.zeros(8192, np.uint16), right])
    arrays = {"image": image, "a": words, "out": np.zeros(128 * n // 2, np.float32)}
    outcome = run_text(kernel_text(body, list(arrays), 128), arrays, shared=32768)
    assert not outcome.reports
    wanted = decoded(a, "bf16") @ decoded(b, "bf16").T + 1
    np.testing.assert_allclose(gathered(arrays["out"], n), wanted, rtol=1e-5, atol=1e-5)


# ---- refused PTX, parameters, control flow and source lines


@pytest.mark.parametrize(
    "code",
    [
        "madc.hi.s32 %r1, %r2, %r3, %r4;",
        "add.cc.u16 %h1, %h2, %h3;",
        "add.rm.f32 %r1, %r2, %r3;",
        "add.f64 %r1, %r2, %r3;",
        "fma.rz.f64 %d1, %d2, %d3, %d4;",
        "fma.rp.f32 %r1, %r2, %r3, %r4;",
        "min.xorsign.f32 %r1, %r2, %r3;",
        "max.f32 %r1, %r2, %r3, %r4;",
        "cvt.rp.bf16.f32 %h1, %r2;",
        "cvt.f32.s32 %r1, %r2;",
        "cvt.rn.e4m3x2.f32 %h1, %r1, %r2;",
        "cvt.rn.relu.f16x2.f32 %r1, %r1, %r2;",
        "ex2.f32 %r1, %r2;",
        "ld.relaxed.gpu.b32 %r1, [%d1];",
        "st.volatile.b32 [%d1], %r1;",
        "ld.b32 %r1, [4096];",
        "ld.const.b32 %r1, [%d1];",
        "ld.acquire.gpu.global.v2.b32 {%r1, %r2}, [%d1];",
        "ld.acquire.cta.shared.b32 %r1, [%r2];",
        "st.release.global.b32 [%d1], %r1;",
        "ld.shared::cluster.b32 %r1, [%r2];",
        "ld.global.L2::cache_hint.b32 %r1, [%d1], %d2;",
        "st.async.shared::cluster.b32 [%r1], %r2, [%r3];",
        "atom.shared.add.v2.f32 {%r1, %r2}, [%r2], {%r3, %r4};",
        "atom.global.add.noftz.f16 %r1, [%d2], %h3;",
        "fence.proxy.alias;",
        "bar.red.popc.u32 %r1, 0, %p1;",
        "barrier.cluster.arrive;",
        "setmaxnreg.inc.sync.aligned.u32 20;",
        "cp.async.cg.shared.global.L2::cache_hint [%r1], [%d1], 16, %r2;",
        "prefetch.global.L2 [%d1];",
        "cvta.shared.u64 %d1, %d2;",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16 {%r1, %r2}, {%r3, %r4, %r5, %r6}, {%r7, %r8}, {%r1, %r2};",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d1, %d2}, {%d3}, {%d4}, {%d1, %d2};",
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r1, %r2}, {%r3}, {%r4}, {%r1, %r2};",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.tf32.tf32 {%r1, %r2, %r3, %r4}, %d1, %d2, 1, 1, 1;",
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r1, %r2, %r3, %r4}, %d1, %d2, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc {%r1, %r2, %r3, %r4}, %d1, %d2, 1;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1, %r2, %r3, %r4}, %d1, %d2, 1, -1, 1, 0, 0;",
        "shfl.idx.b32 %r1, %r2, 0, 31;",
        "redux.sync.min.f32 %r1, %r2, -1;",
        "mov.b32 %r1, %clock;",
        "mov.b32 %r1, another;",
        "call.uni (retval), helper, (param);",
    ],
)
def test_what_is_not_known_is_refused(code):
    opcode = code.split()[0].rstrip(";")
    with pytest.raises(Unknown, match=rf"^line \d+: {opcode.replace('.', '[.]')}"):
        run_text(kernel_text(code, [], 32), {})


def test_one_of_several_kernels():
    """Each kernel of a module has its own text, registers and parameters; line numbers are those of the module."""
    text = kernel_text("mov.b32 %r1, 1;", ["a"], 32)
    second = kernel_text("wgmma.fence.sync.aligned;", ["b"], 128).replace("test(", "other(").partition("smem[];")[2]
    module = text + second
    first, other = parse(module), parse(module, "other")
    assert (first.name, first.params, first.threads) == ("test", [("a", "u64")], 32)
    assert (other.name, other.params, other.threads) == ("other", [("b", "u64")], 128)
    assert "wgmma" not in first.text
    assert "mov.b32 %r1, 1" not in other.text
    (fence,) = (one for block in other.blocks for one in block.instructions if "wgmma" in one.opcode)
    assert "wgmma" in module.split("\n")[fence.line - 1]
    with pytest.raises(Unknown, match=r"without the kernel third \(\.entry\)"):
        parse(module, "third")


def test_refused_texts():
    with pytest.raises(Unknown, match="without a kernel"):
        parse(".version 8.0")
    with pytest.raises(Unknown, match="no label"):
        parse(kernel_text("bra.uni NOWHERE;", [], 32))
    with pytest.raises(Unknown, match="more than one dimension"):
        parse(kernel_text("", [], 32).replace(".reqntid 32", ".reqntid 32, 2"))
    with pytest.raises(Unknown, match="whole warps"):
        run_text(kernel_text("", [], 48), {})
    for one in ("bar.arrive 1;", "@%p1 bar.sync 0;", "bra.uni %r1, NOWHERE;"):
        with pytest.raises(Unknown, match=one.removeprefix("@%p1 ")[:8]):
            parse(kernel_text(one, [], 32))
    with pytest.raises(Unknown, match="the parameter"):
        parse(kernel_text("", [], 32).replace("test()", "test(.param nothing)"))


def test_what_only_schedules_changes_nothing():
    code = """
        setmaxnreg.inc.sync.aligned.u32 240;
        setmaxnreg.dec.sync.aligned.u32 24;
        prefetch.tensormap [%d1];
        fence.mbarrier_init.release.cluster;
        mov.b32 %out, %a;
    """
    a = np.arange(128, dtype=np.uint32)
    same(evaluate(code, a, result="u4"), a)


def test_addresses_of_parameters():
    """An array parameter is aligned to 64 bytes, and its generic address lies in the parameter window."""
    body = "mov.b32 %r1, map;  mov.b32 %r2, a;  cvta.param.u64 %d1, 0;\nst.global.v2.b32 [%p_a], {%r1, %r2};\n"
    body += "st.global.b64 [%p_a+8], %p_map;\nst.global.b64 [%p_a+16], %d1;"
    found = np.zeros(24, np.uint8)
    run_text(
        kernel_text(body, ["a"], 32, ["map"]), {"a": found}, maps={"map": ("a", TensorMap(0, (8,), (), (8,), 4, 0))}
    )
    array, first = found[:8].view(np.uint32).tolist()
    generic, window = found[8:].view(np.uint64).tolist()
    assert (array, first) == (PARAM_BASE + 64, PARAM_BASE)
    assert generic - window == array


def test_parameters_by_addresses():
    """Parameters can be read as compilers read structures: through a register, two at a time, or as another type."""
    body = """
        mov.b64 %d1, map;
        ld.param.v2.u32 {%r1, %r2}, [%d1+40];
        ld.param.u8 %r3, [%d1+102];
        ld.param.v2.b64 {%d2, _}, [map];
        st.global.v2.b32 [%p_out], {%r1, %r2};
        st.global.b32 [%p_out+8], %r3;
        setp.eq.u64 %p1, %d2, %p_out;  selp.b32 %r4, 1, 0, %p1;  st.global.b32 [%p_out+12], %r4;
    """
    out = np.zeros(4, np.uint32)
    maps = {"map": ("out", TensorMap(0, (8, 9), (64,), (8, 2), 7, 0))}
    assert not run_text(kernel_text(body, ["out"], 32, ["map"]), {"out": out}, maps=maps).reports
    same(out, [8, 9, 0, 1])
    for place in ("[%d1+128]", "[%d1+-80]", "[%d1+42]"):
        with pytest.raises(Fault, match=r"an access of 8 bytes (outside|unaligned in) parameters"):
            run_text(kernel_text(body.replace("[%d1+40]", place), ["out"], 32, ["map"]), {"out": out}, maps=maps)


def test_labels_of_two_scopes_are_two():
    """Labels in the braces of inline assembly are separate, even if their names are equal."""
    turns = """
        mov.b32 %r1, 0;
        {
        .reg .pred done;
        again:
        add.s32 %r1, %r1, 1;
        add.s32 %out, %out, STEP;
        setp.ge.u32 done, %r1, %a;
        @!done bra again;
        }
    """
    code = "mov.b32 %out, 0;\n" + turns.replace("STEP", "1") + turns.replace("STEP", "100")
    same(evaluate(code, u32([1, 2, 5]), result="u4"), [101, 202, 505])


def test_loops_and_branches():
    """Each lane runs a loop as often as its own input says; lanes that leave early wait after the loop."""
    code = """
        mov.b32 %out, 0;
        mov.b32 %r1, 0;
        LOOP:
        setp.ge.u32 %p1, %r1, %a;
        @%p1 bra DONE;
        add.s32 %out, %out, %r1;
        add.s32 %r1, %r1, 1;
        bra.uni LOOP;
        DONE:
        add.s32 %out, %out, 100;
    """
    a = np.arange(64, dtype=np.uint32)
    same(evaluate(code, a, result="u4"), a * (a - 1) // 2 + 100)


def test_the_line_of_the_source_is_told():
    body = ".loc 1 42 7\ntrap;\n"
    text = kernel_text(body, [], 32) + '\n.file 1 "/somewhere/kernels.py"\n'
    line = text.split("\n").index("trap;") + 1
    with pytest.raises(Fault, match=rf"^line {line} \(/somewhere/kernels.py:42\): a trap") as caught:
        run_text(text, {})
    assert (caught.value.line, caught.value.source) == (line, "/somewhere/kernels.py:42")


def test_the_chain_of_lines_is_told():
    """A fault names the chain of source lines from the kernel's own line to the innermost inlined function."""
    body = """
        .loc 1 42 7
        .loc 2 10 3, function_name $L__info_string0, inlined_at 1 42 7
        .loc 3 5 1, function_name $L__info_string1, inlined_at 2 10 3
        trap;
    """
    files = '\n.file 1 "kernels.py"\n.file 2 "helpers.py"\n.file 3 "standard.py"\n'

    def source(text: str) -> str | None:
        with pytest.raises(Fault) as caught:
            run_text(kernel_text(text, [], 32) + files, {})
        return caught.value.source

    assert source(body) == "kernels.py:42 > helpers.py:10 > standard.py:5"
    assert source(body.replace("inlined_at 2 10 3", "inlined_at 1 50 1")) == "kernels.py:50 > standard.py:5"
    assert source(body.replace("trap", ".loc 1 43 1\ntrap")) == "kernels.py:43"
    assert source(body.replace("trap", ".loc 1 0 0\ntrap")) is None
    # A later `.loc` for the same line without `inlined_at` ends the chain at that line.
    assert source(body.replace("trap", ".loc 2 10 3\n.loc 3 5 1, inlined_at 2 10 3\ntrap")) == (
        "helpers.py:10 > standard.py:5"
    )


def test_any_order_of_warps_gives_the_same():
    a = np.arange(128, dtype=np.uint32)
    body = """
        mul.wide.u32 %d1, %thread, 4;  add.s64 %d2, %p_out, %d1;  shl.b32 %r1, %thread, 2;  mov.b32 %r2, smem;
        add.s32 %r3, %r2, %r1;  st.shared.b32 [%r3], %thread;
        bar.sync 0;
        xor.b32 %r4, %r1, 508;  add.s32 %r4, %r4, %r2;  ld.shared.b32 %r5, [%r4];  st.global.b32 [%d2], %r5;
    """
    for seed in (None, 1, 2):
        out = np.zeros_like(a)
        outcome = run_text(kernel_text(body, ["out"], 128), {"out": out}, shared=512, seed=seed)
        assert not outcome.reports
        assert {"ld.shared.b32", "bar.sync", "ret"} <= outcome.opcodes
        assert outcome.instructions == 12 or seed is not None
        same(out, a[::-1])
