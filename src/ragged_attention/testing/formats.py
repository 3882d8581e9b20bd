"""Rounding to the formats that kernels read, in NumPy alone.

A float array is kept as float32 whose values the format can hold, an 8-bit float as its bits (uint8); so a batch
needs neither torch nor jax, and the oracle sees exactly what a kernel sees.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.calls import QUANTIZED as QUANTIZED
from ragged_attention.calls.cache_formats import SCALED_FORMATS, UNSCALED_FORMATS, KvFormat
from ragged_attention.calls.cache_formats import element_of as element_of
from ragged_attention.reference._kv_layout import FORMATS as FORMATS
from ragged_attention.reference._kv_layout import decode, encode

NAN_CODES = {"float8_e4m3fn": (0x7F, 0xFF), "float8_e5m2": (0x7E, 0xFD), "float8_e4m3fnuz": (0x80,)}
# The codes of infinities; formats without infinities have those of their largest values.
INFINITY_CODES = {"float8_e4m3fn": (0x7E, 0xFE), "float8_e5m2": (0x7C, 0xFC), "float8_e4m3fnuz": (0x7F, 0xFF)}


# The formats of keys or values by the names that specs have for them: those with scale pages, then the others.
SCALED = {
    form.name + f", {form.scales} pair" * (form.zero == "stored"): form
    for form in SCALED_FORMATS
    if form.codes in (*QUANTIZED, "uint4", "float4_e2m1fn")
}
KV_FORMATS = SCALED | UNSCALED_FORMATS


def rounded(values: Any, dtype: str) -> NDArray[np.float32]:
    """Values to the nearest that the float dtype holds, ties to even."""
    if dtype in FORMATS:
        return values_of(stored(values, dtype), dtype).astype(np.float32)
    values = np.asarray(values, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
        upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
        return np.where(np.isnan(values), np.float32(np.nan), upper)
    return values


def stored(values: Any, dtype: str) -> NDArray[Any]:
    """Values as a cache of that dtype keeps them: rounded float32, the bits of an 8-bit float, or int8."""
    return encode(values, dtype) if dtype in QUANTIZED else rounded(values, dtype)


def values_of(array: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    return decode(array, dtype if dtype in FORMATS else None)


# What the codes of a row of standard normal numbers are about as large as, if its largest one has the largest code.
_USUAL_CODES = {
    "int8": 40.0, "float8_e4m3fn": 128.0, "float8_e4m3fnuz": 64.0, "float8_e5m2": 2.0**14, "uint4": 4.0,
    "float4_e2m1fn": 2.0,
}  # fmt: skip


def any_scales(rng: np.random.Generator, shape: tuple[int, ...], form: KvFormat) -> NDArray[Any]:
    """Scales of a format [..., n] that no quantiser chose: of either sign, 0, or far from the others.

    Few values are larger than standard normal numbers are, as the bounds of `compare` suppose.
    """
    size = np.float32(1 / _USUAL_CODES[form.codes])
    scales = rng.choice(np.array([0.3, 0.3, 0.3, -0.2, 1, 1e-3, 0], np.float32), shape) * size
    if form.scales == "float8_e8m0fnu":
        return (rng.integers(122, 128, shape) + int(np.log2(size))).astype(np.uint8)
    if form.scales == "float8_e4m3fn":
        return encode(scales, form.scales)
    if form.zero == "mantissa":  # below a scale of 0, the zero point would be a subnormal number
        bits = np.where(scales == 0, size, scales).view(np.uint32) & ~np.uint32(15)
        return (bits | rng.integers(0, 16, shape).astype(np.uint32)).view(np.float32)
    if form.zero == "stored":
        scales[..., 1] = rng.uniform(-3, 18, shape[:-1])
    return rounded(scales, form.scales)


def poisoned_scales(kind: str, form: KvFormat, shape: tuple[int, ...]) -> NDArray[Any]:
    """NaN ("nan") or infinite ("inf") scales of a format, or what comes nearest to them in it."""
    if form.scales == "float8_e8m0fnu":
        return np.full(shape, 0xFF if kind == "nan" else 0xFE, np.uint8)
    if form.scales == "float8_e4m3fn":
        return np.full(shape, 0x7F if kind == "nan" else 0x7E, np.uint8)
    return np.full(shape, np.nan if kind == "nan" else np.inf, np.float32)


def poison(kind: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """NaN ("nan") or infinities ("inf") of a format, or what comes nearest to them in it."""
    if dtype == "uint8":
        return rng.integers(0, 256, shape).astype(np.uint8)
    if dtype == "int8":
        return np.where(rng.random(shape) < 0.5, 127, -128).astype(np.int8)
    if dtype in FORMATS:
        return rng.choice(np.array((NAN_CODES if kind == "nan" else INFINITY_CODES)[dtype], np.uint8), shape)
    if kind == "nan":
        return np.full(shape, np.nan, np.float32)
    return np.where(rng.random(shape) < 0.5, np.inf, -np.inf).astype(np.float32)
