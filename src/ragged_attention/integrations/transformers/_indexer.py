"""Indexers of sparse attention that select the same keys as those of transformers, with less memory.

transformers stores the products of all queries, heads and keys, and then sums over the heads. Here, only the sums are
stored.
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
    "MistralLarge4TextIndexer": "apply_rotary_pos_emb_interleave",
}
ROTARY_LAST = ("HYV4Indexer", "HYV4VLIndexer")  # these indexers rotate the last columns, not the first
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
        """The keys [B, L_q, N] to which each query attends, in ascending order and padded with -1.

        `attention_mask` has three dimensions. In continuous batching it is ignored, and the result has slots of the
        cache. transformers up to 5.23 passes the cache as `past_key_values`.
        """
        del position_ids
        q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        cache = past_key_values if cache is None else cache
        return _selected(self, hidden_states, q, position_embeddings, attention_mask, cache)


class IndexedByHidden:
    """The mixin for indexers whose queries come from the hidden states alone (mistral_large4)."""

    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any = None,
        cache: Any = None,
    ) -> torch.Tensor:
        q = self.wq_b(self.q_input_norm(hidden_states)).unflatten(-1, (self.n_heads, self.head_dim))
        q = self.softmax_scaling(q, position_ids, head_dim_first=False)
        cache = past_key_values if cache is None else cache
        return _selected(self, hidden_states, q, position_embeddings, attention_mask, cache)


def is_indexed(indexer: Any) -> bool:
    return isinstance(indexer, Indexed | IndexedByHidden)


def _selected(
    indexer: Any, hidden_states: torch.Tensor, q: torch.Tensor, positions: Any, attention_mask: torch.Tensor, cache: Any
) -> torch.Tensor:
    q, keys, weights = operands(indexer, hidden_states, q, positions, cache)
    if isinstance(cache, PagedLatentCache):
        return select(indexer, q, weights, cache.held(indexer.layer_idx))
    note(indexer, "indexer_logits")
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
    return top_k_indices(logits.flatten(0, 1), min(indexer.index_topk, length)).view(rows, q_len, -1)


def operands(
    indexer: Any,
    hidden_states: torch.Tensor,
    q: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    cache: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of `indexer_logits`: q [B, L_q, H, D], keys [B, L_k, D] of the whole cache, weights [B, L_q, H].

    The argument `q` is not rotated yet.
    """
    norm = indexer.k_norm
    keys = norm(indexer.wk(hidden_states).to(norm.weight.dtype)).to(hidden_states.dtype).unsqueeze(2)
    if getattr(indexer, "use_rope", True):
        q, keys = _rotated(indexer, q, keys, position_embeddings)
    keys = keys.squeeze(2)
    if cache is not None:
        keys = cache.update_indexer(keys, indexer.layer_idx)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    dtype = q.dtype if q.dtype in DTYPES and q.dtype == keys.dtype else torch.float32
    return q.to(dtype), keys.to(dtype), weights


def _rotated(indexer: Any, q: torch.Tensor, keys: torch.Tensor, positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [B, L, H, D], whose first or last columns are rotated."""
    kind = next(kind for kind in type(indexer).__mro__ if kind.__name__ in ROTATE)
    rotate = getattr(sys.modules[kind.__module__], ROTATE[kind.__name__])
    width, last = indexer.qk_rope_head_dim, kind.__name__ in ROTARY_LAST
    sizes = (indexer.head_dim - width, width) if last else (width, indexer.head_dim - width)
    parts = [list(x.split(sizes, -1)) for x in (q, keys)]
    rotated = rotate(*(pair[last] for pair in parts), *positions, unsqueeze_dim=2)
    for pair, part in zip(parts, rotated, strict=True):
        pair[last] = part
    return torch.cat(parts[0], -1), torch.cat(parts[1], -1)


def index(model: Any) -> None:
    """Replace the `forward` of the model's known indexers, if `indexer_logits` takes their head size."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in ROTATE and module.head_dim % 16 == 0 and module.head_dim <= 256:
            mixin = IndexedByHidden if hasattr(module, "q_input_norm") else Indexed
            module.__class__ = type(f"Indexed{kind.__name__}", (mixin, kind), {})
