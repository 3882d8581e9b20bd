"""This step's K and V into the pages, on plain jax operations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import WriteKvPages
from ragged_attention.portable._no_tuning import Tile as Tile
from ragged_attention.portable._no_tuning import heuristic as heuristic
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._pages import per_head
from ragged_attention.portable.xla._quantize import stored_bits
from ragged_attention.portable.xla._ragged import at, sequences
from ragged_attention.portable.xla._slots import places, put

FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale"})


def run(call: WriteKvPages, tile: Tile, launch: Any) -> list[jax.Array]:
    """The new pages, in the old ones' memory where those are donated."""
    del tile, launch
    arrays = [call.kv_pages] if call.combined else list(call.kv_pages)
    if 0 in (call.num_tokens, call.num_pages):
        return arrays
    dtype = arrays[0].dtype
    scales = [None if scale is None else per_head(scale, call.num_kv_heads) for scale in (call.k_scale, call.v_scale)]
    k, v = (stored_bits(values, scale, dtype) for values, scale in zip((call.k, call.v), scales, strict=True))
    rows = [jnp.stack([k, v], axis=2).reshape(len(k), -1, k.shape[-1])] if call.combined else [k, v]
    page, offset = _places(call)
    return [put(pages, new, page, offset) for pages, new in zip(arrays, rows, strict=True)]


def _places(call: WriteKvPages) -> tuple[jax.Array, jax.Array]:
    """Page and offset of each token, i32 [T]; the page is `num_pages` for a token that belongs nowhere."""
    if call.slot_mapping is not None:
        return places(call.slot_mapping, call.num_pages, call.page_size)
    max_num_seqs, pages_per_seq = call.page_indices.shape
    if 0 in (max_num_seqs, pages_per_seq):
        return jnp.full(call.num_tokens, call.num_pages, jnp.int32), jnp.zeros(call.num_tokens, jnp.int32)
    seqs = sequences(call.kv_lens, call.cu_q_lens, call.num_seqs, call.num_tokens, call.capacity)
    token = jnp.arange(call.num_tokens, dtype=jnp.int32)
    seq = jnp.searchsorted(seqs.stops, token, side="right").astype(jnp.int32)
    owned = seq < max_num_seqs
    seq = jnp.minimum(seq, max_num_seqs - 1)
    position = at(seqs.kv_lens, seq) - (at(seqs.stops, seq) - token)
    owned &= (at(seqs.starts, seq) <= token) & (token < at(seqs.stops, seq)) & (position >= 0)
    position = jnp.clip(position, 0, call.capacity - 1)
    page = at(call.page_indices, seq, position // call.page_size)
    valid = owned & (page >= 0) & (page < call.num_pages)
    return jnp.where(valid, page, call.num_pages), position % call.page_size
