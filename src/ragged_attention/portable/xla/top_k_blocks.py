"""Selects the blocks of each row's largest scores in plain jax operations, some rows at a time."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import TopKBlocks
from ragged_attention.portable.xla._blocks import selected
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._indexer import MAX_LOGITS
from ragged_attention.portable.xla._ragged import at

FEATURES = frozenset({"init_blocks", "local_blocks"})
BATCH_INVARIANT = True  # selection is exact, whatever the batch


def run(call: TopKBlocks, tile: Any, launch: Any) -> jax.Array:
    (result,) = call.results()
    if 0 in call.scores.shape:
        return jnp.full(result.shape, -1, jnp.int32)
    num_tokens = call.num_tokens
    size = min(max(MAX_LOGITS // (call.num_heads * call.num_blocks), 1), num_tokens)

    def select(first: jax.Array) -> jax.Array:
        row = jnp.minimum(first + jnp.arange(size, dtype=jnp.int32), num_tokens - 1)
        return selected(at(call.scores, row), call.top_k, call.init_blocks, call.local_blocks)

    firsts = jnp.arange(0, num_tokens, size, dtype=jnp.int32)
    return lax.map(select, firsts).reshape(-1, *result.shape[1:])[:num_tokens]
