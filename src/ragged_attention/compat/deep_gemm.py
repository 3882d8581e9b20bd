"""DeepGEMM's logits of the lightning indexer, with its argument names, order and conventions, on every device.

`import ragged_attention.compat.deep_gemm as deep_gemm` runs code written for these functions of the `deep_gemm`
package, under their older names `fp8_*` and their newer names `fp8_fp4_*`. FP4 inputs are refused. DeepGEMM's limits on
devices, head counts, head sizes and page sizes do not hold here. Logits that DeepGEMM leaves unwritten are -inf here,
with or without `clean_logits`.
"""

import torch

from ragged_attention.calls import dtype_name
from ragged_attention.compat.names import named_as
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import indexer_logits

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]

Quantized = tuple[torch.Tensor, torch.Tensor | None]  # values and their scales
# Our arguments' names and DeepGEMM's, for error messages.
PACKED_NAMES = {
    "keys": "kv[0]", "key_scale": "kv[1]", "starts": "cu_seq_len_k_start", "stops": "cu_seq_len_k_end",
    "max_keys": "max_seqlen_k",
}  # fmt: skip
PAGED_NAMES = {"keys": "kv_cache", "page_indices": "block_table", "kv_lens": "context_lens"}


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """The indexer's logits of each query for the keys in its range.

    Args:
        q: [seq_len, num_heads, head_dim] float8_e4m3fn; bfloat16, float16 and float32 as well.
        kv: the keys [seq_len_kv, head_dim], float8_e4m3fn or q's dtype, and their scales f32 [seq_len_kv].
        weights: f32 [seq_len, num_heads], which include the scales of q; 16-bit weights are widened.
        cu_seq_len_k_start, cu_seq_len_k_end: i32 [seq_len], the range of each query.
        clean_logits: without effect, because logits outside a range are always -inf. With `max_seqlen_k` it has to be
            False, as in DeepGEMM.
        max_seqlen_k: if not 0, the number of columns of the result. Each row then begins at the start of its query's
            range.

    Returns:
        f32 [seq_len, seq_len_kv], or [seq_len, max_seqlen_k].
    """
    return fp8_fp4_mqa_logits((q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def fp8_fp4_mqa_logits(
    q: Quantized,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fp8_mqa_logits` under its newer name; q is a pair: the values, and None instead of their scales.

    Args:
        logits_dtype: float32 or bfloat16, to which float32 logits are rounded.
        schedule_meta: without effect, because the work is divided by shapes.

    The other arguments and the result are those of `fp8_mqa_logits`. FP4 values, and scales of q, are refused.
    """
    del schedule_meta
    values = _fp8(q)
    if clean_logits and max_seqlen_k:
        raise InvalidInput(f"expected clean_logits=False with max_seqlen_k, got True with {max_seqlen_k=}")
    keys, scale = kv
    with named_as(PACKED_NAMES):
        logits = indexer_logits(
            values, keys, _wide(weights), key_scale=scale, starts=cu_seq_len_k_start, stops=cu_seq_len_k_end,
            relative=max_seqlen_k > 0, max_keys=max_seqlen_k or None,
        )  # fmt: skip
    return _as(logits, logits_dtype)


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """A `schedule_meta` for `fp8_paged_mqa_logits`: i32 [num_sms + 1, 2] of zeros, because it has no effect here."""
    del block_kv, indices
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The indexer's logits of each query of a decode step for the keys in its sequence's pages.

    Args:
        q: [batch_size, next_n, num_heads, head_dim] float8_e4m3fn; bfloat16, float16 and float32 as well.
        kv_cache: uint8 [num_blocks, block_kv, 1, head_dim + 4], the e4m3 values of all keys of a page, then their
            float32 scales, as `write_indexer_cache` writes them.
        weights: f32 [batch_size * next_n, num_heads]; 16-bit weights are widened.
        context_lens: i32 [batch_size, next_n], the number of keys that each query sees; or [batch_size], the length of
            each sequence, whose last `next_n` tokens are the queries.
        block_table: i32 [batch_size, blocks].
        schedule_meta: without effect.
        max_context_len: number of columns of the result.
        clean_logits: without effect, because logits of hidden keys are always -inf.
        indices: without effect; in DeepGEMM it shows which rows share a sequence's pages.

    Returns:
        f32 [batch_size * next_n, max_context_len].
    """
    return fp8_fp4_paged_mqa_logits(
        (q, None), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits,
        indices=indices,
    )  # fmt: skip


def fp8_fp4_paged_mqa_logits(
    q: Quantized,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fp8_paged_mqa_logits` under its newer name; q is a pair: the values, and None instead of their scales.

    Args:
        logits_dtype: float32 or bfloat16, to which float32 logits are rounded.

    The other arguments and the result are those of `fp8_paged_mqa_logits`. FP4 values, and scales of q, are refused.
    """
    del schedule_meta, clean_logits, indices
    values = _fp8(q)
    if values.dim() != 4:
        got = list(values.shape)
        raise InvalidInput(f"expected q.shape to be [batch_size, next_n, num_heads, head_dim], got {got}")
    batch_size, next_n, *_ = values.shape
    if context_lens.dim() not in (1, 2) or tuple(context_lens.shape) != (batch_size, next_n)[: context_lens.dim()]:
        raise InvalidInput(
            f"expected context_lens.shape to be [{batch_size=}] or [{batch_size=}, {next_n=}], "
            f"got {list(context_lens.shape)}"
        )
    queries = next_n
    if context_lens.dim() == 2:  # treat each query as a sequence with the pages of its sequence
        context_lens, block_table, queries = context_lens.flatten(), block_table.repeat_interleave(next_n, 0), 1
    edges = torch.arange(len(context_lens) + 1, dtype=torch.int32, device=values.device) * queries
    with named_as(PAGED_NAMES):
        logits = indexer_logits(
            values.flatten(0, 1), kv_cache, _wide(weights), page_indices=block_table, kv_lens=context_lens,
            cu_q_lens=edges,
        )  # fmt: skip
    missing = max_context_len - logits.shape[1]
    logits = torch.nn.functional.pad(logits, (0, max(missing, 0)), value=-torch.inf)
    return _as(logits[:, :max_context_len], logits_dtype)


def _fp8(q: Quantized) -> torch.Tensor:
    """The values of a pair without scales."""
    values, scales = q
    if dtype_name(values) in ("int8", "uint8"):
        raise InvalidInput(f"expected q in FP8, got {dtype_name(values)}: FP4 queries and keys are not supported")
    if scales is not None:
        raise InvalidInput("expected q without scales, which belong in weights, got scales")
    return values


def _wide(weights: torch.Tensor) -> torch.Tensor:
    return weights.float() if dtype_name(weights) in ("bfloat16", "float16") else weights


def _as(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype not in (torch.float32, torch.bfloat16):
        raise InvalidInput(f"expected logits_dtype to be float32 or bfloat16, got {dtype}")
    return logits.to(dtype)
