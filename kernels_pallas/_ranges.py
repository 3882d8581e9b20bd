"""The ranges of keys that queries see, as a launch of ragged paged attention reads them, made by jax before it."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from ragged_attention.kernels_pallas._blocks import cdiv


class Ranges(NamedTuple):
    """What a launch knows of its tiles' ranges, in scalar memory. Tiles are numbered over all sequences."""

    first_tiles: Any  # i32 [S], the number of each sequence's first tile
    lows: Any  # i32 [tiles], the first key that any row of a tile sees
    highs: Any  # i32 [tiles], one past the last; equal if there is none
    edges: Any  # i32 [tiles * 2R], the ranges of tiles of one query; None in other launches


def ranges_of(plan: Any, seqs: Any, computed: Any, key_ranges: Any) -> tuple[Ranges, Any]:
    """The ranges of a launch over the `computed` sequences, bool [S], and those of each row of its tiles.

    The latter are i32 [tiles, 2R, rows], begins and ends in turn, in the order of `Refs.q_rows`; None for tiles of one
    query. Ranges of rows that are not a tile's own are empty; so is [0, 0), as which all empty ranges are given.
    """
    size, count = plan.block_q, len(seqs.starts)
    tiles = jnp.where(computed, cdiv(seqs.q_lens, size), 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    tile = jnp.arange(cdiv(plan.num_tokens, size) + count if plan.in_columns else count, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(ends, tile, side="right").astype(jnp.int32), count - 1)
    first = seqs.starts[seq] + (tile - (ends - tiles)[seq]) * size
    source = jnp.clip(first, 0, plan.num_tokens - size)  # see `span_of`
    row = source[:, None] + jnp.arange(size, dtype=jnp.int32)
    own = (row >= first[:, None]) & (row < (seqs.starts + seqs.q_lens)[seq, None]) & (tile < ends[-1])[:, None]
    ranges = jnp.clip(key_ranges[row], 0, seqs.kv_lens[seq, None, None, None])  # [tiles, size, R, 2]
    some = own[..., None] & (ranges[..., 0] < ranges[..., 1])
    ranges = jnp.where(some[..., None], ranges, 0)
    highs = ranges[..., 1].max(axis=(1, 2))
    lows = jnp.where(some, ranges[..., 0], highs[:, None, None]).min(axis=(1, 2))
    edges = ranges.reshape(len(tile), size, -1).swapaxes(1, 2)  # [tiles, 2R, size]
    if not plan.in_columns:
        return Ranges(ends - tiles, lows, highs, edges.reshape(-1)), None
    rows = jnp.tile(edges, (1, 1, plan.group))
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, plan.rows - rows.shape[2])))
    return Ranges(ends - tiles, lows, highs, None), rows
