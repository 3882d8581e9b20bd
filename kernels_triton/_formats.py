"""The element formats of caches: encoding, decoding and scales of 8-bit and 4-bit elements, and rounding to 16 bits."""

from typing import Any

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import INTERPRETED
from ragged_attention.kernels_triton._tiles import stride_arguments


def e4m3_format(arch: str) -> str:
    """How a GPU decodes e4m3: `e4m3` in hardware, `e4m3_pairs` two codes at a time, `e4m3_bits` one at a time."""
    if arch.startswith("gfx"):  # gfx942 converts e4m3fnuz, which has no -0 and a different exponent bias
        return "e4m3" if arch == "gfx950" else "e4m3_pairs"
    return "e4m3" if arch.startswith("sm_") and int(arch[3:]) >= 89 else "e4m3_bits"


def e4m3fnuz_format(arch: str) -> str:
    """How a GPU decodes e4m3fnuz: `e4m3fnuz_pairs` two codes at a time, or `e4m3fnuz_bits` one at a time.

    gfx942 has instructions for it, but Triton 3.9 makes two conversions of each code, through float32. In the model of
    benchmarks/compiled/amd.py, the vector instructions of a decode then take 1.5 times as long as with pairs.
    """
    return "e4m3fnuz_pairs" if arch.startswith("gfx") else "e4m3fnuz_bits"


def decodes_by_integers(call: Any) -> bool:
    """Whether kernels decode the cache's 8-bit floats with integer instructions, one code at a time."""
    return number_format(call.k_format.codes, call.device.arch) in ("e4m3_bits", "e4m3fnuz_bits")


def number_format(kind: str, arch: str) -> str:
    """The FORMAT of `decode` for elements of a dtype; "plain" if they need no decoding."""
    if kind == "float8_e4m3fn":
        return e4m3_format(arch)
    if kind == "float8_e4m3fnuz":
        return e4m3fnuz_format(arch)
    return {"float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1", "int8": "int8", "uint4": "uint4"}.get(kind, "plain")


def cache_views(call: Any, launch: Any) -> tuple[Any, Any, dict[str, int]]:
    """(K array, V array, stride arguments). If K and V are interleaved, the two arrays are one; see `array_heads`.

    4-bit codes are read two bytes at a time, so an array whose rows begin at odd addresses is copied.
    """
    k_pages, v_pages = (
        launch.aligned(pages, 2) if form.packed_codes else pages
        for pages, form in zip(call.sides, (call.k_format, call.v_format), strict=True)
    )
    if len(k_pages.shape) == 3:  # packed keys; each key counts as a page
        k, v = launch.packed(k_pages), launch.packed(v_pages)
        return k, v, stride_arguments(launch, ("page", "head"), k=k, v=v) | {"k_slot_stride": 0, "v_slot_stride": 0}
    return k_pages, v_pages, stride_arguments(launch, ("page", "slot", "head"), k=k_pages, v=v_pages)


@triton.jit
def array_heads(kv_head, COMBINED: tl.constexpr):
    """The head indices of a KV head's K and V in the arrays of `cache_views`."""
    k_head = kv_head
    v_head = kv_head
    if COMBINED:
        k_head = 2 * kv_head
        v_head = 2 * kv_head + 1
    return k_head, v_head


def scale_arguments(scale: Any, stand_in: Any, launch: Any) -> tuple[Any, float, int]:
    """A scale as (array, factor, stride) for `load_scale`; the array of a plain number is `stand_in`."""
    if scale is None or not hasattr(scale, "shape"):
        return stand_in, 1.0 if scale is None else float(scale), -1
    return launch.packed(scale), 1.0, 0 if len(scale.shape) == 0 or scale.shape[0] == 1 else 1


@triton.jit
def load_scale(scale_ptr, kv_head, factor, STRIDE: tl.constexpr):
    """A KV head's scale. STRIDE is 0 for an array of one scale, 1 for a scale per head, -1 for the number `factor`."""
    scale = factor
    if STRIDE >= 0:
        scale = tl.load(scale_ptr + kv_head * STRIDE).to(tl.float32)
    return scale


@triton.jit
def divided(numbers, scale):
    """float32 numbers divided by a scale, rounded once. A subnormal scale counts as a zero with the same sign."""
    scale = tl.where(tl.abs(scale) < 1.1754943508222875e-38, scale * 0, scale)
    return tl.div_rn(numbers, scale - tl.zeros_like(numbers))  # `+` would turn -0 into +0


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Convert float32 to a float type of 16 or 32 bits, rounding to nearest even.

    The interpreter's own conversion to bfloat16 rounds towards zero, so it is replaced by bit operations.
    """
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        value = tl.where(x == x, rounded, (bits >> 16) | 0x40).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        value = x.to(DTYPE)
    return value


@triton.jit
def halves_of_e4m3(stored):
    """e4m3 codes [rows, columns] as float16, converted two at a time in 32-bit words.

    The product with 256 corrects the exponent bias, 15 instead of 7. Adding 2^7 carries into bit 14 only for the code
    of NaN; setting that bit gives it float16's NaN exponent.
    """
    halves = shifted_pairs(stored)
    halves = halves | ((halves + 0x00800080) & 0x40004000)
    return unpaired(halves, stored) * 256.0


@triton.jit
def halves_of_e4m3fnuz(stored):
    """e4m3fnuz codes [rows, columns] as float16, converted two at a time in 32-bit words.

    This differs from e4m3 in the exponent bias, 8, and in the only NaN, which has the code of -0. Adding 2^15 - 1 to a
    magnitude carries into bit 15 unless the magnitude is 0. So a code is NaN if its sign bit is set and there is no
    carry. It then gets float16's NaN exponent.
    """
    halves = shifted_pairs(stored)
    nonzero = (halves & 0x7FFF7FFF) + 0x7FFF7FFF
    nan = halves & ~nonzero & 0x80008000
    return unpaired(halves | (nan - (nan >> 6)), stored) * 128.0


@triton.jit
def shifted_pairs(stored):
    """8-bit floats with 4 exponent bits, [rows, columns], as words of two float16 with the same exponent and mantissa.

    Sign, exponent and mantissa move to their places in float16; the exponent bias is not corrected.
    """
    low, high = tl.split(tl.reshape(stored, [stored.shape[0], stored.shape[1] // 2, 2]))
    codes = (low.to(tl.uint32) << 8) | (high.to(tl.uint32) << 24)
    return ((codes >> 1) & 0x3F803F80) | (codes & 0x80008000)


@triton.jit
def unpaired(halves, stored):
    """Words of two float16 as float16, in the shape of `stored`."""
    pairs = tl.join(halves.to(tl.uint16), (halves >> 16).to(tl.uint16))
    return tl.reshape(pairs, stored.shape).to(tl.float16, bitcast=True)


@triton.jit
def scale_values(codes, SCALES: tl.constexpr, FACTOR: tl.constexpr):
    """The one-byte scales in the low bytes of `codes`, as exact float32 times FACTOR. NaN stays NaN."""
    if SCALES == "float8_e8m0fnu":
        power = codes & 0xFF
        bits = power.to(tl.uint32) << 23
        bits = tl.where(power == 0, 0x00400000, tl.where(power == 255, 0x7FC00000, bits))
        scale = bits.to(tl.float32, bitcast=True)
        if FACTOR != 1.0:
            scale = scale * FACTOR
    else:  # float8_e4m3fn has sign, exponent and mantissa in the same order as float16
        code = codes.to(tl.uint32)
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        factor: tl.constexpr = 256.0 * FACTOR
        scale = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * factor
        scale = tl.where((code & 0x7F) == 0x7F, float("nan"), scale)
    return scale


@triton.jit
def decode(stored, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Cache elements as DTYPE ("plain" ones unchanged), exact in every format and not multiplied by their scale."""
    if FORMAT == "plain":
        value = stored
    elif FORMAT == "int8":
        value = stored.to(tl.float32).to(DTYPE)
    elif FORMAT == "e4m3":
        value = stored.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif FORMAT == "e5m2":
        value = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    elif FORMAT == "e4m3_pairs":
        value = halves_of_e4m3(stored).to(DTYPE)
    elif FORMAT == "e4m3fnuz_pairs":
        value = halves_of_e4m3fnuz(stored).to(DTYPE)
    elif FORMAT == "uint4":
        value = stored.to(tl.float32).to(DTYPE)
    elif FORMAT == "e2m1":  # sign, exponent and mantissa are in the same order as in float16
        half = ((stored & 7) << 9) | ((stored & 8) << 12)
        value = (half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0).to(DTYPE)
    else:
        code = stored.to(tl.uint16)
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        wide = half.to(tl.float16, bitcast=True).to(tl.float32)
        if FORMAT == "e4m3fnuz_bits":
            value = tl.where(code == 0x80, float("nan"), wide * 128.0).to(DTYPE)
        else:
            value = tl.where((code & 0x7F) == 0x7F, float("nan"), wide * 256.0).to(DTYPE)
    return value


@triton.jit
def unit_of(q):
    """The power of two by which each query row is divided, so that all magnitudes are below 2^9."""
    # The bits of magnitudes, read as integers, have the same order; NaN is the largest.
    exponent = (tl.max(q.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23) - 127 - 8
    exponent = tl.minimum(tl.maximum(exponent, -118), 119)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def in_float16(q):
    """bfloat16 rows as float16, and the power of two that divided each row.

    This serves 8-bit caches. Their codes are exact in float16 and take one conversion each, while bfloat16 takes three
    conversions for two codes. Weights are also more precise: float16 rounds them to 11 bits, bfloat16 to 8.
    """
    wide = q.to(tl.float32)
    unit = unit_of(wide)
    return narrow(wide / unit[:, None], tl.float16), unit


@triton.jit
def encode_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr,
                  NEGATIVE_ZERO: tl.constexpr = True):  # fmt: skip
    """float32 as 8-bit float codes, rounded to nearest even and saturated. All devices produce identical codes.

    NaN keeps its sign. In a format without NEGATIVE_ZERO, the code of -0 is the only NaN, and -0 becomes 0.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - MANTISSA
    rounded = magnitude + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)
    normal = (rounded >> dropped).to(tl.int32) - ((127 - BIAS) << MANTISSA)
    # Adding a power of two whose last mantissa bit is the format's smallest step rounds to that step.
    step: tl.constexpr = 2.0 ** (23 + 1 - BIAS - MANTISSA)
    small = (magnitude.to(tl.float32, bitcast=True) + step).to(tl.uint32, bitcast=True).to(tl.int32)
    small = small - ((127 + 23 + 1 - BIAS - MANTISSA) << 23)
    least_normal: tl.constexpr = (127 + 1 - BIAS) << 23
    code = tl.where(magnitude < least_normal, small, tl.minimum(normal, LARGEST))
    nan = magnitude > 0x7F800000
    sign = (bits >> 24) & 0x80
    if NEGATIVE_ZERO:
        code = tl.where(nan, 0x7F, code).to(tl.uint32) | sign
    else:
        code = tl.where(nan, 0x80, tl.where(code > 0, code.to(tl.uint32) | sign, 0))
    return code.to(tl.uint8)


@triton.jit
def e4m3_values(codes):
    """e4m3 codes as exact float32, one code at a time. It is used for scales, of which there are few."""
    wide = codes.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def encode_float4(x):
    """float32 as e2m1 codes, one in each element, rounded to nearest even and saturated.

    The code of a magnitude is the number of midpoints below it, where a midpoint is halfway between two neighbouring
    e2m1 values. A magnitude at a midpoint gets the even code. NaN becomes 0 with the NaN's sign. All devices produce
    identical codes.
    """
    size = tl.abs(x)
    code = (size > 0.25).to(tl.uint32) + (size >= 0.75).to(tl.uint32) + (size > 1.25).to(tl.uint32)
    code += (size >= 1.75).to(tl.uint32) + (size > 2.5).to(tl.uint32) + (size >= 3.5).to(tl.uint32)
    code += (size > 5.0).to(tl.uint32)
    return code | ((x.to(tl.uint32, bitcast=True) >> 28) & 8)


@triton.jit
def encode(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """float32 values as cache elements of a FORMAT."""
    if FORMAT == "plain":
        stored = narrow(x, DTYPE)
    elif FORMAT == "int8":
        held = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -128.0), 127.0)
        stored = ((held + 12582912.0) - 12582912.0).to(tl.int8)  # adding 1.5 * 2^23 rounds to an integer
    elif FORMAT == "e5m2":
        stored = encode_float8(x, 2, 15, 0x7B)
    elif FORMAT == "e4m3fnuz_pairs" or FORMAT == "e4m3fnuz_bits":
        stored = encode_float8(x, 3, 8, 0x7F, NEGATIVE_ZERO=False)
    else:
        stored = encode_float8(x, 3, 7, 0x7E)
    return stored
