"""The scores of blocks of keys in plain jax operations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import BlockScores
from ragged_attention.portable.xla._blocks import FEATURES as FEATURES
from ragged_attention.portable.xla._blocks import heuristic as heuristic
from ragged_attention.portable.xla._blocks import maxima
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._indexer import over_tiles
from ragged_attention.portable.xla._tile import Tile as Tile


def run(call: BlockScores, tile: Tile, launch: Any) -> jax.Array:
    (result,) = call.results()
    return over_tiles(call, tile, jnp.full(result.shape, -jnp.inf, jnp.float32), functools.partial(maxima, call))
