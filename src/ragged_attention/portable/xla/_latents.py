"""Gathers rows of a latent cache and dequantises them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import CacheFormat
from ragged_attention.jax_shared.latents import Stored
from ragged_attention.jax_shared.scaled_rows import e2m1_values, e8m0_factors
from ragged_attention.portable.xla._pages import BITS
from ragged_attention.portable.xla._ragged import at

UNIT = 8  # bytes; a page of the layout "page" is indexed in units, so that indices fit int32


def all_rows(cache: jax.Array, layout: CacheFormat) -> Stored:
    """The bytes of all rows of a cache; each field is [P, G, 1, ...]."""
    cache = lax.bitcast_convert_type(cache, jnp.uint8)
    num_pages, page_size = cache.shape[:2]
    if not layout.planar:
        return _token_major(cache, layout)
    flat, end = cache.reshape(num_pages, -1), page_size * layout.row_bytes
    data = flat[:, :end].reshape(num_pages, page_size, 1, layout.row_bytes)
    scales = flat[:, end:].reshape(num_pages, page_size, 1, layout.padded_scale_bytes)
    return _planar(data, scales, layout)


def dequantized(stored: Stored, layout: CacheFormat) -> jax.Array:
    """The rows [..., d_qk] in float32: values times scales, then the rotary columns."""
    shape = stored.values.shape[:-1]
    if layout.packed_codes:
        values = e2m1_values(stored.values)
    else:
        values = lax.bitcast_convert_type(stored.values, jnp.float8_e4m3fn).astype(jnp.float32)
    if layout.scales == "float32":
        scales = lax.bitcast_convert_type(stored.scales.reshape(*shape, -1, 4), jnp.float32)
    elif layout.scales == "float8_e4m3fn":
        scales = lax.bitcast_convert_type(stored.scales, jnp.float8_e4m3fn).astype(jnp.float32)
    else:
        scales, second = e8m0_factors(stored.scales)
        values = _by_group(values, second)
    values = _by_group(values, scales)
    if not layout.rotary:
        return values
    rotary = lax.bitcast_convert_type(stored.rotary.reshape(*shape, -1, 2), jnp.bfloat16)
    return jnp.concatenate([values, rotary.astype(jnp.float32)], axis=-1)


def _by_group(values: jax.Array, factors: jax.Array) -> jax.Array:
    """Values [..., n * group] times factors [..., n]."""
    return (values.reshape(*factors.shape, -1) * factors[..., None]).reshape(values.shape)


def _token_major(tokens: jax.Array, layout: CacheFormat) -> Stored:
    ends = layout.value_bytes, layout.value_bytes + layout.scale_bytes
    return Stored(tokens[..., : ends[0]], tokens[..., ends[0] : ends[1]], tokens[..., ends[1] :])


def _planar(data: jax.Array, scales: jax.Array, layout: CacheFormat) -> Stored:
    values = layout.value_bytes
    return Stored(data[..., :values], scales[..., : layout.num_groups], data[..., values:])  # drops the padding


class Latents:
    """Gathers rows of packed latents [s_kv, K, d_qk] or of a paged cache; 8-bit and quantised rows become float32."""

    def __init__(self, cache: Any, layout: CacheFormat) -> None:
        self.cache = cache
        self.page_size = cache.shape[1] if cache.ndim == 4 else 1  # each packed row is a page
        self.layout = layout

    def at_slots(self, slot: jax.Array, head: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.read(slot // self.page_size, slot % self.page_size, head, wanted)

    def read(
        self, page: jax.Array, offset: jax.Array, head: jax.Array, wanted: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The rows [..., D], and a mask of rows that are `wanted` and lie on a valid page.

        Other rows are 0, because a weight of 0 does not remove a NaN. All arguments are broadcast together. Offsets
        must be in bounds.
        """
        seen = wanted & (page >= 0) & (page < self.cache.shape[0])
        page, offset, head, seen = jnp.broadcast_arrays(jnp.where(seen, page, 0), offset, head, seen)
        # Without the barrier, XLA would convert the whole cache before the caller's loop.
        cache, page, offset, head = lax.optimization_barrier((self.cache, page, offset, head))
        cache = cache if cache.ndim == 4 else cache[:, None]  # before the barrier, this would copy the cache
        bits = lax.bitcast_convert_type(cache, BITS[cache.dtype.itemsize])
        if not self.layout.quantized:
            rows = lax.bitcast_convert_type(at(bits, page, offset, head), cache.dtype)
            rows = rows.astype(jnp.float32) if cache.dtype.itemsize == 1 else rows
        elif self.layout.planar:
            units = bits.reshape(len(bits), -1, UNIT)
            row_units, scale_units = planar_units(self.layout)
            data = spans(units, page, row_units * offset, row_units)
            scales = spans(units, page, row_units * self.page_size + scale_units * offset, scale_units)
            rows = dequantized(_planar(data, scales, self.layout), self.layout)
        else:
            # Without the barrier, XLA would gather a scale again for each element of its group.
            tokens = lax.optimization_barrier(at(bits, page, offset, 0))
            rows = dequantized(_token_major(tokens, self.layout), self.layout)
        return jnp.where(seen[..., None], rows, 0), seen


def planar_units(layout: CacheFormat) -> tuple[int, int]:
    """The sizes, in units, of a token's row (values and rotary columns) and of its scales in the layout "page"."""
    return layout.row_bytes // UNIT, layout.padded_scale_bytes // UNIT


def spans(units: jax.Array, page: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """`count` units of page `page`, from unit `first` on, as bytes [..., count * unit]; `units` is [P, N, unit]."""
    rank = page.ndim
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(rank, rank + 1), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    size = (1, count, units.shape[2])
    gathered = lax.gather(units, jnp.stack([page, first], axis=-1), numbers, size, mode=mode)
    return gathered.reshape(*page.shape, -1)
