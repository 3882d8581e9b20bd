"""FlashInfer's prefill and append attention: of one request, of packed batches, and over a paged cache."""

import functools
from typing import Any

import torch

from ragged_attention.compat.flashinfer._arguments import (
    NOT_APPROXIMATE,
    NOT_ITEMS,
    NOT_JIT,
    columns,
    expect_default,
    expect_layout,
    expect_linear_scales,
    expect_planned,
    result_dtype,
    scales_from,
    with_lse,
)
from ragged_attention.compat.flashinfer._attention import Attention, Rows, needs_pages
from ragged_attention.compat.flashinfer._masks import mask_of
from ragged_attention.compat.flashinfer._tables import Tables, expect_indptr, replaced
from ragged_attention.compat.flashinfer._wrapper import PagedWrapper, Planned, planned_dtypes, without_lse
from ragged_attention.compat.flashinfer.page import scale_rows_of
from ragged_attention.errors import InvalidInput, Unsupported

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """Attention of the last tokens of one request to its keys.

    Args:
        q: [qo_len, num_qo_heads, head_dim_qk].
        k, v: NHD [kv_len, num_kv_heads, head_dim_qk] and [kv_len, num_kv_heads, head_dim_vo], or HND with the heads
            first.
        scale_q, scale_k, scale_v: f32 per head, for 8-bit tensors.
        o_dtype: the dtype of out; by default that of q, or bfloat16 for 8-bit queries.
        custom_mask: bool [qo_len, kv_len], which replaces `causal`.
        packed_custom_mask: the mask's bits in bytes, the first bit in the lowest place; it replaces `custom_mask`.
        causal: aligned at the end of the keys.
        pos_encoding_mode: "NONE" or "ALIBI"; other modes are refused, and so is "ALIBI" with a soft cap, sinks or a
            mask.
        sm_scale: factor on q . k; default `head_dim_qk ** -0.5`.
        window_left: number of keys seen before a query's own position; -1 means no window.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`; None and 0 are off.
        use_fp16_qk_reduction, rope_scale, rope_theta, backend: without effect.
        return_lse: also return the base-2 log-sum-exp.
        kv_cache_sf: the scales of nvfp4 keys and values (uint8, with half as many columns), one for each block of 16
            columns: a pair of NHD [kv_len, num_kv_heads, head_dim // 16], or HND, of float8_e4m3fn or as bytes.
        k_scale, v_scale: factors on keys and values.

    Returns:
        out [qo_len, num_qo_heads, head_dim_vo], and with `return_lse` also lse f32 [qo_len, num_qo_heads].
    """
    del use_fp16_qk_reduction, rope_scale, rope_theta
    expect_linear_scales(backend, kv_cache_sf)
    expect_layout(kv_layout)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise InvalidInput(f"expected {name} to have 3 dimensions, got {tensor.dim()}")
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    q_len, kv_len = q.shape[0], k.shape[0]
    q_edges, kv_edges = (torch.tensor([0, length], dtype=torch.int32, device=q.device) for length in (q_len, kv_len))
    rows = Rows(q_edges, kv_edges, q_len, q_len, kv_len)
    has_mask = custom_mask is not None or packed_custom_mask is not None
    attention = Attention(
        result_dtype(o_dtype, q.dtype), sm_scale, causal, window_left, logits_soft_cap, pos_encoding_mode,
        mask=mask_of(rows.tables, custom_mask, packed_custom_mask) if has_mask else None,
        q_scales=(scale_q,), k_scales=(k_scale, scale_k), v_scales=(v_scale, scale_v),
    )  # fmt: skip
    out, lse = attention.over_rows(q, k, v, rows, scale_rows_of(kv_cache_sf, kv_layout))
    return with_lse(out, lse, return_lse=return_lse)


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Prefill and append attention of a batch over a paged cache.

    Args:
        float_workspace_buffer: a tensor on the wrapper's device; no kernel uses it.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: as for `BatchDecodeWithPagedKVCacheWrapper`; custom masks are then refused.
        paged_kv_indices_buf: as `paged_kv_indices_buffer` of that class.
        qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend:
            without effect.
        jit_args, jit_kwargs, variant_owns_mask: must be None, None and False; kernels with the caller's own code are
            refused.
    """

    _PREFIX = "paged_kv_"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        del qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf
        expect_default(NOT_JIT, jit_args=jit_args, jit_kwargs=jit_kwargs)
        expect_default(NOT_JIT, False, variant_owns_mask=variant_owns_mask)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._backend = backend
        self._indices_buffer = paged_kv_indices_buf

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
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
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Keep the tables and settings of a batch for the runs of all layers.

        Args:
            qo_indptr: int [batch_size + 1], the query tokens of each request.
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: as for
                `BatchDecodeWithPagedKVCacheWrapper.plan`.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size: the sizes of q and of the cache.
            custom_mask: bool, flat, `[q_len, kv_len]` of each request, one after another; it replaces `causal`. If some
                query does not see all keys before the new tokens, the batch's pages are copied in each run.
            packed_custom_mask: the mask's bits, as `segment_packbits` packs them with `bitorder="little"`.
            causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap: as for `single_prefill_with_kv_cache`.
            q_data_type, kv_data_type, o_data_type: dtypes of queries, cache and results.
            block_tables, seq_lens: as for `BatchDecodeWithPagedKVCacheWrapper.plan`.
            fixed_split_size, disable_split_kv: make results batch-invariant.
            use_fp16_qk_reduction, rope_scale, rope_theta, non_blocking, max_token_per_sequence, max_sequence_kv,
                uniform_q_len: without effect.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, seq_lens_q: must be at
                their defaults.
        """
        del use_fp16_qk_reduction, non_blocking, max_token_per_sequence, max_sequence_kv, uniform_q_len
        _expect_no_items(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        expect_default("qo_indptr has the lengths of queries", seq_lens_q=seq_lens_q)
        dtypes = planned_dtypes(q_data_type, kv_data_type, o_data_type)
        lens, table = self._tables_of(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, block_tables, seq_lens
        )
        expect_indptr("qo_indptr", qo_indptr, len(lens))
        new = Tables(self._moved("qo_indptr", qo_indptr), lens, table, *_extent(qo_indptr))
        mask = _mask_of(self._use_cuda_graph, new, custom_mask, packed_custom_mask)
        self._tables = replaced(self._tables, new, self._use_cuda_graph, self._indices_buffer)
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        self._sizes = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size)
        self._override(
            causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
            is_batch_invariant=disable_split_kv or (fixed_split_size or -1) > 0, dtypes=dtypes, mask=mask,
            is_planned=True,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attention of one layer over the planned batch.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim_qk].
            paged_kv_cache, args, q_scale, k_scale, v_scale, out, lse, return_lse, window_left, sinks, kv_cache_sf: as
                for `BatchDecodeWithPagedKVCacheWrapper.run`.
            lse_base: "log2", or "ln" for natural logarithms.
            lse_layout: "NH", or "HN" for lse [num_qo_heads, qo_indptr[-1]].
            enable_pdl, use_fp16_softmax, uses_spcompress: without effect.
            skip_softmax_threshold_scale_factor: must be None.

        Returns:
            out [qo_indptr[-1], num_qo_heads, head_dim_vo], and with `return_lse` also lse f32 [qo_indptr[-1],
            num_qo_heads]. A query that sees no key gets out 0 and lse -inf.
        """
        del enable_pdl, use_fp16_softmax, uses_spcompress
        self._expect_plan()
        expect_default(NOT_APPROXIMATE, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        scale_q, scale_k, scale_v = scales_from(args, q)
        attention = self._attention(
            causal=self._causal, window_left=self._window_left if window_left is None else window_left, sinks=sinks,
            q_scales=(q_scale, scale_q), k_scales=(k_scale, scale_k), v_scales=(v_scale, scale_v), out=out,
        )  # fmt: skip
        return self._run(q, paged_kv_cache, attention, lse, return_lse, lse_base, lse_layout, kv_cache_sf=kv_cache_sf)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """`run_return_lse` with settings that replace those of the plan; deprecated by FlashInfer."""
        del use_fp16_qk_reduction
        self._override(
            causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)

    forward = without_lse(forward_return_lse)


class BatchPrefillWithRaggedKVCacheWrapper(Planned):
    """Prefill attention of a batch of packed queries to packed keys.

    Args:
        float_workspace_buffer: a tensor on the wrapper's device; no kernel uses it.
        kv_layout: "NHD", or "HND" for keys and values with the heads first.
        use_cuda_graph: as for `BatchPrefillWithPagedKVCacheWrapper`; custom masks and 8-bit tensors are then refused.
        qo_indptr_buf, kv_indptr_buf, custom_mask_buf, mask_indptr_buf, backend: without effect.
        jit_args, jit_kwargs, variant_owns_mask: must be None, None and False; kernels with the caller's own code are
            refused.
    """

    _rows: Rows | None = None
    _sizes: tuple[int, int, int, int]  # H, K, D and D_v

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        del qo_indptr_buf, kv_indptr_buf, custom_mask_buf, mask_indptr_buf
        expect_default(NOT_JIT, jit_args=jit_args, jit_kwargs=jit_kwargs)
        expect_default(NOT_JIT, False, variant_owns_mask=variant_owns_mask)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._backend = backend
        self._sinks: torch.Tensor | None = None  # vLLM sets it

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Keep the row pointers and settings of a batch for the runs of all layers.

        Args:
            qo_indptr, kv_indptr: int [batch_size + 1] each, the query tokens and the keys of each request.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo: the sizes of q, k and v.
            seq_lens, seq_lens_q, v_indptr, o_indptr: must be None.

        The other arguments are those of `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        del use_fp16_qk_reduction, non_blocking, max_token_per_sequence, max_sequence_kv, uniform_q_len
        _expect_no_items(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        expect_default("qo_indptr and kv_indptr have the lengths", seq_lens=seq_lens, seq_lens_q=seq_lens_q)
        expect_default("keys and values share row pointers", v_indptr=v_indptr)
        expect_default("queries and results share row pointers", o_indptr=o_indptr)
        expect_indptr("qo_indptr", qo_indptr)
        expect_indptr("kv_indptr", kv_indptr, qo_indptr.numel() - 1)
        dtypes = planned_dtypes(q_data_type, kv_data_type, o_data_type)
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        in_pages = needs_pages(dtypes.q, dtypes.kv)
        if self._use_cuda_graph and in_pages:
            raise Unsupported(
                f"expected 16-bit queries and keys with use_cuda_graph=True, got {q_data_type=}, {kv_data_type=}"
            )
        num_q_tokens, max_q_len = _extent(qo_indptr)
        new = Rows(
            self._moved("qo_indptr", qo_indptr), self._moved("kv_indptr", kv_indptr), num_q_tokens, max_q_len,
            _extent(kv_indptr)[1],
        )  # fmt: skip
        has_mask = custom_mask is not None or packed_custom_mask is not None
        # Making the tables waits for the device. It is done here, so that no run waits.
        tables = new.tables if has_mask or in_pages else None
        mask = _mask_of(self._use_cuda_graph, tables, custom_mask, packed_custom_mask)
        self._rows = _replaced_rows(self._rows, new) if self._use_cuda_graph else new
        self._sizes = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        self._override(
            causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
            is_batch_invariant=disable_split_kv or (fixed_split_size or -1) > 0, dtypes=dtypes, mask=mask,
            is_planned=True,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Any:
        """Attention of one layer over the planned batch.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim_qk].
            k, v: [kv_indptr[-1], num_kv_heads, head_dim_qk] and [kv_indptr[-1], num_kv_heads, head_dim_vo].
            kv_cache_sf: as for `single_prefill_with_kv_cache`, or one tensor with an axis of 2 after the first.
            o_scale: must be None or 1.

        The other arguments and the results are those of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        del enable_pdl
        self._expect_plan()
        expect_linear_scales(self._backend, kv_cache_sf)
        if o_scale != 1:
            expect_default("results are not 8-bit", o_scale=o_scale)
        rows = self._rows
        assert rows is not None
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo = self._sizes
        self._expect_rows(q, rows.num_q_tokens, num_qo_heads, head_dim_qk)
        expect_planned(
            **{
                "k.shape[1:]": ([*k.shape[1:-1], columns(k)], [num_kv_heads, head_dim_qk]),
                "v.shape[1:]": ([*v.shape[1:-1], columns(v)], [num_kv_heads, head_dim_vo]),
                "k.dtype": (k.dtype, self._dtypes.kv),
            }
        )
        scale_q, scale_k, scale_v = scales_from(args, q)
        attention = self._attention(
            causal=self._causal, window_left=self._window_left, sinks=self._sinks, q_scales=(q_scale, scale_q),
            k_scales=(k_scale, scale_k), v_scales=(v_scale, scale_v), out=out,
        )  # fmt: skip
        result, natural = attention.over_rows(q, k, v, rows, scale_rows_of(kv_cache_sf, self._kv_layout))
        return with_lse(result, natural, self._sinks, lse, return_lse, lse_base, lse_layout)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """`run_return_lse` with settings that replace those of the plan; deprecated by FlashInfer."""
        del use_fp16_qk_reduction
        self._override(
            causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self.run(q, k, v, return_lse=True)

    forward = without_lse(forward_return_lse)


def _extent(indptr: torch.Tensor) -> tuple[int, int]:
    """The number of rows and the length of the longest request."""
    host = indptr.cpu()
    return int(host[-1]), int(host.diff().max()) if host.numel() > 1 else 0


def _expect_no_items(prefix_len_ptr: Any, token_pos_in_items_ptr: Any, token_pos_in_items_len: int, lens: Any) -> None:
    """Refuse the arguments of multi-item scoring."""
    given = dict(prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=lens)
    expect_default(NOT_ITEMS, **given)
    expect_default(NOT_ITEMS, 0, token_pos_in_items_len=token_pos_in_items_len)


def _mask_of(use_cuda_graph: bool, tables: Tables | None, custom_mask: Any, packed_custom_mask: Any) -> Any:
    """The mask of a plan."""
    if use_cuda_graph:
        reason = "with use_cuda_graph=True a run must not depend on a mask's values"
        expect_default(reason, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
    return None if tables is None else mask_of(tables, custom_mask, packed_custom_mask)


def _replaced_rows(kept: Rows | None, new: Rows) -> Rows:
    """The kept row pointers with the new contents, for captured graphs, which may see other lengths."""
    if kept is None:
        return Rows(new.cu_q_lens.clone(), new.cu_kv_lens.clone(), new.num_q_tokens, None, None)
    if kept.cu_q_lens.shape != new.cu_q_lens.shape:
        planned, given = (len(rows.cu_q_lens) - 1 for rows in (kept, new))
        raise InvalidInput(f"expected batch_size={planned}, which is fixed with use_cuda_graph=True, got {given}")
    kept.cu_q_lens.copy_(new.cu_q_lens)
    kept.cu_kv_lens.copy_(new.cu_kv_lens)
    kept.num_q_tokens = new.num_q_tokens
    vars(kept).pop("tables", None)  # made of the previous lengths
    return kept
