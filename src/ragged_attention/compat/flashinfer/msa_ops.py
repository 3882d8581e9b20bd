"""FlashInfer's MSA, the sparse attention of MiniMax M3: block scores, block selection, attention to selected blocks.

A block is 128 positions. Cases that FlashInfer leaves undefined behave as in our operations: lists may be in any order,
a block that is listed twice counts once, and an entry that is no block of the sequence selects nothing.
"""

from typing import Any

import torch

from ragged_attention.compat.flashinfer._arguments import FP8, expect_default, product, stored
from ragged_attention.compat.flashinfer._attention import Rows, needs_pages
from ragged_attention.compat.names import named_as
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.torch import block_scores, ragged_paged_attention, top_k_blocks, varlen_attention

__all__ = [
    "SUPPORTS_PACKED_KV",
    "msa_proxy_score",
    "msa_sparse_attention",
    "msa_sparse_decode_attention",
    "msa_topk_select",
    "supports_packed_kv",
]

BLOCK_SIZE = 128
SUPPORTS_PACKED_KV = True
NAMES = {
    "selected": "q2k_indices", "keys": "k", "kv_pages": "k, v", "k_pages": "k", "v_pages": "v",
    "sm_scale": "softmax_scale", "page_indices": "page_table", "kv_lens": "seqused_k", "cu_q_lens": "cu_seqlens_q",
    "cu_kv_lens": "cu_seqlens_k",
}  # fmt: skip
NOT_NVFP4 = "keys and values of 4 bits are not supported"


def supports_packed_kv(device: torch.device | str) -> bool:
    """Whether keys and values may be views of pages that hold both: True, on every device."""
    del device
    return SUPPORTS_PACKED_KV


def msa_proxy_score(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    causal: bool = True,
    max_seqlen_q: int | None = None,
    max_k_tiles: int | None = None,
    output: torch.Tensor | None = None,
    reduce_heads: bool = False,
    q_offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """The largest unscaled product of each query with a key of each 128-key block; -inf if it sees no key of the block.

    Args:
        q: [total_q, num_qo_heads, D], float32, float16, bfloat16 or e4m3. D is a multiple of 16 up to 256.
        k: packed [total_k, num_kv_heads, D] with `cu_seqlens_k`, or pages [num_pages, num_kv_heads, page_size, D] with
            `page_table` and `seqused_k`; of q's dtype or e4m3.
        cu_seqlens_q, cu_seqlens_k: i32 [batch_size + 1].
        page_table: i32 [batch_size, max_pages].
        seqused_k: i32 [batch_size], the lengths of the sequences in pages.
        causal: a query sees no key after its own position. Without `q_offset`, a sequence's last query is at the
            position of its last key.
        max_seqlen_q: without effect.
        max_k_tiles: the number of blocks in the result; by default that of the longest sequence, whose length is read
            back.
        output: a tensor for the result.
        reduce_heads: whether to return the maximum over heads, as one head.
        q_offset: the position of each sequence's first query, a number or i32 [batch_size].

    Returns:
        f32 [num_qo_heads or 1, max_k_tiles, total_q].
    """
    del max_seqlen_q
    max_k_tiles = output.shape[1] if max_k_tiles is None and output is not None and output.dim() == 3 else max_k_tiles
    lens = _kv_lens(k, cu_seqlens_k, page_table, seqused_k)
    if max_k_tiles is None:
        max_k_tiles = -(-int(lens.max()) // BLOCK_SIZE) if len(lens) else 0
    tokens, is_plain = q.shape[0], causal and q_offset is None
    with named_as(NAMES):
        if page_table is None:
            assert cu_seqlens_k is not None
            rows, seen = _seen(tokens, cu_seqlens_q, lens, causal, q_offset)
            starts = cu_seqlens_k.to(q.device)[rows] if len(lens) else seen
            scores = block_scores(
                q, k, block_size=BLOCK_SIZE, starts=starts.int(), stops=(starts + seen).int(),
                max_keys=max(max_k_tiles, 1) * BLOCK_SIZE,
            )  # fmt: skip
        elif is_plain:
            scores = block_scores(
                q, k.transpose(1, 2), block_size=BLOCK_SIZE, page_indices=page_table, kv_lens=lens,
                cu_q_lens=cu_seqlens_q.to(q.device),
            )  # fmt: skip
        else:  # each query becomes a sequence of its visible keys
            rows, seen = _seen(tokens, cu_seqlens_q, lens, causal, q_offset)
            table = page_table[rows] if len(lens) else page_table.new_zeros(tokens, 1)
            scores = block_scores(
                q, k.transpose(1, 2), block_size=BLOCK_SIZE, page_indices=table, kv_lens=seen,
                cu_q_lens=torch.arange(tokens + 1, dtype=torch.int32, device=q.device),
            )  # fmt: skip
    scores = scores[..., :max_k_tiles]
    scores = torch.nn.functional.pad(scores, (0, max_k_tiles - scores.shape[2]), value=-torch.inf)
    scores = scores.amax(1, keepdim=True) if reduce_heads else scores
    return stored("output", output, scores.permute(1, 2, 0).contiguous())


def msa_topk_select(
    max_score: torch.Tensor,
    topk: int,
    num_valid_pages: int | torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
) -> torch.Tensor:
    """The blocks with the largest scores of each query and head, in ascending order, then -1.

    Args:
        max_score: f32 [num_qo_heads, max_k_tiles, total_qo_len].
        topk: from 1 to 4096; 16 in FlashInfer.
        num_valid_pages: the number of blocks to select from, for all queries, or i32 [total_qo_len] for each, clamped
            to [0, max_k_tiles].
        output: a tensor for the result.
        force_begin_blocks, force_end_blocks: the numbers of first and of last blocks, among those to select from, that
            are always selected, whatever their scores; together at most `topk`.

    Returns:
        i32 [total_qo_len, num_qo_heads, topk].

    If scores are equal, the block with the larger index is selected. FlashInfer selects either block, and its kernels
    for many blocks do not compare the two lowest bits of a score. If fewer than `topk` blocks have a score above -inf,
    FlashInfer also selects blocks with -inf. Here the list is padded with -1 instead, and NaN counts as -inf.
    """
    if max_score.dim() != 3:
        raise InvalidInput(
            f"expected max_score.shape to be [num_qo_heads, max_k_tiles, total_qo_len], got {list(max_score.shape)}"
        )
    _, tiles, tokens = max_score.shape
    begin, end = force_begin_blocks, force_end_blocks
    if begin < 0 or end < 0 or begin + end > topk:
        raise InvalidInput(
            f"expected force_begin_blocks and force_end_blocks from 0 on with a sum of at most {topk=}, got {begin}, "
            f"{end}"
        )
    valid = _valid_pages(num_valid_pages, tiles, tokens, begin + end).to(max_score.device)
    block = torch.arange(tiles, device=max_score.device)[:, None]
    is_forced = (block < begin) | (block >= (valid - end).clamp(min=begin))
    scores = torch.where(is_forced, torch.inf, max_score.clamp(max=torch.finfo(torch.float32).max))
    scores = scores.masked_fill(block >= valid, -torch.inf)
    with named_as({"scores": "max_score", "top_k": "topk"}):
        lists = top_k_blocks(scores.permute(2, 0, 1).contiguous(), topk)
    return stored("output", output, lists)


def msa_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q2k_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: int | torch.Tensor | None = None,
    return_temperature_lse: bool = False,
    lse_temperature_scale: float = 1.0,
    workspace: Any = None,
) -> Any:
    """Attention of packed queries to the blocks of 128 keys that each query selects.

    Args:
        q: [total_q, num_qo_heads, D], float32, float16 or bfloat16.
        k, v: packed [total_k, num_kv_heads, D] with `cu_seqlens_k`, or pages [num_pages, num_kv_heads, page_size, D]
            with `page_table` and `seqused_k`; of q's dtype or e4m3. Pages may be views of pages that hold both k and v.
        q2k_indices: i32 [num_kv_heads, total_q, topk]. Lists may be in any order, with -1 as padding anywhere. A block
            that is named twice counts once, as FlashInfer defines it, although FlashInfer's kernels need ascending
            lists.
        cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, causal, q_offset: as in `msa_proxy_score`.
        softmax_scale: default D ** -0.5.
        return_softmax_lse: return (out, lse), with lse to base e.
        k_scale, v_scale, k_global_scale: not supported, because they are for 4-bit keys and values.
        v_global_scale: a factor on the result.
        return_temperature_lse: return (out, lse, lse_t). `lse_t` is the lse of logits times `lse_temperature_scale`; a
            second attention call computes it.
        workspace: without effect.

    Returns:
        out [total_q, num_qo_heads, D] of q's dtype, and f32 [total_q, num_qo_heads] for each lse. A query that sees no
        key of its blocks gets out 0 and lse -inf.
    """
    del workspace
    expect_default(NOT_NVFP4, k_scale=k_scale, v_scale=v_scale, k_global_scale=k_global_scale)
    common: dict[str, Any] = dict(
        cu_seqlens_k=cu_seqlens_k, page_table=page_table, seqused_k=seqused_k, causal=causal, q_offset=q_offset,
        v_global_scale=v_global_scale,
    )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _attended(q, k, v, q2k_indices, cu_seqlens_q, softmax_scale=scale, **common)
    if return_temperature_lse:
        warm = scale * lse_temperature_scale
        return out, lse, _attended(q, k, v, q2k_indices, cu_seqlens_q, softmax_scale=warm, **common)[1]
    return (out, lse) if return_softmax_lse else out


def msa_sparse_decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q2k_indices: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqlen_q: int = 1,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: int | torch.Tensor | None = None,
    partial_dtype: torch.dtype | None = None,
    force_fused: bool | None = None,
    workspace: Any = None,
    out: torch.Tensor | None = None,
) -> Any:
    """Attention of `seqlen_q` queries per sequence to the blocks of 128 keys that each query selects.

    Args:
        q: [batch_size * seqlen_q, num_qo_heads, D], also e4m3.
        seqlen_q: the number of queries of each sequence.
        partial_dtype, force_fused, workspace: without effect.
        out: a tensor for the result.

    The other arguments are those of `msa_sparse_attention`.

    Returns:
        out of q's dtype, bfloat16 for e4m3 queries, and with `return_softmax_lse` lse f32 [total_q, num_qo_heads].
    """
    del partial_dtype, force_fused, workspace
    expect_default(NOT_NVFP4, k_scale=k_scale, v_scale=v_scale, k_global_scale=k_global_scale)
    if seqlen_q < 1 or q.shape[0] % seqlen_q:
        raise InvalidInput(f"expected q.shape[0] to be a multiple of seqlen_q, got {q.shape[0]}, {seqlen_q=}")
    edges = torch.arange(q.shape[0] // seqlen_q + 1, dtype=torch.int32, device=q.device) * seqlen_q
    result, lse = _attended(
        q.bfloat16() if q.dtype in FP8 else q, k, v, q2k_indices, edges, cu_seqlens_k=cu_seqlens_k,
        page_table=page_table, seqused_k=seqused_k, causal=causal, q_offset=q_offset, v_global_scale=v_global_scale,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, max_q_len=seqlen_q,
    )  # fmt: skip
    result = stored("out", out, result)
    return (result, lse) if return_softmax_lse else result


def _attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q2k_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    cu_seqlens_k: torch.Tensor | None,
    page_table: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    causal: bool,
    q_offset: int | torch.Tensor | None,
    softmax_scale: float,
    v_global_scale: float | None,
    max_q_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out, and lse to base e, over pages or packed rows."""
    for name, array in (("k", k), ("v", v)):
        if array.dtype == torch.uint8:
            raise Unsupported(f"expected {name}.dtype to be q.dtype or float8_e4m3fn, got torch.uint8: {NOT_NVFP4}")
    if q2k_indices.dim() != 3:
        got = list(q2k_indices.shape)
        raise InvalidInput(f"expected q2k_indices.shape to be [num_kv_heads, total_q, topk], got {got}")
    lens = _kv_lens(k, cu_seqlens_k, page_table, seqused_k)
    edges = cu_seqlens_q.to(q.device)
    seen: dict[str, Any] = dict(causal=causal)
    if causal and q_offset is not None:
        _, stops = _seen(q.shape[0], edges, lens, causal, q_offset)
        seen = dict(key_ranges=torch.stack([torch.zeros_like(stops), stops], 1)[:, None])
    common: dict[str, Any] = dict(
        sm_scale=softmax_scale, selected=q2k_indices.transpose(0, 1), block_size=BLOCK_SIZE, max_q_len=max_q_len,
        return_lse=True, **seen,
    )  # fmt: skip
    with named_as(NAMES):
        if page_table is not None:
            return ragged_paged_attention(
                q, (k.transpose(1, 2), v.transpose(1, 2)), lens, page_table, edges,
                v_scale=product("v_global_scale", v_global_scale), **common,
            )  # fmt: skip
        assert cu_seqlens_k is not None
        rows = Rows(edges, cu_seqlens_k.to(q.device), q.shape[0], max_q_len, None)
        if needs_pages(q.dtype, k.dtype):  # treat packed rows as pages of one position
            return ragged_paged_attention(
                q, (k.unsqueeze(1), v.unsqueeze(1)), lens, rows.tables.page_indices, edges,
                v_scale=product("v_global_scale", v_global_scale), **common,
            )  # fmt: skip
        out, lse = varlen_attention(q, k, v, edges, rows.cu_kv_lens, **common)
    return (out if v_global_scale is None else out * v_global_scale), lse


def _kv_lens(
    k: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    page_table: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> torch.Tensor:
    """The lengths of the sequences, i32 [batch_size], on the device of the keys."""
    if page_table is None:
        if cu_seqlens_k is None:
            raise InvalidInput("expected cu_seqlens_k without page_table, got None")
        if k.dim() != 3:
            raise InvalidInput(f"expected k.shape to be [total_k, num_kv_heads, D], got {list(k.shape)}")
        return cu_seqlens_k.diff().int().to(k.device)
    if seqused_k is None:
        raise InvalidInput("expected seqused_k with page_table, got None")
    if k.dim() != 4:
        raise InvalidInput(f"expected k.shape to be [num_pages, num_kv_heads, page_size, D], got {list(k.shape)}")
    return seqused_k.to(k.device)


def _seen(
    tokens: int, cu_seqlens_q: torch.Tensor, lens: torch.Tensor, causal: bool, q_offset: int | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each query, and the number of keys, from the sequence's first on, that it sees, i32 [tokens]."""
    edges = cu_seqlens_q.to(lens.device)
    token = torch.arange(tokens, dtype=edges.dtype, device=lens.device)
    if not len(lens):
        return token, torch.zeros_like(token)
    rows = torch.searchsorted(edges[1:], token, right=True)
    is_live, rows = rows < len(lens), rows.clamp(max=len(lens) - 1)
    stops = lens[rows]
    if causal:
        first = lens - edges.diff() if q_offset is None else q_offset
        first = first.to(lens.device)[rows] if isinstance(first, torch.Tensor) else first
        stops = torch.minimum(stops, (token - edges[rows] + first + 1).clamp(min=0))
    return rows, torch.where(is_live, stops, 0).int()


def _valid_pages(given: int | torch.Tensor | None, tiles: int, tokens: int, forced: int) -> torch.Tensor:
    """The number of blocks that each query may select from, [tokens or 1]."""
    if isinstance(given, torch.Tensor):
        if given.dim() != 1 or given.dtype != torch.int32 or given.shape[0] != tokens:
            raise InvalidInput(
                f"expected num_valid_pages to be 1D int32 with total_qo_len={tokens} entries, got {given.dtype} "
                f"{list(given.shape)}"
            )
        return given.clamp(0, tiles)
    given = tiles if given is None else given
    if not max(forced, 1) <= given <= tiles:
        raise InvalidInput(
            f"expected num_valid_pages from 1 on, no fewer than the {forced} blocks that are always selected, and at "
            f"most max_k_tiles={tiles}, got {given}"
        )
    return torch.tensor([given])
