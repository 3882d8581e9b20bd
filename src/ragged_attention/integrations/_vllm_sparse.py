"""The backend `RAGGED_SPARSE_MLA`: latent attention over the positions that the model's indexer selects.

Each query token has its own list of positions. So prefill and decode need no different treatment, and requests may be
in any order. Under context parallelism, a rank attends to those selected positions that are in its cache.
"""

import dataclasses
import importlib
from typing import Any

import torch

from ragged_attention.calls.sharding import KvShard
from ragged_attention.integrations._vllm_invariance import as_vllm_asks, is_batch_invariant
from ragged_attention.integrations._vllm_mla import LatentBackend, LatentImpl, joined, stored
from ragged_attention.integrations._vllm_ranks import ranks_of
from ragged_attention.torch import mla_decode, page_indices_to_slots, sparse_mla_prefill

_vllm: Any = importlib.import_module("vllm.v1.attention.backend")
_sparse: Any = importlib.import_module("vllm.model_executor.layers.attention.sparse_mla_attention")

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass
class RaggedSparseMLAMetadata(_vllm.AttentionMetadata):
    """The metadata of a step. All tokens count as decodes, so that vLLM's layer passes them to `forward_mqa`."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor  # only for vLLM's layer
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    request_of_token: torch.Tensor
    shard: KvShard | None  # the rule by which ranks share the cache, if this rank does not hold all of it
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    causal: bool = True
    prefill: None = None
    decode: None = None


class RaggedSparseMLAMetadataBuilder(_vllm.AttentionMetadataBuilder):
    """Adds the request of each token, computed on the device, to vLLM's tables."""

    _cudagraph_support = _vllm.AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        ranks = ranks_of(kv_cache_spec, vllm_config)
        self._shard = None if ranks is None else ranks.shard
        max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._tokens = torch.arange(max_tokens, dtype=torch.int32, device=device)
        # A replayed graph reads the addresses that it captured, so the requests of all steps are in one tensor.
        self._request_of_token = torch.zeros(max_tokens, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> RaggedSparseMLAMetadata:
        """The step's metadata; `common_prefix_len` is always 0 and nothing depends on `fast_build`."""
        common = common_attn_metadata
        tokens, starts = common.num_actual_tokens, common.query_start_loc
        request = torch.searchsorted(starts[1:], self._tokens[:tokens], right=True, out_int32=True)
        request_of_token = self._request_of_token[:tokens].copy_(request.clamp_(max=starts.shape[0] - 2))
        return RaggedSparseMLAMetadata(
            num_reqs=common.num_reqs, num_actual_tokens=tokens, max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len, query_start_loc=starts, seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping, block_table=common.block_table_tensor, request_of_token=request_of_token,
            shard=self._shard, num_decodes=common.num_reqs, num_decode_tokens=tokens,
        )  # fmt: skip


class RaggedSparseMLAImpl(LatentImpl, _vllm.MLAAttentionImpl, _sparse.SharedTopkIndicesBuffer):
    """A layer's sparse latent attention."""

    is_sparse = True
    supports_dense_mha_prefill = False
    # A draft sees only the positions in its list, so any interleaving of the cache over ranks is supported.
    supports_mtp_with_cp_non_trivial_interleave_size = True
    masked_mha_available = False

    def __init__(
        self, *layer_args: Any, topk_indices_buffer: torch.Tensor | None = None, indexer: Any = None, **mla_args: Any
    ) -> None:
        super().__init__(*layer_args, **mla_args)
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Do nothing. vLLM's own backends start work on another stream here, after the indexer has run."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: RaggedSparseMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of each token over the positions of its request that `topk_indices_buffer` lists.

        Args:
            q: absorbed queries [tokens, H, L + R], or a tuple of their two parts. Under context parallelism,
                H counts the heads of all ranks.
            kv_c_and_k_pe_cache: [blocks, block, L + R], or bytes [blocks, block, 656]; blocks need not be contiguous.
            attn_metadata: the result of our builder.
            layer: not read.

        Returns:
            out [tokens, H, L], and lse [tokens, H] float32, by which vLLM merges ranks. It is a natural logarithm. A
            token gets 0 and -inf if no position of its list is in this rank's cache.
        """
        q = joined(q)
        positions = self.topk_indices_buffer[: q.shape[0]]
        if attn_metadata.shard is not None:
            positions = attn_metadata.shard.local(positions)
        slots = slots_of_tokens(
            positions, attn_metadata.request_of_token, attn_metadata.block_table, kv_c_and_k_pe_cache.shape[1]
        )
        cache, cache_format = stored(kv_c_and_k_pe_cache, self.kv_cache_dtype)
        keywords: dict[str, Any] = dict(
            indices=slots.unsqueeze(1), d_v=self.kv_lora_rank, sm_scale=self.scale, cache_format=cache_format
        )
        # With few tokens, `mla_decode` divides a list into KV splits, so it sums in another order than in a prefill.
        divided = attn_metadata.max_query_len == 1 and not is_batch_invariant()
        with as_vllm_asks():
            if divided:
                out, lse = mla_decode(q.unsqueeze(1), cache, **keywords)
                return out.squeeze(1), lse.squeeze(2)
            out, _, lse = sparse_mla_prefill(q, cache, **keywords)
        return out, lse


class RaggedSparseMLABackend(LatentBackend, _vllm.AttentionBackend):
    """The properties by which vLLM selects this backend for sparse latent attention."""

    NAME, IMPL, BUILDER = "RAGGED_SPARSE_MLA", RaggedSparseMLAImpl, RaggedSparseMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    is_mla = is_sparse = LatentBackend.yes


RaggedSparseMLAImpl.BACKEND = RaggedSparseMLABackend


def slots_of_tokens(
    positions: torch.Tensor, request_of_token: torch.Tensor, page_indices: torch.Tensor, page_size: int
) -> torch.Tensor:
    """The cache slots of positions [T, N], which are positions in each token's request; -1 stays -1.

    The tables of all requests are joined to one, as if a single request had all positions. So a single call converts
    requests of any query lengths, and no table is copied for each token.
    """
    requests, pages = page_indices.shape
    span = pages * page_size
    if requests * span > _INT32_MAX:
        return page_indices_to_slots(positions, page_indices[request_of_token], page_size)
    shifted = positions + (request_of_token * span).unsqueeze(1)
    shifted = torch.where((positions >= 0) & (positions < span), shifted, -1)
    return page_indices_to_slots(shifted.unsqueeze(0), page_indices.reshape(1, -1), page_size).squeeze(0)
