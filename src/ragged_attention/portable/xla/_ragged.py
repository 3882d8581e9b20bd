"""The index arrays, held within what the arrays can hold, whatever values they carry."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Sequences(NamedTuple):
    """Rows and keys of each sequence, i32 [S]; a sequence from `num_seqs` on has no rows."""

    starts: jax.Array
    stops: jax.Array
    kv_lens: jax.Array


def sequences(kv_lens: Any, cu_q_lens: Any, num_seqs: Any, num_tokens: int, capacity: int) -> Sequences:
    """The sequences of a call whose rows of `page_indices` hold `capacity` positions each."""
    edges = live_edges(cu_q_lens, num_seqs, num_tokens)
    return Sequences(edges[:-1], jnp.maximum(edges[:-1], edges[1:]), jnp.clip(kv_lens, 0, capacity))


def live_edges(cu_q_lens: Any, num_seqs: Any, num_tokens: int) -> jax.Array:
    """`cu_q_lens` within [0, num_tokens], where entries past `num_seqs` repeat the last live one.

    So whatever those entries hold, sequences past `num_seqs` are empty, and the edges ascend as far as live ones do.
    """
    edges = jnp.clip(cu_q_lens, 0, num_tokens)
    if num_seqs is None:
        return edges
    last = jnp.clip(jnp.reshape(jnp.asarray(num_seqs, jnp.int32), ()), 0, len(edges) - 1)
    return at(edges, jnp.minimum(jnp.arange(len(edges), dtype=jnp.int32), last))


def at(array: jax.Array, *index: Any) -> jax.Array:
    """`array[index]` for indices known to be in bounds."""
    return array.at[index].get(mode="promise_in_bounds")
