"""The lightning indexer's logits on TPUs: `_indexer` computes them by tile, and this module orders them by token."""

from typing import Any

import jax.numpy as jnp

from ragged_attention.kernels_pallas import _indexer
from ragged_attention.kernels_pallas._indexer import FEATURES as FEATURES
from ragged_attention.kernels_pallas._indexer import Tile as Tile
from ragged_attention.kernels_pallas._indexer import heuristic as heuristic
from ragged_attention.kernels_pallas._indexer import why_not as why_not


def run(call: Any, tile: Tile, launch: Any) -> Any:
    """Logits [T, columns]."""
    if _indexer.sees_nothing(call):
        return jnp.full((call.num_tokens, call.columns), -jnp.inf, jnp.float32)
    rows = _indexer.rows_of(call, tile.num_queries_per_block)
    logits = _indexer.logits_of(call, _indexer.pieces_of(call, tile), rows, tile)
    logits = _indexer.from_own_start(call, logits.reshape(-1, _indexer.width_of(call)), rows.starts.reshape(-1))
    return _indexer.by_token(logits, rows, call.num_tokens, -jnp.inf)
