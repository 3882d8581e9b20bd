"""Selects the blocks of keys with the largest scores for each token and index head, in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import SelectBlocks
from ragged_attention.portable.xla._blocks import FEATURES as FEATURES_OF_SCORES
from ragged_attention.portable.xla._blocks import heuristic as heuristic
from ragged_attention.portable.xla._blocks import maxima, selected
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._indexer import Seen, over_tiles
from ragged_attention.portable.xla._tile import Tile as Tile

FEATURES = FEATURES_OF_SCORES | {"init_blocks", "local_blocks"}


def run(call: SelectBlocks, tile: Tile, launch: Any) -> jax.Array:
    def rows(seen: Seen, logits: jax.Array) -> jax.Array:
        return selected(maxima(call, seen, logits), call.top_k, call.init_blocks, call.local_blocks)

    (result,) = call.results()
    return over_tiles(call, tile, jnp.full(result.shape, -1, jnp.int32), rows)
