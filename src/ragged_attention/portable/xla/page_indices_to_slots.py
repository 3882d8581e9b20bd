"""Converts token positions to slots of the cache in plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import PageIndicesToSlots
from ragged_attention.jax_shared.pages import sequences_of_tokens
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._ragged import at

FEATURES = frozenset({"cu_q_lens", "num_seqs"})


def run(call: PageIndicesToSlots, tile: Any, launch: Any) -> jax.Array:
    positions, page_size = call.positions, min(call.page_size, 2**31 - 1)
    num_seqs, pages_per_seq = call.page_indices.shape
    if 0 in (num_seqs, pages_per_seq):
        return jnp.full(positions.shape, -1, jnp.int32)
    row = jnp.arange(call.num_tokens, dtype=jnp.int32)
    seq, to_stop = row, jnp.ones_like(row)
    if call.cu_q_lens is not None:
        seq, to_stop = sequences_of_tokens(call.cu_q_lens, call.num_seqs, call.num_tokens)
    seq, is_live = (array.reshape(-1, *(1,) * (positions.ndim - 1)) for array in (seq, to_stop > 0))
    column, offset = positions // page_size, positions % page_size
    listed = is_live & (positions >= 0) & (column < pages_per_seq)
    page = at(call.page_indices, seq, jnp.where(listed, column, 0))
    valid = listed & (page >= 0) & (page <= (2**31 - 1 - offset) // page_size)
    return jnp.where(valid, page * page_size + offset, -1)
