"""FlashInfer's attention under block-sparse matrices, run with lists of the key blocks that each query sees.

The matrix has a row for each query and a column for each key. Each of its blocks is one or several blocks of our
operations, whose size is a power of two. A block that is listed twice counts once; FlashInfer leaves this undefined.
"""

import functools
import math
from typing import Any

import torch

from ragged_attention.compat.flashinfer._arguments import expect_default, expect_planned, with_lse
from ragged_attention.compat.flashinfer._attention import Blocks, Rows
from ragged_attention.compat.flashinfer._tables import block_table, expect_indptr
from ragged_attention.compat.flashinfer._wrapper import Planned, planned_dtypes
from ragged_attention.errors import InvalidInput

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]

LARGEST_BLOCK = 256
NOT_PACKED = "give `mask` instead"
NOT_BSR = "`indptr` and `indices` give the blocks"
NOT_CAUSAL = "FlashInfer counts positions among the keys that are selected"
NOT_POSITIONS = "lists of keys have no positions"


class _Sparse(Planned):
    """The base of both wrappers: the planned lists, and the attention of one sequence with these lists."""

    _sizes: tuple[int, int, int, int, int]  # M, N, H, K, D
    _blocks: Blocks
    _rows: Rows

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        """Keep the device of the workspace; `backend` is without effect."""
        del backend
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph=False)

    def _keep(self, blocks: Blocks, sizes: tuple[int, int, int, int, int], **settings: Any) -> None:
        """Keep a plan's lists and settings; a setting `x` becomes the attribute `_x`."""
        num_rows, num_columns = sizes[:2]
        of_rows, of_columns = (
            torch.tensor([0, count], dtype=torch.int32, device=self.device) for count in (num_rows, num_columns)
        )
        self._blocks, self._sizes = blocks, sizes
        self._rows = Rows(of_rows, of_columns, num_rows, num_rows, num_columns)
        self._override(**settings)
        self._is_planned = True

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
        """Out [M, H, D] and lse [M, H] of packed rows, to base e."""
        self._expect_plan()
        expect_default(NOT_POSITIONS, "NONE", pos_encoding_mode=self._pos_encoding_mode)
        num_rows, num_columns, num_qo_heads, num_kv_heads, head_dim = self._sizes
        self._expect_rows(q, num_rows, num_qo_heads, head_dim)
        for name, array in (("k", k), ("v", v)):
            expect_planned(
                **{
                    f"{name}.shape": (list(array.shape[:2]), [num_columns, num_kv_heads]),
                    f"{name}.dtype": (array.dtype, self._dtypes.kv),
                }
            )
        return self._attention(blocks=self._blocks, **given).over_rows(q, k, v, self._rows)


class BlockSparseAttentionWrapper(_Sparse):
    """Attention under a matrix whose blocks have one size, and which all heads share."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = "float16",
        non_blocking: bool = True,
        block_mask: torch.Tensor | None = None,
        kv_block_lens: torch.Tensor | None = None,
        q2k_indices: torch.Tensor | None = None,
        q2k_num: torch.Tensor | None = None,
        kv_splits: Any = None,
        use_clc: bool | None = None,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Keep the blocks of a matrix and the settings of its attention.

        Args:
            indptr, indices: [ceil(M / R) + 1] and [nnz], the block columns in each block row.
            M, N: the numbers of queries and of keys; N is a multiple of C.
            R, C: the numbers of queries and of keys in a block.
            mask: bool [nnz, R, C], the visible entries within each block; lists then hold single keys.
            causal, pos_encoding_mode, packed_mask, block_mask, kv_block_lens, q2k_indices, q2k_num, q_scale, k_scale,
                v_scale: not supported.
            logits_soft_cap, sm_scale, q_data_type, kv_data_type, o_data_type: as in the other wrappers.
            use_fp16_qk_reduction, rope_scale, rope_theta, non_blocking, kv_splits, use_clc: without effect.
        """
        del use_fp16_qk_reduction, non_blocking, kv_splits, use_clc
        expect_default(NOT_CAUSAL, False, causal=causal)
        expect_default(NOT_POSITIONS, "NONE", pos_encoding_mode=pos_encoding_mode)
        expect_default(NOT_PACKED, packed_mask=packed_mask)
        expect_default(NOT_BSR, block_mask=block_mask, kv_block_lens=kv_block_lens, q2k_indices=q2k_indices,
                       q2k_num=q2k_num)  # fmt: skip
        expect_default("`run` takes scales", q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        if R < 1 or C < 1 or N % C:
            raise InvalidInput(f"expected R >= 1 and C >= 1, which divides N, got {R=}, {C=}, {N=}")
        expect_indptr("indptr", indptr, -(-M // R))
        # For each block row, the columns of its blocks and their places in `indices`, then -1.
        places = torch.arange(len(indices), dtype=torch.int32, device=self.device)
        rows = block_table(indptr, self._moved("indices", indices)), block_table(indptr, places)
        token = torch.arange(M, device=self.device)
        columns, places = (each[token // R] for each in rows)
        if mask is None:
            lists, size = _divided(columns, C)
        else:
            if mask.shape != (len(indices), R, C) or mask.dtype != torch.bool:
                got = f"{mask.dtype} {list(mask.shape)}"
                raise InvalidInput(f"expected mask to be torch.bool {[len(indices), R, C]}, got {got}")
            lists, size = _divided(columns, C, 1)
            if len(indices):
                is_visible = mask.to(self.device)[places.clamp(min=0).long(), token[:, None] % R]
                lists = lists.masked_fill(~is_visible.flatten(1), -1)
        self._dtypes = planned_dtypes(q_data_type, kv_data_type, o_data_type)
        self._keep(
            Blocks(lists[:, None], size), (M, N, num_qo_heads, num_kv_heads, head_dim),
            pos_encoding_mode=pos_encoding_mode, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """The planned attention.

        Args:
            q: [M, num_qo_heads, head_dim].
            k, v: [N, num_kv_heads, head_dim].
            scale_q, scale_k, scale_v: scales per head of 8-bit tensors.
            out, lse: tensors for the results.
            return_lse: return (out, lse), with lse f32 [M, num_qo_heads] to base 2.
            enable_pdl: without effect.
        """
        del enable_pdl
        scales: dict[str, Any] = dict(q_scales=(scale_q,), k_scales=(scale_k,), v_scales=(scale_v,))
        result, natural = self._attended(q, k, v, out=out, **scales)
        return with_lse(result, natural, None, lse, return_lse)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """`run` with settings that replace those of the plan; deprecated by FlashInfer."""
        del use_fp16_qk_reduction
        self._override(pos_encoding_mode=pos_encoding_mode, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
                       rope_scale=rope_scale, rope_theta=rope_theta)  # fmt: skip
        return self.run(q, k, v, scale_q, scale_k, scale_v)


class VariableBlockSparseAttentionWrapper(_Sparse):
    """Attention under matrices whose blocks have any sizes, one matrix for each KV head.

    The lists hold single keys if a block column has an odd size. In this worst case, they take four bytes for each
    visible entry of the matrix.
    """

    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        """Keep the blocks of a matrix for each KV head, and the settings of its attention.

        Args:
            block_mask_map: bool [num_kv_heads, MB, NB], the visible blocks.
            block_row_sz: [num_kv_heads, MB], the number of queries in each row of blocks.
            block_col_sz: [num_kv_heads, NB], the number of keys in each column of blocks.
            causal, pos_encoding_mode: not supported.
            logits_soft_cap, sm_scale, q_data_type, kv_data_type: as in the other wrappers.
            use_fp16_qk_reduction, rope_scale, rope_theta, non_blocking: without effect.
        """
        del use_fp16_qk_reduction, non_blocking
        expect_default(NOT_CAUSAL, False, causal=causal)
        expect_default(NOT_POSITIONS, "NONE", pos_encoding_mode=pos_encoding_mode)
        rows, columns = (
            self._moved(name, each).cpu().long() for name, each in (("block_row_sz", block_row_sz),
                                                                    ("block_col_sz", block_col_sz))
        )  # fmt: skip
        shape = (num_kv_heads, rows.shape[-1], columns.shape[-1])
        if rows.shape != shape[:2] or columns.shape != shape[::2] or block_mask_map.shape != shape:
            got = [list(each.shape) for each in (block_mask_map, rows, columns)]
            raise InvalidInput(
                "expected the shapes of block_mask_map, block_row_sz and block_col_sz to be [num_kv_heads, MB, NB], "
                f"[num_kv_heads, MB] and [num_kv_heads, NB] with {num_kv_heads=}, got {got}"
            )
        sums = [sorted(set(each.sum(1).tolist())) for each in (rows, columns)]
        if max(map(len, sums)) > 1:
            raise InvalidInput(f"expected block_row_sz and block_col_sz to have one sum for all heads, got {sums}")
        num_rows, num_columns = (each[0] if each else 0 for each in sums)
        size = _largest_power(functools.reduce(math.gcd, columns.flatten().tolist(), 0))
        lists = [
            _listed(present.repeat_interleave(of_columns // size, 1))[
                torch.arange(len(of_rows)).repeat_interleave(of_rows)
            ]
            for present, of_rows, of_columns in zip(block_mask_map.cpu().bool(), rows, columns, strict=True)
        ]
        width = max((each.shape[1] for each in lists), default=0)
        padded = [torch.nn.functional.pad(each, (0, width - each.shape[1]), value=-1) for each in lists]
        self._dtypes = planned_dtypes(q_data_type, kv_data_type, q_data_type)
        self._keep(
            Blocks(torch.stack(padded, 1).to(self.device), size),
            (num_rows, num_columns, num_qo_heads, num_kv_heads, head_dim), pos_encoding_mode=pos_encoding_mode,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """The planned attention.

        Args:
            q: [num_qo_heads, qo_len, head_dim].
            k, v: [num_kv_heads, kv_len, head_dim].
            out, lse: not supported; in FlashInfer, they are grouped by KV heads.
            return_lse: return (out, lse), with lse f32 [num_qo_heads, qo_len] to base 2.
            enable_pdl: without effect.

        Returns:
            [num_qo_heads, qo_len, head_dim].
        """
        del enable_pdl
        expect_default("results are new tensors", out=out, lse=lse)
        result, natural = self._attended(*(each.transpose(0, 1) for each in (q, k, v)))
        return with_lse(result.transpose(0, 1).contiguous(), natural, None, None, return_lse, lse_layout="HN")

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """`run` with settings that replace those of the plan; deprecated by FlashInfer."""
        del use_fp16_qk_reduction
        self._override(pos_encoding_mode=pos_encoding_mode, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
                       rope_scale=rope_scale, rope_theta=rope_theta)  # fmt: skip
        return self.run(q, k, v)


def _largest_power(number: int) -> int:
    """The largest power of two that divides a number and that a block may have; 1 for 0."""
    return min(number & -number, LARGEST_BLOCK) or 1


def _divided(columns: torch.Tensor, size: int, part: int | None = None) -> tuple[torch.Tensor, int]:
    """Lists [M, W] of blocks of `size`, as lists of blocks of a power of two, `part`, and this power."""
    part = _largest_power(size) if part is None else part
    parts = torch.arange(size // part, dtype=torch.int32, device=columns.device)
    divided = columns[:, :, None] * (size // part) + parts
    return divided.masked_fill(columns[:, :, None] < 0, -1).flatten(1), part


def _listed(present: torch.Tensor) -> torch.Tensor:
    """The true columns of each row, i32 [rows, maximum number per row], then -1."""
    counts = present.sum(1)
    order = (~present).int().argsort(dim=1, stable=True)[:, : int(counts.max()) if counts.numel() else 0]
    return order.int().masked_fill(torch.arange(order.shape[1]) >= counts[:, None], -1)
