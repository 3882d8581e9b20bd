"""Selects the columns of each row's largest logits in plain jax operations, some rows at a time."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import TopKIndices
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._indexer import MAX_LOGITS, largest
from ragged_attention.portable.xla._ragged import at

FEATURES = frozenset({"starts", "stops"})
BATCH_INVARIANT = True  # selection is exact, whatever the batch


def run(call: TopKIndices, tile: Any, launch: Any) -> jax.Array:
    num_tokens, columns = call.num_tokens, call.columns
    if 0 in (num_tokens, columns):
        return jnp.full((num_tokens, call.top_k), -1, jnp.int32)
    size = min(max(MAX_LOGITS // columns, 1), num_tokens)
    column = jnp.arange(columns, dtype=jnp.int32)

    def select(first: jax.Array) -> jax.Array:
        row = jnp.minimum(first + jnp.arange(size, dtype=jnp.int32), num_tokens - 1)
        logits = at(call.logits, row)
        if call.starts is not None:
            logits = jnp.where(column >= at(call.starts, row)[:, None], logits, -jnp.inf)
        if call.stops is not None:
            logits = jnp.where(column < at(call.stops, row)[:, None], logits, -jnp.inf)
        return largest(logits, call.top_k)

    firsts = jnp.arange(0, num_tokens, size, dtype=jnp.int32)
    return lax.map(select, firsts).reshape(-1, call.top_k)[:num_tokens]
