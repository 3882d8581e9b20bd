"""Rows of a latent cache: gathered as they are stored, dequantised after that."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import CACHE_FORMATS, CacheFormat
from ragged_attention.portable.xla._pages import BITS
from ragged_attention.portable.xla._ragged import at

UNIT = 8  # bytes; what lies in a page of `fp8_v4` begins at a multiple of it, and their count stays within int32


class Stored(NamedTuple):
    """The bytes of quantised rows, uint8."""

    values: jax.Array  # [..., values]
    scales: jax.Array  # [..., bytes]
    rotary: jax.Array  # [..., 2 * rotary]


def is_planar(layout: CacheFormat) -> bool:
    """Whether a page holds the scales of all its rows behind all their values."""
    return layout.name == "fp8_v4"


def all_rows(cache: jax.Array, layout: CacheFormat) -> Stored:
    """The bytes [P, G, 1, ...] of all rows of a cache."""
    cache = lax.bitcast_convert_type(cache, jnp.uint8)
    num_pages, page_size = cache.shape[:2]
    if not is_planar(layout):
        return _token_major(cache, layout)
    row = layout.values + 2 * layout.rotary
    flat = cache.reshape(num_pages, page_size * layout.token_bytes)
    data = flat[:, : page_size * row].reshape(num_pages, page_size, 1, row)
    scales = flat[:, page_size * row :].reshape(num_pages, page_size, 1, UNIT)
    return _planar(data, scales, layout)


def dequantized(stored: Stored, layout: CacheFormat) -> jax.Array:
    """Rows [..., d_qk] in float32: values times scales, then the rotary columns."""
    shape = stored.values.shape[:-1]
    values = lax.bitcast_convert_type(stored.values, jnp.float8_e4m3fn).astype(jnp.float32)
    if is_planar(layout):
        exponents = stored.scales.astype(jnp.uint32)
        bits = jnp.where(exponents == 0, 1 << 22, exponents << 23)  # 2**-127 is not a normal number
        scales = lax.bitcast_convert_type(jnp.where(exponents == 255, jnp.uint32(0x7FC00000), bits), jnp.float32)
    else:
        scales = lax.bitcast_convert_type(stored.scales.reshape(*shape, -1, 4), jnp.float32)
    values = (values.reshape(*shape, -1, layout.group) * scales[..., None]).reshape(*shape, -1)
    rotary = lax.bitcast_convert_type(stored.rotary.reshape(*shape, -1, 2), jnp.bfloat16)
    return jnp.concatenate([values, rotary.astype(jnp.float32)], axis=-1)


def _token_major(tokens: jax.Array, layout: CacheFormat) -> Stored:
    ends = layout.values, layout.token_bytes - 2 * layout.rotary
    return Stored(tokens[..., : ends[0]], tokens[..., ends[0] : ends[1]], tokens[..., ends[1] :])


def _planar(data: jax.Array, scales: jax.Array, layout: CacheFormat) -> Stored:
    groups = layout.values // layout.group  # behind them is padding
    return Stored(data[..., : layout.values], scales[..., :groups], data[..., layout.values :])


class Latents:
    """Gathers rows of packed latents [s_kv, K, d_qk], or of a paged cache, plain or quantised.

    Plain rows come in their own dtype, quantised ones in float32.
    """

    def __init__(self, cache: Any, cache_format: str) -> None:
        self.cache = cache
        self.page_size = cache.shape[1] if cache.ndim == 4 else 1  # each packed row is a page
        self.layout = CACHE_FORMATS.get(cache_format)

    def at_slots(self, slot: jax.Array, head: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.read(slot // self.page_size, slot % self.page_size, head, wanted)

    def read(
        self, page: jax.Array, offset: jax.Array, head: jax.Array, wanted: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rows [..., D], and which of the `wanted` ones exist; the others are zeros.

        A weight of 0 would not silence a NaN in them. All arguments are broadcast together; offsets are in bounds.
        """
        seen = wanted & (page >= 0) & (page < self.cache.shape[0])
        page, offset, head, seen = jnp.broadcast_arrays(jnp.where(seen, page, 0), offset, head, seen)
        # Without the barrier XLA moves the conversion of the rows out of the caller's loop, onto the whole cache.
        cache, page, offset, head = lax.optimization_barrier((self.cache, page, offset, head))
        cache = cache if cache.ndim == 4 else cache[:, None]  # ahead of the loop it would be a copy
        bits = lax.bitcast_convert_type(cache, BITS[cache.dtype.itemsize])
        if self.layout is None:
            rows = lax.bitcast_convert_type(at(bits, page, offset, head), cache.dtype)
        else:
            planar = is_planar(self.layout)
            stored = self._planar_rows(bits, page, offset) if planar else self._token_rows(bits, page, offset)
            rows = dequantized(stored, self.layout)
        return jnp.where(seen[..., None], rows, 0), seen

    def _token_rows(self, cache: jax.Array, page: jax.Array, offset: jax.Array) -> Stored:
        assert self.layout is not None
        # Gathered once, not again for each element that a scale goes into.
        tokens = lax.optimization_barrier(at(cache, page, offset, 0))
        return _token_major(tokens, self.layout)

    def _planar_rows(self, cache: jax.Array, page: jax.Array, offset: jax.Array) -> Stored:
        assert self.layout is not None
        num_pages, page_size = cache.shape[:2]
        units = cache.reshape(num_pages, -1, UNIT)
        count = self.layout.token_bytes // UNIT - 1
        data = spans(units, page, count * offset, count)
        scales = spans(units, page, count * page_size + offset, 1)
        return _planar(data, scales, self.layout)


def spans(units: jax.Array, page: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """`count` units of pages [P, N, unit] from unit `first` on, as bytes [..., count * unit]."""
    rank = page.ndim
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(rank, rank + 1), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    size = (1, count, units.shape[2])
    found = lax.gather(units, jnp.stack([page, first], axis=-1), numbers, size, mode=mode)
    return found.reshape(*page.shape, -1)
