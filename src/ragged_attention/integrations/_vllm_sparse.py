"""The classes behind `RAGGED_SPARSE_MLA`: latent attention over the positions that the model's indexer selects.

Every query token brings its own list, so prefill and decode are one thing, and a batch needs no order.
"""

import dataclasses
import importlib
from typing import Any, ClassVar

import torch

from ragged_attention.integrations._vllm_mla import LatentBackend, LatentImpl, joined, stored
from ragged_attention.torch import mla_decode, page_indices_to_slots, sparse_mla_prefill

_vllm: Any = importlib.import_module("vllm.v1.attention.backend")
_sparse: Any = importlib.import_module("vllm.model_executor.layers.attention.sparse_mla_attention")

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass
class RaggedSparseMLAMetadata(_vllm.AttentionMetadata):
    """One step's tables. vLLM's layer reads the counts: all tokens count as decode, for one path serves them all."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    request_of_token: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    causal: bool = True
    prefill: None = None
    decode: None = None


class RaggedSparseMLAMetadataBuilder(_vllm.AttentionMetadataBuilder):
    """Adds to vLLM's tables which request each token belongs to, computed on the device."""

    _cudagraph_support = _vllm.AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self._tokens = torch.arange(most, dtype=torch.int32, device=device)
        # A graph replays with the addresses it was captured with, so that what is computed here has a fixed place.
        self._request_of_token = torch.zeros(most, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> RaggedSparseMLAMetadata:
        """The step's metadata; `common_prefix_len` is always 0 and nothing depends on `fast_build`."""
        common = common_attn_metadata
        tokens, starts = common.num_actual_tokens, common.query_start_loc
        request = torch.searchsorted(starts[1:], self._tokens[:tokens], right=True, out_int32=True)
        request_of_token = self._request_of_token[:tokens]
        request_of_token.copy_(request.clamp_(max=starts.shape[0] - 2))
        return RaggedSparseMLAMetadata(
            num_reqs=common.num_reqs,
            num_actual_tokens=tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=starts,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            request_of_token=request_of_token,
            num_decodes=common.num_reqs,
            num_decode_tokens=tokens,
        )


class RaggedSparseMLAImpl(LatentImpl, _vllm.MLAAttentionImpl, _sparse.SharedTopkIndicesBuffer):
    """One layer's sparse latent attention."""

    is_sparse = True
    supports_dense_mha_prefill = False
    supports_dcp = False
    masked_mha_available = False

    def __init__(
        self, *layer_args: Any, topk_indices_buffer: torch.Tensor | None = None, indexer: Any = None, **mla_args: Any
    ) -> None:
        super().__init__(*layer_args, **mla_args)
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: RaggedSparseMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of each token to the positions of its own request that `topk_indices_buffer` lists for it.

        Args:
            q: absorbed queries [tokens, H, L + R], or their two parts.
            kv_c_and_k_pe_cache: [blocks, block, L + R], or bytes [blocks, block, 656]; blocks may lie apart.
            attn_metadata: from our builder.
            layer: not read.

        Returns:
            out [tokens, H, L] and lse [tokens, H] float32, natural.
        """
        q = joined(q)
        chosen = self.topk_indices_buffer[: q.shape[0]]
        slots = slots_of_tokens(
            chosen, attn_metadata.request_of_token, attn_metadata.block_table, kv_c_and_k_pe_cache.shape[1]
        )
        cache, cache_format = stored(kv_c_and_k_pe_cache, self.kv_cache_dtype)
        keywords: dict[str, Any] = dict(
            indices=slots.unsqueeze(1), d_v=self.kv_lora_rank, sm_scale=self.scale, cache_format=cache_format
        )
        if attn_metadata.max_query_len == 1:  # few tokens: the kernel that divides a list among programs
            out, lse = mla_decode(q.unsqueeze(1), cache, **keywords)
            return out.squeeze(1), lse.squeeze(2)
        out, _, lse = sparse_mla_prefill(q, cache, **keywords)
        return out, lse


class RaggedSparseMLABackend(LatentBackend, _vllm.AttentionBackend):
    """What vLLM asks about us before it chooses us for sparse latent attention."""

    NAME, IMPL, BUILDER = "RAGGED_SPARSE_MLA", RaggedSparseMLAImpl, RaggedSparseMLAMetadataBuilder
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    is_mla = is_sparse = LatentBackend.yes


RaggedSparseMLAImpl.BACKEND = RaggedSparseMLABackend


def slots_of_tokens(
    positions: torch.Tensor, request_of_token: torch.Tensor, page_indices: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Positions [T, N] in the requests of their tokens, -1 for none, as slots of the cache, -1 for none.

    The tables of all requests are laid end to end, as if one request had all of their positions: then a batch of any
    query lengths is one call, and no table is copied for each token.
    """
    requests, pages = page_indices.shape
    span = pages * page_size
    if requests * span > _INT32_MAX:
        return page_indices_to_slots(positions, page_indices[request_of_token], page_size)
    shifted = positions + (request_of_token * span).unsqueeze(1)
    shifted = torch.where((positions >= 0) & (positions < span), shifted, -1)
    return page_indices_to_slots(shifted.unsqueeze(0), page_indices.reshape(1, -1), page_size).squeeze(0)
