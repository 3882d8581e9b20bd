"""FlashInfer's merges of partial results, and attention over prefixes that several requests share."""

from collections.abc import Sequence
from typing import Any

import torch

from ragged_attention.compat.flashinfer._arguments import LN2, expect_default
from ragged_attention.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from ragged_attention.compat.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    single_prefill_with_kv_cache_return_lse,
)
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import merge_attention_states

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial results over disjoint keys.

    Args:
        v_a, v_b: [seq_len, num_heads, head_dim] each.
        s_a, s_b: [seq_len, num_heads] each, base-2 log-sum-exps. A partial result with -inf has no weight.

    Returns:
        v like v_a, and s f32 [seq_len, num_heads].
    """
    return _merged([v_a, v_b], [s_a, s_b])


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge another partial result into `v` and `s`.

    Args:
        v, s, v_other, s_other: as for `merge_state`.
        mask: bool [seq_len], the rows to merge; by default all.
    """
    merged_v, merged_s = _merged([v, v_other], [s, s_other])
    if mask is not None:
        rows = mask.bool()
        merged_v, merged_s = torch.where(rows[:, None, None], merged_v, v), torch.where(rows[:, None], merged_s, s)
    v.copy_(merged_v)
    s.copy_(merged_s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge any number of partial results over disjoint keys.

    Args:
        v: [seq_len, num_states, num_heads, head_dim].
        s: [seq_len, num_states, num_heads], base-2 log-sum-exps.

    Returns:
        v [seq_len, num_heads, head_dim], and s f32 [seq_len, num_heads].
    """
    if v.dim() != 4 or tuple(s.shape) != tuple(v.shape[:3]):
        raise InvalidInput(
            "expected v.shape and s.shape to be [seq_len, num_states, num_heads, head_dim] and [seq_len, num_states, "
            f"num_heads], got {list(v.shape)} and {list(s.shape)}"
        )
    return _merged(list(v.unbind(1)), list(s.unbind(1)))


def _merged(outs: Sequence[torch.Tensor], scores: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = merge_attention_states(outs, [score.float() * LN2 for score in scores])
    return out, lse / LN2


class MultiLevelCascadeAttentionWrapper:
    """Attention over several levels of a paged cache, such as a shared prefix and the requests' own keys.

    Each level has its own pages, and its own row pointers into the queries, which all levels share. The partial results
    of the levels are merged in float32.

    Args:
        num_levels: the number of levels.
        float_workspace_buffer, kv_layout, use_cuda_graph: as for `BatchPrefillWithPagedKVCacheWrapper`.
        paged_kv_indices_buf_arr: for each level, the `paged_kv_indices_buf` of a `BatchPrefillWithPagedKVCacheWrapper`.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_last_page_len_buf_arr: without effect.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ) -> None:
        del qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_last_page_len_buf_arr
        buffers = paged_kv_indices_buf_arr or [None] * num_levels
        self._use_cuda_graph = use_cuda_graph
        self._batch_prefill_wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, paged_kv_indices_buf=buffer
            )
            for buffer in buffers
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether later plans write into the first plan's tensors, which a captured graph reads."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor]
    ) -> None:
        """Replace the workspace buffer, which no kernel uses."""
        for wrapper, buffer in zip(self._batch_prefill_wrappers, int_workspace_buffers, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, buffer)

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Keep the tables and settings of a batch, level by level.

        Args:
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: for each level, the
                arguments of `BatchPrefillWithPagedKVCacheWrapper.plan`.
            causal: whether the last level is causal; all queries see all keys of earlier levels.
            window_left: must be -1. FlashInfer counts a window from the end of each level, so windows are refused.

        The other arguments are those of `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        if window_left >= 0:
            expect_default("a window would count from the end of each level", -1, window_left=window_left)
        levels = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        counts = [len(arrays) for arrays in levels]
        if counts != [len(self._batch_prefill_wrappers)] * 4:
            raise InvalidInput(
                f"expected qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr and paged_kv_last_page_len to have "
                f"num_levels={len(self._batch_prefill_wrappers)} tensors, got {counts}"
            )
        last = self._batch_prefill_wrappers[-1]
        for wrapper, tables in zip(self._batch_prefill_wrappers, zip(*levels, strict=True), strict=True):
            wrapper.plan(
                *tables, num_qo_heads, num_kv_heads, head_dim, page_size, causal=causal and wrapper is last,
                pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction, sm_scale=sm_scale,
                logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta, q_data_type=q_data_type,
                kv_data_type=kv_data_type, o_data_type="float32",
            )  # fmt: skip

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attention of one layer: [total tokens, num_qo_heads, head_dim] of q's dtype.

        Args:
            q, paged_kv_cache: as for `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        results = [
            wrapper.run(q, paged_kv_cache, return_lse=True, lse_base="ln") for wrapper in self._batch_prefill_wrappers
        ]
        outs, lses = zip(*results, strict=True)
        dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
        return merge_attention_states(list(outs), list(lses), out_dtype=dtype)[0]

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Decode attention over a packed prefix that all requests share, and over each request's pages.

    Args:
        float_workspace_buffer, kv_layout: as for `BatchDecodeWithPagedKVCacheWrapper`.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._batch_decode_wrapper = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any) -> None:
        """Replace the workspace buffer, which no kernel uses."""
        self._batch_decode_wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype = "float16",
    ) -> None:
        """Keep the tables of the requests' own pages, as `BatchDecodeWithPagedKVCacheWrapper.plan` does."""
        self._batch_decode_wrapper.plan(
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim,
            page_size, q_data_type=data_type, kv_data_type=data_type,
        )  # fmt: skip

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: Any
    ) -> torch.Tensor:
        """Attention of one layer: [batch_size, num_qo_heads, head_dim].

        Args:
            q: [batch_size, num_qo_heads, head_dim].
            k_shared, v_shared: NHD [shared_prefix_len, num_kv_heads, head_dim], or HND with the heads first.
            unique_kv_cache: as for `BatchDecodeWithPagedKVCacheWrapper.run`.
        """
        shared = single_prefill_with_kv_cache_return_lse(q, k_shared, v_shared, kv_layout=self._kv_layout)
        return merge_state(*shared, *self._batch_decode_wrapper.forward_return_lse(q, unique_kv_cache))[0]


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Prefill attention over a packed prefix that all requests share, and over each request's pages.

    Args:
        float_workspace_buffer, kv_layout: as for `BatchPrefillWithPagedKVCacheWrapper`.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._batch_prefill_wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspace buffer, which no kernel uses."""
        self._batch_prefill_wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Keep the tables of the requests' own pages, as `BatchPrefillWithPagedKVCacheWrapper.plan` does."""
        self._batch_prefill_wrapper.plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim,
            page_size,
        )  # fmt: skip

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Any,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Attention of one layer: [qo_indptr[-1], num_qo_heads, head_dim].

        Args:
            q: float16 [qo_indptr[-1], num_qo_heads, head_dim].
            k_shared, v_shared, unique_kv_cache: as for `BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward`.
            causal: whether attention to the requests' own keys is causal.
            sm_scale: factor on q . k; default `head_dim ** -0.5`.
            use_fp16_qk_reduction, rope_scale, rope_theta: without effect.
        """
        del use_fp16_qk_reduction, rope_scale, rope_theta
        shared = single_prefill_with_kv_cache_return_lse(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale
        )
        unique = self._batch_prefill_wrapper.forward_return_lse(q, unique_kv_cache, causal=causal, sm_scale=sm_scale)
        return merge_state(*shared, *unique)[0]
