"""The scores of blocks of keys in plain jax operations, for tiles of tokens as in `_indexer`, and the selection."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.portable.xla._indexer import MAX_LOGITS, MAX_PRODUCTS, Seen, from_own_start
from ragged_attention.portable.xla._tile import Tile

LEAST, INFINITY = -0x7F800000, 0x7F800000  # the integers that `_ordered` has for -inf and inf
FORCED = INFINITY + 1
FEATURES = frozenset({
    "key_scale", "starts", "stops", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs",
})  # fmt: skip


def heuristic(call: Any) -> Tile:
    """Tiles limited to 1024 (token, head) rows, 64 tokens, the mean query length and MAX_LOGITS products."""
    mean = -(-call.num_tokens // max(call.kv_lens.shape[0], 1)) if call.paged else call.num_tokens
    few = MAX_LOGITS // max(call.num_heads * max(call.columns, 1 if call.paged else call.keys.shape[0]), 1)
    block_q = max(min(1024 // call.num_heads, few, mean, 64), 1)
    return Tile(block_q=block_q, block_kv=max(min(512, MAX_PRODUCTS // (block_q * call.num_heads)), 1))


def maxima(call: Any, seen: Seen, logits: jax.Array) -> jax.Array:
    """The largest logit of each block of positions [size, H, B], from a tile's logits [size, H, width]."""
    if not call.paged:
        shift = functools.partial(from_own_start, seen=seen, columns=call.columns)
        logits = jax.vmap(shift, in_axes=1, out_axes=1)(logits)
    padding = call.num_blocks * call.block_size - logits.shape[2]
    logits = jnp.pad(logits, ((0, 0), (0, 0), (0, padding)), constant_values=-jnp.inf)
    return logits.reshape(*logits.shape[:2], call.num_blocks, call.block_size).max(axis=3)


def _ordered(values: jax.Array) -> jax.Array:
    """Int32 numbers in the order of the float32 values; -0.0 equals 0.0, and NaN equals -inf."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    return jnp.where(magnitude > INFINITY, LEAST, jnp.where(bits < 0, -magnitude, magnitude))


def selected(scores: jax.Array, top_k: int, init_blocks: int, local_blocks: int) -> jax.Array:
    """The selected blocks i32 [..., top_k]: some are always selected, the others have the largest scores [..., n]."""
    columns, count = scores.shape[-1], min(top_k, scores.shape[-1])
    order, block = _ordered(scores), jnp.arange(columns, dtype=jnp.int32)
    if init_blocks or local_blocks:
        seen = scores != -jnp.inf
        last_seen = jnp.where(seen, block, -1).max(axis=-1, keepdims=True, initial=-1)
        forced = (block < init_blocks) | (block > last_seen - local_blocks)
        order = jnp.where(seen & forced, FORCED, order)
    best, index = lax.top_k(order[..., ::-1], count)  # reversed, as it prefers the first of equal numbers
    blocks = lax.sort(jnp.where(best > LEAST, columns - 1 - index, columns))
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, top_k - count)]
    blocks = jnp.pad(blocks, padding, constant_values=columns)
    return jnp.where(blocks < columns, blocks, -1)
