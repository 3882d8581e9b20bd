"""Replaces functions of vLLM that its sparse models call, if vLLM has no kernel for the device.

To *bind* a function is to replace it by one of ours under its name in vLLM. The indexer's kernels are functions of
`vllm.utils.deep_gemm` and `vllm._custom_ops`; other bound names are methods that choose a code path by platform.
`bind()` replaces a name in the module that defines it and in the modules that have imported it. `unbind()` restores the
originals. `BINDINGS` and the other lists have all bound names, and docs/vllm.md explains why each binding is needed.
vLLM still does everything else: scheduling, the indexer's metadata, dividing prompts into chunks, and the layers.

vLLM's model registry gets the classes of sparse models from this module, so nothing is imported or bound before a
sparse model is loaded.
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
# The architectures for which names are bound when vLLM loads them. For each: the module and name of the vendor-neutral
# class, and the module in which vLLM itself chooses a class.
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
    """Logits f32 [M, N] of queries [M, H, D] for packed keys [N, D]. Logits outside a query's range are -inf."""
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
    """Quantise keys [T, D] to e4m3 with one scale per key, and write them into pages [P, G, D + 4]."""
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

    Rows after the last key are not written. The host does not wait for the device.
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
    """Write the columns of each row's largest logits, counted from the start of the row's range, and padded with -1."""
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
    """Write the positions of each query's largest logits, padded with -1.

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
    """The function that selects keys in a decode step. It is ours for every `backend`; vLLM has several functions."""
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
    return logits.contiguous()  # vLLM's selection expects contiguous logits


def topk_transform_512_cpu(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """Write the positions of each row's 512 largest scores, and their slots. Both are padded with -1."""
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
    """The e4m3 codes of x, of its shape, and the scales of the groups of each row, f32 [..., groups].

    The function replaces a Triton kernel of vLLM that needs a GPU.
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
    """Rotate and quantise the indexer's queries [T, H, D], and multiply its weights f32 [T, H] by the scales.

    The function replaces a Triton kernel of vLLM that needs a GPU with conversions of 8-bit floats.
    """
    rotary = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
    head = q[..., :rotary].float()
    first, second = head.chunk(2, dim=-1) if is_neox else (head[..., 0::2], head[..., 1::2])
    pairs = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.cat(pairs, dim=-1) if is_neox else torch.stack(pairs, dim=-1).flatten(-2)
    whole = torch.cat((rotated.to(q.dtype), q[..., rotary:]), dim=-1)
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

    The function replaces a Triton kernel of vLLM and has its argument names. Under decode context parallelism, the
    ranges refer to this rank's keys. A query that sees no key gets the range (0, 0), although vLLM's kernel gives it an
    empty range at the start of its request. vLLM's indexer for CPUs looks up the request by the range's start, and a
    start after the last key would not belong to any request.
    """
    device = query_start_loc.device
    key = torch.arange(token_to_seq.shape[0], device=device)
    token_to_seq.copy_(torch.searchsorted(cu_compressed_seq_lens[1:], key, right=True))
    query = torch.arange(query_slice_start, query_slice_stop, device=device)
    request = torch.searchsorted(query_start_loc[1:], query, right=True).clamp_(max=num_reqs - 1)
    left = query_start_loc[request + 1] - query  # the number of queries from this query to the request's last query
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
    """Let vLLM's CPU platform choose our sparse attention. Otherwise it raises an error for sparse attention."""

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_sparse:
            return "ragged_attention.integrations.vllm.RaggedSparseMLABackend"
        return original.__get__(None, cls)(selected_backend, attn_selector_config, num_heads)

    return classmethod(get_attn_backend_cls)


def _config_on_cpu(original: Any) -> Any:
    """Keep chunked prefill and prefix caching enabled for latent attention. vLLM's CPU platform would disable them.

    That platform also lets a step end within an image whose tokens see one another. The tokens that are already
    computed would never see the rest of the image. So this function forbids it, as GPU platforms do.
    """

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        settings = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        original.__get__(None, cls)(vllm_config)
        model = vllm_config.model_config
        if model is not None and set(model.architectures) & set(_LATENT_MODELS):
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = settings
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
    """Let `SparseAttnIndexer.forward_cpu` and `forward_hip` run `forward_cuda`, which calls the functions bound here.

    A model that writes the indexer's cache itself (DeepSeek-V4) keeps vLLM's own path, for which vLLM has kernels.
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
    """Set up vLLM's workspace manager on first use, because vLLM's CPU worker does not set it up as GPU workers do."""
    home = importlib.import_module(_WORKSPACE)

    def current_workspace_manager() -> Any:
        if not home.is_workspace_manager_initialized():
            home.init_workspace_manager(torch.device("cpu"))
        return original()

    return current_workspace_manager


@dataclasses.dataclass(frozen=True)
class Binding:
    """A name in vLLM, its replacement, and the condition for replacing it."""

    owner: str  # a module, or a module:Class
    name: str
    ours: Any
    lacking: Callable[[Any], bool]  # whether vLLM has no such function for its platform
    is_kernel: bool = True  # replaced on every device if the user requests our kernels
    wraps: bool = False  # whether `ours` takes the original and returns the replacement
    for_importers: bool = True  # whether to replace the name also in modules of vLLM that have imported it


class Standin:
    """A replacement of a Triton kernel of vLLM. It also has the method by which vLLM compiles kernels in advance."""

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
    """Whether Triton cannot convert to e4m3 on the device, because its compute capability is less than 8.9."""
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
    """A replacement from `_vllm_m3`, which is imported late, because it imports vLLM's whole model."""
    return lambda original: getattr(importlib.import_module("ragged_attention.integrations._vllm_m3"), name)


# Bindings for MiniMax M3. vLLM has Triton kernels for all GPUs. It has the steps before and after these kernels for
# GPUs only.
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
    """Bind our functions if vLLM has none for the device, and with `everywhere` all kernels. Return the bound names.

    Raises:
        Unsupported: vLLM has no such name.
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    applying = [item for item in bindings if (everywhere and item.is_kernel) or item.lacking(platform)]
    for binding in applying:
        _bind(binding)
    return [f"{binding.owner.replace(':', '.')}.{binding.name}" for binding in applying]


def bind_platform() -> None:
    """Let vLLM's CPU platform take sparse models, and rotate the queries of latent attention correctly."""
    for binding in PLATFORM:
        _bind(binding)


def _bind(binding: Binding) -> None:
    module, _, cls = binding.owner.partition(":")
    home = importlib.import_module(module)
    owner = getattr(home, cls) if cls else home
    name = binding.name
    if name not in vars(owner):
        raise Unsupported(f"expected vLLM to have {binding.owner.replace(':', '.')}.{name}, which ours would replace")
    original = vars(owner)[name]  # getattr would unwrap a static method
    if any(owner is bound_owner and name == bound_name for bound_owner, bound_name, _, _ in _bound):
        return
    ours = binding.ours(original) if binding.wraps else binding.ours
    _bound.append((owner, name, original, ours))
    for holder in _holders(name, original) if binding.for_importers and not cls else [owner]:
        setattr(holder, name, ours)


def _holders(name: str, value: Any) -> list[Any]:
    """The modules of vLLM in which `name` is `value`: its own module, and the modules that have imported it."""
    modules = [module for path, module in [*sys.modules.items()] if path.partition(".")[0] == "vllm"]
    return [module for module in modules if vars(module).get(name) is value]


def unbind() -> None:
    """Restore the originals that `bind` replaced, also in modules of vLLM that imported the replacements later."""
    while _bound:
        owner, name, original, ours = _bound.pop()
        for holder in [owner, *_holders(name, ours)]:
            setattr(holder, name, original)


def __getattr__(architecture: str) -> Any:
    """The class of a model, for vLLM's registry. This look-up also binds the functions that the model needs."""
    if architecture not in MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {architecture!r}")
    lists = dict.fromkeys(_M3_MODELS, (M3,)) | dict.fromkeys(_QSA_MODELS, (QSA,)) | {_V4: (BINDINGS, V4)}
    bound = [name for bindings in lists.get(architecture, (BINDINGS,)) for name in bind(_vllm_indexer.asked, bindings)]
    logging.getLogger("vllm.ragged_attention").info("%s: bound ours as %s", architecture, ", ".join(bound))
    generic, vllm_module = MODELS[architecture]
    if _vllm_indexer.lacking(importlib.import_module("vllm.platforms").current_platform):
        return getattr(importlib.import_module(generic[0]), generic[1])
    return getattr(importlib.import_module(vllm_module), architecture)
