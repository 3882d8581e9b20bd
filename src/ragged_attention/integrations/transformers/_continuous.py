"""Continuous batching: attention over the pages of transformers' own cache."""

from typing import Any

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers._calls import note
from ragged_attention.torch import ragged_paged_attention, varlen_attention


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: Any,
    known: dict[str, Any],
    places: dict[str, Any],
) -> torch.Tensor:
    """One step of a layer: new keys and values are written, then each sequence attends to its own.

    Args:
        query, key, value: [1, H or K, T, D], the new tokens of all sequences, one after another.
        cache: transformers' paged cache.
        known: scale, soft cap, sinks and window, by the names of our operations.
        places: `cu_seq_lens_q`, `max_length_q`, and by kind of layer or cache `cu_seq_lens_k`, `max_length_k`,
            `read_index` and `write_index`, as continuous batching makes them.

    Returns:
        [1, T, H, D_v].
    """
    allocator = cache.layer_to_allocator[module.layer_idx]
    kind = allocator.layer_type
    if kind == "sliding_attention" and known["sliding_window"] is None:
        known = {**known, "sliding_window": allocator.sliding_window}
    edges, cu_kv_lens = places["cu_seq_lens_q"].int(), places["cu_seq_lens_k"][kind].int()
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if kind == "full_attention":
        slots = places["read_index"][allocator.index]
        _write(allocator, module.layer_idx, k, v, places["write_index"][allocator.index])
        if slots.numel():
            note(module, "ragged_paged_attention")
            pages = allocator._kv_page_views[module.layer_idx]
            table = page_table(slots, cu_kv_lens, int(places["max_length_k"][kind]), allocator.tokens_per_page)
            longest = places.get("max_length_q")
            return ragged_paged_attention(q, pages, cu_kv_lens.diff(), table, edges, max_q_len=longest, **known)[None]
    elif kind == "sliding_attention":
        gather = getattr(type(cache).update, "asked", type(cache).update)  # `_host` puts a function before it
        keys, values = gather(cache, key, value, module.layer_idx, dict(places))
        k, v = keys[0].transpose(0, 1), values[0].transpose(0, 1)
    else:
        raise Unsupported(f"expected full or sliding attention in continuous batching, got {kind}")
    note(module, "varlen_attention")
    return varlen_attention(q, k, v, edges, cu_kv_lens, causal=True, **known)[None]


def _write(allocator: Any, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    for tokens, new in zip(allocator._kv_token_views[layer], (k, v), strict=True):
        tokens.index_copy_(0, slots, new)


def page_table(slots: torch.Tensor, cu_kv_lens: torch.Tensor, longest: int, page_size: int) -> torch.Tensor:
    """The pages [S, M] of sequences whose keys' slots are listed one sequence after another."""
    starts = torch.arange(0, longest, page_size, device=slots.device)
    first = cu_kv_lens[:-1, None] + starts
    pages = slots[first.clamp(max=slots.numel() - 1)] // page_size
    return torch.where(starts < cu_kv_lens.diff()[:, None], pages, 0).int()
