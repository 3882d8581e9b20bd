"""Selected blocks of keys for grouped-query attention: the indexers of MiniMax M3 and of Qwen4 (QSA).

An indexer of transformers selects from a whole row of the batch at once, in blocks that begin at multiples of the block
size in that row, and stores the scores of all keys. Here, an indexer only computes its queries and keys. The attention
layer, which knows the sequences in the row and their padding, packs the indexer's queries and keys like its own, and
selects blocks within each sequence. So the selection for a prompt does not depend on its place in the row.
"""

import sys
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers._calls import note
from ragged_attention.integrations.transformers._masks import Mask, Pattern, pattern_of
from ragged_attention.integrations.transformers._sequences import Laid
from ragged_attention.torch import indexer_topk, select_blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # index heads are padded to a multiple of this many columns
MAX_BLOCK = 256  # the limit of `varlen_attention` and `ragged_paged_attention`


class Selection(ABC):
    """The queries and keys of a layer's indexer, in place of the selection or the mask that transformers expects."""

    indexer: Any
    heads: int  # number of heads with separate selections

    @abstractmethod
    def lists(self, laid: Laid, kv_heads: int) -> dict[str, Any]:
        """The arguments `selected` and `block_size` of our operations, for queries and keys in the layout `laid`."""

    def why_not(self, pattern: Pattern, kv_heads: int, q_len: int) -> str | None:
        """Why no lists can be made for an attention call, or None if they can."""
        if not takes(pattern, q_len):
            return "its mask is not causal, or hides more than padding and other sequences"
        if kv_heads % self.heads:
            return f"it has {self.heads} index heads and {kv_heads} KV heads"
        return None


def takes(pattern: Pattern, q_len: int) -> bool:
    """Whether each query sees all keys up to its own in its sequence, because indexers select from these keys."""
    others = pattern.window, pattern.ranges, pattern.blind
    return (pattern.causal or q_len == 1) and all(each is None for each in others)


def unsupported(module: Any, reason: str) -> Unsupported:
    kind = type(module).__name__
    return Unsupported(f"expected selected blocks of keys in calls that our operations take, got {kind}: {reason}")


class Seen(NamedTuple):
    """The sequence of each packed query, and the number of keys that it sees in this sequence, int32 [T] each."""

    sequence: torch.Tensor
    keys: torch.Tensor


def _seen(laid: Laid, tokens: int) -> Seen:
    q_edges, kv_edges = laid.edges
    token = torch.arange(tokens, dtype=torch.int32, device=q_edges.device)
    sequence = torch.bucketize(token, q_edges[1:], right=True).clamp(max=q_edges.shape[0] - 2)
    later = q_edges[sequence + 1] - 1 - token
    return Seen(sequence, kv_edges.diff()[sequence] - later)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % ALIGNMENT))


def _rotary(indexer: Any) -> Any:
    """The rotary function of an indexer's module."""
    return vars(sys.modules[type(indexer).__module__])["apply_rotary_pos_emb"]


# ---- MiniMax M3


class Blocks(Selection):
    """The selection of the blocks that have the largest products of an index query and a key, and of local blocks.

    queries, keys: [B, H_i, L_q, D] and [B, 1, L_k, D].
    """

    def __init__(self, indexer: Any, queries: torch.Tensor, keys: torch.Tensor) -> None:
        self.indexer, self.queries, self.keys, self.heads = indexer, queries, keys, queries.shape[1]

    def lists(self, laid: Laid, kv_heads: int) -> dict[str, Any]:
        note(self.indexer, "select_blocks")
        q, keys = _aligned(laid.queries(self.queries)), _aligned(laid.keys(self.keys))
        seen = _seen(laid, q.shape[0])
        starts = laid.edges[1][seen.sequence]
        selected = select_blocks(
            q, keys, self.indexer.topk_blocks, block_size=self.indexer.block_size, starts=starts,
            stops=starts + seen.keys, max_keys=laid.longest, local_blocks=self.indexer.local_blocks,
        )  # fmt: skip
        if self.heads not in (1, kv_heads):
            selected = selected.repeat_interleave(kv_heads // self.heads, 1)
        return {"selected": selected, "block_size": self.indexer.block_size}


def of_blocks(original: Any, ours: str, kind: type) -> Any:
    """The replacement for `forward` of MiniMax M3's indexer, of class `kind`."""

    def forward(self: Any, hidden_states: Any, position_embeddings: Any, cache: Any, position_ids: Any) -> Any:
        if type(self) is kind and self.config._attn_implementation == ours:
            return _blocks(self, hidden_states, position_embeddings, cache)
        return original(self, hidden_states, position_embeddings, cache, position_ids)

    return forward


@torch.no_grad()
def _blocks(indexer: Any, hidden_states: torch.Tensor, position_embeddings: Any, cache: Any) -> Blocks:
    width = indexer.head_dim
    q, keys = (
        norm(projection(hidden_states).unflatten(-1, (-1, width))).transpose(1, 2)
        for norm, projection in ((indexer.q_norm, indexer.q_proj), (indexer.k_norm, indexer.k_proj))
    )
    q, keys = _rotary(indexer)(q, keys, *(part[..., :width] for part in position_embeddings))
    return Blocks(indexer, q, keys if cache is None else cache.layers[indexer.layer_idx].update_index(keys))


# ---- Qwen4


class Groups(Selection):
    """The selection of groups of neighbouring keys by their means, and of a query's last, incomplete group.

    The model treats an instance as a mask of selected keys. So instances can be inverted, and can be the mask argument
    of `masked_fill` of one of our masks.

    queries, keys: [B, H_i, L_q, D], and [B, 1, L_k, D] before any norm.
    positions: cosines and sines [B, 1, L_k, R] of the keys.
    """

    heads = 1  # all index heads together select one list

    def __init__(
        self, indexer: Any, queries: torch.Tensor, keys: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        self.indexer, self.queries, self.keys, self.positions = indexer, queries, keys, positions
        self.is_inverted = False

    def __invert__(self) -> "Groups":
        inverse = Groups(self.indexer, self.queries, self.keys, self.positions)
        inverse.is_inverted = not self.is_inverted
        return inverse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types, kwargs
        if func is torch.Tensor.masked_fill and isinstance(args[0], Mask) and args[1].is_inverted:
            mask, inverse, _ = args
            pattern = pattern_of(mask)
            assert pattern is not None  # without a pattern, the original indexer runs
            return Mask(pattern._replace(selection=~inverse), tuple(mask.shape), mask.dtype, mask.device)
        raise Unsupported(f"expected selected groups of keys to hide keys of a mask alone, got {func.__name__} of them")

    def lists(self, laid: Laid, kv_heads: int) -> dict[str, Any]:
        del kv_heads  # all KV heads share the list
        note(self.indexer, "indexer_topk")
        ratio, q = self.indexer.compress_ratio, laid.queries(self.queries)
        seen, most = _seen(laid, q.shape[0]), max(1, laid.longest // ratio)
        keys, first = self._means(laid, ratio)
        starts, complete = first[seen.sequence], seen.keys // ratio
        groups = indexer_topk(
            _aligned(q), _aligned(keys), torch.ones(q.shape[:2], device=q.device), min(self.indexer.block_topk, most),
            starts=starts, stops=starts + complete, relative=True, max_keys=most,
        )  # fmt: skip
        # Add the last, incomplete group. If it has no visible keys, the mask hides all of it.
        groups = torch.cat((groups, complete[:, None]), 1)[:, None]
        if ratio & (ratio - 1) == 0 and ratio <= MAX_BLOCK:
            return {"selected": groups, "block_size": ratio}
        within = torch.arange(ratio, dtype=torch.int32, device=q.device)
        keys = torch.where(groups[..., None] < 0, -1, groups[..., None] * ratio + within)
        return {"selected": keys.flatten(2), "block_size": 1}

    def _means(self, laid: Laid, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys [N, D] of all sequences' complete groups, and the index of each sequence's first group."""
        edges, keys = laid.edges[1], laid.keys(self.keys)[:, 0]
        counts = edges.diff() // ratio
        ends = counts.cumsum(0, dtype=torch.int32)
        first = ends - counts
        group = torch.arange(max(1, keys.shape[0] // ratio), dtype=torch.int32, device=keys.device)
        sequence = torch.bucketize(group, ends, right=True).clamp(max=counts.shape[0] - 1)
        start = (edges[sequence] + (group - first[sequence]) * ratio).clamp(max=keys.shape[0] - 1)
        within = torch.arange(ratio, dtype=torch.int32, device=keys.device)
        members = keys[(start[:, None] + within).clamp(max=keys.shape[0] - 1)]
        means = self.indexer.k_layernorm(members.float().mean(1).to(keys.dtype))
        cos, sin = (laid.keys(part)[start, 0] for part in self.positions)
        return _rotary(self.indexer)(means[:, None], cos=cos, sin=sin)[:, 0], first


def of_groups(original: Any, ours: str, kind: type) -> Any:
    """The replacement for `forward` of Qwen4's indexer, of class `kind`. Without a mask of ours, the original runs."""
    del ours

    def forward(self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any, cache: Any) -> Any:
        pattern = pattern_of(attention_mask) if isinstance(attention_mask, Mask) else None
        is_taken = type(self) is kind and pattern is not None and takes(pattern, hidden_states.shape[1])
        if is_taken and hidden_states.dtype in DTYPES and not torch.compiler.is_compiling():
            return _groups(self, hidden_states, position_embeddings, cache)
        return original(self, hidden_states, position_embeddings, attention_mask, cache)

    return forward


@torch.no_grad()
def _groups(indexer: Any, hidden_states: torch.Tensor, position_embeddings: Any, cache: Any) -> Groups:
    """The indexer's queries and keys. `position_embeddings` are those of all keys."""
    (rows, q_len), heads = hidden_states.shape[:2], (indexer.index_n_heads, indexer.index_kv_heads)
    q, keys = indexer.index_qk_proj(hidden_states).unflatten(-1, (-1, indexer.index_head_dim)).split(heads, 2)
    cos, sin = (part[:, -q_len:] for part in position_embeddings)
    q = _rotary(indexer)(indexer.q_layernorm(q), cos=cos, sin=sin, unsqueeze_dim=2).transpose(1, 2)
    keys = keys.squeeze(2)
    keys = keys if cache is None else cache.update_indexer(keys, indexer.layer_idx)
    unused = keys.shape[1] - position_embeddings[0].shape[1]  # unused keys of a cache of fixed size
    cos, sin = (
        torch.nn.functional.pad(part, (0, 0, 0, unused)).expand(rows, -1, -1)[:, None] for part in position_embeddings
    )
    return Groups(indexer, q, keys[:, None], (cos, sin))
