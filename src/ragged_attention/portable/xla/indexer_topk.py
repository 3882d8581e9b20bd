"""Selects each token's keys with the largest logits of the lightning indexer, in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import IndexerTopk
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._indexer import FEATURES as FEATURES_OF_LOGITS
from ragged_attention.portable.xla._indexer import Seen, largest, over_tiles
from ragged_attention.portable.xla._indexer import heuristic as heuristic
from ragged_attention.portable.xla._tile import Tile as Tile

FEATURES = FEATURES_OF_LOGITS | {"candidate_blocks", "candidate_block_size"}


def run(call: IndexerTopk, tile: Tile, launch: Any) -> jax.Array:
    def rows(seen: Seen, logits: jax.Array) -> jax.Array:
        selected = largest(logits, call.top_k)
        return jnp.where(selected < 0, selected, selected - seen.starts[:, None]) if call.relative else selected

    return over_tiles(call, tile, jnp.full((call.num_tokens, call.top_k), -1, jnp.int32), rows)
