"""Vectors of floats, and memory by address: the primitives of the kernels.

An address is an int64, like a pointer in C, and an index counts elements from an address. Accesses are not checked. A
vector has sixteen floats on CPUs with AVX-512, and eight on all others, for which LLVM may use several registers.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, config, types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from ragged_attention.portable.numba._pipeline import Inlined, PartFunction


def features_of_the_cpu() -> dict[str, bool]:
    """The CPU features that Numba compiles for: the host's, unless NUMBA_CPU_FEATURES or NUMBA_CPU_NAME is set."""
    features: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    if features is None:
        return dict(binding.get_host_cpu_features())
    return {name[1:]: name[0] == "+" for name in features.split(",") if name}


LANES = 16 if features_of_the_cpu().get("avx512f") else 8
# Whether to use vdpbf16ps, which multiplies pairs of bfloat16. The code also needs AVX512-VBMI, to look bytes up in
# tables; every CPU with AVX512-BF16 has it, except Cooper Lake.
PAIRS = LANES == 16 and all(features_of_the_cpu().get(name, False) for name in ("avx512bf16", "avx512vbmi"))
if PAIRS:
    binding.initialize_native_asmparser()  # for `instruction`
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False, "no_cpython_wrapper": True}


def compiled(function: Callable[..., Any]) -> Any:
    """A decorator for functions that are compiled once and never inlined."""
    return PartFunction(function, nopython=True, forceinline=False, **OPTIONS)


def inlined(function: Callable[..., Any]) -> Any:
    """A decorator like `compiled`, for functions that are small or called in a loop: they are always inlined."""
    return Inlined(function, nopython=True, forceinline=True, **OPTIONS)


I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


# ---- the type of vectors, and arithmetic


class VectorType(types.Type):
    """LANES float32."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, of: Any) -> None:
        super().__init__(manager, of, FLOATS)


def _arithmetic(symbol: Any, name: str) -> None:
    """Compile the operator `symbol` between vectors to the LLVM instruction `name`."""

    @infer_global(symbol)  # type: ignore[misc]
    class Template(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            del kws
            return signature(vector, *args) if args == (vector, vector) else None

    @lower_builtin(symbol, vector, vector)
    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        return getattr(builder, name)(*values)


for _symbol, _name in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"),
                       (operator.truediv, "fdiv")):  # fmt: skip
    _arithmetic(_symbol, _name)


def number(value: int) -> ir.Constant:
    """An int64."""
    return ir.Constant(I64, value)


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def shuffled(builder: Any, lanes: list[int], first: Any, second: Any = None) -> Any:
    """A vector of the given `lanes` of two vectors; lanes of the second are numbered after those of the first."""
    second = ir.Constant(first.type, ir.Undefined) if second is None else second
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def intrinsic_of(name: str, parameters: Sequence[str], typed: Callable[..., Any]) -> Any:
    """An intrinsic with these parameters; `typed` takes their types, and returns a signature and a code generator."""
    names, scope = ", ".join(parameters), {"typed": typed}
    exec(f"def {name}(context, {names}):\n    return typed({names})", scope)  # Numba counts the parameters
    return intrinsic(scope[name])


def function_of(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that turns `emit(builder, *values)`, which emits instructions, into an intrinsic of these types."""

    def decorated(emit: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            del signature
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        names = [f"a{index}" for index in range(len(arguments))]
        new_intrinsic = intrinsic_of(emit.__name__, names, lambda *_: (signature(result, *arguments), generate))
        new_intrinsic.__doc__ = emit.__doc__
        return new_intrinsic

    return decorated


def called(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call a C function or an LLVM intrinsic by name; returns its result."""
    kind = ir.FunctionType(result, [value.type for value in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def in_all_lanes(builder: Any, value: Any) -> Any:
    """A vector with `value` in every lane."""
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return shuffled(builder, [0] * LANES, first)


splat = function_of(vector, types.float32)(in_all_lanes)


@function_of(vector)
def lane_numbers(builder: Any) -> Any:
    """The indices of the lanes, from 0 on, as floats."""
    del builder
    return ir.Constant(FLOATS, [ir.Constant(F32, float(lane)) for lane in range(LANES)])


def add_product(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded only once if the CPU has a fused multiply-add."""
    return called(builder, f"llvm.fmuladd.v{LANES}f32", FLOATS, a, b, c)


fma = function_of(vector, vector, vector, vector)(add_product)


def instruction(builder: Any, text: str, result: Any, constraint: str, *values: Any) -> Any:
    """One instruction as inline assembly, since llvmlite has no type for vectors of bfloat16."""
    return builder.asm(ir.FunctionType(result, [value.type for value in values]), text, constraint, values, False)


def add_products_of_pairs(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """In each lane, c + the two products of the pairs of bfloat16 in a and b; subnormals count as 0. Needs PAIRS."""
    return instruction(builder, "vdpbf16ps $3, $2, $0", FLOATS, "=v,0,v,v", c, a, b)


fma_pairs = function_of(vector, vector, vector, vector)(add_products_of_pairs)


def join(builder: Any, low: Any, high: Any) -> Any:
    """Two vectors, truncated to bfloat16, as pairs with `low` in the lower halves of the lanes."""
    below = builder.lshr(builder.bitcast(low, INTS), constant(INTS, 16))
    above = builder.and_(builder.bitcast(high, INTS), constant(INTS, 0xFFFF0000))
    return builder.bitcast(builder.or_(below, above), FLOATS)


def halves(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """The low and the high numbers of pairs of bfloat16 as two vectors of float32: the inverse of `join`."""
    bits = builder.bitcast(pairs, INTS)
    low, high = builder.shl(bits, constant(INTS, 16)), builder.and_(bits, constant(INTS, 0xFFFF0000))
    return builder.bitcast(low, FLOATS), builder.bitcast(high, FLOATS)


@function_of(vector, vector)
def sum_of_pairs(builder: Any, pairs: Any) -> Any:
    """In each lane, the sum of a pair of bfloat16."""
    return builder.fadd(*halves(builder, pairs))


def interleaved(builder: Any, a: Any, b: Any, first: int) -> Any:
    """Pairs of the numbers at the same places of two vectors of bfloat16, for LANES places from `first` on."""
    kind = ir.VectorType(I16, 2 * LANES)
    a, b = (builder.bitcast(each, kind) for each in (a, b))
    places = [place for lane in range(first, first + LANES) for place in (lane, 2 * LANES + lane)]
    return builder.bitcast(shuffled(builder, places, a, b), FLOATS)


@function_of(vector, vector, vector)
def paired_low(builder: Any, a: Any, b: Any) -> Any:
    """Pairs of the numbers at the same places of two vectors of bfloat16, for the first half of the places."""
    return interleaved(builder, a, b, 0)


@function_of(vector, vector, vector)
def paired_high(builder: Any, a: Any, b: Any) -> Any:
    """`paired_low` for the second half of the places."""
    return interleaved(builder, a, b, LANES)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger number in each lane; b if either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


maximum = function_of(vector, vector, vector)(_larger)


@function_of(vector, vector, vector, vector, vector)
def where_less(builder: Any, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
    """`then` in the lanes where a < b, else `otherwise`."""
    return builder.select(builder.fcmp_ordered("<", a, b), then, otherwise)


def bits_in(builder: Any, a: Any, mask: int) -> Any:
    """The bits of a vector that are in `mask`, as integers."""
    return builder.and_(builder.bitcast(a, INTS), constant(INTS, mask))


@function_of(vector, vector)
def magnitude(builder: Any, a: Any) -> Any:
    return builder.bitcast(bits_in(builder, a, 0x7FFFFFFF), FLOATS)


def _larger_magnitude(builder: Any, a: Any, b: Any) -> Any:
    """The larger magnitude in each lane; NaN if either is NaN: as an integer, NaN is larger than infinity."""
    x, y = (bits_in(builder, each, 0x7FFFFFFF) for each in (a, b))
    return builder.bitcast(builder.select(builder.icmp_signed(">", x, y), x, y), FLOATS)


larger_magnitude = function_of(vector, vector, vector)(_larger_magnitude)


@function_of(vector, vector, vector)
def with_bits(builder: Any, a: Any, mask: Any) -> Any:
    """The bitwise AND of `a` and `mask`, as floats."""
    return builder.bitcast(builder.and_(builder.bitcast(a, INTS), builder.bitcast(mask, INTS)), FLOATS)


@function_of(vector, vector, vector)
def with_sign(builder: Any, a: Any, sign: Any) -> Any:
    """`a`, which must not be negative, with the sign of `sign`."""
    bit = bits_in(builder, sign, 0x80000000)
    return builder.bitcast(builder.or_(builder.bitcast(a, INTS), bit), FLOATS)


@function_of(vector, vector)
def without_signs_of_nan(builder: Any, a: Any) -> Any:
    """`a`, with a positive sign for each NaN."""
    nan = builder.bitcast(constant(INTS, 0x7FC00000), FLOATS)
    return builder.select(builder.fcmp_unordered("uno", a, a), nan, a)


@function_of(vector, vector)
def truncated(builder: Any, a: Any) -> Any:
    """`a` rounded towards zero; the result must fit int32."""
    return builder.sitofp(builder.fptosi(a, INTS), FLOATS)


def _folded(builder: Any, a: Any, step: Callable[[Any, Any], Any]) -> Any:
    half = LANES
    while half := half // 2:
        a = step(a, shuffled(builder, [(lane + half) % LANES for lane in range(LANES)], a))
    return builder.extract_element(a, ir.Constant(I32, 0))


@function_of(types.float32, vector)
def total(builder: Any, a: Any) -> Any:
    """The sum of the lanes."""
    return _folded(builder, a, builder.fadd)


def _larger_or_nan(builder: Any, a: Any, b: Any) -> Any:
    """The larger number in each lane; NaN if either is NaN."""
    larger = builder.select(builder.fcmp_ordered(">", a, b), a, b)
    return builder.select(builder.fcmp_unordered("uno", a, a), a, larger)


larger_or_nan = function_of(vector, vector, vector)(_larger_or_nan)


@function_of(types.float32, vector)
def largest_or_nan(builder: Any, a: Any) -> Any:
    """The largest lane; NaN if a lane is NaN."""
    return _folded(builder, a, lambda x, y: _larger_or_nan(builder, x, y))


@function_of(types.float32, vector)
def largest_of_magnitudes(builder: Any, a: Any) -> Any:
    """The largest magnitude of the lanes; NaN if a lane is NaN."""
    return _folded(builder, a, lambda x, y: _larger_magnitude(builder, x, y))


def _quads(*runs: int) -> list[int]:
    """The lanes of the given runs of four lanes, for `shuffled`."""
    return [4 * run + lane for run in runs for lane in range(4)]


# ---- numbers of four rows in one vector

ROWS = 4
SPAN = LANES // ROWS  # lanes per row in such a vector
FEW = ir.VectorType(F32, ROWS)


def _by_rows(step: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """A function that emits a reduction of four vectors.

    The result of each vector fills SPAN lanes, in the order of the vectors.
    """

    def emit(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        half, quarters = LANES // 2, [range(part * SPAN, (part + 1) * SPAN) for part in range(2 * ROWS)]
        low, high = [*range(half), *range(LANES, LANES + half)], [*range(half, LANES), *range(LANES + half, 2 * LANES)]
        ab, cd = (
            step(builder, shuffled(builder, low, x, y), shuffled(builder, high, x, y)) for x, y in ((a, b), (c, d))
        )
        even, odd = ([lane for part in range(first, 2 * ROWS, 2) for lane in quarters[part]] for first in (0, 1))
        reduced, distance = step(builder, shuffled(builder, even, ab, cd), shuffled(builder, odd, ab, cd)), SPAN
        while distance := distance // 2:
            reduced = step(builder, reduced, shuffled(builder, [lane ^ distance for lane in range(LANES)], reduced))
        return reduced

    return emit


totals_by_rows = function_of(vector, vector, vector, vector, vector)(_by_rows(lambda builder, a, b: builder.fadd(a, b)))
largest_by_rows = function_of(vector, vector, vector, vector, vector)(_by_rows(_larger))


@function_of(vector, types.int64, types.int64)
def load_by_rows(builder: Any, address: Any, index: Any) -> Any:
    """Four floats from memory, one for each row."""
    numbers = load_aligned(builder, element(builder, address, index, F32), FEW, 4)
    return shuffled(builder, [lane // SPAN for lane in range(LANES)], numbers)


@function_of(types.none, types.int64, types.int64, vector)
def store_by_rows(builder: Any, address: Any, index: Any, value: Any) -> None:
    few = shuffled(builder, [row * SPAN for row in range(ROWS)], value)
    store_aligned(builder, few, element(builder, address, index, F32), 4)


def _row(row: int) -> Any:
    def emit(builder: Any, value: Any) -> Any:
        return shuffled(builder, [row * SPAN] * LANES, value)

    emit.__name__ = f"row_{row}"
    return function_of(vector, vector)(emit)


row_0, row_1, row_2, row_3 = map(_row, range(ROWS))  # the number of one row, in all lanes


@function_of(types.int64, vector, vector)
def rows_above(builder: Any, a: Any, b: Any) -> Any:
    """A bit for each row whose number in `a` is greater than that in `b`."""
    above = shuffled(builder, [row * SPAN for row in range(ROWS)], builder.fcmp_ordered(">", a, b))
    return builder.zext(builder.bitcast(above, ir.IntType(ROWS)), I64)


@function_of(types.none, types.int64, types.int64, vector, *(vector,) * LANES)
def store_totals(builder: Any, address: Any, stride: Any, factor: Any, *vectors: Any) -> None:
    """Store the lane sums of LANES vectors, times `factor`, as 4 rows of LANES / 4 floats, `stride` floats apart."""

    def halved(first: list[int], second: list[int], pairs: Any) -> list[Any]:
        neighbours = zip(pairs[::2], pairs[1::2], strict=True)
        return [builder.fadd(shuffled(builder, first, a, b), shuffled(builder, second, a, b)) for a, b in neighbours]

    # Sum within runs of four lanes first, which is cheapest: add adjacent lanes twice.
    even = [base + lane for run in range(0, LANES, 4) for base in (run, run + LANES) for lane in (0, 2)]
    sums: Any = vectors
    for _ in range(2):
        sums = halved(even, [lane + 1 for lane in even], sums)
    if LANES == 16:
        sums = halved(_quads(0, 1, 4, 5), _quads(2, 3, 6, 7), sums)
        sums = halved(_quads(0, 2, 4, 6), _quads(1, 3, 5, 7), sums)
    else:
        sums = halved(_quads(0, 2), _quads(1, 3), sums)
    products = builder.fmul(sums[0], factor)
    for row in range(4):
        part = shuffled(builder, list(range(row * LANES // 4, (row + 1) * LANES // 4)), products)
        store_aligned(builder, part, element(builder, address, builder.mul(stride, number(row)), F32), 4)


@function_of(types.none, *(types.int64,) * 6)
def transpose(builder: Any, sources: Any, count: Any, otherwise: Any, floats: Any, target: Any, stride: Any) -> None:
    """Transpose the first `floats` of LANES rows, a multiple of LANES; the rows of `target` are `stride` floats apart.

    `sources` lists the addresses of `count` rows. For further rows, and for rows at address 0, the row at
    `otherwise` is read.
    """
    addresses = []
    for index in range(LANES):
        entry = number(index)
        exists = builder.icmp_signed("<", entry, count)
        listed = builder.load(builder.select(exists, element(builder, sources, entry, I64),
                                             element(builder, sources, number(0), I64)))  # fmt: skip
        exists = builder.and_(exists, builder.icmp_signed("!=", listed, number(0)))
        addresses.append(builder.select(exists, listed, otherwise))
    with cgutils.for_range_slice(builder, number(0), floats, number(LANES)) as (place, _):
        rows = [load_aligned(builder, element(builder, address, place, F32), FLOATS, 4) for address in addresses]
        step = LANES
        while step := step // 2:  # exchange off-diagonal blocks of halving size
            upper = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
            lower = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
            for row in range(LANES):
                if not row & step:
                    a, b = rows[row], rows[row + step]
                    rows[row], rows[row + step] = shuffled(builder, upper, a, b), shuffled(builder, lower, a, b)
        for index, row in enumerate(rows):
            column = builder.mul(stride, builder.add(place, number(index)))
            store_aligned(builder, row, element(builder, target, column, F32), 4)


@function_of(vector, vector)
def nearest_integers(builder: Any, a: Any) -> Any:
    return called(builder, f"llvm.rint.v{LANES}f32", FLOATS, a)


@function_of(vector, vector, vector, vector)
def times_power_of_two(builder: Any, a: Any, power: Any, x: Any) -> Any:
    """a * 2 ** power, for an integer power of at most 127, in lanes where x >= -126 or is NaN; elsewhere 0."""
    seen = builder.fcmp_unordered(">=", x, constant(FLOATS, -126.0))
    if LANES == 16:
        bits, none = builder.bitcast(seen, I16), ir.Constant(FLOATS, None)
        return called(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, a, power, none, bits, ir.Constant(I32, 4))
    biased = builder.add(builder.fptosi(power, INTS), constant(INTS, 127))
    scale = builder.bitcast(builder.shl(biased, constant(INTS, 23)), FLOATS)
    return builder.select(seen, builder.fmul(a, scale), ir.Constant(FLOATS, None))


@inlined
def exp2(x):
    """2 ** x for x <= 0, with an error of at most 2 units in the last place; 0 if x < -126, NaN for NaN."""
    whole = nearest_integers(x)
    f = x - whole  # from -0.5 to 0.5; the coefficients are a least-squares fit at Chebyshev's points of that range
    p = fma(splat(1.546144746770952e-4), f, splat(1.339086735119938e-3))
    p = fma(p, f, splat(9.618056669872647e-3))
    p = fma(p, f, splat(5.550357104253380e-2))
    p = fma(p, f, splat(2.402265092234288e-1))
    p = fma(p, f, splat(6.931471880293429e-1))
    p = fma(p, f, splat(1.0))
    return times_power_of_two(p, whole, x)


# ---- memory


def element(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    """A pointer to element `index` of an array of `kind` at an address."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def load_aligned(builder: Any, place: Any, kind: Any, alignment: int) -> Any:
    loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
    loaded.align = alignment
    return loaded


def store_aligned(builder: Any, value: Any, place: Any, alignment: int) -> None:
    builder.store(value, builder.bitcast(place, value.type.as_pointer())).align = alignment


@function_of(vector, types.int64, types.int64)
def load(builder: Any, address: Any, index: Any) -> Any:
    """A vector from memory."""
    return load_aligned(builder, element(builder, address, index, F32), FLOATS, 4)


@function_of(types.none, types.int64, types.int64, vector)
def store(builder: Any, address: Any, index: Any, value: Any) -> None:
    store_aligned(builder, value, element(builder, address, index, F32), 4)


def _reader(result: Any, kind: Any, name: str) -> Any:
    def read(builder: Any, address: Any, index: Any) -> Any:
        loaded = builder.load(element(builder, address, index, kind))
        return loaded if kind in (F32, I64) else (builder.zext if kind is I8 else builder.sext)(loaded, I64)

    read.__name__ = name
    return function_of(result, types.int64, types.int64)(read)


float_at = _reader(types.float32, F32, "float_at")
byte_at = _reader(types.int64, I8, "byte_at")
int32_at = _reader(types.int64, I32, "int32_at")
int_at = _reader(types.int64, I64, "int_at")


def _setter(value_type: Any, kind: Any, name: str) -> Any:
    def write(builder: Any, address: Any, index: Any, value: Any) -> None:
        narrow = value if kind in (F32, I64) else builder.trunc(value, kind)
        builder.store(narrow, element(builder, address, index, kind))

    write.__name__ = name
    return function_of(types.none, types.int64, types.int64, value_type)(write)


set_float = _setter(types.float32, F32, "set_float")
set_int = _setter(types.int64, I64, "set_int")
set_int32 = _setter(types.int64, I32, "set_int32")
set_int16 = _setter(types.int64, I16, "set_int16")
set_byte = _setter(types.int64, I8, "set_byte")


@function_of(types.int64, types.int64, types.int64)
def add_to(builder: Any, address: Any, amount: Any) -> Any:
    """Add atomically to an int64; returns its old value."""
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), amount, "seq_cst")


@function_of(types.none, types.int64, types.float32)
def raise_float(builder: Any, address: Any, value: Any) -> None:
    """Replace a float32 atomically by `value` if `value` is larger or NaN. A NaN is never replaced.

    The bits are compared as integers. A `value` from 0 up, or NaN, needs a signed maximum, because these integers
    ascend. A negative `value` needs an unsigned minimum, because these integers descend. Both operations always run;
    the operation that is not needed gets an operand that changes nothing.
    """
    place, bits = builder.inttoptr(address, I32.as_pointer()), builder.bitcast(value, I32)
    bits = builder.select(builder.fcmp_unordered("uno", value, value), ir.Constant(I32, 0x7FC00000), bits)
    negative = builder.icmp_signed("<", bits, ir.Constant(I32, 0))
    builder.atomic_rmw("max", place, builder.select(negative, ir.Constant(I32, -(2**31)), bits), "seq_cst")
    builder.atomic_rmw("umin", place, builder.select(negative, bits, ir.Constant(I32, -1)), "seq_cst")


@function_of(types.float32, types.int64)
def float_of(builder: Any, bits: Any) -> Any:
    """The float32 whose bits are the lower half of an int64."""
    return builder.bitcast(builder.trunc(bits, I32), F32)


@function_of(types.int64, types.float32)
def bits_of_float(builder: Any, value: Any) -> Any:
    return builder.zext(builder.bitcast(value, I32), I64)


@function_of(types.int64, types.int64)
def trailing_zeros(builder: Any, bits: Any) -> Any:
    """The index of the lowest bit that is set in an int64; 64 if no bit is set."""
    return builder.cttz(bits, ir.Constant(I1, 0))


@function_of(types.int64, types.int64)
def allocate(builder: Any, size: Any) -> Any:
    """Allocate `size` bytes at a multiple of 64; returns the address, 0 if there is no memory."""
    whole = builder.and_(builder.add(size, number(63)), number(-64))
    return builder.ptrtoint(called(builder, "aligned_alloc", I8.as_pointer(), number(64), whole), I64)


@function_of(types.none, types.int64)
def release(builder: Any, address: Any) -> None:
    """Release memory from `allocate`; an address of 0 is ignored."""
    called(builder, "free", ir.VoidType(), builder.inttoptr(address, I8.as_pointer()))


@function_of(types.none, types.int64, types.int64)
def zero(builder: Any, address: Any, size: Any) -> None:
    """Set `size` bytes to 0."""
    cgutils.memset(builder, builder.inttoptr(address, I8.as_pointer()), size, 0)


@function_of(types.none, types.int64, types.int64, types.int64)
def copy(builder: Any, target: Any, source: Any, size: Any) -> None:
    """Copy `size` bytes."""
    target, source = (builder.inttoptr(address, I8.as_pointer()) for address in (target, source))
    cgutils.raw_memcpy(builder, target, source, size, number(1))


def prefetch_line(builder: Any, address: Any, level: int = 1) -> None:
    """Emit a prefetch into the L1 or L2 cache (`level`) of the line at an i64 address, which need not be valid."""
    hints = [ir.Constant(I32, hint) for hint in (0, 4 - level, 1)]  # 0: to read it, 1: as data
    called(builder, "llvm.prefetch.p0i8", ir.VoidType(), builder.inttoptr(address, I8.as_pointer()), *hints)


def _prefetch_into(level: int) -> Any:
    @function_of(types.none, types.int64, types.int64)
    def prefetch(builder: Any, address: Any, size: Any) -> None:
        many = builder.and_(size, number(-256))
        for begin, end, lines in ((number(0), many, 4), (many, size, 1)):
            with cgutils.for_range_slice(builder, begin, end, number(64 * lines)) as (offset, _):
                for line in range(lines):
                    prefetch_line(builder, builder.add(builder.add(address, offset), number(64 * line)), level)

    return prefetch


# prefetch(address, size): prefetch `size` bytes into the L1 cache; the address need not be valid. `prefetch_early` uses
# the L2 cache: it is for bytes that are used much later and would fill the L1 cache.
prefetch, prefetch_early = _prefetch_into(1), _prefetch_into(2)


@function_of(types.none, types.int64, types.int64)
def prefetch_vector(builder: Any, address: Any, index: Any) -> None:
    """Prefetch the vector of floats that begins with float `index` from an address on, which need not be valid."""
    prefetch_line(builder, builder.add(address, builder.mul(index, number(4))))


@function_of(types.none)
def let_others_run(builder: Any) -> None:
    called(builder, "sched_yield", I32)


@function_of(types.int64, types.int64, types.int64)
def call_at(builder: Any, function: Any, value: Any) -> Any:
    """Call the function at the address `function` with one int64; returns its result, an int64."""
    kind = ir.FunctionType(I64, [I64]).as_pointer()
    return builder.call(builder.inttoptr(function, kind), [value])


@function_of(types.none, types.int64, types.int64, types.int64, types.int64)
def in_team(builder: Any, team: Any, function: Any, value: Any, num_threads: Any) -> None:
    """Call `function`, an address, in `num_threads` OpenMP threads; `team` is the address of GOMP_parallel."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I32, I32]).as_pointer()
    count = builder.trunc(num_threads, I32)
    builder.call(builder.inttoptr(team, kind), [function, value, count, ir.Constant(I32, 0)])


@function_of(types.int64, types.int64, types.int64, types.int64)
def start_thread(builder: Any, place: Any, function: Any, value: Any) -> Any:
    """Call `function`, an address, in a new thread, whose handle is written to `place`; returns 0 on success."""
    begun = called(builder, "pthread_create", I32, place, number(0), function, value)
    return builder.sext(begun, I64)


@function_of(types.none, types.int64)
def join_thread(builder: Any, handle: Any) -> None:
    """Wait until a thread ends."""
    called(builder, "pthread_join", I32, handle, number(0))


@compiled
def fill_some(address, first, stop, value):
    """`fill` for at least one float."""
    for index in range(first, stop):
        set_float(address, index, value)


@inlined
def fill(address, first, stop, value):
    """Set the floats [first, stop), often none, to `value`."""
    if first < stop:
        fill_some(address, first, stop, value)


@inlined
def between(a, least, most):
    """Numbers clamped to [least, most]; the least for NaN."""
    a = maximum(a, splat(least))
    return where_less(a, splat(most), a, splat(most))


@compiled
def add_row(target, source, count):
    """Add `count` floats at `source` to those at `target`, in whole vectors."""
    for index in range(0, count, LANES):
        store(target, index, load(target, index) + load(source, index))


@compiled
def add_multiple(target, source, count, factor):
    """Add `count` floats at `source` times `factor` to those at `target`, in whole vectors."""
    for index in range(0, count, LANES):
        store(target, index, fma(load(source, index), splat(factor), load(target, index)))


@compiled
def add_in_all(target, count, number):
    """Add a number to `count` floats at `target`, in whole vectors."""
    for index in range(0, count, LANES):
        store(target, index, load(target, index) + splat(number))
