"""Ragged attention over a paged latent cache in plain jax operations.

It is ragged paged attention whose keys are the latent rows. Values are the keys' first columns, so a block of rows is
gathered once for keys and values.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import MlaDecode, RaggedMlaAttention, RaggedPagedAttention
from ragged_attention.jax_shared.pages import per_head
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._latents import Latents
from ragged_attention.portable.xla._ragged import at
from ragged_attention.portable.xla._tile import Tile as Tile
from ragged_attention.portable.xla.ragged_paged_attention import attention

FEATURES = frozenset({
    "num_seqs", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "kv_scale", "rope_scale",
    "return_lse", "return_max_logits", "key_ranges", "cache_format", "cache_layout", "out_dtype",
})  # fmt: skip


def heuristic(call: RaggedMlaAttention) -> Tile:
    """Tiles of about the mean query length, up to 64 tokens, and blocks that fit a core's cache.

    Tiles of more than 8 tokens have at most 256 rows.
    """
    mean = -(-call.num_tokens // max(call.max_num_seqs, 1))
    block_q = min(64, max(8, 256 // call.num_q_heads), 1 << max(mean - 1, 0).bit_length())
    return Tile(block_q=block_q, block_kv=512 if block_q < 8 else 256)


def run(call: RaggedMlaAttention, tile: Tile, launch: Any) -> Any:
    names = "cu_q_lens", "num_seqs", "key_ranges", "return_max_logits"
    arguments = {name: getattr(call, name) for name in names}
    # With two scales, keys are multiplied by them as they are read.
    k_scale = None if call.scales_rope else call.kv_scale
    out, lse, max_logits = attend(call, tile, **arguments, k_scale=k_scale, v_scale=call.kv_scale)
    return call.requested(out=out, lse=lse, max_logits=max_logits)


def attend(
    call: MlaDecode | RaggedMlaAttention, tile: Tile, num_q_tokens: int | None = None, **others: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Out [T, H, d_v], lse [T, H] and max_logits of a call over latents, computed as ragged paged attention.

    `others` has the ragged call's arguments whose names or shapes differ. `num_q_tokens` is the number of queries per
    sequence, if known.
    """
    names = (
        "q", "kv_lens", "page_indices", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "out_dtype",
    )  # fmt: skip
    rows = call.kv_cache.shape[:3]
    values: dict[str, Any] = dict.fromkeys(RaggedPagedAttention.argument_names())
    values |= {name: getattr(call, name) for name in names}
    values["kv_pages"] = [jax.ShapeDtypeStruct((*rows, width), call.q.dtype) for width in (call.d_qk, call.d_v)]
    ragged = RaggedPagedAttention.unchecked(**values | others, device=call.device)
    return attention(ragged, tile, LatentBlocks(call), num_q_tokens)


class LatentBlocks:
    """`Blocks` that gathers latent rows as K, and their first columns as V."""

    def __init__(self, call: MlaDecode | RaggedMlaAttention) -> None:
        self.latents = Latents(call.kv_cache, call.kv_format)
        self.page_indices, self.d_v = call.page_indices, call.d_v
        self.heads = jnp.arange(call.num_kv_heads, dtype=jnp.int32)[:, None]
        self.key_scales = None
        if isinstance(call, RaggedMlaAttention) and call.scales_rope:
            kv_scale, rope_scale = (per_head(scale, 1) for scale in (call.kv_scale, call.rope_scale))
            self.key_scales = jnp.where(jnp.arange(call.d_qk) < call.d_v, kv_scale, rope_scale)

    def read(self, seq: jax.Array, key: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        page_size = self.latents.page_size
        column = jnp.minimum(key // page_size, self.page_indices.shape[1] - 1)
        rows, seen = self.latents.read(at(self.page_indices, seq, column), key % page_size, self.heads, wanted)
        keys = rows if self.key_scales is None else rows.astype(jnp.float32) * self.key_scales
        return keys, rows[..., : self.d_v].astype(jnp.float32), seen[0]
