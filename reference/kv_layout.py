"""How the paged KV cache lies in memory: the two page layouts and the 8-bit formats, exactly.

A page p holds the G positions p*G ... p*G + G-1 of whatever sequence lists it. *Combined* pages are one array
[P, G, 2K, D] with K of head h at index 2h and V at 2h+1; *split* pages are a pair [P, G, K, D], [P, G, K, D_v].
8-bit floats are kept as their bits (uint8) here, so that nothing depends on a NumPy extension; `cache_dtype` names
the format.
"""

import itertools
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]

# Exponent bits, mantissa bits, exponent bias, code of the largest finite value.
FORMATS = {"float8_e4m3fn": (4, 3, 7, 0x7E), "float8_e5m2": (5, 2, 15, 0x7B)}


def format_values(cache_dtype: str) -> Float64:
    """The values of all 256 codes of an 8-bit float format (OCP 8-bit floating point specification)."""
    exponent_bits, mantissa_bits, bias, largest = FORMATS[cache_dtype]
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    significand = np.where(exponent > 0, 1.0, 0.0) + mantissa / 2**mantissa_bits
    value = np.ldexp(significand, np.maximum(exponent, 1) - bias)
    beyond = (code & 0x7F) > largest
    has_infinity = cache_dtype == "float8_e5m2"
    value = np.where(beyond, np.where(has_infinity & (mantissa == 0), np.inf, np.nan), value)
    return np.where(code & 0x80, -value, value)


def decode(stored: ArrayLike, cache_dtype: str | None = None) -> Float64:
    """Stored elements as values: bits of an 8-bit float through its table, anything else as it is."""
    if cache_dtype in FORMATS:
        return format_values(cache_dtype)[np.asarray(stored)]
    return np.asarray(stored, np.float64)


def encode(values: ArrayLike, cache_dtype: str | None = None) -> NDArray[Any]:
    """Values as they are stored: to the nearest representable one, ties to even, saturating at the largest finite.

    8-bit floats keep the sign of a NaN; int8 stores 0 for it. Formats of 16 and 32 bits are left to the caller's cast.
    """
    values = np.asarray(values, np.float64)
    if cache_dtype == "int8":
        return np.clip(np.rint(np.nan_to_num(values, nan=0.0)), -128, 127).astype(np.int8)
    if cache_dtype not in FORMATS:
        return values
    largest = FORMATS[cache_dtype][3]
    finite = format_values(cache_dtype)[: largest + 1]
    magnitude = np.minimum(np.abs(values), finite[-1])
    above = np.searchsorted(finite, magnitude).clip(0, largest)
    below = np.maximum(above - 1, 0)
    to_above, to_below = finite[above] - magnitude, magnitude - finite[below]
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    code = np.where(np.isnan(values), 0x7F, np.where(take_above, above, below))
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def split_pages(kv_pages: object, cache_dtype: str | None = None) -> tuple[Float64, Float64]:
    """Either layout as values of K [P, G, K, D] and V [P, G, K, D_v]."""
    if isinstance(kv_pages, tuple | list):
        k_pages, v_pages = kv_pages
        return decode(k_pages, cache_dtype), decode(v_pages, cache_dtype)
    pages = decode(kv_pages, cache_dtype)  # type: ignore[arg-type]
    return pages[:, :, 0::2], pages[:, :, 1::2]


def per_head(scale: ArrayLike | None, num_kv_heads: int) -> NDArray[np.float32]:
    """A scale in any of its forms (None, number, [] or [K]) as one float32 a KV head."""
    return np.broadcast_to(np.float32(1) if scale is None else np.asarray(scale, np.float32), (num_kv_heads,))


def sequence_bounds(cu_q_lens: ArrayLike, num_seqs: ArrayLike | None, num_tokens: int) -> list[tuple[int, int]]:
    """First and one-past-last query row of every live sequence, held within the arrays whatever the values are."""
    cu_q_lens = np.asarray(cu_q_lens)
    max_num_seqs = len(cu_q_lens) - 1
    count = max_num_seqs if num_seqs is None else int(np.asarray(num_seqs).reshape(()))
    edges = np.clip(cu_q_lens[: min(max(count, 0), max_num_seqs) + 1], 0, num_tokens)
    return [(int(start), int(max(start, stop))) for start, stop in itertools.pairwise(edges)]
