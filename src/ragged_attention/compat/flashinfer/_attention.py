"""One attention call, run by our operations with the settings of FlashInfer's wrappers and functions."""

import contextlib
import dataclasses
import functools
from typing import Any

import torch

from ragged_attention.compat.flashinfer._arguments import (
    FP8,
    NVFP4,
    PACKED_NAMES,
    PAGED_NAMES,
    SLOT_NAMES,
    Scales,
    alibi_slopes,
    product,
    scaled,
    soft_cap_of,
    window_of,
)
from ragged_attention.compat.flashinfer._masks import Mask
from ragged_attention.compat.flashinfer._tables import Tables, block_table
from ragged_attention.compat.names import named_as
from ragged_attention.config import use_backend
from ragged_attention.errors import Unsupported
from ragged_attention.torch import ragged_paged_attention, varlen_attention

Results = tuple[torch.Tensor, torch.Tensor]
ScalePages = tuple[torch.Tensor | None, torch.Tensor | None]  # the scale pages of keys and those of values


def needs_pages(q_dtype: torch.dtype, k_dtype: torch.dtype) -> bool:
    """Whether packed keys have to be treated as pages of one position: `varlen_attention` refuses these dtypes."""
    return q_dtype in FP8 or k_dtype in (*FP8, NVFP4)


@dataclasses.dataclass
class Rows:
    """A batch of packed queries and packed keys."""

    cu_q_lens: torch.Tensor  # i32 [S + 1]
    cu_kv_lens: torch.Tensor  # i32 [S + 1]
    num_q_tokens: int
    max_q_len: int | None
    max_kv_len: int | None

    @functools.cached_property
    def tables(self) -> Tables:
        """The batch with each packed key as a page of one position."""
        slots = torch.arange(int(self.cu_kv_lens[-1]), dtype=torch.int32, device=self.cu_kv_lens.device)
        return Tables(
            self.cu_q_lens, self.cu_kv_lens.diff().int(), block_table(self.cu_kv_lens, slots), self.num_q_tokens,
            self.max_q_len,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Lists of the blocks of keys that queries see."""

    selected: torch.Tensor  # i32 [T, K or 1, N]
    block_size: int


@dataclasses.dataclass(frozen=True)
class Attention:
    """The settings of an attention call, in FlashInfer's terms. Its methods return out and lse as our operations do."""

    out_dtype: torch.dtype
    sm_scale: float | None
    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float | None = None
    pos_encoding_mode: str = "NONE"
    mask: Mask | None = None
    sinks: torch.Tensor | None = None
    q_scales: Scales = ()
    k_scales: Scales = ()
    v_scales: Scales = ()
    out: torch.Tensor | None = None
    is_batch_invariant: bool = False
    blocks: Blocks | None = None

    def over_pages(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, tables: Tables, names: Any = None,
        scale_pages: ScalePages = (None, None),
    ) -> Results:  # fmt: skip
        """Attention over a paged cache `[P, G, K, D]`, `[P, G, K, D_v]`, with scale pages if it is nvfp4."""
        slopes = self._slopes(q)
        common: dict[str, Any] = scaled(q, self.sm_scale, self.q_scales, self.k_scales) | dict(
            v_scale=product("v_scale", *self.v_scales), soft_cap=soft_cap_of(self.logits_soft_cap), sinks=self.sinks,
            out_dtype=self.out_dtype, out=self.out, return_lse=True, **self._lists(),
        )  # fmt: skip
        if k_pages.dtype == torch.int8 and scale_pages[0] is None and common["k_scale"] is None:
            common["k_scale"] = 1.0  # `sm_scale` includes scales that are numbers
        if v_pages.dtype == torch.int8 and scale_pages[1] is None and common["v_scale"] is None:
            common["v_scale"] = 1.0
        if self.mask is not None and self.mask.draft is None:
            if slopes is not None:
                raise Unsupported("expected pos_encoding_mode='NONE' with a custom mask, got 'ALIBI'")
            caches, tables = self._seen_rows((k_pages, v_pages, *scale_pages), tables)
            k_pages, v_pages, scale_pages = caches[0], caches[1], (caches[2], caches[3])
            visible: dict[str, Any] = dict(causal=False)
        else:
            draft_mask = None if self.mask is None else self.mask.draft
            causal = self.causal or draft_mask is not None
            visible = dict(causal=causal, draft_mask=draft_mask, sliding_window=window_of(self.window_left))
        with named_as(PAGED_NAMES if names is None else names), self._division():
            result, lse = ragged_paged_attention(
                kv_pages=(k_pages, v_pages), kv_lens=tables.kv_lens, page_indices=tables.page_indices,
                cu_q_lens=tables.cu_q_lens, max_q_len=tables.max_q_len, alibi_slopes=slopes,
                k_scale_pages=scale_pages[0], v_scale_pages=scale_pages[1], **visible, **common,
            )  # fmt: skip
        return result, _counted_from_first_query(lse, slopes, tables.cu_q_lens, tables.kv_lens)

    def over_rows(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, scale_pages: ScalePages = (None, None)
    ) -> Results:
        """Attention of packed queries `[T, H, D]` to packed keys and values `[T_k, K, D]`, `[T_k, K, D_v]`.

        `scale_pages` has the scales of the keys and values, in the form of pages of one position.
        """
        scales = (*self.q_scales, *self.k_scales, *self.v_scales)
        in_pages = needs_pages(q.dtype, k.dtype)
        if self.mask is not None or in_pages or any(isinstance(scale, torch.Tensor) for scale in scales):
            return self.over_pages(q, k.unsqueeze(1), v.unsqueeze(1), rows.tables, SLOT_NAMES, scale_pages)
        slopes = self._slopes(q)
        common = scaled(q, self.sm_scale, self.q_scales, self.k_scales)
        out, dtype = self.out, q.dtype
        if self.out_dtype != dtype:
            common["q"], k, v, out = common["q"].float(), k.float(), v.float(), None
        with named_as(PACKED_NAMES), self._division():
            result, lse = varlen_attention(
                common["q"], k, v, rows.cu_q_lens, rows.cu_kv_lens, max_q_len=rows.max_q_len,
                max_kv_len=rows.max_kv_len, sm_scale=common["sm_scale"], causal=self.causal,
                sliding_window=window_of(self.window_left), soft_cap=soft_cap_of(self.logits_soft_cap),
                sinks=self.sinks, alibi_slopes=slopes, out=out, return_lse=True, **self._lists(),
            )  # fmt: skip
        lse = _counted_from_first_query(lse, slopes, rows.cu_q_lens, rows.cu_kv_lens.diff())
        v_scale = product("v_scale", *self.v_scales)
        if v_scale not in (None, 1):
            result = result.mul_(v_scale) if out is not None else result * v_scale
        if self.out_dtype != dtype:
            result = result.to(self.out_dtype) if self.out is None else self.out.copy_(result)
        return result, lse

    def _lists(self) -> dict[str, Any]:
        return {} if self.blocks is None else vars(self.blocks)

    def _slopes(self, q: torch.Tensor) -> torch.Tensor | None:
        slopes = alibi_slopes(self.pos_encoding_mode, q.shape[1], q.device)
        if slopes is None:
            return None
        if soft_cap_of(self.logits_soft_cap) is not None:  # FlashInfer's cap includes biases
            raise Unsupported(f"expected logits_soft_cap=None with ALIBI, got {self.logits_soft_cap}")
        if self.sinks is not None:  # a sink's weight depends on the position from which biases count
            raise Unsupported("expected sinks=None with pos_encoding_mode='ALIBI', got a tensor")
        return slopes

    def _division(self) -> contextlib.AbstractContextManager[Any]:
        """A batch-invariant context if the plan has FlashInfer's fixed splits, which make results batch-invariant."""
        return use_backend(batch_invariant=True) if self.is_batch_invariant else contextlib.nullcontext()

    def _seen_rows(self, caches: tuple[torch.Tensor | None, ...], tables: Tables) -> tuple[list[Any], Tables]:
        """A copy of the batch's cache in pages of one position, and tables that list each query's visible keys."""
        mask = self.mask
        assert mask is not None
        assert caches[0] is not None
        num_pages, page_size = caches[0].shape[:2]
        table = tables.page_indices.long()
        is_page = (table >= 0) & (table < num_pages)
        copied = table.clamp(0, max(num_pages - 1, 0)).flatten()
        positions, counts = mask.lists(self.window_left)
        columns = (positions // page_size).clamp(max=table.shape[1] - 1)
        slots = (mask.sequences[:, None] * table.shape[1]) * page_size + positions
        slots = torch.where(is_page[mask.sequences[:, None], columns], slots, -1).int()
        num_tokens = slots.shape[0]
        edges = torch.arange(num_tokens + 1, dtype=torch.int32, device=slots.device)
        rows = [None if pages is None else pages[copied].flatten(0, 1).unsqueeze(1) for pages in caches]
        return rows, Tables(edges, counts, slots, num_tokens, 1)


def _counted_from_first_query(
    lse: torch.Tensor, slopes: torch.Tensor | None, cu_q_lens: torch.Tensor, kv_lens: torch.Tensor
) -> torch.Tensor:
    """The lse [T, H] with ALiBi biases that count from the request's first query, as in FlashInfer."""
    if slopes is None or len(kv_lens) == 0:
        return lse
    tokens = torch.arange(lse.shape[0], dtype=cu_q_lens.dtype, device=lse.device)
    owners = torch.searchsorted(cu_q_lens[1:], tokens, right=True).clamp_(max=len(kv_lens) - 1)
    return lse + slopes * (kv_lens - cu_q_lens.diff())[owners, None]
