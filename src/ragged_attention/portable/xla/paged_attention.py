"""Paged decode over heads-first pages in plain jax operations: ragged paged attention with one query per sequence."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import PagedAttention
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._heads_first import attend
from ragged_attention.portable.xla._heads_first import heuristic as heuristic
from ragged_attention.portable.xla._tile import Tile as Tile

FEATURES = frozenset({"sm_scale", "soft_cap"})


def run(call: PagedAttention, tile: Tile, launch: Any) -> jax.Array:
    edges = jnp.arange(call.num_tokens + 1, dtype=jnp.int32)
    return attend(call, tile, call.page_indices, kv_lens=call.lengths, cu_q_lens=edges)
