"""Stand-ins for what vLLM's DeepSeek-V4 calls by name on a CPU, with vLLM's signatures as of 0.32."""

from typing import Any


class Missing(Exception):
    """A Triton kernel of vLLM was called, where there is no compiler for it."""


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


# The names of vLLM's kernels, where those of the functions above are others.
KERNELS = {
    "_COMPRESSED_SLOT_MAPPING_KERNEL": compressed_slot_mapping,
    "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL": compute_swa_indices_and_lens,
    "_COMPUTE_PREFILL_METADATA_KERNEL": compute_prefill_metadata,
    "compute_token_to_req_indices": compute_token_to_req_indices,
    "forward_mqa": forward_mqa,
}


def contents() -> dict[str, dict[str, Any]]:
    """The modules of a vLLM for CPUs."""

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
