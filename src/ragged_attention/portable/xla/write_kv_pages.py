"""Writes this step's K and V to the pages, in plain jax operations."""

from typing import Any

import jax

from ragged_attention.calls import WriteKvPages
from ragged_attention.jax_shared.pages import new_rows
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._slots import addresses_of, put

FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale"})


def written(call: Any, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """The new pages of a call, with K and V at its slots, in the old pages' memory if those are donated."""
    arrays = [call.kv_pages] if call.combined else list(call.kv_pages)
    if 0 in (call.num_tokens, call.num_pages):
        return arrays
    page, offset = addresses_of(call)
    return [put(pages, new, page, offset) for pages, new in zip(arrays, new_rows(call, k, v), strict=True)]


def run(call: WriteKvPages, tile: Any, launch: Any) -> list[jax.Array]:
    return written(call, call.k, call.v)
