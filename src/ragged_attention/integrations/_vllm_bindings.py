"""Binds functions that vLLM's sparse models call by name to our operations, if vLLM has no kernel for the device.

vLLM calls the indexer's kernels by names: functions of `vllm.utils.deep_gemm` and `vllm._custom_ops`, and classes that
choose a path by the platform. `bind()` replaces them in the module that defines each and in those that have imported
it, and `unbind()` restores the originals. `BINDINGS` lists all of them, and docs/vllm.md explains why each is needed.
Everything else remains vLLM's: its scheduler, the indexer's metadata, the chunks of a prompt, its layers.

vLLM's model registry finds sparse models in this module, so nothing is imported or bound before one is loaded.
"""

import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ragged_attention.compat import deep_gemm, flash_mla
from ragged_attention.errors import Unsupported
from ragged_attention.integrations import _vllm_experts, _vllm_indexer, _vllm_qsa, _vllm_v4
from ragged_attention.torch import page_indices_to_slots, top_k_indices, write_indexer_cache

_E4M3_MAX = 448.0
_SCALE_BYTES = 4  # bytes of the float32 scale of each key in the indexer's cache
_GENERIC = "vllm.model_executor.models.deepseek_v2"
_M3 = "vllm.models.minimax_m3"
# The architectures that bind names when vLLM loads them: the vendor-neutral class, and vLLM's own choice of module.
_LATENT_MODELS = {
    "DeepseekV32ForCausalLM": ((_GENERIC, "DeepseekV3ForCausalLM"), "vllm.models.deepseek_v32"),
    "GlmMoeDsaForCausalLM": ((_GENERIC, "GlmMoeDsaForCausalLM"), "vllm.models.deepseek_v32"),
    "DeepseekV4ForCausalLM": (("vllm.models.deepseek_v4", "DeepseekV4ForCausalLM"), "vllm.models.deepseek_v4"),
}
_M3_MODELS = {
    name: ((_M3, name), _M3) for name in ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
}
_QSA = "vllm.models.qwen4_exp"
_QSA_MODELS = {name: ((_QSA, name), _QSA) for name in ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")}
MODELS = _LATENT_MODELS | _M3_MODELS | _QSA_MODELS
_V4 = "DeepseekV4ForCausalLM"


# The indexer's logits (vllm.utils.deep_gemm)


def fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    clean_logits: bool,
) -> torch.Tensor:
    """Logits f32 [M, N] of queries [M, H, D] for packed keys [N, D]; those outside a query's range are -inf."""
    return deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits)


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_size: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """A schedule of zeros, because our operations need none."""
    return deep_gemm.get_paged_mqa_logits_metadata(context_lens, block_size, num_sms, indices)


def fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor,
    max_model_len: int,
    clean_logits: bool,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits f32 [B * next_n, max_model_len] of queries [B, next_n, H, D] for the pages of their sequences."""
    return deep_gemm.fp8_fp4_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits,
        indices=indices,
    )  # fmt: skip


# The indexer's cache and its selection (vllm._custom_ops)


def indexer_k_quant_and_cache(
    k: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, quant_block_size: int, kv_cache_dtype: str
) -> None:
    """Quantise keys [T, D] to e4m3 with a scale for each, and write them into pages [P, G, D + 4]."""
    if quant_block_size != k.shape[1]:
        raise Unsupported(f"expected quant_block_size to be the keys' size, {k.shape[1]}, got {quant_block_size}")
    write_indexer_cache(k, kv_cache.unsqueeze(2), slot_mapping, power_of_two=kv_cache_dtype == "ue8m0")


def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """Copy the cached keys of all requests, one after another, into `dst_k` [N, D] and `dst_scale` [N, 4].

    Rows after the last key are not written. Nothing waits for the device.
    """
    pages, page_size, width = kv_cache.shape
    head_dim = width - _SCALE_BYTES
    # A page holds the values of all its keys, then their scales.
    gap = kv_cache.stride(0)
    values = kv_cache.as_strided((pages, page_size, head_dim), (gap, head_dim, 1))
    start = kv_cache.storage_offset() + page_size * head_dim
    scales = kv_cache.as_strided((pages, page_size, _SCALE_BYTES), (gap, _SCALE_BYTES, 1), start)
    token = torch.arange(dst_k.shape[0], device=kv_cache.device)
    request = torch.searchsorted(cu_seq_lens[1:], token, right=True).clamp_(max=block_table.shape[0] - 1)
    position = (token - cu_seq_lens[request]).clamp_(max=block_table.shape[1] * page_size - 1)
    page = block_table[request, position // page_size].long()
    is_key = ((token < cu_seq_lens[-1]) & (page >= 0) & (page < pages)).unsqueeze(1)
    page, offset = page.clamp(0, pages - 1), position % page_size
    for target, source in ((dst_k.view(torch.uint8), values), (dst_scale.view(torch.uint8), scales)):
        target.copy_(torch.where(is_key, source[page, offset], target))


def top_k_per_row_prefill(
    logits: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """Write the columns of each row's largest logits, counted from the start of its range, then -1."""
    columns = top_k_indices(logits[:num_rows], topk_tokens, cu_seqlen_ks[:num_rows], cu_seqlen_ke[:num_rows])
    raw_topk_indices[:num_rows] = torch.where(columns < 0, -1, columns - cu_seqlen_ks[:num_rows].unsqueeze(1))


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """Write the positions of each query's largest logits, then -1.

    Args:
        seq_lens: i32 [B, next_n], the number of keys that each query sees; or i32 [B], the lengths of the sequences,
            whose last tokens are the queries.
    """
    stops = seq_lens.reshape(-1)
    if stops.shape[0] != num_rows:
        query = torch.arange(next_n, dtype=stops.dtype, device=stops.device)
        stops = (stops.unsqueeze(1) - next_n + 1 + query).reshape(-1)
    raw_topk_indices[:num_rows] = top_k_indices(logits[:num_rows], topk_tokens, stops=stops)


def get_indexer_topk(backend: str) -> Callable[..., None]:
    """The function that selects keys in a decode step: ours for every name, where vLLM has several."""
    return _indexer_topk


def _indexer_topk(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    next_n: int,
    topk_indices: torch.Tensor,
    topk_tokens: int,
    max_seq_len: int,
) -> None:
    rows, stride0, stride1 = logits.shape[0], logits.stride(0), logits.stride(1)
    top_k_per_row_decode(logits, next_n, seq_lens, topk_indices, rows, stride0, stride1, topk_tokens)


def fp8_paged_mqa_logits_cpu(
    q_fp8: torch.Tensor,
    kvcache_fp8: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    block_size: int,
    max_seq_len: int,
) -> torch.Tensor:
    """Logits f32 [T, max_seq_len] of queries [T, H, D] for pages whose bytes are rows of `kvcache_fp8`."""
    pages, width = kvcache_fp8.shape[0], q_fp8.shape[-1] + _SCALE_BYTES
    stride = (kvcache_fp8.stride(0), width, width, 1)
    cache = kvcache_fp8.as_strided((pages, block_size, 1, width), stride).view(torch.uint8)
    lens, table = seq_lens.int(), page_table.int()
    logits = deep_gemm.fp8_paged_mqa_logits(q_fp8.unsqueeze(1), cache, weight, lens, table, None, max_seq_len)
    return logits.contiguous()  # vLLM's selection expects this


def topk_transform_512_cpu(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """Write the 512 positions of the largest scores of each row, then -1, and the slots of those positions."""
    positions = top_k_indices(scores, 512, stops=seq_lens.int())
    out_page_indices.copy_(page_indices_to_slots(positions, page_tables.int(), page_size))
    if out_raw_indices is not None:
        out_raw_indices.copy_(positions)


# The indexer's queries


def per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of a row as e4m3 values of x's shape, and their scales f32 [..., groups].

    It does the work of a Triton kernel of vLLM that needs a GPU.
    """
    if column_major_scales or tma_aligned_scales:
        raise Unsupported("expected scales in the order of rows, got column_major_scales or tma_aligned_scales")
    if dtype not in (None, torch.float8_e4m3fn):
        raise Unsupported(f"expected dtype to be float8_e4m3fn, got {dtype}")
    groups = x.float().unflatten(-1, (-1, group_size))
    scales = (groups.abs().amax(-1).clamp(min=eps)) * (1.0 / _E4M3_MAX)
    if use_ue8m0:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scaled = (groups / scales.unsqueeze(-1)).clamp(-_E4M3_MAX, _E4M3_MAX)
    codes = scaled.to(torch.float8_e4m3fn).flatten(-2)
    return (codes if out_q is None else out_q.copy_(codes)), scales


def fused_indexer_q_rope_quant(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantise the indexer's queries [T, H, D], and put their scales into its weights f32 [T, H].

    It does the work of a Triton kernel of vLLM that needs a GPU with conversions of 8-bit floats.
    """
    rotary = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
    head = q[..., :rotary].float()
    first, second = head.chunk(2, dim=-1) if is_neox else (head[..., 0::2], head[..., 1::2])
    turned = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.cat(turned, dim=-1) if is_neox else torch.stack(turned, dim=-1).flatten(-2)
    whole = torch.cat((turned.to(q.dtype), q[..., rotary:]), dim=-1)
    codes, scales = per_token_group_quant_fp8(whole, q.shape[-1], use_ue8m0=True)
    return codes, weights.float() * scales.squeeze(-1) * softmax_scale * head_scale


# The indexer's metadata of a prompt


def build_prefill_chunk_metadata(
    query_start_loc: torch.Tensor,
    uncompressed_seq_lens: torch.Tensor,
    cu_compressed_seq_lens: torch.Tensor,
    row_start_cu_compressed_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    cu_compressed_seq_len_ks: torch.Tensor,
    cu_compressed_seq_len_ke: torch.Tensor,
    query_slice_start: int,
    query_slice_stop: int,
    DCP_RANK: int,
    DCP_WORLD: int,
    DCP_INTERLEAVE: int,
    num_reqs: int,
    COMPRESS_RATIO: int,
) -> None:
    """Write the request of each key of a chunk, and the range of keys that each of the chunk's queries sees.

    It does the work of a Triton kernel of vLLM and has its argument names. Under decode context parallelism the ranges
    refer to this rank's keys. A query that sees no key gets the range (0, 0) instead of an empty range at its request's
    start. vLLM's indexer for CPUs looks up the request at the start, and a start after the last key has no request.
    """
    device = query_start_loc.device
    key = torch.arange(token_to_seq.shape[0], device=device)
    token_to_seq.copy_(torch.searchsorted(cu_compressed_seq_lens[1:], key, right=True))
    query = torch.arange(query_slice_start, query_slice_stop, device=device)
    request = torch.searchsorted(query_start_loc[1:], query, right=True).clamp_(max=num_reqs - 1)
    left = query_start_loc[request + 1] - query  # the number of queries from this one to the request's last
    seen = torch.div(uncompressed_seq_lens[request] - left + 1, COMPRESS_RATIO, rounding_mode="floor")
    if DCP_WORLD > 1:
        whole = seen // DCP_INTERLEAVE // DCP_WORLD * DCP_INTERLEAVE
        rest = seen - whole * DCP_WORLD - DCP_RANK * DCP_INTERLEAVE
        seen = whole + rest.clamp(0, DCP_INTERLEAVE)
    starts = torch.where(seen > 0, row_start_cu_compressed_seq_lens[request], 0)
    cu_compressed_seq_len_ks.copy_(starts)
    cu_compressed_seq_len_ke.copy_(starts + seen)


# Functions that choose by the platform


def _sparse_backend_on_cpu(original: Any) -> Any:
    """Let vLLM's CPU platform choose our sparse attention, for which it would raise an error."""

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_sparse:
            return "ragged_attention.integrations.vllm.RaggedSparseMLABackend"
        return original.__get__(None, cls)(selected_backend, attn_selector_config, num_heads)

    return classmethod(get_attn_backend_cls)


def _config_on_cpu(original: Any) -> Any:
    """Keep chunked prompts and cached prefixes on for latents, which vLLM's CPU platform would turn off.

    That platform also lets a step end within an image whose tokens see one another. GPU platforms forbid this, because
    the computed tokens would never see the rest of the image, and so does this function.
    """

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        original.__get__(None, cls)(vllm_config)
        model = vllm_config.model_config
        if model is not None and set(model.architectures) & set(_LATENT_MODELS):
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = asked
        if model is not None and model.is_mm_prefix_lm and scheduler.is_multimodal_model:
            scheduler.disable_chunked_mm_input = True

    return classmethod(check_and_update_config)


def _rotation_on_cpu(original: Any) -> Any:
    """Use vLLM's rotary embedding in torch: vLLM 0.32's CPU operator is wrong for queries [T, H, D] with H > 1."""

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() == 3:
            return self.forward_native(positions, query, key)
        return original(self, positions, query, key)

    return forward_cpu


def _by_names(original: Any) -> Any:
    """`SparseAttnIndexer.forward_cpu` and `forward_hip` that take vLLM's path for NVIDIA GPUs, which calls by name.

    A model that writes the indexer's cache itself (DeepSeek-V4) keeps vLLM's path, because vLLM has its kernels.
    """

    def forward(
        self: Any, hidden_states: torch.Tensor, q_quant: Any, k: torch.Tensor | None, weights: torch.Tensor
    ) -> Any:
        if self.skip_k_cache_insert:
            return original(self, hidden_states, q_quant, k, weights)
        return self.forward_cuda(hidden_states, q_quant, k, weights)

    return forward


def _block_sizes(original: Any) -> Any:
    """Report page sizes in multiples of 16, which vLLM's CPU platform uses for latents. Our kernels take any size."""
    multiple_of = importlib.import_module("vllm.v1.attention.backend").MultipleOf
    return staticmethod(lambda kv_cache_spec=None: [multiple_of(16)])


def _workspace_of_cpu(original: Any) -> Any:
    """Set up vLLM's workspace manager on first use. GPU workers have one, but the CPU worker does not."""
    home = importlib.import_module(_WORKSPACE)

    def current_workspace_manager() -> Any:
        if not home.is_workspace_manager_initialized():
            home.init_workspace_manager(torch.device("cpu"))
        return original()

    return current_workspace_manager


@dataclasses.dataclass(frozen=True)
class Binding:
    """A name of vLLM's with its replacement, and the platforms on which it is replaced."""

    owner: str  # a module, or a module:Class
    name: str
    ours: Any
    lacking: Callable[[Any], bool]  # whether vLLM's platform lacks its own
    is_kernel: bool = True  # replaced on every device if the user requests our kernels
    wraps: bool = False  # whether `ours` is a function from the original to the replacement
    for_importers: bool = True  # whether to replace it also in modules of vLLM that imported it


class Standin:
    """A replacement of one of vLLM's Triton kernels. vLLM also asks kernels to compile in advance."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def register_warmup(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because nothing needs compilation."""


def _lacks_operator(library: str, name: str) -> Callable[[Any], bool]:
    def lacking(platform: Any) -> bool:
        importlib.import_module("vllm._custom_ops")  # this import loads the library
        return not hasattr(getattr(torch.ops, library), name)

    return lacking


def _lacks_cpu_operator(name: str) -> Callable[[Any], bool]:
    lacking = _lacks_operator("_C", name)
    return lambda platform: platform.is_cpu() and lacking(platform)


def _lacks_triton(platform: Any) -> bool:
    return not importlib.import_module("vllm.triton_utils").HAS_TRITON


def _is_cpu(platform: Any) -> bool:
    return platform.is_cpu()


def _lacks_cuda_indexer(platform: Any) -> bool:
    return platform.is_cuda() and _vllm_indexer.lacking(platform)


def _lacks_rocm_indexer(platform: Any) -> bool:
    return platform.is_rocm() and _vllm_indexer.lacking(platform)


def _cannot_convert_e4m3(platform: Any) -> bool:
    """Triton's NVIDIA backend has no e4m3 before compute capability 8.9."""
    return platform.is_cuda() and not platform.has_device_capability(89)


def _lacks_flash_mla(platform: Any) -> bool:
    flash_mla_of_vllm = importlib.import_module(_FLASH_MLA)
    return not platform.is_cpu() and not flash_mla_of_vllm.is_flashmla_sparse_supported()[0]


_DEEP_GEMM = "vllm.utils.deep_gemm"
_OPS = "vllm._custom_ops"
_FLASH_MLA = "vllm.v1.attention.ops.flashmla"
_LAYER = "vllm.model_executor.layers.sparse_attn_indexer"
_METADATA = "vllm.v1.attention.backends.mla.indexer"
_CPU = "vllm.platforms.cpu:CpuPlatform"
_CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts"
_CPU_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter"
_WORKSPACE = "vllm.v1.worker.workspace"
_WINDOW = "vllm.v1.attention.backends.mla.sparse_swa"
_FP8 = "vllm.model_executor.layers.quantization.utils.fp8_utils"

BINDINGS = (
    Binding(_DEEP_GEMM, "fp8_fp4_mqa_logits", fp8_fp4_mqa_logits, _vllm_indexer.lacking),
    Binding(_DEEP_GEMM, "fp8_fp4_paged_mqa_logits", fp8_fp4_paged_mqa_logits, _vllm_indexer.lacking),
    Binding(_DEEP_GEMM, "get_paged_mqa_logits_metadata", get_paged_mqa_logits_metadata, _vllm_indexer.lacking),
    Binding(
        _OPS, "indexer_k_quant_and_cache", indexer_k_quant_and_cache,
        _lacks_operator("_C_cache_ops", "indexer_k_quant_and_cache"),
    ),
    Binding(
        _OPS, "cp_gather_indexer_k_quant_cache", cp_gather_indexer_k_quant_cache,
        _lacks_operator("_C_cache_ops", "cp_gather_indexer_k_quant_cache"),
    ),
    Binding(_OPS, "top_k_per_row_prefill", top_k_per_row_prefill, _lacks_operator("_C", "top_k_per_row_prefill")),
    Binding(_OPS, "top_k_per_row_decode", top_k_per_row_decode, _lacks_operator("_C", "top_k_per_row_decode")),
    Binding(
        "vllm.model_executor.layers.indexer_topk", "get_indexer_topk", get_indexer_topk,
        _lacks_operator("_C", "top_k_per_row_decode"),
    ),
    Binding(
        _OPS, "fp8_paged_mqa_logits_cpu", fp8_paged_mqa_logits_cpu, _lacks_cpu_operator("fp8_paged_mqa_logits_cpu")
    ),
    Binding(_OPS, "topk_transform_512_cpu", topk_transform_512_cpu, _lacks_cpu_operator("topk_transform_512_cpu")),
    Binding(_FLASH_MLA, "flash_mla_sparse_fwd", flash_mla.flash_mla_sparse_fwd, _lacks_flash_mla, is_kernel=False),
    Binding(_FLASH_MLA, "flash_mla_with_kvcache", flash_mla.flash_mla_with_kvcache, _lacks_flash_mla, is_kernel=False),
    Binding(_FLASH_MLA, "get_mla_metadata", flash_mla.get_mla_metadata, _lacks_flash_mla, is_kernel=False),
    Binding(_FLASH_MLA, "FlashMLASchedMeta", flash_mla.FlashMLASchedMeta, _lacks_flash_mla, is_kernel=False),
    Binding(_FP8, "per_token_group_quant_fp8", per_token_group_quant_fp8, _is_cpu, is_kernel=False),
    Binding(
        _LAYER, "fused_indexer_q_rope_quant", fused_indexer_q_rope_quant, _cannot_convert_e4m3, is_kernel=False
    ),
    Binding(
        _METADATA, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", Standin(build_prefill_chunk_metadata), _lacks_triton,
        is_kernel=False,
    ),
    Binding(_WORKSPACE, "current_workspace_manager", _workspace_of_cpu, _is_cpu, is_kernel=False, wraps=True),
    Binding(
        _LAYER, "has_deep_gemm", lambda: True, _lacks_cuda_indexer, is_kernel=False, for_importers=False
    ),
    Binding(f"{_LAYER}:SparseAttnIndexer", "forward_cpu", _by_names, _is_cpu, is_kernel=False, wraps=True),
    Binding(
        f"{_LAYER}:SparseAttnIndexer", "forward_hip", _by_names, _lacks_rocm_indexer, is_kernel=False, wraps=True
    ),
    Binding(
        f"{_METADATA}:DeepseekV32IndexerBackend", "get_supported_kernel_block_sizes", _block_sizes, _is_cpu,
        is_kernel=False, wraps=True,
    ),
)  # fmt: skip

# Bindings for DeepSeek-V4 only. vLLM itself serves it on a CPU if Triton has a compiler for the CPU.
V4 = (
    Binding(
        "vllm.v1.attention.ops.metadata", "compute_token_to_req_indices", _vllm_v4.compute_token_to_req_indices,
        _lacks_triton, is_kernel=False,
    ),
    Binding(
        "vllm.v1.attention.backends.mla.compressor_utils", "_COMPRESSED_SLOT_MAPPING_KERNEL",
        Standin(_vllm_v4.compressed_slot_mapping), _lacks_triton, is_kernel=False,
    ),
    Binding(
        _WINDOW, "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL", Standin(_vllm_v4.compute_swa_indices_and_lens), _lacks_triton,
        is_kernel=False,
    ),
    Binding(
        _WINDOW, "_COMPUTE_PREFILL_METADATA_KERNEL", Standin(_vllm_v4.compute_prefill_metadata), _lacks_triton,
        is_kernel=False,
    ),
    Binding(
        "vllm.models.deepseek_v4.cpu.cpu_mla:DeepseekV4CPUSparseSWAMetadataBuilder", "build_tile_scheduler",
        _vllm_v4.all_kinds_of_layers, _is_cpu, is_kernel=False, wraps=True,
    ),
    Binding(
        "vllm.models.deepseek_v4.cpu.cpu_sparse:DeepseekV4CPUAttention", "forward_mqa", _vllm_v4.forward_mqa, _is_cpu,
        is_kernel=False,
    ),
)  # fmt: skip


def _of_m3(name: str) -> Callable[[Any], Any]:
    """A replacement from `_vllm_m3`, imported late, because it extends classes of vLLM that import the whole model."""
    return lambda original: getattr(importlib.import_module("ragged_attention.integrations._vllm_m3"), name)


# Bindings for MiniMax M3. vLLM has Triton kernels for all GPUs, and the steps around them for GPUs only.
M3 = (
    Binding(
        f"{_M3}.common.indexer", "select_indexer_impl_cls", _of_m3("select_indexer_impl_cls"), _is_cpu, wraps=True
    ),
    Binding(
        f"{_M3}.common.sparse_attention", "select_main_backend_and_impl_cls",
        _of_m3("select_main_backend_and_impl_cls"), _is_cpu, wraps=True,
    ),
    Binding(
        _OPS, "fused_minimax_m3_qknorm_rope_kv_insert", _of_m3("fused_minimax_m3_qknorm_rope_kv_insert"), _is_cpu,
        is_kernel=False, wraps=True,
    ),
    Binding(
        f"{_M3}.nvidia.model:MiniMAXGemmaRMSNorm", "forward", _of_m3("gemma_norm"), _is_cpu, is_kernel=False, wraps=True
    ),
    *(
        Binding(owner, name, ours, _is_cpu, is_kernel=False, wraps=True)
        for owner, name, ours in (
            (_CPU_EXPERTS, "_supports_activation", _vllm_experts.supports_activation),
            (_CPU_EXPERTS, "_pad_moe_intermediate", _vllm_experts.pad_moe_intermediate),
            (_CPU_EXPERTS, "apply", _vllm_experts.apply),
            (_CPU_ROUTER, "_compute_routing", _vllm_experts.compute_routing),
        )
    ),
)  # fmt: skip

# Bindings for Qwen4's layers. vLLM has these kernels on all GPUs on which it serves the model.
QSA = (
    *(
        Binding(f"{_QSA}.nvidia.ops.qsa_indexer", ours.__name__, ours, lambda platform: False)
        for ours in (_vllm_qsa.qsa_select_paged_decode, _vllm_qsa.qsa_select_paged_prefill)
    ),
    Binding(
        f"{_QSA}.nvidia.ops.qsa", "qsa_sparse_paged_attention", _vllm_qsa.qsa_sparse_paged_attention,
        lambda platform: False,
    ),
)  # fmt: skip

# Bindings that are needed before a model is loaded.
PLATFORM = (
    Binding(
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding", "forward_cpu", _rotation_on_cpu, _is_cpu,
        is_kernel=False, wraps=True,
    ),
    Binding(_CPU, "get_attn_backend_cls", _sparse_backend_on_cpu, _is_cpu, is_kernel=False, wraps=True),
    Binding(_CPU, "check_and_update_config", _config_on_cpu, _is_cpu, is_kernel=False, wraps=True),
)  # fmt: skip

_bound: list[tuple[Any, str, Any, Any]] = []  # owner, name, original, ours


def bind(everywhere: bool = False, bindings: Sequence[Binding] = BINDINGS) -> list[str]:
    """Bind our functions if vLLM lacks its own, or all kernels if `everywhere`; returns the bound names.

    Raises:
        Unsupported: vLLM has no such name.
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    applying = [one for one in bindings if (everywhere and one.is_kernel) or one.lacking(platform)]
    for one in applying:
        _bind(one)
    return [f"{one.owner.replace(':', '.')}.{one.name}" for one in applying]


def bind_platform() -> None:
    """Let vLLM's platform take sparse models, and rotate the queries of latent attention correctly."""
    for one in PLATFORM:
        _bind(one)


def _bind(one: Binding) -> None:
    module, _, cls = one.owner.partition(":")
    home = importlib.import_module(module)
    owner = getattr(home, cls) if cls else home
    if one.name not in vars(owner):
        raise Unsupported(f"expected vLLM to have {one.owner.replace(':', '.')}.{one.name}, which ours would replace")
    original = vars(owner)[one.name]  # getattr would unwrap a static method
    if any(owner is where and one.name == name for where, name, _, _ in _bound):
        return
    ours = one.ours(original) if one.wraps else one.ours
    _bound.append((owner, one.name, original, ours))
    for place in _holders(one.name, original) if one.for_importers and not cls else [owner]:
        setattr(place, one.name, ours)


def _holders(name: str, value: Any) -> list[Any]:
    """The modules of vLLM in which `name` is `value`: the one that defines it, and those that have imported it."""
    modules = [module for path, module in [*sys.modules.items()] if path.partition(".")[0] == "vllm"]
    return [module for module in modules if vars(module).get(name) is value]


def unbind() -> None:
    """Restore the originals that `bind` replaced, also in modules of vLLM that have imported ours since."""
    while _bound:
        owner, name, original, ours = _bound.pop()
        for place in [owner, *_holders(name, ours)]:
            setattr(place, name, original)


def __getattr__(architecture: str) -> Any:
    """The class of a model, for vLLM's registry. Getting it binds the functions that the model needs."""
    if architecture not in MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {architecture!r}")
    lists = dict.fromkeys(_M3_MODELS, (M3,)) | dict.fromkeys(_QSA_MODELS, (QSA,)) | {_V4: (BINDINGS, V4)}
    bound = [name for bindings in lists.get(architecture, (BINDINGS,)) for name in bind(_vllm_indexer.asked, bindings)]
    logging.getLogger("vllm.ragged_attention").info("%s: bound ours as %s", architecture, ", ".join(bound))
    generic, own = MODELS[architecture]
    if _vllm_indexer.lacking(importlib.import_module("vllm.platforms").current_platform):
        return getattr(importlib.import_module(generic[0]), generic[1])
    return getattr(importlib.import_module(own), architecture)
