"""Latent caches as bytes: the fields of quantised pages, conversion between rows and pages, and poison.

Here a plain cache is float32 [P, G, K, d_qk], and a quantised one is uint8 [P, G, 1, bytes]. This code does not use the
reference's implementation of the formats, so that the two check each other.

One name stands for a format and its layout here. It is the format's name, followed by ", page" if the layout is "page"
and that is not the format's own layout. An example is "fp8_v41, page".
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.calls import CACHE_FORMATS, CacheFormat
from ragged_attention.testing import formats

Bytes = NDArray[np.uint8]
Cache = NDArray[Any]  # float32 or bytes
SCALES = ("powers", "arbitrary", "far apart", "any sign")


LAID_OUT: dict[str, CacheFormat] = CACHE_FORMATS | {
    f"{layout.name}, page": dataclasses.replace(layout, layout="page")
    for layout in CACHE_FORMATS.values()
    if layout.layout != "page" and "page" in layout.layouts
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a quantised cache as bytes, each [P, G, ...]. They are views, so writing them writes the cache."""

    values: Bytes
    scales: Bytes
    rotary: Bytes
    spare: Bytes


def format_of(cache: Cache, given: str | None = None, layout: str | None = None) -> str:
    """The name of a cache's format and layout. The format is `given` or else follows from the last dimension."""
    by_width = {entry.token_bytes: name for name, entry in CACHE_FORMATS.items()}
    name = given or ("plain" if cache.dtype != np.uint8 else by_width[cache.shape[3]])
    return name if name == "plain" or layout in (None, CACHE_FORMATS[name].layout) else f"{name}, {layout}"


def layout_of(name: str) -> str | None:
    """The `cache_layout` argument for a format's name; None means the format's own layout."""
    return "page" if name.endswith(", page") else None


def fields_of(cache: Bytes, name: str) -> Fields:
    """The fields of a cache in the named format and layout."""
    num_pages, page_size, _, token_bytes = cache.shape
    layout = LAID_OUT[name]
    values = layout.values * {"float8_e4m3fn": 8, "float4_e2m1fn": 4}[layout.codes] // 8
    scales = layout.values // layout.group * {"float32": 4, "float8_e8m0fnu": 1, "float8_e4m3fn": 1}[layout.scales]
    if layout.layout == "token":
        rows = cache[:, :, 0]
        rotary = rows[..., values + scales :]
        return Fields(rows[..., :values], rows[..., values : values + scales], rotary, rows[..., :0])
    page = cache.reshape(num_pages, page_size * token_bytes)
    row_bytes = values + 2 * layout.rotary
    rows = page[:, : page_size * row_bytes].reshape(num_pages, page_size, row_bytes)
    tail = page[:, page_size * row_bytes :].reshape(num_pages, page_size, token_bytes - row_bytes)
    return Fields(rows[..., :values], tail[..., :scales], rows[..., values:], tail[..., scales:])


def bits_of_bfloat16(values: NDArray[np.float32]) -> Bytes:
    """The bytes of values that bfloat16 can represent; the last dimension becomes twice as long."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return bits.astype("<u2").view(np.uint8)


def from_bfloat16(stored: Bytes) -> NDArray[np.float32]:
    return (np.ascontiguousarray(stored).view("<u2").astype(np.uint32) << 16).view(np.float32)


def scales_of(stored: Bytes, name: str) -> NDArray[np.float32]:
    """The scales as float32, one for each group of columns, [P, G, groups]."""
    kind = LAID_OUT[name].scales
    if kind == "float32":
        return np.ascontiguousarray(stored).view("<f4")
    if kind == "float8_e4m3fn":
        return formats.values_of(stored, kind).astype(np.float32)
    with np.errstate(over="ignore"):
        powers = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
    return np.where(stored == 0xFF, np.float32(np.nan), powers)


def values_of(codes: Bytes, name: str) -> NDArray[np.float64]:
    """The values of codes, without scales."""
    if LAID_OUT[name].codes == "float8_e4m3fn":
        return formats.values_of(codes, "float8_e4m3fn")
    values = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]))
    values[..., ::2], values[..., 1::2] = E2M1[codes % 16], E2M1[codes // 16]
    return values


def codes_of(values: NDArray[np.floating[Any]], name: str) -> Bytes:
    """The codes that are nearest to values [..., n]."""
    if LAID_OUT[name].codes == "float8_e4m3fn":
        return formats.stored(values, "float8_e4m3fn")
    nearest = np.abs(values[..., None] - E2M1).argmin(axis=-1).astype(np.uint8)
    return nearest[..., ::2] + 16 * nearest[..., 1::2]


def rows_of(cache: Cache, name: str) -> NDArray[np.float64]:
    """The dequantised row of every slot, [P * G, K, d_qk]."""
    if name == "plain":
        return cache.reshape(-1, *cache.shape[2:]).astype(np.float64)
    fields, layout = fields_of(cache, name), LAID_OUT[name]
    with np.errstate(all="ignore"):  # some bytes may be arbitrary
        scales = np.repeat(scales_of(fields.scales, name).astype(np.float64), layout.group, axis=-1)
        quantised = values_of(fields.values, name) * scales
        rows = np.concatenate([quantised, from_bfloat16(fields.rotary).astype(np.float64)], axis=-1)
    return rows.reshape(-1, 1, layout.width)


def quantised(rows: NDArray[np.float32], name: str, scales: str, rng: np.random.Generator) -> Bytes:
    """A quantised cache, in bytes, with rows like `rows` [P, G, 1, d_qk], but with other scales for groups of columns.

    `scales` is one of SCALES: "powers" of two, "arbitrary" float32, "far apart" (some so small that a group hardly
    counts), or "any sign" (also negative and zero). 8-bit scales are such scales, rounded. e8m0 scales are always
    powers of two.
    """
    layout = LAID_OUT[name]
    cache = np.zeros((*rows.shape[:3], layout.token_bytes), np.uint8)
    fields = fields_of(cache, name)
    groups = rows[:, :, 0, : layout.values].reshape(*rows.shape[:2], layout.values // layout.group, layout.group)
    largest = np.float32(448 if layout.codes == "float8_e4m3fn" else 6)
    least = np.maximum(np.abs(groups).max(axis=-1) / largest, np.float32(1e-4))
    scaled = (groups / least[..., None]).reshape(*groups.shape[:2], layout.values)
    fields.values[...] = codes_of(scaled, name)
    fields.rotary[...] = bits_of_bfloat16(formats.rounded(rows[:, :, 0, layout.values :], "bfloat16"))
    factor = {
        "powers": lambda: np.ones(least.shape),
        "arbitrary": lambda: rng.uniform(0.5, 2, least.shape),
        "far apart": lambda: 10.0 ** rng.uniform(-5, 0.3, least.shape),
        "any sign": lambda: rng.choice([1.3, -0.7, 0.0], least.shape, p=[0.5, 0.4, 0.1]),
    }[scales]()
    exponents = np.round(np.log2(least * np.maximum(np.abs(factor), 1e-6))).astype(np.int32)
    if layout.scales == "float8_e4m3fn":
        factors = np.ldexp(1.0, exponents) if scales == "powers" else least * factor
        fields.scales[...] = formats.stored(factors, layout.scales)
    elif layout.scales == "float8_e8m0fnu":
        fields.scales[...] = (exponents + 127).astype(np.uint8)
    elif scales == "powers":
        fields.scales[...] = np.ldexp(np.float32(1), exponents).view(np.uint8)
    else:
        fields.scales[...] = (least * factor).astype("<f4").view(np.uint8)
    return cache


def repaged(cache: Cache, name: str, order: NDArray[np.integer], page_size: int) -> Cache:
    """A cache with the slots `order` of `cache`, in pages of `page_size` slots. The last page may have unused slots."""
    num_pages = -(-len(order) // page_size)
    new = np.zeros((num_pages, page_size, *cache.shape[2:]), cache.dtype)
    page, offset = np.divmod(np.arange(len(order)), page_size)
    old_page, old_offset = np.divmod(order, cache.shape[1])
    if name == "plain":
        new[page, offset] = cache[old_page, old_offset]
        return new
    for part in dataclasses.fields(Fields):
        source, target = getattr(fields_of(cache, name), part.name), getattr(fields_of(new, name), part.name)
        target[page, offset] = source[old_page, old_offset]
    return new


def poisoned(cache: Cache, name: str, unread: NDArray[np.bool_], kind: str, rng: np.random.Generator) -> Cache:
    """A copy of the cache with poison in the slots `unread` [P * G].

    For "nan", the poison is NaN; for "inf", it is infinities or, in quantised caches, arbitrary bytes.
    """
    cache = cache.copy()
    unread = unread.reshape(cache.shape[:2])
    if name == "plain":
        cache[unread] = formats.poison(kind, "float32", cache[unread].shape, rng)
        return cache
    fields = fields_of(cache, name)
    for part in (fields.values, fields.scales, fields.rotary):
        part[unread] = _bytes(kind, part[unread].shape, rng)
    fields.spare[...] = _bytes(kind, fields.spare.shape, rng)
    return cache


def _bytes(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Bytes:
    """Bytes that are NaN in every field of every format, or arbitrary bytes."""
    return np.full(shape, 0xFF, np.uint8) if kind == "nan" else rng.integers(0, 256, shape, np.uint8)
