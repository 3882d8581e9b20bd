"""Round arrays to the formats that kernels read, with NumPy only.

Batches hold float arrays as float32 with values that the format can represent, and 8-bit floats as their bits (uint8).
So a batch needs neither torch nor jax, and the reference reads exactly the values that a kernel reads.
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
# The codes of infinities. For formats without infinities, these are the codes of the largest values.
INFINITY_CODES = {"float8_e4m3fn": (0x7E, 0xFE), "float8_e5m2": (0x7C, 0xFC), "float8_e4m3fnuz": (0x7F, 0xFF)}


# The formats of keys and values, by their names in specs: first formats with scale pages, then the others.
SCALED = {
    form.name + f", {form.scales} pair" * (form.zero == "stored"): form
    for form in SCALED_FORMATS
    if form.codes in (*QUANTIZED, "uint4", "float4_e2m1fn")
}
KV_FORMATS = SCALED | UNSCALED_FORMATS


def rounded(values: Any, dtype: str) -> NDArray[np.float32]:
    """Values rounded to the nearest values of the float dtype, ties to even."""
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
    """Values as a cache of this dtype stores them: rounded float32, the bits of 8-bit floats, or int8."""
    return encode(values, dtype) if dtype in QUANTIZED else rounded(values, dtype)


def values_of(array: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    return decode(array, dtype if dtype in FORMATS else None)


# The typical magnitude of codes in a row of standard normal numbers that is scaled so that its maximum has the largest
# code.
_USUAL_CODES = {
    "int8": 40.0, "float8_e4m3fn": 128.0, "float8_e4m3fnuz": 64.0, "float8_e5m2": 2.0**14, "uint4": 4.0,
    "float4_e2m1fn": 2.0,
}  # fmt: skip


def any_scales(rng: np.random.Generator, shape: tuple[int, ...], form: KvFormat) -> NDArray[Any]:
    """Scales [..., n] for a format, unlike those of a quantiser: positive, negative, 0, or far from each other.

    With these scales, few values are larger than standard normal numbers, as the tolerances of `compare` assume.
    """
    size = np.float32(1 / _USUAL_CODES[form.codes])
    scales = rng.choice(np.array([0.3, 0.3, 0.3, -0.2, 1, 1e-3, 0], np.float32), shape) * size
    if form.scales == "float8_e8m0fnu":
        return (rng.integers(122, 128, shape) + int(np.log2(size))).astype(np.uint8)
    if form.scales == "float8_e4m3fn":
        return encode(scales, form.scales)
    if form.zero == "mantissa":  # the scale's low bits are the zero point; they would make a scale of 0 subnormal
        bits = np.where(scales == 0, size, scales).view(np.uint32) & ~np.uint32(15)
        return (bits | rng.integers(0, 16, shape).astype(np.uint32)).view(np.float32)
    if form.zero == "stored":
        scales[..., 1] = rng.uniform(-3, 18, shape[:-1])
    return rounded(scales, form.scales)


def poisoned_scales(kind: str, form: KvFormat, shape: tuple[int, ...]) -> NDArray[Any]:
    """NaN ("nan") or infinite ("inf") scales; their nearest equivalents if the format lacks these."""
    if form.scales == "float8_e8m0fnu":
        return np.full(shape, 0xFF if kind == "nan" else 0xFE, np.uint8)
    if form.scales == "float8_e4m3fn":
        return np.full(shape, 0x7F if kind == "nan" else 0x7E, np.uint8)
    return np.full(shape, np.nan if kind == "nan" else np.inf, np.float32)


def poison(kind: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """NaN ("nan") or infinities ("inf") in a dtype; their nearest equivalents if the dtype lacks these."""
    if dtype == "uint8":
        return rng.integers(0, 256, shape).astype(np.uint8)
    if dtype == "int8":
        return np.where(rng.random(shape) < 0.5, 127, -128).astype(np.int8)
    if dtype in FORMATS:
        return rng.choice(np.array((NAN_CODES if kind == "nan" else INFINITY_CODES)[dtype], np.uint8), shape)
    if kind == "nan":
        return np.full(shape, np.nan, np.float32)
    return np.where(rng.random(shape) < 0.5, np.inf, -np.inf).astype(np.float32)
