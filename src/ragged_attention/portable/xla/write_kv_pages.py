"""Writes this step's K and V to the pages, in plain jax operations."""

from typing import Any

import jax

from ragged_attention.calls import WriteKvPages
from ragged_attention.jax_shared.scaled_rows import new_rows
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._slots import addresses_of, page_of_last, put

FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale", "k_scale_pages",
    "v_scale_pages",
})  # fmt: skip


def written(call: Any, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """The new arrays of a call's cache, with K and V at the tokens' slots, in the old memory if that is donated."""
    if 0 in (call.num_tokens, call.num_pages):
        return call.caches
    page, offset = addresses_of(call)
    if call.scaled:  # so that a slot's codes and scales come from the same token
        page = page_of_last(page, offset, call.num_pages, call.page_size)
    return [put(array, new, page, offset) for array, new in zip(call.caches, new_rows(call, k, v), strict=True)]


def run(call: WriteKvPages, tile: Any, launch: Any) -> list[jax.Array]:
    return written(call, call.k, call.v)
