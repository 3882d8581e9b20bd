"""The layouts of pages, and the 8-bit and latent formats of a KV cache.

A page holds G positions of any sequence that lists it. *Combined* pages are one array [P, G, 2K, D] with K of head h at
index 2h and V at 2h + 1; *split* pages are a pair [P, G, K, D], [P, G, K, D_v]. *Latent* pages hold one row per
position, which is K and whose first columns are V: plain [P, G, K, d_qk], or bytes [P, G, 1, token_bytes] in one of
`CACHE_FORMATS`. 8-bit floats are given as their bits (uint8), so that no NumPy extension is needed; `cache_dtype` names
their format.
"""

import functools
import itertools
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.calls import CACHE_FORMATS, CacheFormat
from ragged_attention.calls.cache_formats import laid_out

Float64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]

# Exponent bits, mantissa bits, exponent bias, code of the largest finite value.
FORMATS = {
    "float8_e4m3fn": (4, 3, 7, 0x7E), "float8_e5m2": (5, 2, 15, 0x7B), "float8_e4m3fnuz": (4, 3, 8, 0x7F)
}  # fmt: skip
NO_NEGATIVE_ZERO = ("float8_e4m3fnuz",)  # formats whose only NaN is 0x80, the code of -0 in other formats
# The magnitude of an e2m1 code, by its lower 3 bits; bit 3 is the sign.
E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@functools.cache
def format_values(cache_dtype: str) -> Float64:
    """The values of all 256 codes of an 8-bit float format.

    The OCP 8-bit floating point specification defines e4m3fn and e5m2. AMD's MI300 defines e4m3fnuz.
    """
    exponent_bits, mantissa_bits, bias, largest = FORMATS[cache_dtype]
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    significand = np.where(exponent > 0, 1.0, 0.0) + mantissa / 2**mantissa_bits
    value = np.ldexp(significand, np.maximum(exponent, 1) - bias)
    beyond = (code & 0x7F) > largest
    has_infinity = cache_dtype == "float8_e5m2"
    value = np.where(beyond, np.where(has_infinity & (mantissa == 0), np.inf, np.nan), value)
    value = np.where(code & 0x80, -value, value)
    return np.where(code == 0x80, np.nan, value) if cache_dtype in NO_NEGATIVE_ZERO else value


def decode(stored: ArrayLike, cache_dtype: str | None = None) -> Float64:
    """The values of stored elements; `cache_dtype` names their format if they are the bits of 8-bit floats."""
    if cache_dtype in FORMATS:
        return format_values(cache_dtype)[np.asarray(stored)]
    return widened(stored)


def encode(values: ArrayLike, cache_dtype: str | None = None) -> NDArray[Any]:
    """Values encoded in an 8-bit format: rounded to nearest, ties to even, saturating at the largest finite value.

    8-bit floats keep the sign of a NaN, except e4m3fnuz, which has one NaN and no -0. int8 stores 0 for a NaN. The
    caller casts to 16-bit and 32-bit formats.
    """
    values = widened(values)
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
    code, sign = np.where(take_above, above, below), np.where(np.signbit(values), 0x80, 0)
    if cache_dtype in NO_NEGATIVE_ZERO:
        return np.where(np.isnan(values), 0x80, np.where(code > 0, code | sign, 0)).astype(np.uint8)
    return (np.where(np.isnan(values), 0x7F, code) | sign).astype(np.uint8)


def per_head(scale: ArrayLike | None, num_kv_heads: int) -> NDArray[np.float32]:
    """A scale (None, a number, [] or [K]) as one float32 per KV head."""
    return np.broadcast_to(np.float32(1) if scale is None else widened(scale, np.float32), (num_kv_heads,))


def divisors(scale: ArrayLike | None, num_kv_heads: int) -> NDArray[np.float32]:
    """The divisor of each KV head's new rows: the head's scale, or a zero of the same sign if it is subnormal."""
    scales = per_head(scale, num_kv_heads)
    return np.where(np.abs(scales) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), scales), scales)


def true_queries(q: ArrayLike, q_scale: ArrayLike | None, sm_scale: float, dtype: str | None) -> tuple[Float64, float]:
    """Queries [T, H, D] and the scale of the logits, one of them multiplied by `q_scale`.

    A `q_scale` that is a number multiplies the scale of the logits. An array, [1] or [H], multiplies the queries in
    float32, and the products are rounded to `dtype`.
    """
    if q_scale is None or isinstance(q_scale, int | float):
        return widened(q), sm_scale * (1.0 if q_scale is None else q_scale)
    scaled = widened(q, np.float32) * widened(q_scale, np.float32).reshape(-1, 1)
    if dtype == "bfloat16":
        return bfloat16_values(bfloat16_bits(scaled)), sm_scale
    return widened(scaled.astype(dtype)), sm_scale


def sequence_bounds(cu_q_lens: ArrayLike, num_seqs: ArrayLike | None, num_tokens: int) -> list[tuple[int, int]]:
    """The rows [start, stop) of each of the first `num_seqs` sequences, clamped to [0, num_tokens]."""
    cu_q_lens = np.asarray(cu_q_lens)
    max_num_seqs = len(cu_q_lens) - 1
    count = max_num_seqs if num_seqs is None else int(np.asarray(num_seqs).reshape(()))
    edges = np.clip(cu_q_lens[: min(max(count, 0), max_num_seqs) + 1], 0, num_tokens)
    return [(int(start), int(max(start, stop))) for start, stop in itertools.pairwise(edges)]


def latent_format(
    pages: NDArray[Any], cache_format: str | None = None, cache_layout: str | None = None
) -> CacheFormat | None:
    """The format of latent pages, which follows from their element and token sizes; None for plain pages."""
    if pages.dtype.itemsize > 1:
        return None
    candidates = [layout for layout in CACHE_FORMATS.values() if cache_format in (None, layout.name)]
    return laid_out(next(layout.name for layout in candidates if layout.token_bytes == pages.shape[-1]), cache_layout)


def planes(pages: NDArray[Any], layout: CacheFormat) -> tuple[Bytes, Bytes, Bytes]:
    """Views [P, G, ...] of the bytes of each token's values, scales and rotary columns. The pages must be contiguous.

    The layout "token" stores all bytes of a token together; "page" stores the scales of all tokens at the page's end.
    """
    num_pages, page_size, _, token_bytes = pages.shape
    tokens = pages.view(np.uint8).reshape(num_pages, page_size, token_bytes)
    if not layout.planar:
        bounds = np.cumsum([layout.value_bytes, layout.scale_bytes])
        return tokens[..., : bounds[0]], tokens[..., bounds[0] : bounds[1]], tokens[..., bounds[1] :]
    whole, end = tokens.reshape(num_pages, page_size * token_bytes), page_size * layout.row_bytes
    rows = whole[:, :end].reshape(num_pages, page_size, layout.row_bytes)
    scales = whole[:, end:].reshape(num_pages, page_size, layout.padded_scale_bytes)
    return rows[..., : layout.value_bytes], scales, rows[..., layout.value_bytes :]


def latent_rows(
    pages: ArrayLike,
    slots: NDArray[np.integer[Any]],
    cache_format: str | None = None,
    cache_layout: str | None = None,
    code_dtype: str | None = None,
) -> Float64:
    """The rows [n, K, d_qk] at `slots` [n], which must be valid slots; no other row is read.

    `code_dtype` names the dtype of a plain 8-bit cache, whose scale is not applied.
    """
    pages = np.asarray(pages)
    page, offset = np.divmod(slots, pages.shape[1])
    if code_dtype is not None:
        return decode(pages[page, offset], code_dtype)
    layout = latent_format(pages, cache_format, cache_layout)
    if layout is None:
        return widened(pages[page, offset])
    codes, scales, rotary = (np.ascontiguousarray(plane[page, offset]) for plane in planes(pages, layout))
    return dequantize_rows(codes, scales, rotary, layout)[:, None]


def dequantize_rows(codes: Bytes, scales: Bytes, rotary: Bytes, layout: CacheFormat) -> Float64:
    """The rows [..., d_qk] that bytes encode: each value times its group's scale, then the rotary columns."""
    if layout.scales == "float32":
        factors = widened(scales.view("<f4"))
    elif layout.scales == "float8_e8m0fnu":
        factors = e8m0_values(scales[..., : layout.num_groups])
    else:
        factors = decode(scales, layout.scales)
    elements = decode_e2m1(codes) if layout.packed_codes else decode(codes, layout.codes)
    grouped = elements.reshape(*factors.shape, layout.group)
    with np.errstate(invalid="ignore"):  # zero times an infinite scale is NaN
        values = (grouped * factors[..., None]).reshape(elements.shape)
    return np.concatenate([values, bfloat16_values(rotary.view("<u2"))], axis=-1)


def quantize_rows(rows: ArrayLike, layout: CacheFormat, power_of_two_scales: bool) -> tuple[Bytes, Bytes, Bytes]:
    """The bytes of rows [..., d_qk], in the order of `planes`; all arithmetic is in float32. Padding bytes are 0."""
    rows = np.ascontiguousarray(widened(rows, np.float32))
    groups = rows[..., : layout.values].reshape(*rows.shape[:-1], layout.num_groups, layout.group)
    rotary = bfloat16_bits(rows[..., layout.values :]).astype("<u2").view(np.uint8)
    if layout.packed_codes:
        return *quantize_groups_to_e2m1(groups), rotary
    codes, scales = quantize_groups(groups, power_of_two_scales)
    if layout.scales == "float32":
        stored = scales.astype("<f4").view(np.uint8)
    else:
        stored = (scales.view(np.uint32) >> 23).astype(np.uint8)  # 0xFF, e8m0's NaN, if not finite
        padding = np.zeros((*stored.shape[:-1], layout.padded_scale_bytes - layout.num_groups), np.uint8)
        stored = np.concatenate([stored, padding], axis=-1)
    return codes.reshape(*rows.shape[:-1], layout.values), stored, rotary


def quantize_groups(groups: NDArray[np.float32], power_of_two: bool) -> tuple[Bytes, NDArray[np.float32]]:
    """The e4m3 codes of groups [..., group] and their scales [...], in float32.

    A NaN is stored as 0x7F whatever its sign, because devices differ in the sign of a NaN that a division produces.
    """
    scales = group_scales(groups, power_of_two)
    with np.errstate(invalid="ignore"):  # infinity over infinity is NaN
        scaled = groups / scales[..., None]
    return encode(np.where(np.isnan(scaled), np.float32(np.nan), scaled), "float8_e4m3fn"), scales


def quantize_groups_to_e2m1(groups: NDArray[np.float32]) -> tuple[Bytes, Bytes]:
    """The bytes of groups [..., num_groups, group] as 4-bit values, and the bytes of their e4m3 scales.

    A scale is the largest magnitude / 6, clamped to [2 ** -9, 448] and rounded to e4m3. If a group holds a NaN, its
    scale is NaN (0x7F) and its codes are 0, because e2m1 has no NaN.
    """
    with np.errstate(invalid="ignore"):
        largest = np.abs(groups).max(axis=-1) / np.float32(6)
        stored = encode(np.abs(np.clip(largest, np.float32(2**-9), np.float32(448))), "float8_e4m3fn")
        scaled = groups / format_values("float8_e4m3fn")[stored].astype(np.float32)[..., None]
    codes = np.where(np.isnan(scaled), 0, encode_e2m1(scaled)).astype(np.uint8)
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    return packed.reshape(*stored.shape[:-1], groups.shape[-2] * groups.shape[-1] // 2), stored


def encode_e2m1(values: NDArray[np.float32]) -> Bytes:
    """The 4-bit codes of values: rounded to nearest, ties to the even code, saturating."""
    magnitude = np.minimum(np.abs(np.nan_to_num(values, nan=0.0, posinf=6.0, neginf=-6.0)), np.float32(6))
    midpoints = (E2M1_VALUES[:-1] + E2M1_VALUES[1:]) / 2
    below, above = np.searchsorted(midpoints, magnitude), np.searchsorted(midpoints, magnitude, side="right")
    code = np.where(below % 2 == 0, below, above)  # they differ only at a midpoint
    return (code | np.where(np.signbit(values), 8, 0)).astype(np.uint8)


def decode_e2m1(codes: Bytes) -> Float64:
    """Bytes [..., n] as values [..., 2 n]; a byte's low 4 bits hold the first of its two values."""
    pairs = np.stack([codes & 0xF, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    return np.where(pairs & 8, -1.0, 1.0) * E2M1_VALUES[pairs & 7]


def group_scales(groups: NDArray[np.float32], power_of_two: bool) -> NDArray[np.float32]:
    """The scales of groups [..., group]: largest magnitude / 448, at least 1e-4, optionally rounded up to 2 ** n."""
    scales = np.maximum(np.abs(groups).max(axis=-1) / np.float32(448), np.float32(1e-4))
    scales = np.where(np.isnan(scales), np.float32(np.nan), scales)
    if power_of_two:
        up = ((scales.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)
        scales = np.where(np.isfinite(scales), up, scales)
    return scales


def e8m0_values(codes: Bytes) -> Float64:
    """The values of e8m0 codes: code b is 2 ** (b - 127), and 0xFF is NaN."""
    return np.where(codes == 0xFF, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))


def bfloat16_values(bits: NDArray[np.uint16]) -> Float64:
    return widened((bits.astype(np.uint32) << 16).view(np.float32))


def widened(values: ArrayLike, to: type[np.floating] = np.float64) -> NDArray[Any]:
    """Values in a wider dtype; signaling NaNs become quiet ones, without a warning."""
    with np.errstate(invalid="ignore"):
        return np.asarray(values, to) * to(1)  # a NaN cast from float16 may still be signaling; the product is quiet


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of values rounded to bfloat16, ties to even; a NaN keeps its sign."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype(np.uint16)
