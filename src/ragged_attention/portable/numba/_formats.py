"""The number formats of stored arrays, converted to float32 and back, a vector at a time.

Kernels get a format as a code at run time, so each kernel is compiled once for all formats: rows are widened to float32
as they are read, and narrowed as they are written.
"""

import functools
import platform
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from ragged_attention.calls.fields import SMALLEST_FLOAT32
from ragged_attention.portable.numba._vectors import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    PAIRS,
    called,
    compiled,
    constant,
    element,
    features_of_the_cpu,
    function_of,
    in_all_lanes,
    inlined,
    instruction,
    interleaved,
    join,
    load_aligned,
    number,
    shuffled,
    splat,
    store,
    store_aligned,
    vector,
)

CODES = {
    "float32": 0, "bfloat16": 1, "float16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4, "int8": 5, "float8_e4m3fnuz": 6
}  # fmt: skip
LARGE = 2.0**100  # a factor below it does not overflow when it is multiplied by 256
TWICE_E2M1 = 0xC8643210  # twice the positive e2m1 values, in 4 bits each: 0, 1, 2, 3, 4, 6, 8, 12
FLOAT32, BFLOAT16, FLOAT16, E4M3, E5M2, INT8, E4M3FNUZ = CODES.values()
BYTES, SHORTS, HALVES = (ir.VectorType(kind, LANES) for kind in (I8, I16, ir.HalfType()))

# Whether the CPU converts float16 itself; otherwise LLVM would call a function that may not exist.
CONVERTS_HALVES = platform.machine() in ("aarch64", "arm64") or features_of_the_cpu().get("f16c", False)


# ---- to float32


def _from_bits(builder: Any, codes: Any, size: int, mantissa: int, bias: int, special: int) -> Any:
    """Floats from a narrower format of `size` bits.

    Codes whose magnitude bits are at least `special` are infinite or NaN.
    """
    wide = builder.zext(codes, INTS)
    magnitude = builder.and_(wide, constant(INTS, (1 << size - 1) - 1))
    sign = builder.shl(builder.and_(wide, constant(INTS, 1 << size - 1)), constant(INTS, 32 - size))
    bits = builder.shl(magnitude, constant(INTS, 23 - mantissa))
    value = builder.fmul(builder.bitcast(bits, FLOATS), constant(FLOATS, 2.0 ** (127 - bias)))
    infinite = builder.icmp_unsigned(">=", magnitude, constant(INTS, special))
    bits = builder.select(infinite, builder.or_(bits, constant(INTS, 0x7F800000)), builder.bitcast(value, INTS))
    return builder.bitcast(builder.or_(bits, sign), FLOATS)


def _from_half(builder: Any, codes: Any) -> Any:
    if CONVERTS_HALVES:
        return builder.fpext(builder.bitcast(codes, HALVES), FLOATS)
    return _from_bits(builder, codes, 16, 10, 15, 0x7C00)


def _from_bfloat16(builder: Any, codes: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(codes, INTS), constant(INTS, 16)), FLOATS)


def _shifted_to_half(builder: Any, codes: Any) -> Any:
    """Codes with 4 exponent bits as float16 bits with the same exponent and mantissa."""
    kind = ir.VectorType(I16, codes.type.count)
    high = builder.shl(builder.zext(codes, kind), constant(kind, 8))
    return builder.and_(builder.ashr(high, constant(kind, 1)), constant(kind, 0xBF80))


def _half_from_e4m3(builder: Any, codes: Any) -> Any:
    """The float16 bits of the values divided by 256, so that subnormals need no extra instructions; NaN stays NaN."""
    half = _shifted_to_half(builder, codes)
    carried = builder.add(half, constant(half.type, 0x80))
    nan = builder.and_(carried, constant(half.type, 0x4000))  # the exponent's top bit, set for NaN only
    return builder.or_(half, nan)


def _from_e4m3(builder: Any, codes: Any) -> Any:
    if CONVERTS_HALVES:
        return builder.fmul(_from_half(builder, _half_from_e4m3(builder, codes)), constant(FLOATS, 256.0))
    return _from_bits(builder, codes, 8, 3, 7, 0x7F)


def _from_e4m3fnuz(builder: Any, codes: Any) -> Any:
    if CONVERTS_HALVES:
        value = builder.fmul(_from_half(builder, _shifted_to_half(builder, codes)), constant(FLOATS, 128.0))
    else:
        value = _from_bits(builder, codes, 8, 3, 8, 0x80)
    nan = builder.icmp_unsigned("==", codes, constant(codes.type, 0x80))  # NaN; -0 in other formats
    return builder.select(nan, constant(FLOATS, np.nan), value)


def _from_e5m2(builder: Any, codes: Any) -> Any:
    return _from_half(builder, builder.shl(builder.zext(codes, SHORTS), constant(SHORTS, 8)))


def _from_int8(builder: Any, codes: Any) -> Any:
    return builder.sitofp(builder.sext(codes, INTS), FLOATS)


def _from_e8m0(builder: Any, codes: Any) -> Any:
    """Powers of two from their exponents: 2 ** (code - 127), which is subnormal for code 0, and NaN for code 255."""
    wide = builder.zext(codes, INTS)
    bits = builder.shl(wide, constant(INTS, 23))
    bits = builder.select(builder.icmp_unsigned("==", wide, constant(INTS, 0)), constant(INTS, 1 << 22), bits)
    nan = builder.icmp_unsigned("==", wide, constant(INTS, 255))
    return builder.bitcast(builder.select(nan, constant(INTS, 0x7FC00000), bits), FLOATS)


# ---- from float32


def _to_float(kind: Any, mantissa: int, bias: int, largest: int, nan: int, builder: Any, value: Any) -> Any:
    """Codes in a narrower format, rounded to nearest, ties to even; `largest` and `nan` encode overflow and NaN."""
    shift = 23 - mantissa
    bits = builder.bitcast(value, INTS)
    magnitude = builder.and_(bits, constant(INTS, 0x7FFFFFFF))
    sign = builder.lshr(builder.and_(bits, constant(INTS, 0x80000000)), constant(INTS, 32 - kind.element.width))
    odd = builder.and_(builder.lshr(magnitude, constant(INTS, shift)), constant(INTS, 1))
    rounded = builder.add(builder.add(magnitude, constant(INTS, (1 << (shift - 1)) - 1)), odd)
    normal = builder.sub(builder.lshr(rounded, constant(INTS, shift)), constant(INTS, (127 - bias) << mantissa))
    # Adding `step` rounds to multiples of its last place, which is the format's smallest subnormal number.
    step = 2.0 ** (23 + 1 - bias - mantissa)
    shifted = builder.fadd(builder.bitcast(magnitude, FLOATS), constant(FLOATS, step))
    subnormal = builder.sub(builder.bitcast(shifted, INTS), builder.bitcast(constant(FLOATS, step), INTS))
    small = builder.fcmp_ordered("<", builder.bitcast(magnitude, FLOATS), constant(FLOATS, 2.0 ** (1 - bias)))
    code = builder.select(small, subnormal, normal)
    code = builder.select(builder.icmp_signed(">", code, constant(INTS, largest)), constant(INTS, largest), code)
    code = builder.select(builder.fcmp_unordered("uno", value, value), constant(INTS, nan), code)
    return builder.trunc(builder.or_(code, sign), kind)


def _to_e4m3fnuz(builder: Any, value: Any) -> Any:
    code = _to_float(BYTES, 3, 8, 0x7F, 0, builder, value)  # 0x80 for -0
    negative_zero = builder.icmp_unsigned("==", code, constant(BYTES, 0x80))
    code = builder.select(negative_zero, constant(BYTES, 0), code)
    return builder.select(builder.fcmp_unordered("uno", value, value), constant(BYTES, 0x80), code)


def _to_bfloat16(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, constant(INTS, 16)), constant(INTS, 1))
    rounded = builder.add(builder.add(bits, constant(INTS, 0x7FFF)), odd)
    nan = builder.or_(bits, constant(INTS, 0x400000))
    rounded = builder.select(builder.fcmp_unordered("uno", value, value), nan, rounded)
    return builder.trunc(builder.lshr(rounded, constant(INTS, 16)), SHORTS)


def _to_bfloat16_fast(builder: Any, value: Any) -> Any:
    """The bfloat16 codes. With PAIRS, a single instruction computes them and flushes subnormals to 0."""
    if not PAIRS:
        return _to_bfloat16(builder, value)
    return instruction(builder, "vcvtneps2bf16 $1, $0", SHORTS, "=v,v", value)


def _to_int8(builder: Any, value: Any) -> Any:
    """The nearest integers from -128 to 127, ties to even; 0 for NaN."""
    least, most, step = (constant(FLOATS, bound) for bound in (-128.0, 127.0, 1.5 * 2**23))
    value = builder.select(builder.fcmp_unordered("uno", value, value), constant(FLOATS, 0.0), value)
    value = builder.select(builder.fcmp_ordered("<", value, least), least, value)
    value = builder.select(builder.fcmp_ordered(">", value, most), most, value)
    rounded = builder.fsub(builder.fadd(value, step), step)
    return builder.trunc(builder.fptosi(rounded, INTS), BYTES)


# ---- memory


def _first_lanes(builder: Any, count: Any) -> Any:
    """A mask of the first `count` lanes."""
    return builder.icmp_signed(
        "<", ir.Constant(INTS, list(range(LANES))), in_all_lanes(builder, builder.trunc(count, I32))
    )


def _masked(builder: Any, name: str, result: Any, kind: Any, *values: Any) -> Any:
    bits = {"float": "f32", "i16": "i16", "i8": "i8"}[str(kind.element)]
    return called(builder, f"llvm.masked.{name}.v{LANES}{bits}.p0v{LANES}{bits}", result, *values)


def _reader(kind: Any, decode: Callable[[Any, Any], Any], name: str) -> tuple[Any, Any]:
    """Two functions that emit a vector read. The first reads all lanes, the second `count` lanes and codes of 0."""
    size = 4 if kind is FLOATS else kind.element.width // 8

    def read(builder: Any, address: Any, index: Any) -> Any:
        return decode(builder, load_aligned(builder, element(builder, address, index, kind.element), kind, size))

    def read_some(builder: Any, address: Any, index: Any, count: Any) -> Any:
        place = builder.bitcast(element(builder, address, index, kind.element), kind.as_pointer())
        arguments = (place, ir.Constant(I32, size), _first_lanes(builder, count), ir.Constant(kind, None))
        return decode(builder, _masked(builder, "load", kind, kind, *arguments))

    read.__name__, read_some.__name__ = f"read_{name}", f"read_some_{name}"
    return read, read_some


def _writer(kind: Any, encode: Callable[[Any, Any], Any], name: str) -> tuple[Any, Any]:
    """Two functions that emit a vector write. The first writes all numbers, the second only the first `count`."""
    size = 4 if kind is FLOATS else kind.element.width // 8

    def write(builder: Any, address: Any, index: Any, value: Any) -> None:
        store_aligned(builder, encode(builder, value), element(builder, address, index, kind.element), size)

    def write_some(builder: Any, address: Any, index: Any, value: Any, count: Any) -> None:
        place = builder.bitcast(element(builder, address, index, kind.element), kind.as_pointer())
        arguments = (place, ir.Constant(I32, size), _first_lanes(builder, count))
        _masked(builder, "store", ir.VoidType(), kind, encode(builder, value), *arguments)

    write.__name__, write_some.__name__ = f"write_{name}", f"write_some_{name}"
    return write, write_some


_FORMATS = (  # in the order of CODES
    (FLOATS, lambda _, value: value, lambda _, value: value, "float32"),
    (SHORTS, _from_bfloat16, _to_bfloat16, "bfloat16"),
    (SHORTS, _from_half, functools.partial(_to_float, SHORTS, 10, 15, 0x7C00, 0x7E00), "float16"),
    (BYTES, _from_e4m3, functools.partial(_to_float, BYTES, 3, 7, 0x7E, 0x7F), "e4m3"),
    (BYTES, _from_e5m2, functools.partial(_to_float, BYTES, 2, 15, 0x7B, 0x7F), "e5m2"),
    (BYTES, _from_int8, _to_int8, "int8"),
    (BYTES, _from_e4m3fnuz, _to_e4m3fnuz, "e4m3fnuz"),
)
READS, READS_SOME = zip(*(_reader(kind, decode, name) for kind, decode, _, name in _FORMATS), strict=True)
WRITES, WRITES_SOME = zip(*(_writer(kind, encode, name) for kind, _, encode, name in _FORMATS), strict=True)


def _coder(encode: Callable[[Any, Any], Any], name: str) -> Any:
    """A function that returns the code of one number.

    A masked store cannot replace it: if LLVM sees that the mask selects a single narrow code, it stores 32 bits.
    """

    def code_of(builder: Any, value: Any) -> Any:
        first = builder.extract_element(encode(builder, in_all_lanes(builder, value)), ir.Constant(I32, 0))
        return builder.zext(first, I64)

    code_of.__name__ = f"code_of_{name}"
    return function_of(types.int64, types.float32)(code_of)


code_of_float16, code_of_e4m3 = (_coder(_FORMATS[code][2], _FORMATS[code][3]) for code in (FLOAT16, E4M3))
_reading, _reading_some = (function_of(vector, *(types.int64,) * count) for count in (2, 3))
read_bfloat16, read_e4m3 = _reading(READS[BFLOAT16]), _reading(READS[E4M3])
read_some_e4m3 = _reading_some(READS_SOME[E4M3])
read_some_e8m0 = _reading_some(_reader(BYTES, _from_e8m0, "e8m0")[1])
write_weights = function_of(types.none, types.int64, types.int64, vector)(
    _writer(SHORTS, _to_bfloat16_fast, "weights")[0]
)


@function_of(types.none, types.int64, types.int64, types.int64, vector)
def widen_two_e4m3(builder: Any, source: Any, target: Any, index: Any, factor: Any) -> None:
    """Decode two vectors of e4m3 at once and store them times `factor` as float32; needs abs(factor) < LARGE."""
    kind = ir.VectorType(I8, 2 * LANES)
    codes = load_aligned(builder, element(builder, source, index, I8), kind, 1)
    if CONVERTS_HALVES:
        codes, factor = _half_from_e4m3(builder, codes), builder.fmul(factor, constant(FLOATS, 256.0))
    for part in range(2):
        some = shuffled(builder, list(range(part * LANES, (part + 1) * LANES)), codes)
        value = _from_half(builder, some) if CONVERTS_HALVES else _from_e4m3(builder, some)
        place = element(builder, target, builder.add(index, number(part * LANES)), F32)
        store_aligned(builder, builder.fmul(value, factor), place, 4)


def nibbles(builder: Any, source: Any, index: Any) -> Any:
    """A vector of 4-bit codes, the low half of each byte first."""
    kind = ir.VectorType(I8, LANES // 2)
    first = builder.lshr(index, number(1))
    stored = load_aligned(builder, element(builder, source, first, I8), kind, 1)
    twice = shuffled(builder, [lane // 2 for lane in range(LANES)], stored)
    codes = builder.lshr(builder.zext(twice, INTS), ir.Constant(INTS, [lane % 2 * 4 for lane in range(LANES)]))
    return builder.and_(codes, constant(INTS, 15))


@function_of(types.none, types.int64, types.int64, types.int64, vector)
def widen_e2m1_vector(builder: Any, source: Any, target: Any, index: Any, factor: Any) -> None:
    """Decode a vector of e2m1 codes, the low half of each byte first, and store it times `factor` as float32."""
    codes = nibbles(builder, source, index)
    places = builder.shl(builder.and_(codes, constant(INTS, 7)), constant(INTS, 2))
    doubled = builder.and_(builder.lshr(constant(INTS, TWICE_E2M1), places), constant(INTS, 15))
    sign = builder.shl(builder.and_(codes, constant(INTS, 8)), constant(INTS, 28))
    value = builder.fmul(builder.sitofp(doubled, FLOATS), constant(FLOATS, 0.5))
    value = builder.bitcast(builder.or_(builder.bitcast(value, INTS), sign), FLOATS)
    store_aligned(builder, builder.fmul(value, factor), element(builder, target, index, F32), 4)


@inlined
def size_of(code):
    """Bytes per number of a format."""
    return 4 if code == FLOAT32 else 2 if code <= FLOAT16 else 1


def _indices(builder: Any, start: Any, stop: Any, step: int) -> Any:
    """A context that emits a loop over range(start, stop, step). Code that is emitted inside it is the loop's body."""
    return cgutils.for_range_slice(builder, start, stop, number(step))


def _by_code(
    name: str, result: Any, emitters: Mapping[int, Callable[..., Any]], *arguments: Any, inline: bool = False
) -> Any:
    """A function whose first argument, a format's code, selects which of `emitters` emits its instructions.

    Any other code selects the last emitter. One function serves all formats, because Numba would take far longer to
    compile a function for each format. It is not inlined unless `inline`, because LLVM would take far longer to compile
    all formats for every call.
    """

    def define(function: ir.Function) -> None:
        function.linkage = "linkonce_odr"
        function.attributes.add("alwaysinline" if inline else "noinline")
        builder = ir.IRBuilder(function.append_basic_block())
        code, *values = function.args
        blocks = {case: builder.append_basic_block(f"{name}_{case}") for case in emitters}
        choice = builder.switch(code, [*blocks.values()][-1])
        for case, block in blocks.items():
            choice.add_case(number(case), block)
            builder.position_at_end(block)
            value = emitters[case](builder, *values)
            builder.ret_void() if value is None else builder.ret(value)

    def emit(builder: Any, *values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType() if result is types.none else FLOATS, [value.type for value in values])
        function = cgutils.get_or_insert_function(builder.module, kind, f"format_{name}")
        if function.is_declaration:
            define(function)
        value = builder.call(function, values)
        return None if result is types.none else value

    emit.__name__ = name
    return function_of(result, types.int64, *arguments)(emit)


def _widening(read: Any) -> Any:
    def widen_vectors(builder: Any, source: Any, target: Any, count: Any) -> None:
        with _indices(builder, number(0), count, LANES) as (index, _):
            store_aligned(builder, read(builder, source, index), element(builder, target, index, F32), 4)

    return widen_vectors


def _narrowing(write: Any) -> Any:
    def narrow_vectors(builder: Any, source: Any, target: Any, count: Any, divisor: Any, divided: Any) -> None:
        with _indices(builder, number(0), count, LANES) as (index, _):
            write(builder, target, index, _over(builder, source, index, divisor, divided))

    return narrow_vectors


def _over(builder: Any, source: Any, index: Any, divisor: Any, divided: Any) -> Any:
    """A float32 vector, divided by `divisor` if `divided`.

    Otherwise it is unchanged bit for bit: even a division by 1 might flush subnormals to 0.
    """
    value, before = load_aligned(builder, element(builder, source, index, F32), FLOATS, 4), builder.block
    with builder.if_then(divided):
        quotient, block = builder.fdiv(value, divisor), builder.block
    result = builder.phi(FLOATS)
    result.add_incoming(value, before)
    result.add_incoming(quotient, block)
    return result


# `read_some` and `write_some` transfer at most one vector. `read_some` pads it with zeros.
read_some = _by_code("read_some", vector, dict(enumerate(READS_SOME)), *(types.int64,) * 3)
write_some = _by_code(
    "write_some", types.none, dict(enumerate(WRITES_SOME)), types.int64, types.int64, vector, types.int64
)
_widen_vectors = _by_code("widen_vectors", types.none, dict(enumerate(map(_widening, READS))), *(types.int64,) * 3)
_narrow_vectors = _by_code(
    "narrow_vectors", types.none, dict(enumerate(map(_narrowing, WRITES))), *(types.int64,) * 3, vector, types.boolean
)
over = function_of(vector, types.int64, types.int64, vector, types.boolean)(_over)


@compiled
def widen_e4m3(source, target, count, factor):
    """Store `count` e4m3 numbers, then zeros to fill the last vector, all times `factor`, as float32."""
    scale, whole = splat(factor), count // LANES * LANES
    pairs = whole // (2 * LANES) * (2 * LANES) if abs(factor) < LARGE else 0
    for index in range(0, pairs, 2 * LANES):
        widen_two_e4m3(source, target, index, scale)
    for index in range(pairs, whole, LANES):
        store(target, index, read_e4m3(source, index) * scale)
    if whole < count:
        store(target, whole, read_some_e4m3(source, whole, count - whole) * scale)


@compiled
def widen_e2m1(source, target, count, factor):
    """Store `count` e2m1 numbers times `factor` as float32; `count` is a multiple of LANES."""
    for index in range(0, count, LANES):
        widen_e2m1_vector(source, target, index, splat(factor))


@compiled
def widen(code, source, target, count):
    """Store `count` numbers of a format as float32, then zeros to fill the last vector.

    Numbers of 16 and 32 bits are converted without arithmetic (except float16 if CONVERTS_HALVES is false), because in
    XLA's threads arithmetic flushes subnormals to 0.
    """
    whole = count // LANES * LANES
    if code == E4M3:
        widen_e4m3(source, target, count, 1.0)
        return
    _widen_vectors(code, source, target, whole)
    if whole < count:
        store(target, whole, read_some(code, source, whole, count - whole))


def _bfloat16_of(mantissa: int, bias: int, special: Callable[[int], float | None]) -> Any:
    """The bfloat16 bits of an 8-bit format's positive codes; `special` is infinity, NaN, or None for finite codes."""
    values = []
    for code in range(128):
        exponent, fraction = code >> mantissa, (code & (1 << mantissa) - 1) / 2**mantissa
        value = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        values.append(value if (found := special(code)) is None else found)
    return np.array(values, np.float32).view(np.uint32) >> 16


def magnitudes_of(builder: Any, table: Any, codes: Any) -> tuple[Any, Any]:
    """The numbers that `table` has for the lower seven bits of `codes`, as pairs, and the sign bits of `codes`.

    `table` has 128 numbers of 16 bits. `codes` holds each code twice. The results are vectors of bytes. Needs PAIRS.
    """
    kind = codes.type
    name = "llvm.x86.avx512.vpermi2var.qi.512"  # looks up the lower seven bits in a table of 128 bytes
    low, high = (
        called(builder, name, kind, ir.Constant(kind, half[:64]), codes, ir.Constant(kind, half[64:]))
        for half in ((table & 255).tolist(), (table >> 8).tolist())
    )
    alternate = shuffled(builder, [place + 64 * (place % 2) for place in range(64)], low, high)
    return alternate, builder.and_(codes, ir.Constant(kind, [0, 128] * 32))


def _lookup(builder: Any, table: Any, codes: Any) -> Any:
    """Pairs of bfloat16, with their signs, for `codes`; `table` has the bfloat16 bits of the positive codes."""
    return builder.bitcast(builder.or_(*magnitudes_of(builder, table, codes)), FLOATS)


def _with_nan_for_negative_zero(builder: Any, pairs: Any) -> Any:
    kind = ir.VectorType(I16, 2 * LANES)
    halves = builder.bitcast(pairs, kind)
    negative_zero = builder.icmp_unsigned("==", halves, constant(kind, 0x8000))
    return builder.bitcast(builder.select(negative_zero, constant(kind, 0x7FC0), halves), FLOATS)


def _pairs_by_table(table: Any, decode: Callable[[Any, Any], Any], has_negative_zero: bool = True) -> Any:
    """A function that emits the write of one vector for `pair`; on CPUs with PAIRS, codes are looked up in `table`.

    In a format without -0, the code that would be -0 is NaN.
    """

    def write(builder: Any, first: Any, second: Any, target: Any, index: Any) -> None:
        rows = [load_aligned(builder, element(builder, row, index, I8), BYTES, 1) for row in (first, second)]
        if PAIRS:
            places = [place for lane in range(LANES) for place in (lane, lane, LANES + lane, LANES + lane)]
            pairs = _lookup(builder, table, shuffled(builder, places, *rows))
            if not has_negative_zero:
                pairs = _with_nan_for_negative_zero(builder, pairs)
        else:
            pairs = join(builder, *(decode(builder, row) for row in rows))
        store_aligned(builder, pairs, element(builder, target, index, F32), 4)

    return write


E4M3_BITS = _bfloat16_of(3, 7, lambda code: np.nan if code == 127 else None)


@function_of(types.none, types.int64, types.int64, types.int64, types.int64)
def pairs_of_four_e4m3(builder: Any, source: Any, index: Any, target: Any, stride: Any) -> None:
    """Decode words of four e4m3 codes into two vectors of pairs, `stride` floats apart.

    The first vector has bytes 0 and 1 of each word, the second bytes 2 and 3.
    """
    kind = ir.VectorType(I8, 4 * LANES)
    codes = load_aligned(builder, element(builder, source, index, F32), kind, 4)
    for half in range(2):
        if PAIRS:
            places = [4 * lane + 2 * half + byte for lane in range(LANES) for byte in (0, 0, 1, 1)]
            pairs = _lookup(builder, E4M3_BITS, shuffled(builder, places, codes))
        else:
            both = (shuffled(builder, list(range(2 * half + byte, 4 * LANES, 4)), codes) for byte in range(2))
            pairs = join(builder, *(_from_e4m3(builder, each) for each in both))
        place = builder.add(index, builder.mul(stride, number(half)))
        store_aligned(builder, pairs, element(builder, target, place, F32), 4)


@function_of(vector, types.int64, types.int64)
def bfloat16_of_e4m3(builder: Any, source: Any, index: Any) -> Any:
    """Pairs of bfloat16 of 2 * LANES neighbouring e4m3 codes."""
    kind = ir.VectorType(I8, 2 * LANES)
    codes = load_aligned(builder, element(builder, source, index, I8), kind, 1)
    if PAIRS:
        places = [2 * lane + byte for lane in range(LANES) for byte in (0, 0, 1, 1)]
        return _lookup(builder, E4M3_BITS, shuffled(builder, places, codes))
    both = (shuffled(builder, list(range(byte, 2 * LANES, 2)), codes) for byte in range(2))
    return join(builder, *(_from_e4m3(builder, each) for each in both))


def _pairs_by_reading(read: Any) -> Any:
    """A function that emits the write of one vector for `pair`, from two vectors that `read` reads."""

    def write(builder: Any, first: Any, second: Any, target: Any, index: Any) -> None:
        pairs = join(builder, read(builder, first, index), read(builder, second, index))
        store_aligned(builder, pairs, element(builder, target, index, F32), 4)

    return write


def _over_rows(write: Any) -> Any:
    """A function that emits `write(builder, first, second, target, index)` for all vectors of two rows.

    The loop writes four vectors at a time. LLVM would unroll a simple loop eight times, and then a head of 128 columns,
    which has four vectors, would be left to the slow remainder loop.
    """

    def pair_rows(builder: Any, first: Any, second: Any, target: Any, count: Any) -> None:
        whole = builder.and_(count, number(-4 * LANES))
        with _indices(builder, number(0), whole, 4 * LANES) as (index, _):
            for part in range(4):
                write(builder, first, second, target, builder.add(index, number(part * LANES)))
        with _indices(builder, whole, count, LANES) as (index, _):
            write(builder, first, second, target, index)

    return pair_rows


def _rows_of_bfloat16(builder: Any, first: Any, second: Any, target: Any, count: Any) -> None:
    """Emit the pairs of two rows of bfloat16: two vectors of pairs from one vector of each row."""
    whole, pair_at = builder.and_(count, number(-4 * LANES)), _pairs_by_reading(READS[BFLOAT16])
    with _indices(builder, number(0), whole, 4 * LANES) as (index, _):
        for part in range(0, 4 * LANES, 2 * LANES):
            column = builder.add(index, number(part))
            place = builder.lshr(column, number(1))
            a, b = (load_aligned(builder, element(builder, row, place, F32), FLOATS, 2) for row in (first, second))
            for half in (0, LANES):
                at = element(builder, target, builder.add(column, number(half)), F32)
                store_aligned(builder, interleaved(builder, a, b, half), at, 4)
    with _indices(builder, whole, count, LANES) as (index, _):
        pair_at(builder, first, second, target, index)


def _over_keys(pair_rows: Any, size: int) -> Any:
    """A function that emits `pair_rows` for the two halves of each row in a list; a number has `size` bytes."""

    def pair_keys(builder: Any, sources: Any, target: Any, width: Any, count: Any) -> None:
        with _indices(builder, number(0), count, 1) as (key, _):
            source = builder.load(element(builder, sources, key, I64))
            with builder.if_then(builder.icmp_signed("!=", source, number(0))):
                second_half = builder.add(source, builder.mul(width, number(size)))
                row = builder.add(target, builder.mul(builder.mul(key, width), number(4)))
                pair_rows(builder, source, second_half, row, width)

    return pair_keys


def _over_values(pair_rows: Any) -> Any:
    """A function that emits `pair_rows` for every two consecutive rows in a list."""

    def pair_values(builder: Any, sources: Any, target: Any, width: Any, columns: Any, count: Any) -> None:
        none = number(0)
        with _indices(builder, none, count, 2) as (key, _):
            after = builder.add(key, number(1))
            first, second = (builder.load(element(builder, sources, index, I64)) for index in (key, after))
            second = builder.select(builder.icmp_signed("<", after, count), second, none)
            has_first, has_second = (builder.icmp_signed("!=", each, none) for each in (first, second))
            first, second = builder.select(has_first, first, second), builder.select(has_second, second, first)
            row = builder.add(target, builder.mul(builder.mul(key, width), number(2)))
            with builder.if_else(builder.or_(has_first, has_second)) as (some, missing):
                with some:
                    pair_rows(builder, first, second, row, columns)
                with missing:
                    size = builder.mul(columns, number(4))
                    cgutils.memset(builder, builder.inttoptr(row, I8.as_pointer()), size, 0)

    return pair_values


_PAIRS = {
    E4M3: _pairs_by_table(E4M3_BITS, _from_e4m3),
    E5M2: _pairs_by_table(
        _bfloat16_of(2, 15, lambda code: None if code < 124 else np.inf if code == 124 else np.nan), _from_e5m2
    ),
    E4M3FNUZ: _pairs_by_table(_bfloat16_of(3, 8, lambda _: None), _from_e4m3fnuz, has_negative_zero=False),
    INT8: _pairs_by_reading(READS[INT8]),
}
_ROWS = {BFLOAT16: _rows_of_bfloat16} | {code: _over_rows(write) for code, write in _PAIRS.items()}
_KEYS = {code: _over_keys(rows, 2 if code == BFLOAT16 else 1) for code, rows in _ROWS.items()}
# pair(code, first, second, target, count): stores the numbers of two rows as pairs of bfloat16, in whole vectors.
# bfloat16 must represent the numbers exactly.
pair = _by_code("pair", types.none, _ROWS, *(types.int64,) * 4, inline=True)
# pair_keys(code, sources, target, width, count): stores the keys at the addresses `sources` as pairs of columns d and
# d + `width`. A key whose address is 0 is skipped.
pair_keys = _by_code("pair_keys", types.none, _KEYS, *(types.int64,) * 4)
# pair_values(code, sources, target, width, columns, count): stores the values at the addresses `sources` in pairs of
# keys. If one key of a pair is missing, the other is read twice. `sources` has memory for an even number of addresses.
pair_values = _by_code(
    "pair_values", types.none, {code: _over_values(rows) for code, rows in _ROWS.items()}, *(types.int64,) * 5
)


@function_of(types.float32, vector)
def first_of(builder: Any, value: Any) -> Any:
    return builder.extract_element(value, ir.Constant(I32, 0))


@inlined
def number_at(code, source, index):
    """One number of a format."""
    return first_of(read_some(code, source, index, 1))


@inlined
def scale_of(array, code, stride, number, head):
    """A KV head's scale: `number` if `array` is 0, else element `head * stride` of the array at that address."""
    return number_at(code, array, head * stride) if array else np.float32(number)


@compiled
def narrow(code, source, target, count, divisor):
    """Divide `count` float32 numbers by `divisor` and store them in a format; `source` is read in whole vectors.

    A divisor whose magnitude is below the smallest normal float32 is replaced by 0 with its sign.
    """
    if abs(divisor) < SMALLEST_FLOAT32:
        divisor *= np.float32(0)
    divisors, divided, whole = splat(divisor), divisor != 1, count // LANES * LANES
    _narrow_vectors(code, source, target, whole, divisors, divided)
    if whole < count:
        write_some(code, target, whole, over(source, whole, divisors, divided), count - whole)
