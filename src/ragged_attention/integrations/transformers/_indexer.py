"""Indexers of sparse attention that select the same keys as those of transformers, with less memory.

transformers stores the products of all queries, heads and keys before it sums over the heads; here only sums exist.
"""

import sys
from typing import Any

import torch

from ragged_attention.integrations.transformers._calls import note
from ragged_attention.integrations.transformers._paged_latents import PagedLatentCache, select
from ragged_attention.torch import indexer_logits, top_k_indices

# The rotary function of each indexer's module, which differs between the families.
ROTATE = {
    "AXK2Indexer": "apply_rotary_pos_emb",
    "DeepseekV32Indexer": "apply_rotary_pos_emb",
    "Dots3NoteTextIndexer": "apply_rotary_pos_emb_interleave",
    "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave",
    "HYV4Indexer": "apply_rotary_pos_emb",
    "HYV4VLIndexer": "apply_rotary_pos_emb",
}
ROTARY_LAST = ("HYV4Indexer", "HYV4VLIndexer")  # whose last columns are rotated, not the first
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Indexed:
    """The mixin that gives an indexer's class our forward."""

    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
    ) -> torch.Tensor:
        """The keys [B, L_q, N] that each query attends to, in ascending order, then -1; `attention_mask` is 3D.

        In continuous batching they are slots of the cache, and the mask is ignored. transformers up to 5.23 passes the
        cache as `past_key_values`.
        """
        del position_ids
        cache = past_key_values if cache is None else cache
        q, keys, weights = operands(self, hidden_states, q_resid, position_embeddings, cache)
        if isinstance(cache, PagedLatentCache):
            return select(self, q, weights, cache.held(self.layer_idx))
        note(self, "indexer_logits")
        (rows, q_len), length = q.shape[:2], keys.shape[1]
        start = torch.arange(rows, dtype=torch.int32, device=q.device).repeat_interleave(q_len) * length
        logits = indexer_logits(
            q.flatten(0, 1), keys.flatten(0, 1), weights.flatten(0, 1), starts=start, stops=start + length,
            relative=True, max_keys=length,
        ).view(rows, q_len, length)  # fmt: skip
        if attention_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attention_mask, -torch.inf)
        else:
            logits = logits + attention_mask
        return top_k_indices(logits.flatten(0, 1), min(self.index_topk, length)).view(rows, q_len, -1)


def operands(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    cache: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of `indexer_logits`: q [B, L_q, H, D], keys [B, L_k, D] of the whole cache, weights [B, L_q, H]."""
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    norm = indexer.k_norm
    keys = norm(indexer.wk(hidden_states).to(norm.weight.dtype)).to(hidden_states.dtype).unsqueeze(2)
    kind = next(kind for kind in type(indexer).__mro__ if kind.__name__ in ROTATE)
    rotate = getattr(sys.modules[kind.__module__], ROTATE[kind.__name__])
    width, last = indexer.qk_rope_head_dim, kind.__name__ in ROTARY_LAST
    sizes = (indexer.head_dim - width, width) if last else (width, indexer.head_dim - width)
    parts = [list(x.split(sizes, -1)) for x in (q, keys)]
    rotated = rotate(*(each[last] for each in parts), *position_embeddings, unsqueeze_dim=2)
    for each, part in zip(parts, rotated, strict=True):
        each[last] = part
    q, keys = (torch.cat(each, -1) for each in parts)
    keys = keys.squeeze(2)
    if cache is not None:
        keys = cache.update_indexer(keys, indexer.layer_idx)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    dtype = q.dtype if q.dtype in DTYPES and q.dtype == keys.dtype else torch.float32
    return q.to(dtype), keys.to(dtype), weights


def index(model: Any) -> None:
    """Give our forward to the model's indexers whose head size it takes."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in ROTATE and module.head_dim % 16 == 0 and module.head_dim <= 256:
            module.__class__ = type(f"Indexed{kind.__name__}", (Indexed, kind), {})
