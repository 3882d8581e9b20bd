"""Attention of torch and of transformers, on a CPU."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from benchmarks.judged import FILLED, Recipe


def heads_first(array: torch.Tensor) -> torch.Tensor:
    """An array [T, H, D] as [1, H, T, D]."""
    return array.transpose(0, 1)[None]


def one_by_one(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
) -> torch.Tensor:
    """The results of `attend`, a function of heads-first queries, keys and values, for one sequence after another."""
    parts = []
    q_lens, kv_lens = cu_q_lens.diff().tolist(), cu_kv_lens.diff().tolist()
    for rows in zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), strict=True):
        parts.append(attend(*map(heads_first, rows))[0].transpose(0, 1))
    return torch.cat(parts)


def seen(num_queries: int, num_keys: int, causal: bool, sliding_window: int | None) -> torch.Tensor:
    """A mask of the keys that each query of a sequence sees, [num_queries, num_keys]."""
    query = torch.arange(num_queries)[:, None] + (num_keys - num_queries)
    key = torch.arange(num_keys)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool)
    mask = mask & (key <= query) if causal else mask
    return mask if sliding_window is None else mask & (key > query - sliding_window)


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    sm_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """`scaled_dot_product_attention`, one sequence after another, with masks."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = seen(query.shape[2], key.shape[2], causal, sliding_window)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=sm_scale, enable_gqa=True
        )

    return one_by_one(attend, q, k, v, cu_q_lens, cu_kv_lens)


def sdpa_causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    sm_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with its flag `is_causal`. The flag aligns the first query with the first key."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if causal and query.shape[2] != key.shape[2]:
            raise NotImplementedError("is_causal is aligned at the first key")
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=sm_scale, enable_gqa=True
        )

    return one_by_one(attend, q, k, v, cu_q_lens, cu_kv_lens)


def sdpa_nested(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """`scaled_dot_product_attention` over jagged nested tensors, without a loop."""
    if q.shape[1] != k.shape[1]:
        raise NotImplementedError("expected as many query heads as KV heads")
    query, key, value = (
        torch.nested.nested_tensor_from_jagged(array, edges.long()).transpose(1, 2)
        for array, edges in ((q, cu_q_lens), (k, cu_kv_lens), (v, cu_kv_lens))
    )
    return functional.scaled_dot_product_attention(query, key, value, scale=sm_scale).transpose(1, 2).values()


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    sm_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """FlexAttention over packed rows. A mask separates the sequences, and a score function applies the cap."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    of_query = torch.repeat_interleave(torch.arange(len(cu_q_lens) - 1), cu_q_lens.diff().long())
    of_key = torch.repeat_interleave(torch.arange(len(cu_kv_lens) - 1), cu_kv_lens.diff().long())
    # a query's row + shift = the row of the key at the query's position
    shift = (cu_kv_lens[1:] - cu_q_lens[1:]).long()

    def mask(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        del batch, head
        distance = key - (query + shift[of_query[query]])
        visible = of_query[query] == of_key[key]
        visible = visible & (distance <= 0) if causal else visible
        return visible if sliding_window is None else visible & (distance > -sliding_window)

    def capped(score: torch.Tensor, *_: Any) -> torch.Tensor:
        return soft_cap * torch.tanh(score / soft_cap)  # type: ignore[operator]

    blocks = create_block_mask(mask, None, None, len(q), len(k), device="cpu")
    query, key, value = map(heads_first, (q, k, v))
    out, aux = flex_attention(
        query, key, value, score_mod=None if soft_cap is None else capped, block_mask=blocks, scale=sm_scale,
        enable_gqa=True, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    assert aux.lse is not None  # it was requested with AuxRequest
    out, lse = out[0].transpose(0, 1), aux.lse[0].transpose(0, 1)
    return (out, lse) if return_lse else out


def transformers_eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    sm_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """`eager_attention_forward` of transformers' Llama, per sequence. The mask adds the dtype's lowest number."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    module = torch.nn.Module()
    module.num_key_value_groups = q.shape[1] // k.shape[1]  # type: ignore[assignment]
    module.eval()
    scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        visible = seen(query.shape[2], key.shape[2], causal, sliding_window)
        mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)
        return eager_attention_forward(module, query, key, value, mask[None, None], scale)[0].transpose(1, 2)

    return one_by_one(attend, q, k, v, cu_q_lens, cu_kv_lens)


PACKED: Mapping[str, Any] = {"framework": "torch", "declines": FILLED, "gradients": True}
RECIPES: Mapping[str, Recipe] = {
    "sdpa": Recipe("torch", sdpa, "varlen_attention", PACKED),
    "sdpa_causal": Recipe("torch", sdpa_causal, "varlen_attention", PACKED),
    "sdpa_nested": Recipe("torch", sdpa_nested, "varlen_attention", PACKED),
    "flex": Recipe("torch", flex, "varlen_attention", PACKED),
    "transformers_eager": Recipe("transformers", transformers_eager, "varlen_attention", PACKED),
}
