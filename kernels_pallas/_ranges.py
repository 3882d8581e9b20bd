"""Key ranges in the form that a launch of ragged paged attention reads, prepared by XLA before the launch."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from ragged_attention.kernels_pallas._blocks import cdiv


class Ranges(NamedTuple):
    """The ranges of a launch's tiles, in scalar memory. Tiles are numbered across all sequences."""

    first_tiles: Any  # i32 [S], the number of each sequence's first tile
    lows: Any  # i32 [tiles], the first key that any row of a tile sees
    highs: Any  # i32 [tiles], one past the last such key; equal to `lows` if there is none
    edges: Any  # i32 [tiles * 2R], begins and ends alternate; range r of a tile contains range r of each row


def ranges_of(plan: Any, seqs: Any, computed: Any, key_ranges: Any) -> tuple[Ranges, Any]:
    """The `Ranges` of a launch over the `computed` sequences, bool [S], and the ranges of each row of its tiles.

    The rows' ranges are i32 [tiles, 2R, rows], in which begins and ends alternate, in the order of `Refs.q_rows`. They
    are None for tiles of one query. Empty ranges, and ranges of rows outside a tile, become [0, 0).
    """
    size, count = plan.block_q, len(seqs.starts)
    tiles = jnp.where(computed, cdiv(seqs.q_lens, size), 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    tile = jnp.arange(cdiv(plan.num_tokens, size) + count if plan.in_columns else count, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(ends, tile, side="right").astype(jnp.int32), count - 1)
    first = seqs.starts[seq] + (tile - (ends - tiles)[seq]) * size
    source = jnp.clip(first, 0, plan.num_tokens - size)  # see `span_of`
    row = source[:, None] + jnp.arange(size, dtype=jnp.int32)
    in_tile = (row >= first[:, None]) & (row < (seqs.starts + seqs.q_lens)[seq, None]) & (tile < ends[-1])[:, None]
    ranges = jnp.clip(key_ranges[row], 0, seqs.kv_lens[seq, None, None, None])  # [tiles, size, R, 2]
    is_nonempty = in_tile[..., None] & (ranges[..., 0] < ranges[..., 1])
    ranges = jnp.where(is_nonempty[..., None], ranges, 0)
    highs = ranges[..., 1].max(axis=(1, 2))
    # An empty range must not widen its tile's range.
    begins = jnp.where(is_nonempty, ranges[..., 0], highs[:, None, None])
    ranges_of_tiles = jnp.stack([begins.min(axis=1), ranges[..., 1].max(axis=1)], axis=-1)
    scalars = Ranges(ends - tiles, begins.min(axis=(1, 2)), highs, ranges_of_tiles.reshape(-1))
    if not plan.in_columns:
        return scalars, None
    rows = ranges.reshape(len(tile), size, -1).swapaxes(1, 2)  # [tiles, 2R, size]
    rows = jnp.tile(rows, (1, 1, plan.group))
    return scalars, jnp.pad(rows, ((0, 0), (0, 0), (0, plan.rows - rows.shape[2])))
