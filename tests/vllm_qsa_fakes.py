"""Stand-ins for the functions that Qwen4's sparse attention in vLLM calls by name, with the signatures of vLLM 0.32."""

from typing import Any

ARCHITECTURES = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
_HOME = "vllm.models.qwen4_exp"


class Missing(Exception):
    """The error of a call to one of vLLM's kernels, which need a GPU."""


def qsa_select_paged_decode(
    q, k_cache, page_table, visible_blocks, token_topk, compress_ratio, decode_query_len, block_indices
):
    raise Missing


def qsa_select_paged_prefill(
    q, k_cache, page_table, query_start_loc, visible_blocks, token_topk, compress_ratio, max_query_len, block_indices,
    max_seq_len,
):  # fmt: skip
    raise Missing


def qsa_sparse_paged_attention(
    q, k_cache, v_cache, logical_indices, block_table, token_to_req, use_prefill_config, out=None, k_scale=None,
    v_scale=None, *, output_gate,
):  # fmt: skip
    raise Missing


def contents() -> dict[str, dict[str, Any]]:
    selects = (qsa_select_paged_decode, qsa_select_paged_prefill)
    return {
        f"{_HOME}.nvidia.ops.qsa_indexer": {one.__name__: one for one in selects},
        f"{_HOME}.nvidia.ops.qsa": {"qsa_sparse_paged_attention": qsa_sparse_paged_attention},
        _HOME: {name: f"vLLM's {name}" for name in ARCHITECTURES},
    }
