"""Runs vLLM's tests of MiniMax M3 through `block_scores`, `select_blocks` and `ragged_paged_attention`."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.sparse_suites import _vllm
from ragged_attention.errors import Unsupported
from ragged_attention.torch import block_scores, ragged_paged_attention, select_blocks, top_k_blocks

FILES = (
    "tests/kernels/attention/test_minimax_m3.py",
    "tests/kernels/attention/test_minimax_m3_fp8_triton_indexer.py",
    "tests/kernels/test_minimax_m3_sparse_attn_fp8_scale.py",
)
SIZES = ("num_reqs",)
LARGEST = 100.0
# Other tests are left out. They test layouts, launches and kernels for one architecture, and use names that are not
# replaced here.
TESTS = (
    "test_prefill_index_topk_correctness",
    "test_decode_index_topk_correctness",
    "test_decode_index_topk_fp8",
    "test_prefill_sparse_attention_correctness",
    "test_decode_sparse_attention_correctness",
    "test_decode_sparse_attention_ignores_invalid_topk",
    "test_decode_wrong_layout_breaks_parity",
    "test_fp8_index_query_and_cache_decode_topk_matches_bf16",
    "test_fp8_index_query_and_cache_prefill_topk_matches_bf16",
    "test_bf16_query_against_fp8_cache_decode_topk_matches_bf16",
    "test_minimax_m3_sparse_prefill_fp8_kv_scales",
    "test_minimax_m3_sparse_decode_fp8_kv_scales",
)
BLOCK = 128
OPS = "vllm.models.minimax_m3.common.ops"


def minimax_m3_index_score(
    idx_q: Any, index_kv_cache: Any, block_table: Any, cu_seqlens_q: Any, seq_lens: Any, *others: Any, **named: Any
) -> Any:
    """Scores [heads, tokens, blocks]. `others` and `named` are ignored, because the other arguments determine them."""
    scores = block_scores(
        idx_q, index_kv_cache[:, :, None], block_size=BLOCK, page_indices=block_table, kv_lens=seq_lens,
        cu_q_lens=cu_seqlens_q,
    )  # fmt: skip
    return scores.transpose(0, 1)


def minimax_m3_index_topk(
    score: Any, cu_seqlens_q: Any, prefix_lens: Any, max_query_len: int, topk: int, init_blocks: int, local_blocks: int
) -> Any:
    lists = top_k_blocks(score.transpose(0, 1).contiguous(), topk, init_blocks=init_blocks, local_blocks=local_blocks)
    return lists.transpose(0, 1)


def minimax_m3_index_decode(
    idx_q: Any, index_kv_cache: Any, block_table: Any, seq_lens: Any, max_seq_len: int, topk: int, init_blocks: int,
    local_blocks: int, num_kv_heads: int, decode_query_len: int, max_decode_query_len: int,
) -> Any:  # fmt: skip
    lists = select_blocks(
        idx_q, index_kv_cache[:, :, None], topk, block_size=BLOCK, page_indices=block_table, kv_lens=seq_lens,
        cu_q_lens=torch.arange(len(seq_lens) + 1, dtype=torch.int32) * decode_query_len, init_blocks=init_blocks,
        local_blocks=local_blocks,
    )  # fmt: skip
    return lists.transpose(0, 1)


def minimax_m3_sparse_attn(
    q: Any, kv_cache: Any, topk_idx: Any, block_table: Any, cu_seqlens_q: Any, seq_lens: Any, prefix_lens: Any,
    max_query_len: int, num_kv_heads: int, sm_scale: float, output: Any, k_scale: Any = None, v_scale: Any = None,
) -> None:  # fmt: skip
    """Attention to keys and values [pages, heads, positions, 2 * size], with lists [heads, tokens, blocks]."""
    if k_scale is not None and k_scale.ndim:
        raise Unsupported(f"expected one k_scale for a head, got {tuple(k_scale.shape)}: scales of single positions")
    k, v = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    scales: dict[str, Any] = {} if k_scale is None else {"k_scale": float(k_scale), "v_scale": float(v_scale)}
    output[:] = ragged_paged_attention(
        q, (k, v), seq_lens, block_table, cu_seqlens_q, sm_scale=sm_scale, **scales,
        selected=topk_idx.transpose(0, 1), block_size=BLOCK,
    )  # fmt: skip


def minimax_m3_sparse_attn_decode(
    q: Any, kv_cache: Any, topk_idx: Any, block_table: Any, seq_lens: Any, num_kv_heads: int, sm_scale: float,
    output: Any, decode_query_len: int, k_scale: Any = None, v_scale: Any = None,
) -> None:  # fmt: skip
    edges = F.pad(torch.full_like(seq_lens, decode_query_len).cumsum(0), (1, 0)).int()
    minimax_m3_sparse_attn(
        q, kv_cache, topk_idx, block_table, edges, seq_lens, None, decode_query_len, num_kv_heads, sm_scale, output,
        k_scale, v_scale,
    )  # fmt: skip


def install(checkout: Path) -> None:
    _vllm.install(
        checkout, (f"{OPS}.index_topk", f"{OPS}.sparse_attn", "vllm.models.minimax_m3.common.sparse_attention")
    )
    _vllm.replace(f"{OPS}.index_topk", minimax_m3_index_score, minimax_m3_index_topk, minimax_m3_index_decode)
    _vllm.replace(f"{OPS}.sparse_attn", minimax_m3_sparse_attn, minimax_m3_sparse_attn_decode)
