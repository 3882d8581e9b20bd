"""PTX arithmetic on NumPy arrays, as the PTX ISA defines it: number formats, rounding, and bits.

Registers hold bits, so a 16-bit or 8-bit float is a uint16 or uint8 here. Rounding is to nearest, ties to even. A NaN
result has whatever bits NumPy gives it, except in 16-bit and 8-bit formats, where it is the ISA's canonical NaN. The
approximate functions (`ex2.approx` etc.) are NumPy's, whose errors are smaller than the ISA allows.
"""

import ctypes
import ctypes.util
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[Any]  # unsigned integers
Floats = NDArray[Any]  # float32 or float64
WHOLE = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}  # rounds floats to integers, by PTX mode
TINY = np.float32(2.0**-126)  # the smallest normal float32
# Masks for the bits of a float64. BELOW: the 29 bits that a float32 lacks. HALF_WAY: half of a float32's last bit.
# SIZE: all bits except the sign. SMALL: the bits of twice the smallest normal float32.
BELOW, HALF_WAY, SIZE = np.uint64((1 << 29) - 1), np.uint64(1 << 28), np.uint64((1 << 63) - 1)
ONE, SMALL = np.uint64(1), np.float64(2.0**-125).view(np.uint64)


# ---- rounding


def flush(x: Any) -> Floats:
    """Subnormal float32 -> zero of the same sign, as `.ftz` does."""
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def saturate(x: Any) -> Floats:
    """`.sat` of floats: clamped to [0, 1]; NaN becomes 0."""
    return np.clip(np.nan_to_num(x, nan=0.0), 0, 1).astype(np.asarray(x).dtype)


def round_to_odd(x: Any) -> Floats:
    """float64 -> float32, rounded to odd: an inexact value becomes the neighbour whose last bit is 1.

    Rounding the result again, to a format of at most 22 bits, gives the same as rounding `x` directly.
    """
    x = np.asarray(x, np.float64)
    near = x.astype(np.float32)
    bits = np.atleast_1d(near).view(np.int32)
    inexact = (near.astype(np.float64) != x) & ~np.isnan(x)
    towards_zero = bits - (np.abs(near.astype(np.float64)) > np.abs(x))
    return np.where(inexact, towards_zero | 1, bits).view(np.float32).reshape(x.shape)


def odd_sum(a: Any, b: Any) -> NDArray[np.float64]:
    """a + b in float64, rounded to odd: rounding it again, to float32 or narrower, gives the correctly rounded sum."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    total = np.atleast_1d(a + b)
    back = total - a  # Knuth's two-sum: `error` is exactly what rounding lost
    error = (a - (total - back)) + (b - back)
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    move = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    return np.where(move, bits + step, bits).view(np.float64).reshape(a.shape)


def toward_zero(x: Any) -> NDArray[np.float32]:
    """float64 -> float32, rounded towards zero: `.rz`."""
    x = np.asarray(x, np.float64)
    near = np.atleast_1d(x.astype(np.float32))
    return step_back(near, near, np.atleast_1d(x)).reshape(x.shape)


def step_back(near: NDArray[Any], values: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
    """`x` rounded towards zero. `near` has the nearest floats, or their bits, and `values` has their values."""
    bits = near.view(f"u{near.dtype.itemsize}")
    return (bits - (np.abs(values) > np.abs(x)).astype(bits.dtype)).view(near.dtype)


def fma32(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    """a * b + c of float32, rounded once. The product of two float32 is exact in float64.

    The sum is first rounded to float64. This matters only if it then seems to lie half-way between two float32. For
    normal float32 the lower bits show that. Sums that are below 2**-125 are always computed again.
    """
    product, c = np.broadcast_arrays(np.float64(a) * np.float64(b), np.float64(c))
    shape, product, c = product.shape, np.atleast_1d(product), np.atleast_1d(c)
    total = product + c
    result, bits = total.astype(np.float32), total.view(np.uint64)
    small = ((bits & SIZE) - ONE) < SMALL  # not zero: subtracting 1 from it gives the largest number
    doubtful = ((bits & BELOW) == HALF_WAY) | small
    if doubtful.any():
        result[doubtful] = odd_sum(product[doubtful], c[doubtful]).astype(np.float32)
    return result.reshape(shape)


def fma64(a: Any, b: Any, c: Any) -> NDArray[np.float64]:
    """a * b + c of float64, rounded once, by the C library."""
    return _fma64()(a, b, c).astype(np.float64)


@functools.cache
def _fma64() -> Any:
    function = ctypes.CDLL(ctypes.util.find_library("m")).fma
    function.argtypes, function.restype = (ctypes.c_double,) * 3, ctypes.c_double
    return np.frompyfunc(function, 3, 1)


def fma_wide(a: Any, b: Any, c: Any) -> NDArray[np.float64]:
    """a * b + c of 16-bit floats that are given as float64, rounded to odd. The caller rounds the result to 16 bits."""
    return odd_sum(a * b, c)


# ---- 16-bit floats, and pairs of them in words


def bf16_bits(x: Any) -> NDArray[np.uint16]:
    """float32 or float64 -> bfloat16."""
    x = np.atleast_1d(x)
    word = np.ascontiguousarray(round_to_odd(x) if x.dtype == np.float64 else x, np.float32).view(np.uint32)
    rounded = (word + (np.uint32(0x7FFF) + ((word >> 16) & 1))) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def bf16_value(bits: Any) -> NDArray[np.float32]:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_bits(x: Any) -> NDArray[np.uint16]:
    """float32 or float64 -> float16; values that are too large become infinity."""
    x = np.atleast_1d(x)
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


def f16_value(bits: Any) -> NDArray[np.float32]:
    return np.asarray(bits).view(np.float16).astype(np.float32)


VALUES = {"bf16": bf16_value, "f16": f16_value}


def bf16_bits_down(x: Any) -> NDArray[np.uint16]:
    """float32 -> bfloat16, towards zero."""
    x = np.atleast_1d(np.asarray(x, np.float32))
    return np.where(np.isnan(x), np.uint32(0x7FFF), np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)


def f16_bits_down(x: Any) -> NDArray[np.uint16]:
    """float32 -> float16, towards zero; finite values that are too large become the largest finite float16."""
    x = np.atleast_1d(x)
    near = x.astype(np.float16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), step_back(near, near, x).view(np.uint16))


BITS = {"bf16": bf16_bits, "f16": f16_bits, "bf16_down": bf16_bits_down, "f16_down": f16_bits_down}


def pack(high: Any, low: Any, kind: str) -> NDArray[np.uint32]:
    """Two floats, rounded to 16 bits and packed into a word; `kind` is a key of `BITS`."""
    return BITS[kind](low).astype(np.uint32) | (BITS[kind](high).astype(np.uint32) << np.uint32(16))


def on_halves(function: Any, kind: str, *words: Any) -> Bits:
    """A function of floats, applied to 16-bit floats, of which each element holds one (uint16) or two (uint32)."""
    arrays = np.broadcast_arrays(*map(np.atleast_1d, words))
    parts = [VALUES[kind](np.ascontiguousarray(a).view(np.uint16)).astype(np.float64) for a in arrays]
    return BITS[kind](function(*parts)).view(arrays[0].dtype)


def flush_halves(x: Any, kind: str) -> Floats:
    """Values that would be subnormal as 16-bit floats -> zero of the same sign."""
    return np.where(np.abs(x) < {"bf16": 2.0**-126, "f16": 2.0**-14}[kind], np.copysign(0.0, x), x)


def negate_halves(word: Any) -> Bits:
    word = np.asarray(word)
    return word ^ word.dtype.type(0x8000 if word.dtype.itemsize == 2 else 0x80008000)


def absolute_halves(word: Any) -> Bits:
    word = np.asarray(word)
    return word & word.dtype.type(0x7FFF if word.dtype.itemsize == 2 else 0x7FFF7FFF)


def tf32_value(bits: Any) -> NDArray[np.float32]:
    """The number that a tensor core reads from a word: its upper 19 bits."""
    return (np.asarray(bits) & np.uint32(0xFFFFE000)).view(np.float32)


def tf32_bits(x: Any, ties: str) -> NDArray[np.uint32]:
    """float32 -> tf32 to nearest; ties to "even" or "away" from zero."""
    word = np.atleast_1d(np.asarray(x, np.float32)).view(np.uint32)
    half = np.uint32(0x1000) if ties == "away" else np.uint32(0xFFF) + ((word >> 13) & 1)
    rounded = (word + half) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), np.where(np.isinf(x), word, rounded))


# ---- 8-bit floats


def fp8_values(mantissa: int, bias: int, special: Mapping[int, float]) -> NDArray[np.float32]:
    """The values of the 256 codes of an 8-bit float; `special` has the positive codes that are not finite numbers."""
    code = np.arange(128)
    exponent = code >> mantissa
    fraction = (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    x = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    x[[*special]] = [*special.values()]
    return np.concatenate([x, -x]).astype(np.float32)


FP8 = {
    "e4m3": fp8_values(3, 7, {127: np.nan}),
    "e5m2": fp8_values(2, 15, {124: np.inf, 125: np.nan, 126: np.nan, 127: np.nan}),
}


def fp8_to_f16(word: Any, kind: str) -> NDArray[np.uint32]:
    """Two 8-bit floats (uint16) -> two float16 (uint32)."""
    codes = np.atleast_1d(np.ascontiguousarray(word, np.uint16)).view(np.uint8)
    return f16_bits(FP8[kind][codes]).view(np.uint32)


def fp8_pair(high: Any, low: Any, kind: str) -> NDArray[np.uint16]:
    """Two floats -> two 8-bit floats, `.satfinite`: clamped to the finite range; NaN becomes the canonical 0x7F."""
    table = FP8[kind][: 127 if kind == "e4m3" else 124].astype(np.float64)
    codes = []
    for x in (np.atleast_1d(low), np.atleast_1d(high)):
        size = np.minimum(np.abs(x.astype(np.float64)), table[-1])
        above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
        to_lower, to_upper = size - table[above - 1], table[above] - size
        lower = (to_lower < to_upper) | ((to_lower == to_upper) & (above % 2 == 1))
        code = np.where(lower, above - 1, above) | (np.signbit(x) * 128)
        codes.append(np.where(np.isnan(x), 127, code).astype(np.uint16))
    return codes[0] | (codes[1] << np.uint16(8))


# ---- accumulators of matrix instructions

SUMS = {"f32": "f4", "f16": "f2", "s32": "i4"}  # the dtypes of accumulators


def unpack_sums(words: NDArray[np.uint32], kind: str) -> NDArray[Any]:
    """The accumulators in registers [n, lanes], one or two in each: float32 or int32 [values, lanes]."""
    if kind != "f16":
        return words.view(SUMS[kind])
    pairs = f16_value(np.ascontiguousarray(words)[..., None].view(np.uint16))
    return pairs.transpose(0, 2, 1).reshape(-1, words.shape[1])


def pack_sums(values: NDArray[Any], kind: str) -> NDArray[np.uint32]:
    """Accumulators [values, lanes] as registers [n, lanes]: the inverse of `unpack_sums`."""
    if kind != "f16":
        return np.ascontiguousarray(values, SUMS[kind]).view(np.uint32)
    return pack(values[1::2], values[0::2], "f16")


def add_sums(before: NDArray[Any], product: NDArray[Any], kind: str, limited: bool) -> NDArray[Any]:
    """Accumulators plus a product. Integers wrap or, if `limited`, are clamped to their range."""
    if kind == "f32":
        return before + product
    if kind == "f16":
        return f16_value(f16_bits(before + product))
    total = before.astype(np.int64) + product.astype(np.int64)
    return (np.clip(total, -(2**31), 2**31 - 1) if limited else total).astype(np.int32)


# ---- minimum, maximum and comparison


def either_nan(a: Any, b: Any) -> NDArray[np.bool_]:
    return np.isnan(a) | np.isnan(b)


def signed_by_both(x: Any, a: Any, b: Any) -> Floats:
    """The magnitude `x` with the sign of the product of `a` and `b`: `.xorsign`."""
    return np.where(np.signbit(a) != np.signbit(b), -x, x)


def minimum(a: Any, b: Any) -> Floats:
    """`min` of floats: a number and a NaN give the number, and -0 is less than +0."""
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


def maximum(a: Any, b: Any) -> Floats:
    """`max` of floats: a number and a NaN give the number, and +0 is greater than -0."""
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def minimum_nan(a: Any, b: Any) -> Floats:
    """`min.NaN`: as `minimum`, but NaN if either operand is NaN."""
    return np.where(either_nan(a, b), np.asarray(a).dtype.type(np.nan), minimum(a, b))


def maximum_nan(a: Any, b: Any) -> Floats:
    """`max.NaN`: as `maximum`, but NaN if either operand is NaN."""
    return np.where(either_nan(a, b), np.asarray(a).dtype.type(np.nan), maximum(a, b))


def relu(x: Any) -> Any:
    """`.relu`: numbers below 0 become 0; NaN stays."""
    return np.where(np.asarray(x) < 0, np.asarray(x).dtype.type(0), x)


# ---- integers


def quotient(a: Any, b: Any) -> Any:
    """Integer division towards zero. A division by zero gives all ones; the ISA leaves the value open."""
    a, b = np.asarray(a), np.asarray(b)
    by_zero = b == 0
    divisor = np.where(by_zero, b.dtype.type(1), b)
    down = np.floor_divide(a, divisor)
    inexact = (down * divisor != a) & ((a < 0) != (divisor < 0))
    return np.where(by_zero, ~np.zeros_like(a), down + inexact).astype(a.dtype)


def remainder(a: Any, b: Any) -> Any:
    """The remainder of the division towards zero; for a divisor of zero, the dividend."""
    a, b = np.asarray(a), np.asarray(b)
    return np.where(b == 0, a, a - quotient(a, b) * b).astype(a.dtype)


def carry(a: Any, b: Any, more: Any) -> tuple[Any, Any]:
    """(a + b, whether it overflows) of unsigned integers; if `more` is not None, 1 is added where it is set."""
    total = np.add(a, b)
    over = total < a
    if more is None:
        return total, over
    final = total + more
    return final, over | (final < total)


def borrow(a: Any, b: Any, more: Any) -> tuple[Any, Any]:
    """(a - b, whether it is below 0) of unsigned integers; if `more` is not None, 1 is subtracted where it is set."""
    total = np.subtract(a, b)
    under = np.less(a, b)
    if more is None:
        return total, under
    final = total - more
    return final, under | (final > total)


def saturated(function: Any, a: Any, b: Any) -> Any:
    """A sum or difference of int32, clamped to the range of int32."""
    return np.clip(function(np.int64(a), np.int64(b)), -(2**31), 2**31 - 1).astype(np.int32)


def high_half(a: Any, b: Any, signed: bool) -> Any:
    """The upper half of the product of two integers of 16, 32 or 64 bits."""
    a, b = np.broadcast_arrays(np.atleast_1d(a), np.atleast_1d(b))
    if a.dtype.itemsize < 8:
        wide = np.dtype("i8" if signed else "u8")
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(8 * a.dtype.itemsize)).astype(a.dtype)
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    low, by = np.uint64(0xFFFFFFFF), np.uint64(32)
    cross = (x & low) * (y >> by)
    middle = (x >> by) * (y & low) + ((x & low) * (y & low) >> by)
    high = (x >> by) * (y >> by) + (middle >> by) + ((cross + (middle & low)) >> by)
    if signed:
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.astype(a.dtype)


def to_integer(x: Any, mode: str, dtype: str) -> Any:
    """Floats -> integers of `dtype`, rounded by "rzi", "rni", "rmi" or "rpi"; saturates.

    NaN becomes 0. In 64-bit integers, and from float64, it becomes the value with only the highest bit set.
    """
    x = np.atleast_1d(x)
    whole = WHOLE[mode](x.astype(np.float64))
    info = np.iinfo(dtype)
    over, under = whole >= float(info.max), whole <= float(info.min)
    inside = np.where(over | under | np.isnan(x), 0.0, whole).astype(dtype)
    top = np.array(1 << (info.bits - 1), f"u{info.bits // 8}").astype(dtype)
    nan = top if info.bits == 64 or x.dtype == np.float64 else np.dtype(dtype).type(0)
    limited = np.where(over, np.dtype(dtype).type(info.max), np.where(under, np.dtype(dtype).type(info.min), inside))
    return np.where(np.isnan(x), nan, limited)


def clip_integer(x: Any, dtype: str) -> Any:
    """`cvt.sat` of integers: clamped to the range of `dtype`."""
    x, info = np.asarray(x), np.iinfo(dtype)
    source = np.iinfo(x.dtype)
    return np.clip(x, max(info.min, source.min), min(info.max, source.max)).astype(dtype)


def on_pairs(function: Any, dtype: str, a: Any, b: Any) -> NDArray[np.uint32]:
    """A function of 16-bit integers, applied to words that hold two each."""
    a, b = (np.ascontiguousarray(x).view(dtype) for x in np.broadcast_arrays(np.atleast_1d(a), np.atleast_1d(b)))
    return function(a, b).view(np.uint32)


# ---- bits


def shift_left(a: Any, by: Any) -> Any:
    """`shl`: shifts in zeros. The amount is not taken modulo the width."""
    a = np.asarray(a)
    return np.left_shift(a, np.minimum(by, 8 * a.dtype.itemsize).astype(a.dtype))


def shift_right(a: Any, by: Any) -> Any:
    """`shr`: shifts in zeros, or the sign if `a` is signed. The amount is not taken modulo the width."""
    a = np.asarray(a)
    bits = 8 * a.dtype.itemsize
    return np.right_shift(a, np.minimum(by, bits - 1 if a.dtype.kind == "i" else bits).astype(a.dtype))


def funnel(low: Any, high: Any, by: Any, left: bool, wrap: bool) -> NDArray[np.uint32]:
    """`shf`: 32 bits of high:low, shifted. The amount is taken modulo 32 (`wrap`) or limited to 32."""
    amount = (np.asarray(by) & np.uint32(31) if wrap else np.minimum(by, 32)).astype(np.uint64)
    both = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | np.asarray(low)
    shifted = (both << amount) >> np.uint64(32) if left else both >> amount
    return shifted.astype(np.uint32)


def _ones(count: Any, dtype: np.dtype[Any]) -> Bits:
    """Words whose lowest `count` bits are set; all bits if `count` is at least the width."""
    return ~np.left_shift(~np.zeros((), dtype), np.minimum(count, 8 * dtype.itemsize).astype(dtype))


def bfe(a: Any, position: Any, length: Any, signed: bool) -> Bits:
    """`bfe`: a bit field of unsigned `a`, extended by zeros or by its sign.

    The sign is the field's highest bit, or the word's if the field reaches beyond the word.
    """
    a = np.asarray(a)
    width, one = 8 * a.dtype.itemsize, a.dtype.type(1)
    position, length = np.asarray(position) & np.uint32(255), np.asarray(length) & np.uint32(255)
    field = shift_right(a, position) & _ones(length, a.dtype)
    if not signed:
        return field
    top = np.minimum(position.astype(np.int64) + length - 1, width - 1)
    sign = (length != 0) & (shift_right(a, np.maximum(top, 0)) & one == one)
    inside = np.minimum(length, np.maximum(width - position.astype(np.int64), 0))
    return np.where(sign, field | ~_ones(inside, a.dtype), field)


def bfi(field: Any, a: Any, position: Any, length: Any) -> Bits:
    """`bfi`: `a` with the lowest `length` bits of `field` at `position`."""
    field, a = np.asarray(field), np.asarray(a)
    position, length = np.asarray(position) & np.uint32(255), np.asarray(length) & np.uint32(255)
    mask = shift_left(np.broadcast_to(_ones(length, a.dtype), np.shape(a)), position)
    return (a & ~mask) | (shift_left(field, position) & mask)


def lop3(a: Any, b: Any, c: Any, table: int) -> Bits:
    """`lop3`: any function of three bits; bit 4a + 2b + c of the table is its value."""
    a, b, c = np.broadcast_arrays(a, b, c)
    result = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return result


# The selector that each mode of `prmt` stands for, by the two lowest bits of its selector operand.
PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def prmt(a: Any, b: Any, selector: Any, mode: str | None) -> NDArray[np.uint32]:
    """`prmt`: four of the eight bytes b:a. Without a mode, bit 3 of a byte's selector fills the byte with its sign."""
    a, b, selector = np.broadcast_arrays(*(np.asarray(x).astype(np.uint64) for x in (a, b, selector)))
    if mode:
        selector = np.array(PRMT_MODES[mode], np.uint64)[selector & np.uint64(3)]
    both = a | (b << np.uint64(32))
    result = np.zeros(both.shape, np.uint64)
    for index in range(4):
        nibble = (selector >> np.uint64(4 * index)) & np.uint64(15)
        byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * index)
    return result.astype(np.uint32)


def count_ones(a: Any) -> NDArray[np.uint32]:
    """`popc`: the number of bits that are 1."""
    return np.unpackbits(np.atleast_1d(a).view(np.uint8)).reshape(np.size(a), -1).sum(1).astype(np.uint32)


def leading_zeros(a: Any) -> NDArray[np.uint32]:
    """`clz`: the number of leading zeros."""
    a = np.atleast_1d(a)
    bits = np.unpackbits(a.astype(a.dtype.newbyteorder(">")).view(np.uint8)).reshape(a.size, -1)
    return np.where(bits.any(1), bits.argmax(1), bits.shape[1]).astype(np.uint32)


def reverse_bits(a: Any) -> Bits:
    """`brev`: the bits in reverse order."""
    a = np.atleast_1d(a)
    return np.packbits(np.unpackbits(a.view(np.uint8)).reshape(a.size, -1)[:, ::-1], axis=1).view(a.dtype)[:, 0]
