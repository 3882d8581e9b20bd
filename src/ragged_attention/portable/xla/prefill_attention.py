"""Chunked prefill over heads-first pages in plain jax operations: ragged paged attention of one sequence."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import PrefillAttention
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._heads_first import attend
from ragged_attention.portable.xla._heads_first import heuristic as heuristic
from ragged_attention.portable.xla._tile import Tile as Tile

FEATURES = frozenset({"sm_scale", "soft_cap", "sliding_window", "align"})


def run(call: PrefillAttention, tile: Tile, launch: Any) -> jax.Array:
    chunk = call.num_tokens
    length = jnp.clip(call.length.reshape(1), 0, call.capacity)
    live = jnp.full(1, chunk, jnp.int32)
    if call.align == "chunk" and chunk:
        live = jnp.where(length > 0, (length - 1) % chunk + 1, 0)
    edges = jnp.concatenate([jnp.zeros(1, jnp.int32), live])
    return attend(call, tile, call.page_indices[None], kv_lens=length, cu_q_lens=edges)
