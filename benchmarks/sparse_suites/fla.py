"""Runs flash-linear-attention's tests of native sparse attention through `varlen_attention` and `top_k_blocks`.

Native sparse attention (NSA) has three branches. Compressed attention is attention to the mean key and value of each
block. A query sees a block if its position is not before the block's last key, so its visible blocks form one range of
keys. Selected attention is attention with block lists. The third branch is attention with a window.
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.foreign_tests import bare_package
from ragged_attention.torch import top_k_blocks, varlen_attention

FILES = ("tests/ops/test_nsa.py",)
SIZES = ("B", "T", "cu_seqlens", "HQ", "D", "S", "block_size")
LARGEST = 1e9  # FLA's reference keeps eight bytes times the product of the sizes for its gradient
TESTS = (
    "test_parallel_value_split_matches_single_tile",
    "test_parallel",
    "test_parallel_varlen",
    "test_parallel_selective_decode",
    "test_parallel_selective_varlen_decode",
    "test_parallel_compressive",
    "test_parallel_compressive_varlen",
    "test_parallel_topk_decode",
    "test_parallel_topk_varlen",
    "test_parallel_decode",
    "test_parallel_varlen_decode",
)
INIT_BLOCKS, LOCAL_BLOCKS = 1, 2  # blocks that NSA always selects
Edges = tuple[torch.Tensor, torch.Tensor]


def packed(q: Any, k: Any, v: Any, edges: Edges, **settings: Any) -> tuple[Any, Any]:
    """Out and lse of `varlen_attention` for tensors [B, T, heads, size], whose rows are packed into one axis."""
    rows = [array.flatten(0, 1) for array in (q, k, v)]
    out, lse = varlen_attention(rows[0], rows[1], rows[2], *edges, **settings, return_lse=True)
    return out.view(*q.shape[:3], -1), lse.view(q.shape[:3])


def edges_of(q: torch.Tensor, kv_len: int, cu_seqlens: Any) -> Edges:
    """The cumulative lengths of queries [B, TQ, ...] and of keys, by default `kv_len` keys per sequence."""
    if cu_seqlens is None:
        counts = torch.arange(len(q) + 1, dtype=torch.int32)
        return counts * q.shape[1], counts * kv_len
    first, second = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    return first.int(), second.int()


def positions_of(edges: Edges) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence and the position of each query. The last query of a sequence is at its last key."""
    q_lens, kv_lens = (each.diff().long() for each in edges)
    seq = torch.repeat_interleave(torch.arange(len(q_lens)), q_lens)
    return seq, torch.arange(len(seq)) - edges[0][1:][seq] + kv_lens[seq]


def blocks_of(edges: Edges, block_size: int) -> torch.Tensor:
    """The cumulative numbers of blocks of the sequences."""
    return F.pad((-(-edges[1].diff() // block_size)).cumsum(0), (1, 0)).int()


def selected(
    q: Any, k: Any, v: Any, lists: Any, counts: Any, block_size: int, scale: float, cu_seqlens: Any
) -> tuple[Any, Any]:
    """Out and lse of attention with the first `counts` blocks of each list."""
    edges = edges_of(q, k.shape[1], cu_seqlens)
    ends = counts.unsqueeze(-1) if isinstance(counts, torch.Tensor) else counts
    lists = lists.masked_fill(torch.arange(lists.shape[-1]) >= ends, -1).int()
    settings = {"selected": lists.flatten(0, 1), "block_size": block_size}
    return packed(q, k, v, edges, sm_scale=scale, causal=True, **settings)


def parallel_nsa_fwd(
    q: Any, k: Any, v: Any, block_indices: Any, block_counts: Any, block_size: int, scale: float,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, token_indices_q: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    cu_seqlens = None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k)
    return selected(q, k, v, block_indices, block_counts, block_size, scale, cu_seqlens)


def parallel_nsa_compression(
    q: Any, k: Any, v: Any, TK: int, block_size: int, scale: float, cu_seqlens: Any = None
) -> tuple[Any, Any]:
    """Out and lse of compressed attention. As in FLA's kernel, lse is 0 for a query that sees no block."""
    edges = edges_of(q, TK, cu_seqlens)
    _, position = positions_of(edges)
    ranges = torch.stack([torch.zeros_like(position), (position + 1) // block_size], 1)[:, None].int()
    out, lse = packed(q, k, v, (edges[0], blocks_of(edges, block_size)), sm_scale=scale, key_ranges=ranges)
    return out, lse.masked_fill(lse.isneginf(), 0)


def parallel_nsa_topk(
    q: Any, k: Any, TK: int, lse: Any, block_counts: int, block_size: int, scale: float, cu_seqlens: Any = None
) -> torch.Tensor:
    """The lists of selected blocks.

    A block's score is its probability in attention to the block means, averaged over the heads of a group. The blocks
    that are always selected come first in a list.
    """
    edges, kv_heads = edges_of(q, TK, cu_seqlens), k.shape[2]
    seq, position = positions_of(edges)
    starts, means, packed = blocks_of(edges, block_size), k.flatten(0, 1).float(), q.flatten(0, 1).float()
    block = torch.arange(int(starts.diff().max()))
    each = means[(starts[seq].long()[:, None] + block).clamp(max=len(means) - 1)]  # block means [T, B, K, D]
    logits = torch.einsum("tkgd,tbkd->tkgb", packed.unflatten(1, (kv_heads, -1)), each) * scale
    hidden = (block >= (position[:, None] + 1) // block_size)[:, None, None]
    scores = logits.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0).mean(2)
    own_block = position // block_size
    scores = scores.masked_fill((block > own_block[:, None])[:, None], -torch.inf)
    selected = top_k_blocks(scores, block_counts, init_blocks=INIT_BLOCKS, local_blocks=LOCAL_BLOCKS)
    always = (selected < INIT_BLOCKS) | (selected > own_block[:, None, None] - LOCAL_BLOCKS)
    rank = torch.where(selected < 0, 2, torch.where(always, 0, 1))
    return selected.gather(2, rank.argsort(dim=2, stable=True)).view(*q.shape[:2], kv_heads, -1)


def parallel_nsa(
    q: Any, k: Any, v: Any, g_cmp: Any = None, g_slc: Any = None, g_swa: Any = None, block_indices: Any = None,
    block_counts: Any = 16, block_size: int = 64, window_size: int = 0, scale: Any = None,
    cu_seqlens: Any = None,
) -> Any:  # fmt: skip
    """The sum of NSA's three branches, each multiplied by its gate."""
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    edges = edges_of(q, k.shape[1], cu_seqlens)
    compressed: Any = 0
    if g_cmp is not None:
        k_mean, v_mean = (mean_pooling(each, block_size, None if cu_seqlens is None else edges[1]) for each in (k, v))
        compressed, _ = parallel_nsa_compression(q, k_mean, v_mean, k.shape[1], block_size, scale, cu_seqlens)
        compressed = compressed * g_cmp.unsqueeze(-1)
        if block_indices is None:
            block_indices = parallel_nsa_topk(q, k_mean, k.shape[1], None, block_counts, block_size, scale, cu_seqlens)
    out, _ = selected(q, k, v, block_indices, block_counts, block_size, scale, cu_seqlens)
    if g_slc is not None:
        out = out * g_slc.unsqueeze(-1)
    if window_size > 0:
        near, _ = packed(q, k, v, edges, causal=True, sliding_window=window_size)
        out = out + near * g_swa.unsqueeze(-1)
    return out + compressed


def mean_pooling(x: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    """The mean of each block. The last block of a sequence may be shorter.

    FLA's reference uses this function too, since FLA's own function is a Triton kernel.
    """
    if cu_seqlens is None:
        parts = [part.mean(1) for part in x.float().split(chunk_size, 1)]
        return torch.stack(parts, 1).to(x.dtype)
    rows = x[0].float().split(cu_seqlens.diff().tolist())
    return torch.stack([part.mean(0) for row in rows for part in row.split(chunk_size)])[None].to(x.dtype)


def flash_attn_func(q: Any, k: Any, v: Any, causal: bool, window_size: tuple[int, int]) -> Any:
    """Attention with a window, computed by torch with a dense mask. FLA's reference calls this function."""
    assert causal
    position = torch.arange(k.shape[1])
    back = position[k.shape[1] - q.shape[1] :, None] - position
    mask = (back >= 0) & (back <= window_size[0])
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def flash_attn_varlen_func(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **named: Any) -> Any:
    parts = zip(*(
        each.split(edges.diff().tolist())
        for each, edges in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    ), strict=True)  # fmt: skip
    masks = {name: named[name] for name in ("causal", "window_size")}
    return torch.cat([flash_attn_func(*(each[None] for each in part), **masks)[0] for part in parts])


def install(checkout: Path) -> None:
    """Replace the functions that call FLA's kernels by ours, in the modules from which the tests import them."""
    for name in ("fla", "fla.ops"):  # avoids importing the kernels of other operations
        bare_package(name, checkout / name.replace(".", "/"))
    flash_attn: Any = types.ModuleType("flash_attn")
    flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    sys.modules["flash_attn"] = flash_attn
    for name in ("fla.ops.utils.pooling", "fla.ops.nsa.naive"):
        vars(importlib.import_module(name))["mean_pooling"] = mean_pooling
    for name, functions in (
        ("fla.ops.nsa.compression", (parallel_nsa_compression,)),
        ("fla.ops.nsa.parallel", (parallel_nsa, parallel_nsa_fwd, parallel_nsa_topk)),
    ):
        vars(importlib.import_module(name)).update({each.__name__: each for each in functions})
