"""Runs vLLM's tests of QSA, Qwen4's sparse attention, through `indexer_topk` and `ragged_paged_attention`.

The indexer scores the means of groups of keys. A separate cache stores these means. Attention gets lists of the single
selected positions.
"""

import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks.sparse_suites import _vllm
from ragged_attention.torch import indexer_topk, ragged_paged_attention

FILES = ("tests/models/qwen4_exp/test_qsa_reference.py",)
SIZES = ("num_rows", "num_query_heads", "num_requests", "page_size")
LARGEST = 2e6  # larger cases have caches of some gigabytes
# Other tests are left out. They test metadata and caches, which are not operations.
TESTS = (
    "test_qsa_decode_selection_correctness",
    "test_qsa_prefill_selection_correctness",
    "test_qsa_sparse_paged_attention_correctness",
    "test_qsa_split_selection_correctness",
    "test_qsa_selection_handles_no_complete_compressed_blocks",
)
OPS = "vllm.models.qwen4_exp.nvidia.ops"
SMALLEST_HEAD = 16  # the least columns of an index query in `indexer_topk`


def selected(q: Any, k_cache: Any, page_table: Any, rows: Any, visible_blocks: Any, top_k: int) -> torch.Tensor:
    """The groups that each query selects.

    Each query is a separate sequence, because the tests give the number of visible groups per query.
    """
    size = q.shape[-1]
    q, keys = (F.pad(each.float(), (0, max(SMALLEST_HEAD - size, 0))).to(each.dtype) for each in (q, k_cache[:, :, 0]))
    weights = torch.full(q.shape[:2], 1 / math.sqrt(size))
    return indexer_topk(
        q, keys, weights, top_k, page_indices=page_table[rows].int(), kv_lens=visible_blocks.int(),
        cu_q_lens=torch.arange(len(q) + 1, dtype=torch.int32),
    )  # fmt: skip


def qsa_select_paged_decode(
    q: Any, k_cache: Any, page_table: Any, visible_blocks: Any, token_topk: int, compress_ratio: int,
    decode_query_len: int, block_indices: Any,
) -> None:  # fmt: skip
    rows = torch.arange(len(page_table)).repeat_interleave(decode_query_len)
    block_indices[:] = selected(q, k_cache, page_table, rows, visible_blocks, token_topk // compress_ratio)


def qsa_select_paged_prefill(
    q: Any, k_cache: Any, page_table: Any, query_start_loc: Any, visible_blocks: Any, token_topk: int,
    compress_ratio: int, max_query_len: int, block_indices: Any, max_seq_len: int,
) -> None:  # fmt: skip
    rows = torch.arange(len(page_table)).repeat_interleave(query_start_loc.diff())
    block_indices[:] = selected(q, k_cache, page_table, rows, visible_blocks, token_topk // compress_ratio)


def expand_qsa_block_indices(
    block_indices: Any, query_positions: Any, visible_blocks: Any, compress_ratio: int, token_topk: int, out: Any
) -> None:
    """Write the positions of the selected groups and of the incomplete last group, then -1.

    The last column is the number of positions.
    """
    groups = block_indices.long().masked_fill(block_indices >= visible_blocks[:, None], -1)
    positions = torch.where(groups >= 0, groups * compress_ratio, -token_topk * compress_ratio)
    positions = (positions[:, :, None] + torch.arange(compress_ratio)).flatten(1)
    tail = (visible_blocks * compress_ratio)[:, None] + torch.arange(compress_ratio - 1)
    positions = torch.cat([positions, tail.masked_fill(tail > query_positions[:, None], -1)], 1).clamp(min=-1)
    order = (positions < 0).int().argsort(dim=1, stable=True)
    out[:, :-1] = positions.gather(1, order)
    out[:, -1] = (positions >= 0).sum(1)


def qsa_sparse_paged_attention(
    q: Any, k_cache: Any, v_cache: Any, logical_indices: Any, block_table: Any, token_to_req: Any,
    use_prefill_config: bool, k_scale: float = 1.0, v_scale: float = 1.0, *, output_gate: Any,
) -> Any:  # fmt: skip
    """Attention to listed positions. All of them are visible, so neither a mask nor sequence lengths are needed."""
    counts = torch.bincount(token_to_req.long(), minlength=len(block_table))
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale} if k_cache.dtype != q.dtype else {}
    out = ragged_paged_attention(
        q, (k_cache, v_cache), torch.full((len(block_table),), block_table.shape[1] * k_cache.shape[1]).int(),
        block_table, F.pad(counts.cumsum(0), (1, 0)).int(), causal=False, selected=logical_indices[:, None, :-1],
        block_size=1, **scales,
    )  # fmt: skip
    return out * torch.sigmoid(output_gate)


@pytest.fixture
def workspace_init() -> None:
    """A fixture that does nothing. It replaces vLLM's fixture for scratch memory, which our kernels do not need."""


def install(checkout: Path) -> None:
    for name in ("model", "qsa", "indexer_qsa"):  # whole layers, which no test here uses
        sys.modules[f"vllm.models.qwen4_exp.nvidia.{name}"] = mock.MagicMock()
    others = ("vllm.models.qwen4_exp.common.qsa_cache", "vllm.v1.worker.utils")
    _vllm.install(checkout, (f"{OPS}.qsa", f"{OPS}.qsa_indexer", *others))
    _vllm.replace(f"{OPS}.qsa_indexer", qsa_select_paged_decode, qsa_select_paged_prefill, expand_qsa_block_indices)
    _vllm.replace(f"{OPS}.qsa", qsa_sparse_paged_attention)
