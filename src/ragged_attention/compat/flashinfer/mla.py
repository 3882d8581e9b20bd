"""FlashInfer's latent attention over a paged cache, with absorbed projections."""

import dataclasses
import functools
from typing import Any

import torch

from ragged_attention.calls import is_number
from ragged_attention.compat.flashinfer._arguments import (
    FP8,
    NOT_APPROXIMATE,
    expect_default,
    expect_planned,
    with_lse,
)
from ragged_attention.compat.flashinfer._tables import Tables, block_table, expect_indptr, replaced
from ragged_attention.compat.flashinfer._wrapper import Planned, planned_dtypes
from ragged_attention.compat.names import named_as
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import ragged_mla_attention

__all__ = ["BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"]

NAMES = {
    "q": "query", "kv_cache": "kv_cache", "cu_q_lens": "qo_indptr", "kv_lens": "kv_len_arr",
    "page_indices": "kv_indices", "d_v": "head_dim_ckv", "kv_scale": "ckv_scale", "rope_scale": "kpe_scale",
}  # fmt: skip
Parts = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class MLAPlanMetadata:
    """The tables of a batch: as row pointers (`csr`), as a block table (`dense`), or as both (`dual`)."""

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> "MLAPlanMetadata":
        """Tables with row pointers: int [batch_size + 1] twice, [kv_indptr[-1]] and [batch_size] in this order."""
        return cls(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> "MLAPlanMetadata":
        """Tables with a block table: int [batch_size + 1], [batch_size, max pages] and [batch_size] in this order."""
        return cls(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> "MLAPlanMetadata":
        """Both forms of one batch."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)


class BatchMLAPagedAttentionWrapper(Planned):
    """Latent attention of a batch over a paged cache.

    Args:
        float_workspace_buffer: a tensor on the wrapper's device; no kernel uses it.
        use_cuda_graph: as for `BatchPrefillWithPagedKVCacheWrapper`.
        kv_indices: as `paged_kv_indices_buf` of that class.
        qo_indptr, kv_indptr, kv_len_arr, backend: without effect.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        del qo_indptr, kv_indptr, kv_len_arr
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph)
        self._backend = backend
        self._indices_buffer = kv_indices
        self._tables: Tables | None = None
        self._sizes: tuple[int, ...] = (0, 0, 0, 0)  # H, the widths of latents and rotary keys, and the page size

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Keep the tables and settings of a batch for the runs of all layers.

        Args:
            qo_indptr, kv_indptr, kv_indices, kv_len_arr: int [batch_size + 1] twice, [kv_indptr[-1]] and [batch_size];
                instead of these, `metadata`, or cum_seq_lens_q, block_tables and seq_lens.
            num_heads, head_dim_ckv, head_dim_kpe, page_size: the sizes of the queries and of the cache.
            causal: queries see keys up to their own position, and are aligned at the end of the keys.
            sm_scale: factor on q . k.
            q_data_type, kv_data_type, output_dtype: dtypes of queries, cache and results.
            metadata: a `MLAPlanMetadata`.
            max_q_len, use_profiler, enable_pdl, query_layout, kv_cache_layout, lse_mode, use_sinks: without effect;
                `run` takes queries and cache in any of their forms.
            output_scale, skip_softmax: must be "none" and False.
            scale_mode: "default" or "kv-per-tensor"; other modes are refused.
        """
        del max_q_len, use_profiler, enable_pdl, query_layout, kv_cache_layout, lse_mode, use_sinks
        expect_default("results are not 8-bit", "none", output_scale=output_scale)
        expect_default(NOT_APPROXIMATE, False, skip_softmax=skip_softmax)
        if scale_mode not in ("default", "kv-per-tensor"):
            expect_default("scales of matrix products are not supported", "default", scale_mode=scale_mode)
        required: dict[str, Any] = dict(
            num_heads=num_heads, head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe, page_size=page_size,
            causal=causal, sm_scale=sm_scale, q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip
        if missing := [name for name, value in required.items() if value is None]:
            raise TypeError(f"expected {', '.join(missing)} in plan(), got None")
        flat = MLAPlanMetadata(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, None
        )
        given = flat if metadata is None else metadata
        if not isinstance(given, MLAPlanMetadata):
            raise TypeError(f"expected metadata to be an MLAPlanMetadata, got {type(metadata).__name__}")
        if metadata is not None and flat != MLAPlanMetadata():
            raise InvalidInput("expected metadata or its tensors as arguments, got both")
        dtypes = planned_dtypes(q_data_type, kv_data_type, output_dtype)
        self._tables = replaced(self._tables, self._tables_of(given), self._use_cuda_graph, self._indices_buffer)
        self._sizes = tuple(required[name] for name in ("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size"))
        self._override(causal=causal, sm_scale=sm_scale, page_size=page_size, dtypes=dtypes, is_planned=True)

    def _tables_of(self, given: MLAPlanMetadata) -> Tables:
        """The tables of a plan, from the block table if there is one."""
        if given.block_tables is not None:
            edges, lens, table = given.cum_seq_lens_q, given.seq_lens, self._moved("block_tables", given.block_tables)
            names = ("cum_seq_lens_q", "seq_lens")
        else:
            edges, lens, names = given.qo_indptr, given.kv_len_arr, ("qo_indptr", "kv_len_arr")
            if given.kv_indptr is None or given.kv_indices is None:
                raise TypeError("expected metadata, or kv_indptr with kv_indices, or block_tables, got none of them")
            expect_indptr("kv_indptr", given.kv_indptr)
            used = given.kv_indptr if edges is None else given.kv_indptr[: len(edges)]  # the rest is unused
            table = block_table(used, self._moved("kv_indices", given.kv_indices))
        if edges is None or lens is None:
            raise TypeError(f"expected {names[0]} and {names[1]} with the pages, got None")
        expect_indptr(names[0], edges, table.shape[0])
        host = edges.cpu()
        longest = int(host.diff().max()) if host.numel() > 1 else 0
        return Tables(
            self._moved(names[0], edges), self._moved(names[1], lens.flatten()), table, int(host[-1]), longest
        )

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | torch.Tensor | None = None,
        bmm2_scale: float | torch.Tensor | None = None,
    ) -> Any:
        """Attention of one layer over the planned batch.

        Args:
            q_nope, q_pe: [tokens, num_heads, head_dim_ckv] and [tokens, num_heads, head_dim_kpe].
            ckv_cache, kpe_cache: [max_num_pages, page_size, head_dim_ckv] and [max_num_pages, page_size, head_dim_kpe].
                Adjacent views of one tensor are used without a copy. Other tensors are joined by a copy in each run, of
                the batch's pages or of the whole cache, whichever is smaller.
            query, kv_cache: pairs of these tensors, or joined tensors [tokens, num_heads, head_dim_ckv + head_dim_kpe]
                and [max_num_pages, page_size, head_dim_ckv + head_dim_kpe].
            out, lse: tensors for the results.
            return_lse: also return the log-sum-exp, which includes sinks.
            return_lse_base_on_e: whether the log-sum-exp has base e instead of base 2.
            ckv_scale, kpe_scale: the scales of an 8-bit cache.
            sinks: f32 [num_heads].
            profiler_buffer: without effect.
            kv_len, page_table, o_scale, ckv_scale_arr, skip_softmax_threshold_scale_factor, bmm1_scale, bmm2_scale:
                must be None.

        Returns:
            out [tokens, num_heads, head_dim_ckv], and with `return_lse` also lse f32 [tokens, num_heads].
        """
        del profiler_buffer
        self._expect_plan()
        expect_default("plan() has the tables of the batch", kv_len=kv_len, page_table=page_table)
        expect_default("results are not 8-bit", o_scale=o_scale)
        expect_default("an 8-bit cache has one scale per tensor", ckv_scale_arr=ckv_scale_arr)
        expect_default(NOT_APPROXIMATE, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        expect_default("ckv_scale and kpe_scale scale the cache", bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale)
        q = self._parts("query", query, ("q_nope", q_nope), ("q_pe", q_pe), self._dtypes.q)
        cache = self._parts("kv_cache", kv_cache, ("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache), self._dtypes.kv)
        tables = self._tables
        assert tables is not None
        num_heads, head_dim_ckv, head_dim_kpe, page_size = self._sizes
        if ckv_scale is None and kpe_scale is None and self._dtypes.kv in FP8 and self._dtypes.q not in FP8:
            raise InvalidInput("expected ckv_scale and kpe_scale with an 8-bit cache, got None")
        if (ckv_scale is not None or kpe_scale is not None) and self._dtypes.kv not in FP8:
            raise InvalidInput(f"expected ckv_scale and kpe_scale only with an 8-bit cache, got {self._dtypes.kv}")
        _expect_scales(ckv_scale, kpe_scale)
        joined = q if isinstance(q, torch.Tensor) else torch.cat(q, -1)
        expect_planned(
            **{
                "query.shape": (list(joined.shape), [tables.num_q_tokens, num_heads, head_dim_ckv + head_dim_kpe]),
                "page_size of kv_cache": ((cache if isinstance(cache, torch.Tensor) else cache[0]).shape[1], page_size),
            }
        )
        pages, table = _joined_pages(cache, tables)
        with named_as(NAMES):
            result, natural = ragged_mla_attention(
                joined, pages.unsqueeze(2), tables.kv_lens, table, tables.cu_q_lens, max_q_len=tables.max_q_len,
                d_v=head_dim_ckv, sm_scale=self._sm_scale, causal=self._causal, sinks=sinks, kv_scale=ckv_scale,
                rope_scale=None if kpe_scale == ckv_scale else kpe_scale,  # one scale is faster than two
                q_scale=1.0 if joined.dtype in FP8 else None, out=out, out_dtype=self._dtypes.out,
                return_lse=True, cache_format="plain",
            )  # fmt: skip
        return with_lse(result, natural, sinks, lse, return_lse, "ln" if return_lse_base_on_e else "log2")

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _parts(self, name: str, whole: Any, left: Any, right: Any, dtype: torch.dtype) -> Parts:
        """The queries or the cache, of the planned dtype: one tensor, or a pair of a latent and a rotary tensor."""
        pair = (left[1], right[1])
        if whole is None:
            if pair[0] is None or pair[1] is None:
                raise TypeError(f"expected {name}, or {left[0]} and {right[0]}, got None")
            whole = pair
        elif pair != (None, None):
            raise TypeError(f"expected {name}, or {left[0]} and {right[0]}, got both")
        if isinstance(whole, torch.Tensor):
            expect_planned(**{f"{name}.dtype": (whole.dtype, dtype)})
            return whole
        if not isinstance(whole, tuple) or len(whole) != 2 or not all(isinstance(x, torch.Tensor) for x in whole):
            raise TypeError(f"expected {name} to be a tensor or a pair of them, got {type(whole).__name__}")
        for (part_name, _), part in zip((left, right), whole, strict=True):
            expect_planned(**{f"{part_name}.dtype": (part.dtype, dtype)})
        return whole


def _expect_scales(ckv_scale: Any, kpe_scale: Any) -> None:
    """Check that both scales are numbers or both are None."""
    if (ckv_scale is None) != (kpe_scale is None):
        raise InvalidInput(f"expected ckv_scale and kpe_scale together, got {ckv_scale!r} and {kpe_scale!r}")
    for name, scale in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
        if scale is not None and not is_number(scale):
            raise TypeError(f"expected {name} to be a number, got {type(scale).__name__}")


def _joined_pages(cache: Parts, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages `[P, G, D]`, whose rows are a latent and then its rotary key, and the block table for these pages."""
    if isinstance(cache, torch.Tensor):
        return cache, tables.page_indices
    left, right = cache
    if not right.shape[-1]:
        return left, tables.page_indices
    shape = (*left.shape[:-1], left.shape[-1] + right.shape[-1])
    offset = right.storage_offset() - left.storage_offset()
    if (
        left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and left.stride() == right.stride()
        and left.shape[:-1] == right.shape[:-1]
        and offset == left.shape[-1]
        and left.stride(-1) == 1
    ):
        return left.as_strided(shape, left.stride(), left.storage_offset()), tables.page_indices
    table = tables.page_indices
    if table.numel() >= len(left):  # copy the cache
        return torch.cat((left, right), -1), table
    entries = table.flatten().long()  # copy the batch's pages
    known = (entries >= 0) & (entries < len(left))
    copied = entries.clamp(0, len(left) - 1)
    places = torch.arange(table.numel(), dtype=torch.int32, device=table.device)
    return torch.cat((left[copied], right[copied]), -1), torch.where(known, places, -1).view_as(table)
