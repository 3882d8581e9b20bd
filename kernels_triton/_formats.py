"""Elements of a cache: 8-bit formats, their scales, and rounding to 16 bits."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from typing import Any

import triton
import triton.language as tl

from ragged_attention.kernels_triton._compiler import decoded_at_once as decoded_at_once
from ragged_attention.kernels_triton._constants import INTERPRETED


def e4m3_format(arch: str) -> str:
    """How a GPU decodes e4m3: in hardware, two codes at a time, or one by one."""
    if arch.startswith("gfx"):  # gfx942 converts another e4m3, which has no negative zero and counts from 2^-8
        return "e4m3" if arch == "gfx950" else "e4m3_pairs"
    return "e4m3" if arch.startswith("sm_") and int(arch[3:]) >= 89 else "e4m3_bits"


def cache_format(call: Any) -> str:
    """How kernels are to read the cache: `plain`, or which 8-bit format, and how e4m3 is decoded."""
    return number_format(call.cache_dtype, call.device.arch)


def decodes_by_integers(call: Any) -> bool:
    """Whether kernels decode the cache's e4m3 codes by integer instructions, one code at a time."""
    return call.kv_format.codes == "float8_e4m3fn" and e4m3_format(call.device.arch) == "e4m3_bits"


def number_format(kind: str, arch: str) -> str:
    """The same of numbers of a dtype."""
    if kind == "float8_e4m3fn":
        return e4m3_format(arch)
    return {"float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1", "int8": "int8"}.get(kind, "plain")


def cache_views(call: Any, launch: Any) -> tuple[Any, Any, dict[str, int]]:
    """The arrays that hold K and V, which are one where the two are interleaved, and the kernels' arguments about them.

    Where they are interleaved, heads 2i and 2i + 1 of the array are K and V of KV head i.
    """
    k_pages, v_pages = (call.kv_pages, call.kv_pages) if call.combined else call.kv_pages
    strides = {}
    for name, array in {"k": k_pages, "v": v_pages}.items():
        axes = zip(("page", "slot", "head"), launch.strides(array)[:3], strict=True)
        strides |= {f"{name}_{axis}_stride": stride for axis, stride in axes}
    return k_pages, v_pages, strides


@triton.jit
def array_heads(kv_head, COMBINED: tl.constexpr):
    """The heads of `cache_views`' arrays that are K and V of a KV head."""
    k_head = kv_head
    v_head = kv_head
    if COMBINED:
        k_head = 2 * kv_head
        v_head = 2 * kv_head + 1
    return k_head, v_head


def scale_arguments(name: str, scale: Any, stand_in: Any, launch: Any) -> tuple[Any, dict[str, Any]]:
    """A scale as (array, arguments): `<name>_factor` for a number, `<NAME>_STRIDE` (0 or 1) for an array, else -1."""
    if scale is None or not hasattr(scale, "shape"):
        factor = 1.0 if scale is None else float(scale)
        return stand_in, {f"{name}_factor": factor, f"{name.upper()}_STRIDE": -1}
    one = len(scale.shape) == 0 or scale.shape[0] == 1
    return launch.packed(scale), {f"{name}_factor": 1.0, f"{name.upper()}_STRIDE": 0 if one else 1}


@triton.jit
def load_scale(scale_ptr, kv_head, factor, STRIDE: tl.constexpr):
    """A KV head's scale, from an array (STRIDE 0 or 1) or the number `factor` (STRIDE -1)."""
    scale = factor
    if STRIDE >= 0:
        scale = tl.load(scale_ptr + kv_head * STRIDE).to(tl.float32)
    return scale


@triton.jit
def divided(numbers, scale):
    """float32 numbers over a scale, rounded once; below the smallest normal float32 it is 0, of its sign."""
    scale = tl.where(tl.abs(scale) < 1.1754943508222875e-38, scale * 0, scale)
    return tl.div_rn(numbers, scale - tl.zeros_like(numbers))  # a sum with 0 would lose the sign of -0


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Convert float32 to a float type of 16 or 32 bits, rounding to nearest even.

    The interpreter has no arithmetic for bfloat16: it would round towards zero.
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
    """e4m3 codes [rows, columns] as float16, two at a time in words of 32 bits.

    Sign, exponent and mantissa go where float16 has them, whose exponents count from 2^-15 instead of 2^-7. The code of
    NaN is the only one that reaches 2^14 when 2^7 is added; so it gets that bit too, and with it a whole exponent.
    """
    low, high = tl.split(tl.reshape(stored, [stored.shape[0], stored.shape[1] // 2, 2]))
    codes = (low.to(tl.uint32) << 8) | (high.to(tl.uint32) << 24)
    halves = ((codes >> 1) & 0x3F803F80) | (codes & 0x80008000)
    halves = halves | ((halves + 0x00800080) & 0x40004000)
    pairs = tl.join(halves.to(tl.uint16), (halves >> 16).to(tl.uint16))
    return tl.reshape(pairs, stored.shape).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def decode(stored, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Elements of the cache as operands; exact for every format, scales excluded."""
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
    else:
        code = stored.to(tl.uint16)
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), wide).to(DTYPE)
    return value


@triton.jit
def unit_of(q):
    """The power of two by which a row of queries is divided to lie below 2^9."""
    # Magnitudes are in order as whole numbers too, with NaN above all others.
    exponent = (tl.max(q.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23) - 127 - 8
    exponent = tl.minimum(tl.maximum(exponent, -118), 119)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def in_float16(q):
    """bfloat16 rows as float16, and the powers of two that they were divided by.

    For caches of 8 bits: their codes are exact in float16 and a single conversion from it, while bfloat16 takes three
    for two of them; and weights are rounded to 11 bits instead of 8.
    """
    wide = q.to(tl.float32)
    unit = unit_of(wide)
    return narrow(wide / unit[:, None], tl.float16), unit


@triton.jit
def encode_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """float32 to the bits of an 8-bit float: nearest even, saturating, NaN keeps its sign; the same bits everywhere."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - MANTISSA
    rounded = magnitude + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)
    normal = (rounded >> dropped).to(tl.int32) - ((127 - BIAS) << MANTISSA)
    # Adding a power of two whose last bit is the format's smallest step rounds to that step.
    step: tl.constexpr = 2.0 ** (23 + 1 - BIAS - MANTISSA)
    small = (magnitude.to(tl.float32, bitcast=True) + step).to(tl.uint32, bitcast=True).to(tl.int32)
    small = small - ((127 + 23 + 1 - BIAS - MANTISSA) << 23)
    least_normal: tl.constexpr = (127 + 1 - BIAS) << 23
    code = tl.where(magnitude < least_normal, small, tl.minimum(normal, LARGEST))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code.to(tl.uint32) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(codes):
    """Codes of e4m3 as float32, exactly; for scales, of which there are few."""
    wide = codes.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def encode_float4(x):
    """float32 to the bits of e2m1, one in each byte: nearest even, saturating; the same bits everywhere.

    A code is how many middles between two neighbours lie below; in the middle itself the even one is taken. NaN becomes
    a 0 of its sign.
    """
    size = tl.abs(x)
    code = (size > 0.25).to(tl.uint32) + (size >= 0.75).to(tl.uint32) + (size > 1.25).to(tl.uint32)
    code += (size >= 1.75).to(tl.uint32) + (size > 2.5).to(tl.uint32) + (size >= 3.5).to(tl.uint32)
    code += (size > 5.0).to(tl.uint32)
    return code | ((x.to(tl.uint32, bitcast=True) >> 28) & 8)


@triton.jit
def encode(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """float32 values as elements of the cache."""
    if FORMAT == "plain":
        stored = narrow(x, DTYPE)
    elif FORMAT == "int8":
        held = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -128.0), 127.0)
        stored = ((held + 12582912.0) - 12582912.0).to(tl.int8)  # adding 1.5 * 2^23 rounds to a whole number
    elif FORMAT == "e5m2":
        stored = encode_float8(x, 2, 15, 0x7B)
    else:
        stored = encode_float8(x, 3, 7, 0x7E)
    return stored
