"""FlashInfer's formulas as dense float64 attention of each request, and batches whose unused memory is hostile."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ragged_attention.testing.compare import agrees

LN2 = math.log(2)


def dense(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window_left: int = -1,
    cap: float | None = None,
    sm_scale: float | None = None,
    mask: Any = None,
    sinks: Any = None,
    slopes: Any = None,
) -> tuple[Any, Any]:
    """The result of one request and its base-2 log-sum-exp, which includes sinks.

    The shapes are q [T, H, D], k [N, K, D] and v [N, K, D_v]. `mask` is bool [T, N], or [H, T, N] if heads differ.
    """
    (q_len, heads, dim), (kv_len, kv_heads, _) = q.shape, k.shape
    k, v = (each.double().repeat_interleave(heads // kv_heads, 1) for each in (k, v))
    logits = torch.einsum("thd,nhd->htn", q.double(), k) * (dim**-0.5 if sm_scale is None else sm_scale)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    if slopes is not None:  # positions count from the request's first query
        logits = logits + slopes[:, None, None] * (torch.arange(kv_len) - torch.arange(q_len)[:, None])
    position, key = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if mask is not None:
        seen = mask.clone()
    elif causal:
        seen = key <= position
    if window_left >= 0:
        seen = seen & (key >= position - window_left)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(heads, q_len, 1)], 2)
    lse = torch.logsumexp(logits, 2)
    weights = torch.exp(logits - torch.where(lse == -torch.inf, 0, lse)[..., None])[..., :kv_len]
    return torch.einsum("htn,nhd->thd", weights, v), (lse / LN2).T


@dataclass
class Batch:
    """A paged batch whose unused slots hold NaN and whose unused page indices are garbage."""

    q: Any
    cache: Any  # in FlashInfer's format
    keys: list[Any]
    values: list[Any]
    qo_indptr: Any
    indptr: Any
    indices: Any
    last: Any
    lens: list[tuple[int, int]]
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    dtype: torch.dtype

    def wanted(self, **settings: Any) -> tuple[Any, Any]:
        """The exact results of all requests, concatenated."""
        parts = [
            dense(self.q[start : start + q_len], k, v, **settings)
            for start, k, v, (q_len, _) in zip(self.qo_indptr.tolist(), self.keys, self.values, self.lens, strict=False)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def batch(
    lens: list[tuple[int, int]],
    page_size: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    layout: str = "NHD",
    form: str = "pair",
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Batch:
    """A batch of requests (q_len, kv_len).

    Args:
        form: "pair" for two tensors, "one" for a single tensor with an axis of 2, or "gaps" for such a single tensor
            that is a slice of a larger tensor.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    counts = [-(-kv_len // page_size) for _, kv_len in lens]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=generator).int()
    pages = torch.full((num_pages, 2, page_size, kv_heads, dim), torch.nan)
    keys, values, used = [], [], 0
    store = dtype if cache_dtype is None else cache_dtype
    for (_, kv_len), count in zip(lens, counts, strict=True):
        k, v = (normal(kv_len, kv_heads, dim).to(store).float() for _ in range(2))
        for position in range(kv_len):
            page = order[used + position // page_size]
            pages[page, 0, position % page_size], pages[page, 1, position % page_size] = k[position], v[position]
        keys.append(k)
        values.append(v)
        used += count
    pages = pages.to(store)
    if layout == "HND":
        pages = pages.transpose(2, 3).contiguous()
    if form == "gaps":
        wide = torch.full((num_pages, 3, *pages.shape[2:4], dim + 8), torch.nan).to(store)
        wide[:, 1:, :, :, :dim] = pages
        pages = wide[:, 1:, :, :, :dim]
    cache = (pages[:, 0].contiguous(), pages[:, 1].contiguous()) if form == "pair" else pages
    edges = torch.tensor([0, *(q_len for q_len, _ in lens)]).cumsum(0).int()
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    indices = torch.cat([order[:used], torch.tensor([2**31 - 1, -7], dtype=torch.int32)])
    last = torch.tensor(
        [(kv_len - 1) % page_size + 1 for _, kv_len in lens], dtype=torch.int32
    )  # an empty request has page_size here, not 0
    q = normal(int(edges[-1]), heads, dim).to(dtype)
    return Batch(q, cache, keys, values, edges, indptr, indices, last, lens, heads, kv_heads, dim, page_size, dtype)


def same(got: Any, want: Any, dtype: torch.dtype = torch.float32) -> None:
    """Assert that a result agrees with the exact result within the bounds for its dtype."""
    assert agrees(got.double().numpy(), want.double().numpy(), str(dtype).rpartition(".")[2])
