"""Stand-ins for the functions that DeepSeek-V4 in vLLM calls by name on a CPU, with the signatures of vLLM 0.32."""

from typing import Any


class Missing(Exception):
    """The error of a call to one of vLLM's Triton kernels, which need a compiler."""


def compute_token_to_req_indices(query_start_loc, out, num_mapped_tokens, num_tokens):
    raise Missing


def compressed_slot_mapping(
    compressed_slot_mapping, slot_mapping, query_start_loc, seq_lens, block_table, block_size, compress_ratio,
    dcp_world_size, cp_interleave,
):  # fmt: skip
    raise Missing


def compute_swa_indices_and_lens(
    swa_indices, swa_lens, window_size, index_width, left_visible, right_visible, query_start_loc, seq_lens,
    token_to_req_indices, is_valid_token, block_table, block_size, replay_start, *, num_tokens, token_offset,
    has_image=False,
):  # fmt: skip
    raise Missing


def compute_prefill_metadata(
    prefill_gather_lens, seq_lens, query_start_loc, replay_start, num_prefills, num_decodes, window_size
):
    raise Missing


def forward_mqa(self, q, kv, positions, output):
    raise Missing


# The names in vLLM of the functions above. Three of them are kernels with other names.
KERNELS = {
    "_COMPRESSED_SLOT_MAPPING_KERNEL": compressed_slot_mapping,
    "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL": compute_swa_indices_and_lens,
    "_COMPUTE_PREFILL_METADATA_KERNEL": compute_prefill_metadata,
    "compute_token_to_req_indices": compute_token_to_req_indices,
    "forward_mqa": forward_mqa,
}


def contents() -> dict[str, dict[str, Any]]:
    """The contents of vLLM's modules by name, for CPUs."""

    class DeepseekV4CPUAttention:
        pass

    class DeepseekV4CPUSparseSWAMetadataBuilder:
        def build_tile_scheduler(self, num_decode_tokens):
            return {"c4a": None}

    DeepseekV4CPUAttention.forward_mqa = forward_mqa  # type: ignore[attr-defined]
    sliding = ("_COMPUTE_SWA_INDICES_AND_LENS_KERNEL", "_COMPUTE_PREFILL_METADATA_KERNEL")
    return {
        "vllm.forward_context": {"get_forward_context": lambda: None},
        "vllm.v1.attention.ops.metadata": {"compute_token_to_req_indices": compute_token_to_req_indices},
        "vllm.v1.attention.backends.mla.compressor_utils": {"_COMPRESSED_SLOT_MAPPING_KERNEL": compressed_slot_mapping},
        "vllm.v1.attention.backends.mla.sparse_swa": {name: KERNELS[name] for name in sliding},
        "vllm.models.deepseek_v4.cpu.cpu_mla": {
            "DeepseekV4CPUSparseSWAMetadataBuilder": DeepseekV4CPUSparseSWAMetadataBuilder
        },
        "vllm.models.deepseek_v4.cpu.cpu_sparse": {"DeepseekV4CPUAttention": DeepseekV4CPUAttention},
        "vllm.models.deepseek_v4": {"DeepseekV4ForCausalLM": "V4 for CPUs"},
    }
