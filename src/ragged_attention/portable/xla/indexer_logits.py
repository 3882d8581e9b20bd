"""The lightning indexer's logits in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import IndexerLogits
from ragged_attention.portable.xla import _indexer
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._indexer import Seen, from_own_start, over_tiles
from ragged_attention.portable.xla._indexer_lists import listed_logits, tile_of_lists
from ragged_attention.portable.xla._tile import Tile as Tile

FEATURES = _indexer.FEATURES | {"indices"}


def heuristic(call: IndexerLogits) -> Tile:
    return tile_of_lists(call) if call.listed else _indexer.heuristic(call)


def run(call: IndexerLogits, tile: Tile, launch: Any) -> jax.Array:
    if call.listed:
        return listed_logits(call, tile)

    def rows(seen: Seen, logits: jax.Array) -> jax.Array:
        return from_own_start(logits, seen, call.columns) if call.relative else logits

    return over_tiles(call, tile, jnp.full((call.num_tokens, call.columns), -jnp.inf, jnp.float32), rows)
