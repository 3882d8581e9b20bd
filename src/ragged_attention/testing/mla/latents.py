"""Latent caches as their bytes: what each byte of a quantised page is, rows into pages and back, poison.

A plain cache is float32 [P, G, K, d_qk] here, a quantised one uint8 [P, G, 1, bytes]. Nothing of this rests on the
definition's own reading of the formats, so that the two check each other.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.calls import CACHE_FORMATS
from ragged_attention.testing import formats

Bytes = NDArray[np.uint8]
Cache = NDArray[Any]  # float32 or bytes
FLOAT32_SCALE = 4  # bytes; an e8m0 scale has one
SCALES = ("powers", "arbitrary", "far apart", "any sign")


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """The parts of a quantised cache as bytes, each [P, G, ...]; views, so that writing them writes the cache."""

    values: Bytes
    scales: Bytes
    rotary: Bytes
    spare: Bytes


def format_of(cache: Cache, given: str | None = None) -> str:
    """`given`, or the format that the last dimension tells."""
    by_width = {layout.token_bytes: name for name, layout in CACHE_FORMATS.items()}
    return given or ("plain" if cache.dtype != np.uint8 else by_width[cache.shape[3]])


def fields_of(cache: Bytes, name: str) -> Fields:
    num_pages, page_size, _, token_bytes = cache.shape
    layout = CACHE_FORMATS[name]
    if name == "fp8_v32":
        rows = cache[:, :, 0]
        bounds = np.cumsum([layout.values, FLOAT32_SCALE * layout.values // layout.group])
        return Fields(rows[..., : bounds[0]], rows[..., bounds[0] : bounds[1]], rows[..., bounds[1] :], rows[..., :0])
    page = cache.reshape(num_pages, page_size * token_bytes)
    row_bytes = layout.values + 2 * layout.rotary
    rows = page[:, : page_size * row_bytes].reshape(num_pages, page_size, row_bytes)
    scales = page[:, page_size * row_bytes :].reshape(num_pages, page_size, token_bytes - row_bytes)
    count = layout.values // layout.group
    return Fields(rows[..., : layout.values], scales[..., :count], rows[..., layout.values :], scales[..., count:])


def bits_of_bfloat16(values: NDArray[np.float32]) -> Bytes:
    """Values that bfloat16 holds as its bytes, the last dimension twice as long."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return bits.astype("<u2").view(np.uint8)


def from_bfloat16(stored: Bytes) -> NDArray[np.float32]:
    return (np.ascontiguousarray(stored).view("<u2").astype(np.uint32) << 16).view(np.float32)


def scales_of(stored: Bytes, name: str) -> NDArray[np.float32]:
    """One float32 a group of columns, [P, G, groups]."""
    if name == "fp8_v32":
        return np.ascontiguousarray(stored).view("<f4")
    with np.errstate(over="ignore"):
        powers = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
    return np.where(stored == 0xFF, np.float32(np.nan), powers)


def rows_of(cache: Cache, name: str) -> NDArray[np.float64]:
    """Every slot's row as values, [P * G, K, d_qk]."""
    if name == "plain":
        return cache.reshape(-1, *cache.shape[2:]).astype(np.float64)
    fields, layout = fields_of(cache, name), CACHE_FORMATS[name]
    with np.errstate(all="ignore"):  # some of the bytes may be any
        scales = np.repeat(scales_of(fields.scales, name).astype(np.float64), layout.group, axis=-1)
        quantised = formats.values_of(fields.values, "float8_e4m3fn") * scales
        rows = np.concatenate([quantised, from_bfloat16(fields.rotary).astype(np.float64)], axis=-1)
    return rows.reshape(-1, 1, layout.width)


def quantised(rows: NDArray[np.float32], name: str, scales: str, rng: np.random.Generator) -> Bytes:
    """Bytes of a cache in which every row [P, G, 1, d_qk] is like the one given, its groups of columns scaled anew.

    `scales` is one of SCALES: powers of two, any in float32, any from so small that a group hardly counts, negative
    and zero ones too. `fp8_v4` can hold powers of two alone.
    """
    layout = CACHE_FORMATS[name]
    cache = np.zeros((*rows.shape[:3], layout.token_bytes), np.uint8)
    fields = fields_of(cache, name)
    groups = rows[:, :, 0, : layout.values].reshape(*rows.shape[:2], layout.values // layout.group, layout.group)
    least = np.maximum(np.abs(groups).max(axis=-1) / np.float32(448), np.float32(1e-4))
    fields.values[...] = formats.stored(groups / least[..., None], "float8_e4m3fn").reshape(fields.values.shape)
    fields.rotary[...] = bits_of_bfloat16(formats.rounded(rows[:, :, 0, layout.values :], "bfloat16"))
    factor = {
        "powers": lambda: np.ones(least.shape),
        "arbitrary": lambda: rng.uniform(0.5, 2, least.shape),
        "far apart": lambda: 10.0 ** rng.uniform(-5, 0.3, least.shape),
        "any sign": lambda: rng.choice([1.3, -0.7, 0.0], least.shape, p=[0.5, 0.4, 0.1]),
    }[scales]()
    if name == "fp8_v4" or scales == "powers":
        exponents = np.round(np.log2(least * np.maximum(np.abs(factor), 1e-6))).astype(np.int32)
        powers = np.ldexp(np.float32(1), exponents)
        fields.scales[...] = (exponents + 127).astype(np.uint8) if name == "fp8_v4" else powers.view(np.uint8)
    else:
        fields.scales[...] = (least * factor).astype("<f4").view(np.uint8)
    return cache


def repaged(cache: Cache, name: str, order: NDArray[np.integer], page_size: int) -> Cache:
    """The slots `order` of a cache as a cache of their own, in pages of another size; the last page may have room."""
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
    """A copy with NaN ("nan") or anything ("inf": infinities, or any byte) in the `unread` slots [P * G]."""
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
    """Bytes that are NaN in each of the formats' parts, or any."""
    return np.full(shape, 0xFF, np.uint8) if kind == "nan" else rng.integers(0, 256, shape, np.uint8)
