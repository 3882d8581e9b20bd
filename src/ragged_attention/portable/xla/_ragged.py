"""The index arrays, clamped to what the arrays can hold, whatever their values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ragged_attention.jax_shared.pages import live_edges


class Sequences(NamedTuple):
    """Rows and keys of each sequence, i32 [S]; a sequence from `num_seqs` on has no rows."""

    starts: jax.Array
    stops: jax.Array
    kv_lens: jax.Array


def sequences(kv_lens: Any, cu_q_lens: Any, num_seqs: Any, num_tokens: int, capacity: int) -> Sequences:
    """The sequences of a call whose rows of `page_indices` hold `capacity` positions each."""
    edges = live_edges(cu_q_lens, num_seqs, num_tokens)
    return Sequences(edges[:-1], jnp.maximum(edges[:-1], edges[1:]), jnp.clip(kv_lens, 0, capacity))


def at(array: jax.Array, *index: Any) -> jax.Array:
    """`array[index]` for indices known to be in bounds."""
    return array.at[index].get(mode="promise_in_bounds")
