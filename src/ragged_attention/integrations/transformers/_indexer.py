"""Indexers of sparse attention that select the same keys as those of transformers, with less memory.

transformers stores the products of all queries, heads and keys before it sums over the heads; here only sums exist.
"""

import sys
from typing import Any

import torch

from ragged_attention.integrations.transformers._calls import note
from ragged_attention.torch import indexer_logits, top_k_indices

# The rotary function of each indexer's module, the only difference between the families.
ROTATE = {"DeepseekV32Indexer": "apply_rotary_pos_emb", "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave"}
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

        transformers up to 5.23 passes the cache as `past_key_values`.
        """
        del position_ids
        cache = past_key_values if cache is None else cache
        q, keys, weights = operands(self, hidden_states, q_resid, position_embeddings, cache)
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
    rotary = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    kind = next(kind for kind in type(indexer).__mro__ if kind.__name__ in ROTATE)
    rotate = getattr(sys.modules[kind.__module__], ROTATE[kind.__name__])
    rotated = rotate(q[..., :rotary], keys[..., :rotary], *position_embeddings, unsqueeze_dim=2)
    q, keys = (torch.cat((part, x[..., rotary:]), -1) for part, x in zip(rotated, (q, keys), strict=True))
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
