"""FlashInfer's decode attention: of one request, and of a batch over a paged cache."""

import functools
import warnings
from typing import Any

import torch

from ragged_attention.compat.flashinfer._arguments import (
    NOT_APPROXIMATE,
    NOT_JIT,
    expect_default,
    expect_layout,
    result_dtype,
    scales_from,
    with_lse,
)
from ragged_attention.compat.flashinfer._attention import Attention
from ragged_attention.compat.flashinfer._tables import Tables, replaced
from ragged_attention.compat.flashinfer._wrapper import PagedWrapper, planned_dtypes, without_lse
from ragged_attention.errors import InvalidInput

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
]


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of one query token to the keys of its request.

    Args:
        q: [num_qo_heads, head_dim].
        k, v: NHD [kv_len, num_kv_heads, head_dim], or HND [num_kv_heads, kv_len, head_dim].
        pos_encoding_mode: "NONE" or "ALIBI"; other modes are refused, and so is "ALIBI" with a soft cap or sinks.
        q_scale, k_scale, v_scale: factors on queries, keys and values.
        window_left: number of keys seen before the last one; -1 means no window.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`; None and 0 are off.
        sm_scale: factor on q . k; default `head_dim ** -0.5`.
        use_tensor_cores, rope_scale, rope_theta: without effect.
        return_lse: also return the base-2 log-sum-exp.

    Returns:
        out [num_qo_heads, head_dim], and with `return_lse` also lse f32 [num_qo_heads].
    """
    del use_tensor_cores, rope_scale, rope_theta
    expect_layout(kv_layout)
    for name, tensor, rank in (("q", q, 2), ("k", k, 3), ("v", v, 3)):
        if tensor.dim() != rank:
            raise InvalidInput(f"expected {name} to have {rank} dimensions, got {tensor.dim()}")
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    kv_len = k.shape[0]
    if not kv_len:  # a page has at least one position
        k, v = k.new_zeros(1, *k.shape[1:]), v.new_zeros(1, *v.shape[1:])
    attention = Attention(
        result_dtype(None, q.dtype), sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
        pos_encoding_mode=pos_encoding_mode, q_scales=(q_scale,), k_scales=(k_scale,), v_scales=(v_scale,),
    )  # fmt: skip
    edges, lens, table = (
        torch.tensor(numbers, dtype=torch.int32, device=q.device) for numbers in ([0, 1], [kv_len], [[0]])
    )
    names = {"kv_pages": "k, v", "k_pages": "k", "v_pages": "v", "soft_cap": "logits_soft_cap"}
    out, lse = attention.over_pages(q[None], k[None], v[None], Tables(edges, lens, table, 1, 1), names)
    return with_lse(out[0], lse[0], return_lse=return_lse)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Decode attention of a batch over a paged cache.

    Args:
        float_workspace_buffer: a tensor on the wrapper's device; no kernel uses it.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: keep the tensors of the first plan, so that a captured run sees later plans. The number of
            requests is then fixed.
        use_tensor_cores, backend: without effect.
        paged_kv_indices_buffer: with `use_cuda_graph`, the buffer's size divided by the number of requests is the
            maximum number of pages per request, unless the first plan has more. Without a buffer, the first plan
            determines this maximum. The buffer's content is not used.
        paged_kv_indptr_buffer, paged_kv_last_page_len_buffer: without effect.
        jit_args: must be None; kernels with the caller's own code are refused.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        del paged_kv_indptr_buffer, paged_kv_last_page_len_buffer
        expect_default(NOT_JIT, jit_args=jit_args)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._use_tensor_cores = use_tensor_cores
        self._indices_buffer = paged_kv_indices_buffer
        self._backend = backend

    @property
    def use_tensor_cores(self) -> bool:
        """The constructor's argument, for engines that read it."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
    ) -> None:
        """Keep the tables and settings of a batch for the runs of all layers.

        Args:
            indptr, indices, last_page_len: int [batch_size + 1], [indptr[-1]] and [batch_size], the pages of each
                request and the number of keys in its last page; on any device.
            num_qo_heads, num_kv_heads, head_dim, page_size: the sizes of q and of the cache.
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale: as for `single_decode_with_kv_cache`.
            q_data_type, kv_data_type, o_data_type: dtypes of queries, cache and results.
            data_type: the value of `q_data_type` and `kv_data_type` where these are None.
            block_tables, seq_lens: int [batch_size, max_num_blocks_per_seq] and [batch_size]; they replace the pages
                and lengths of the first three arguments.
            fixed_split_size, disable_split_kv: make results batch-invariant.
            q_len_per_req: query tokens per request.
            is_causal: default `q_len_per_req > 1`, aligned at the end of the keys.
            rope_scale, rope_theta, non_blocking: without effect.
            window_right: must be 0.
        """
        del non_blocking
        expect_default("keys after a query are never seen", 0, window_right=window_right)
        if q_len_per_req < 1:
            raise InvalidInput(f"expected q_len_per_req >= 1, got {q_len_per_req}")
        q_data_type = data_type if q_data_type is None else q_data_type
        kv_data_type = data_type if kv_data_type is None else kv_data_type
        dtypes = planned_dtypes(q_data_type, kv_data_type, o_data_type)
        lens, table = self._tables_of(indptr, indices, last_page_len, page_size, block_tables, seq_lens)
        batch_size = len(lens)
        edges = torch.arange(batch_size + 1, dtype=torch.int32, device=self.device) * q_len_per_req
        kept = self._tables
        if kept is not None and self._use_cuda_graph and kept.num_q_tokens != kept.num_seqs * q_len_per_req:
            planned = kept.num_q_tokens // max(kept.num_seqs, 1)
            raise InvalidInput(
                f"expected q_len_per_req={planned}, which is fixed with use_cuda_graph=True, got {q_len_per_req}"
            )
        new = Tables(edges, lens, table, batch_size * q_len_per_req, q_len_per_req)
        self._tables = replaced(kept, new, self._use_cuda_graph, self._indices_buffer)
        self._sizes = (num_qo_heads, num_kv_heads, head_dim, head_dim, page_size)
        self._override(
            pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
            causal=q_len_per_req > 1 if is_causal is None else is_causal,
            is_batch_invariant=disable_split_kv or (fixed_split_size or -1) > 0, dtypes=dtypes, is_planned=True,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Any:
        """Attention of one layer over the planned batch.

        Args:
            q: [batch_size * q_len_per_req, num_qo_heads, head_dim].
            paged_kv_cache: a pair of NHD `[max_num_pages, page_size, num_kv_heads, head_dim]` or HND
                `[max_num_pages, num_kv_heads, page_size, head_dim]`, or one tensor with an axis of 2 after the first.
                Unused pages and positions do not affect results, even if they hold NaN. A uint8 cache is nvfp4, with
                `head_dim // 2` columns.
            args: the scales of 8-bit queries, keys and values, per head.
            q_scale, k_scale, v_scale: factors on queries, keys and values: numbers, or tensors of one element.
            out, lse: tensors for the results.
            return_lse: also return the base-2 log-sum-exp, which includes sinks.
            window_left: by default, the value of the plan.
            sinks: f32 [num_qo_heads], one logit per head, which is added to the denominator of the softmax.
            q_len_per_req: must be the planned value; deprecated.
            enable_pdl: without effect.
            skip_softmax_threshold_scale_factor: must be None.
            kv_cache_sf: the scales of an nvfp4 cache, one for each block of 16 columns: in the form of the cache, but
                with `head_dim // 16` columns, of float8_e4m3fn or as bytes. With `backend="trtllm-gen"`, which has
                another order, they are refused.

        Returns:
            out like q, and with `return_lse` also lse f32 [batch_size * q_len_per_req, num_qo_heads]. A request without
            keys gets out 0 and lse -inf.
        """
        del enable_pdl
        self._expect_plan()
        expect_default(NOT_APPROXIMATE, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        if q_len_per_req is not None:
            warnings.warn("q_len_per_req is an argument of plan()", DeprecationWarning, stacklevel=2)
            assert self._tables is not None
            if q_len_per_req * self._tables.num_seqs != self._tables.num_q_tokens:
                planned = self._tables.num_q_tokens // max(self._tables.num_seqs, 1)
                raise InvalidInput(f"expected q_len_per_req={planned} as in plan(), got {q_len_per_req}")
        scale_q, scale_k, scale_v = scales_from(args, q)
        attention = self._attention(
            causal=self._causal, window_left=self._window_left if window_left is None else window_left, sinks=sinks,
            q_scales=(q_scale, scale_q), k_scales=(k_scale, scale_k), v_scales=(v_scale, scale_v), out=out,
        )  # fmt: skip
        return self._run(q, paged_kv_cache, attention, lse, return_lse, kv_cache_sf=kv_cache_sf)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """`run_return_lse` with settings that replace those of the plan; deprecated by FlashInfer."""
        self._override(
            pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True)

    forward = without_lse(forward_return_lse)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph=True`."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """`BatchDecodeWithPagedKVCacheWrapper.plan` as a function, with which engines replace a wrapper's method.

    Args:
        global_override_indptr_cpu: indptr on the host, which saves a wait for the device.

    The other arguments are those of the method. The default of `q_data_type` is `data_type`, else "float16".
    """
    host = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    dtype = q_data_type if q_data_type is not None else data_type
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self, host, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode,
        window_left, logits_soft_cap, "float16" if dtype is None else dtype, kv_data_type, None, data_type, sm_scale,
        rope_scale, rope_theta, non_blocking, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )  # fmt: skip
