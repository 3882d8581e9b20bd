"""Stand-ins for the functions that vLLM's sparse models call by name, with the signatures of vLLM 0.32.

Functions that need a GPU or a compiled library raise an error here. A test that passes has therefore called ours.
`vllm_fakes.py` installs the stand-ins.
"""

from types import SimpleNamespace
from typing import Any

import torch

from tests import vllm_m3_fakes as m3
from tests import vllm_qsa_fakes as qsa
from tests import vllm_v4_fakes as v4


class Missing(Exception):
    """The error of a call to one of vLLM's own kernels, which do not exist here."""


def fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits):
    raise Missing


def fp8_fp4_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits, indices=None
):
    raise Missing


def get_paged_mqa_logits_metadata(context_lens, block_size, num_sms, indices=None):
    raise Missing


def indexer_k_quant_and_cache(k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype):
    raise Missing


def cp_gather_indexer_k_quant_cache(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens):
    raise Missing


def top_k_per_row_prefill(
    logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens
):
    raise Missing


def top_k_per_row_decode(logits, next_n, seq_lens, raw_topk_indices, num_rows, stride0, stride1, topk_tokens):
    raise Missing


def fp8_paged_mqa_logits_cpu(q_fp8, kvcache_fp8, weight, seq_lens, page_table, block_size, max_seq_len):
    raise Missing


def topk_transform_512_cpu(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices=None):
    raise Missing


def get_indexer_topk(backend):
    raise Missing


def indexer_topk(logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len):
    """A stand-in for the result of `get_indexer_topk`: the bound method `SparseIndexerTopk.forward`."""


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    raise Missing


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
):  # fmt: skip
    raise Missing


def get_mla_metadata():
    raise Missing


class FlashMLASchedMeta:
    pass


def per_token_group_quant_fp8(
    x, group_size, eps=1e-10, dtype=None, column_major_scales=False, tma_aligned_scales=False, out_q=None,
    use_ue8m0=None,
):  # fmt: skip
    raise Missing


def fused_indexer_q_rope_quant(positions, q, cos_sin_cache, weights, softmax_scale, head_scale, is_neox):
    raise Missing


def build_prefill_chunk_metadata(
    query_start_loc, uncompressed_seq_lens, cu_compressed_seq_lens, row_start_cu_compressed_seq_lens, token_to_seq,
    cu_compressed_seq_len_ks, cu_compressed_seq_len_ke, query_slice_start, query_slice_stop, DCP_RANK, DCP_WORLD,
    DCP_INTERLEAVE, num_reqs, COMPRESS_RATIO,
):  # fmt: skip
    raise Missing


def has_deep_gemm():
    return False


def current_workspace_manager():
    raise AssertionError("not initialised")


def contents(device: str) -> dict[str, dict[str, Any]]:
    """The contents of vLLM's modules by name, for a device: "cpu", "sm90" and the like, or "gfx1200" and the like."""

    class Platform:
        def is_cpu(self) -> bool:
            return device == "cpu"

        def is_cuda(self) -> bool:
            return device.startswith("sm")

        def is_rocm(self) -> bool:
            return device.startswith("gfx")

        def has_device_capability(self, capability: int) -> bool:
            return self.is_cuda() and int(device[2:]) >= capability

        def fp8_dtype(self) -> torch.dtype:
            return torch.float8_e4m3fnuz if device.startswith("gfx94") else torch.float8_e4m3fn

        def support_deep_gemm(self) -> bool:
            return device in ("sm90", "sm100", "sm120")

    class CpuPlatform:
        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            if attn_selector_config.use_sparse:
                raise NotImplementedError("Sparse Attention is not supported on CPU.")
            return "vllm.CPU_ATTN"

        @classmethod
        def check_and_update_config(cls, vllm_config):
            vllm_config.scheduler_config.enable_chunked_prefill = False
            vllm_config.scheduler_config.max_num_batched_tokens = 4096
            vllm_config.cache_config.enable_prefix_caching = False
            vllm_config.cache_config.block_size = 16

    class RotaryEmbedding:
        def forward_native(self, positions, query, key=None):
            return "native"

        def forward_cpu(self, positions, query, key=None):
            return "operator"

    class SparseAttnIndexer:
        def __init__(self, skip_k_cache_insert: bool) -> None:
            self.skip_k_cache_insert = skip_k_cache_insert

        def forward_cuda(self, hidden_states, q_quant, k, weights):
            return "by names"

        def forward_cpu(self, hidden_states, q_quant, k, weights):
            return "cpu"

        def forward_hip(self, hidden_states, q_quant, k, weights):
            return "hip"

    class DeepseekV32IndexerBackend:
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec=None):
            return [64]

    class ModelRegistry:
        models = dict.fromkeys(
            (
                "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV4ForCausalLM", "LlamaForCausalLM",
                *m3.ARCHITECTURES, *qsa.ARCHITECTURES,
            ),
            "vllm",
        )  # fmt: skip

        @classmethod
        def register_model(cls, model_arch, model_cls):
            cls.models[model_arch] = model_cls

    manager: list[Any] = []
    logits = {
        one.__name__: one for one in (fp8_fp4_mqa_logits, fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata)
    }
    aiter = SimpleNamespace(is_enabled=lambda: False, is_rdna_aiter_enabled=lambda: False)
    return {
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.platforms.cpu": {"CpuPlatform": CpuPlatform},
        "vllm.model_executor.layers.rotary_embedding.base": {"RotaryEmbedding": RotaryEmbedding},
        "vllm.platforms.rocm": {"on_gfx11": lambda: device.startswith("gfx11"), "on_gfx950": lambda: False},
        "vllm._aiter_ops": {"rocm_aiter_ops": aiter},
        "vllm.triton_utils": {"HAS_TRITON": device != "cpu"},
        "vllm.utils.import_utils": {"has_deep_gemm": has_deep_gemm},
        "vllm.utils.deep_gemm": logits,
        "vllm._custom_ops": {
            one.__name__: one
            for one in (
                indexer_k_quant_and_cache, cp_gather_indexer_k_quant_cache, top_k_per_row_prefill,
                top_k_per_row_decode, fp8_paged_mqa_logits_cpu, topk_transform_512_cpu,
            )
        },
        "vllm.v1.attention.ops.flashmla": {
            "flash_mla_sparse_fwd": flash_mla_sparse_fwd,
            "flash_mla_with_kvcache": flash_mla_with_kvcache,
            "get_mla_metadata": get_mla_metadata,
            "FlashMLASchedMeta": FlashMLASchedMeta,
            "is_flashmla_sparse_supported": lambda: (device in ("sm90", "sm100"), None),
        },
        "vllm.model_executor.layers.indexer_topk": {"get_indexer_topk": get_indexer_topk},
        "vllm.model_executor.layers.quantization.utils.fp8_utils": {
            "per_token_group_quant_fp8": per_token_group_quant_fp8
        },
        "vllm.model_executor.layers.sparse_attn_indexer": {
            "SparseAttnIndexer": SparseAttnIndexer,
            "fused_indexer_q_rope_quant": fused_indexer_q_rope_quant,
            "has_deep_gemm": has_deep_gemm,
            "get_indexer_topk": get_indexer_topk,
            "fp8_fp4_mqa_logits": fp8_fp4_mqa_logits,
        },
        "vllm.v1.attention.backends.mla.indexer": {
            "DeepseekV32IndexerBackend": DeepseekV32IndexerBackend,
            "_BUILD_PREFILL_CHUNK_METADATA_KERNEL": build_prefill_chunk_metadata,
        },
        "vllm.v1.worker.workspace": {
            "current_workspace_manager": lambda: manager[-1],
            "is_workspace_manager_initialized": lambda: bool(manager),
            "init_workspace_manager": manager.append,
        },
        "vllm.model_executor.models.registry": {"ModelRegistry": ModelRegistry},
        "vllm.model_executor.models.deepseek_v2": {
            "DeepseekV3ForCausalLM": "generic V3.2",
            "GlmMoeDsaForCausalLM": "generic GLM",
            "per_token_group_quant_fp8": per_token_group_quant_fp8,
        },
        "vllm.models.deepseek_v32": {
            "DeepseekV32ForCausalLM": "NVIDIA's V3.2",
            "GlmMoeDsaForCausalLM": "NVIDIA's GLM",
        },
    } | v4.contents()  # fmt: skip
