"""MiniMax M3 in vLLM: our selection of blocks, our attention to them, and on CPUs also the steps around them.

vLLM's layer writes keys, values and index keys into their caches. Then it calls an indexer, which writes the selected
blocks of each token and KV head into a buffer. Then it calls attention, which reads the blocks from the buffer. This
module has our indexer and our attention. Each is a single call for prompts, chunks, decodes and drafts together, with
the step's metadata of `RAGGED`. They take pages of any size; vLLM's kernels need pages of one block.
"""

import importlib
from typing import Any, ClassVar

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations._vllm_attention import RaggedBackend, RaggedMetadata, RaggedMetadataBuilder
from ragged_attention.integrations._vllm_caches import FP8, PLAIN, stored
from ragged_attention.integrations._vllm_invariance import as_vllm_asks
from ragged_attention.torch import ragged_paged_attention, select_blocks, write_kv_pages

_vllm: Any = importlib.import_module("vllm.v1.attention.backend")
_attention: Any = importlib.import_module("vllm.models.minimax_m3.common.sparse_attention")
_indexer: Any = importlib.import_module("vllm.models.minimax_m3.common.indexer")
_context: Any = importlib.import_module("vllm.forward_context")

INDEX_CACHES = ("bf16", "fp8", "fp8_e4m3")


class BlocksMetadataBuilder(RaggedMetadataBuilder):
    """Builds the metadata of `RAGGED` without key ranges, because lists of blocks determine the visible keys."""

    # As in vLLM's own builder, so that the same steps run as graphs.
    _cudagraph_support = _vllm.AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self._ranks is not None:
            raise Unsupported("expected no decode context parallelism for MiniMax M3, got a cache divided among ranks")

    def _make_ranges(self, metadata: RaggedMetadata) -> None:
        """Do nothing, because the lists of blocks determine which keys a token sees."""


def _step_of(layer: str) -> RaggedMetadata | None:
    """A layer's metadata of this step, or None in vLLM's profiling run."""
    steps = _context.get_forward_context().attn_metadata
    return steps[layer] if isinstance(steps, dict) else None


# The indexer


class RaggedM3IndexerBackend(RaggedBackend, _indexer.MiniMaxM3IndexerBackend):
    """The properties of the cache of index keys that vLLM asks for."""

    NAME, BUILDER = "RAGGED_M3_INDEXER", BlocksMetadataBuilder
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*PLAIN, *FP8]


class RaggedM3Indexer(_indexer.MiniMaxM3IndexerImpl):
    """A layer's selection of blocks by `select_blocks`, over the layer's cache of index keys."""

    indexer_backend_cls = RaggedM3IndexerBackend

    def __init__(
        self, *, score_type: str = "max", topk_indices_buffer: torch.Tensor | None = None, **others: Any
    ) -> None:
        if score_type != "max":
            raise Unsupported(f"expected sparse_score_type to be max for MiniMax M3, got {score_type!r}")
        if topk_indices_buffer is None:
            raise Unsupported("expected topk_indices_buffer for MiniMax M3, got None")
        super().__init__(score_type=score_type, topk_indices_buffer=topk_indices_buffer, **others)

    def forward(self, index_query: torch.Tensor) -> None:
        """Write the selected blocks of each token and KV head into `topk_indices_buffer` [tokens, K, top_k].

        Args:
            index_query: [tokens, K * D] of the dtype of the index keys; rows after the step's tokens are padding.
        """
        step = _step_of(self.index_cache.prefix)
        if step is None:
            return
        tokens = step.num_actual_tokens
        with as_vllm_asks():
            selected = select_blocks(
                index_query[:tokens].view(tokens, self.num_index_heads, self.index_head_dim),
                self.index_cache.kv_cache.unsqueeze(2), self.topk_blocks, block_size=self.block_size,
                page_indices=step.page_indices, kv_lens=step.kv_lens, cu_q_lens=step.cu_q_lens,
                init_blocks=self.init_blocks, local_blocks=self.local_blocks,
            )  # fmt: skip
        self.topk_indices_buffer[:tokens] = selected


RaggedM3IndexerBackend.IMPL = RaggedM3Indexer


def select_indexer_impl_cls(*, topk_blocks: int, indexer_kv_dtype: str = "bf16") -> type:
    """The indexer of a layer. It is ours for every number of blocks."""
    if indexer_kv_dtype not in INDEX_CACHES:
        names = ", ".join(INDEX_CACHES)
        raise Unsupported(f"expected indexer_kv_dtype to be one of {names} for MiniMax M3, got {indexer_kv_dtype!r}")
    return RaggedM3Indexer


# Attention


class RaggedM3Backend(RaggedBackend, _attention.MiniMaxM3SparseBackend):
    """The properties of attention to blocks that vLLM asks for."""

    NAME, BUILDER = "RAGGED_M3_SPARSE", BlocksMetadataBuilder
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*PLAIN, *FP8]


class RaggedM3Impl(_attention.MiniMaxM3SparseImpl):
    """A layer's attention to the blocks that the layer's indexer has selected."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        *,
        query_fp8: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the step's queries to the blocks in `layer.topk_indices_buffer`.

        Args:
            layer: vLLM's layer; its `_k_scale` and `_v_scale` are the scales of an 8-bit cache.
            query: [tokens, H * D]; rows after the step's tokens are padding.
            kv_cache: [blocks, K, block, 2 * D] with any strides. The step's keys and values are already written to it.
            output: [tokens, H * D], written and returned; padding rows are not written.
            query_fp8: must be None.
        """
        if query_fp8 is not None:
            raise Unsupported("expected query_fp8 to be None for MiniMax M3, got queries in 8 bits")
        step = _step_of(layer.layer_name)
        if step is None:
            return output
        tokens = step.num_actual_tokens
        q, out = (rows[:tokens].view(tokens, self.num_heads, self.head_size) for rows in (query, output))
        cache = stored(kv_cache, self.kv_cache_dtype, self.head_size, layer)
        with as_vllm_asks():
            ragged_paged_attention(
                q, kv_lens=step.kv_lens, page_indices=step.page_indices, cu_q_lens=step.cu_q_lens,
                max_q_len=step.max_q_len, sm_scale=self.scale, selected=layer.topk_indices_buffer[:tokens],
                block_size=self.block_size, out=out, **cache._asdict(),
            )  # fmt: skip
        return output


RaggedM3Backend.IMPL = RaggedM3Impl


def select_main_backend_and_impl_cls(
    *, topk_blocks: int, kv_cache_dtype: str, num_kv_heads: int, emits_sparse_block_table: bool = False
) -> tuple[type, type]:
    """The classes of a layer's backend and attention. They are ours for every number of blocks."""
    RaggedM3Backend.expect_layer("decoder", kv_cache_dtype)
    if emits_sparse_block_table:
        raise Unsupported("expected emits_sparse_block_table to be False for MiniMax M3, got True")
    return RaggedM3Backend, RaggedM3Impl


# The steps before and after attention, for which vLLM has only GPU kernels


def gemma_norm(
    self: Any, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The RMS norm of rows, times 1 + weight. A residual is first added to the rows, and the sum is returned too."""
    if residual is None:
        return _normed(x, self.weight, self.variance_epsilon).to(x.dtype)
    whole = x.float() + residual.float()
    return _normed(whole, self.weight, self.variance_epsilon).to(x.dtype), whole.to(residual.dtype)


def fused_minimax_m3_qknorm_rope_kv_insert(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    rotary_dim: int,
    eps: float,
    index_q_norm_weight: torch.Tensor | None = None,
    index_k_norm_weight: torch.Tensor | None = None,
    num_index_heads: int = 0,
    slot_mapping: torch.Tensor | None = None,
    index_slot_mapping: torch.Tensor | None = None,
    kv_cache: torch.Tensor | None = None,
    index_cache: torch.Tensor | None = None,
    block_size: int = 0,
    q_out: torch.Tensor | None = None,
    index_q_out: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    skip_index_branch: bool = False,
    q_fp8_out: torch.Tensor | None = None,
    q_fp8_scale: float = 1.0,
    kv_k_scale: torch.Tensor | None = None,
    kv_v_scale: torch.Tensor | None = None,
) -> None:
    """Normalise and rotate the heads of a step, and write keys, values and index keys into their caches.

    Args:
        qkv: [tokens, H * D + 2 * K * D]. In sparse layers, the columns of index_q and of one head of index_k follow.
            Keys are changed in place. Queries are changed in place if `q_out` and `index_q_out` are not given.
        slot_mapping, index_slot_mapping: [tokens] or shorter; -1 is skipped. Without `index_slot_mapping`,
            `slot_mapping` is for both caches.
        kv_cache: [blocks, K, block, 2 * D].
        index_cache: [blocks, block, D], bfloat16 or e4m3.
    """
    if q_fp8_out is not None:
        raise Unsupported("expected q_fp8_out to be None for MiniMax M3, got queries in 8 bits")
    if kv_cache_dtype not in (*PLAIN, *FP8):
        raise Unsupported(f"expected kv_cache_dtype to be one of {', '.join((*PLAIN, *FP8))}, got {kv_cache_dtype!r}")
    dim, tokens = q_norm_weight.shape[0], qkv.shape[0]
    index_heads = num_index_heads and num_index_heads + 1
    heads = qkv.view(tokens, num_heads + 2 * num_kv_heads + index_heads, dim)
    q, k, v, index_q, index_k = heads.split(
        [num_heads, num_kv_heads, num_kv_heads, num_index_heads, index_heads and 1], 1
    )
    cos_sin = cos_sin_cache[positions, :rotary_dim].float().unsqueeze(1).chunk(2, dim=-1)
    branches = [(q, q_norm_weight, q_out), (k, k_norm_weight, None)]
    if num_index_heads and not skip_index_branch:
        branches += [(index_q, index_q_norm_weight, index_q_out), (index_k, index_k_norm_weight, None)]
    for x, weight, place in branches:
        assert weight is not None
        target = x if place is None else place.view(x.shape)
        target.copy_(_saturated(_rotated(_normed(x, weight, eps), *cos_sin), target.dtype))
    if kv_cache is not None and slot_mapping is not None:
        slots = len(slot_mapping)
        write_kv_pages(k[:slots], v[:slots], stored(kv_cache, kv_cache_dtype, dim).kv_pages, slot_mapping)
    index_slots = slot_mapping if index_slot_mapping is None else index_slot_mapping
    if index_cache is not None and index_slots is not None and not skip_index_branch:
        has_slot = index_slots >= 0
        slots, page_size = index_slots[has_slot], index_cache.shape[1]
        index_cache[slots // page_size, slots % page_size] = _saturated(
            index_k[: len(has_slot), 0][has_slot], index_cache.dtype
        )


def _saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers in another dtype, clamped to its range, because e4m3 has no infinity."""
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Float32 heads whose first 2 * half columns are rotated; column i is paired with column i + half."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
