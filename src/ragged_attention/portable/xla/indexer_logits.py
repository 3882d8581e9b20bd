"""The lightning indexer's logits in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import IndexerLogits
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._indexer import FEATURES as FEATURES
from ragged_attention.portable.xla._indexer import Seen, from_own_start, over_tiles
from ragged_attention.portable.xla._indexer import heuristic as heuristic
from ragged_attention.portable.xla._tile import Tile as Tile


def run(call: IndexerLogits, tile: Tile, launch: Any) -> jax.Array:
    def rows(seen: Seen, logits: jax.Array) -> jax.Array:
        return from_own_start(logits, seen, call.columns) if call.relative else logits

    return over_tiles(call, tile, jnp.full((call.num_tokens, call.columns), -jnp.inf, jnp.float32), rows)
