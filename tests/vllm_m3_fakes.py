"""Stand-ins for the parts of MiniMax M3 in vLLM, with the names and signatures of vLLM 0.32; see `vllm_fakes.py`."""

import enum
from types import SimpleNamespace
from typing import Any

import torch

ARCHITECTURES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")


class Missing(Exception):
    """The error of a call to one of vLLM's kernels, which need a GPU."""


class Activation(enum.Enum):
    """A stand-in for `MoEActivation`."""

    SILU = "silu"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"


def fused_minimax_m3_qknorm_rope_kv_insert(
    qkv, q_norm_weight, k_norm_weight, cos_sin_cache, positions, num_heads, num_kv_heads, rotary_dim, eps,
    index_q_norm_weight=None, index_k_norm_weight=None, num_index_heads=0, slot_mapping=None, index_slot_mapping=None,
    kv_cache=None, index_cache=None, block_size=0, q_out=None, index_q_out=None, kv_cache_dtype="auto",
    skip_index_branch=False, q_fp8_out=None, q_fp8_scale=1.0, kv_k_scale=None, kv_v_scale=None,
):  # fmt: skip
    raise Missing


def select_main_backend_and_impl_cls(*, topk_blocks, kv_cache_dtype, num_kv_heads, emits_sparse_block_table=False):
    raise Missing


def select_indexer_impl_cls(*, topk_blocks, indexer_kv_dtype="bf16"):
    raise Missing


class MiniMAXGemmaRMSNorm:
    def forward(self, x, residual=None):
        raise Missing


class CPUUnquantizedExperts:
    """A stand-in that records its calls in `calls`."""

    def __init__(self, **config: Any) -> None:
        self.moe_config, self.calls = SimpleNamespace(**config), []

    @staticmethod
    def _supports_activation(activation):
        return activation is Activation.SILU

    def _pad_moe_intermediate(self, layer):
        self.calls.append("padded")

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *rest):
        self.calls.append(activation)


class CPURouter:
    use_grouped_topk = False
    custom_routing_function = e_score_correction_bias = None
    routed_scaling_factor = 1.0

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        return "vLLM's"


class MiniMaxM3SparseImpl:
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, kv_cache_dtype="auto", *, topk_blocks, sparse_block_size,
        msa_decode_backend="triton",
    ):  # fmt: skip
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype, self.block_size = kv_cache_dtype, sparse_block_size

    def forward(self, layer, query, kv_cache, output, *, query_fp8=None):
        raise NotImplementedError


class MiniMaxM3IndexerImpl(torch.nn.Module):
    indexer_backend_cls: Any = None

    def __init__(
        self, *, num_kv_heads, scale, topk_blocks, sparse_block_size, num_index_heads, index_head_dim, prefix,
        init_blocks=0, local_blocks=0, score_type="max", cache_config=None, indexer_kv_dtype="bf16",
        topk_indices_buffer=None,
    ):  # fmt: skip
        super().__init__()
        self.topk_blocks, self.block_size = topk_blocks, sparse_block_size
        self.init_blocks, self.local_blocks = init_blocks, local_blocks
        self.num_index_heads, self.index_head_dim = num_index_heads, index_head_dim
        self.topk_indices_buffer = topk_indices_buffer
        self.index_cache = SimpleNamespace(prefix=f"{prefix}.index_cache", kv_cache=torch.tensor([]))

    def forward(self, index_query):
        raise NotImplementedError


def _anew(cls: type) -> type:
    """A copy of a class. Methods that are replaced in the copy stay unchanged in the stand-in."""
    return type(cls.__name__, (), {name: one for name, one in vars(cls).items() if name not in _OF_EVERY_CLASS})


_OF_EVERY_CLASS = ("__dict__", "__weakref__")


def contents(backend: type) -> dict[str, dict[str, Any]]:
    """The contents of vLLM's modules by name. `backend` is the stand-in for `AttentionBackend`."""

    class MiniMaxM3SparseBackend(backend):
        @classmethod
        def get_supported_head_sizes(cls):
            return [128]

        @classmethod
        def is_sparse(cls):
            return True

    class MiniMaxM3IndexerBackend(MiniMaxM3SparseBackend):
        pass

    home = "vllm.models.minimax_m3"
    return {
        f"{home}.common.sparse_attention": {
            "MiniMaxM3SparseBackend": MiniMaxM3SparseBackend,
            "MiniMaxM3SparseImpl": MiniMaxM3SparseImpl,
            "select_main_backend_and_impl_cls": select_main_backend_and_impl_cls,
        },
        f"{home}.common.indexer": {
            "MiniMaxM3IndexerBackend": MiniMaxM3IndexerBackend,
            "MiniMaxM3IndexerImpl": MiniMaxM3IndexerImpl,
            "select_indexer_impl_cls": select_indexer_impl_cls,
        },
        f"{home}.nvidia.model": {
            "MiniMAXGemmaRMSNorm": _anew(MiniMAXGemmaRMSNorm),
            "select_main_backend_and_impl_cls": select_main_backend_and_impl_cls,
        },
        home: {name: f"vLLM's {name}" for name in ARCHITECTURES},
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe": {"CPUUnquantizedExperts": _anew(CPUUnquantizedExperts)},
        "vllm.model_executor.layers.fused_moe.router.cpu_router": {"CPURouter": _anew(CPURouter)},
        "vllm._custom_ops": {"fused_minimax_m3_qknorm_rope_kv_insert": fused_minimax_m3_qknorm_rope_kv_insert},
    }
