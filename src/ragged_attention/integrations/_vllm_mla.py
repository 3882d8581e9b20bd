"""The backend `RAGGED_MLA` for latent attention, over cached latents or over keys and values of each head.

Short requests attend to the cached latents, in a single call. Long requests attend to keys and values of each head.

vLLM's own classes split a batch by query lengths, absorb W_UK into the queries of short requests, and divide the cached
context of long requests into chunks. This module has the attention, the gathering of cached latents, and the merge.
Short requests are decodes, drafts and prompt chunks of up to `ABSORBED` tokens, with any mix of lengths. For longer
requests it is cheaper to compute keys and values of each head, which have a third of a latent's columns. With
VLLM_BATCH_INVARIANT=1, all requests count as short, so that no result depends on the rest of the batch.
"""

import importlib
from typing import Any, ClassVar

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations._vllm_attention import RaggedBackend
from ragged_attention.integrations._vllm_caches import FP8, PLAIN
from ragged_attention.integrations._vllm_invariance import as_vllm_asks, is_batch_invariant
from ragged_attention.torch import (
    dequantize_mla_cache,
    merge_attention_states,
    ragged_mla_attention,
    varlen_attention,
    write_mla_cache,
)

_vllm: Any = importlib.import_module("vllm.v1.attention.backend")
_mla: Any = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")

CACHE_FORMATS = dict.fromkeys(PLAIN, "plain") | {"fp8_ds_mla": "fp8_v32"}
SCALED = ("fp8", "fp8_e4m3")  # e4m3 with one scale per layer

# vLLM puts requests of up to this number of tokens first in the batch, and treats them as decodes. With latents of 512
# columns and heads of 128, a head needs 512 * 256 products to compute a key and a value, and then 320 products per
# query. With the latent itself it needs 1088 products per query. So latents are cheaper for fewer than 170 queries, and
# they are read in place.
ABSORBED = 128


class LatentBackend(RaggedBackend):
    """The properties that the dense and the sparse backend for latent attention share: their cache formats."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [*CACHE_FORMATS]

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **named: Any
    ) -> str | None:
        if kv_cache_dtype == "fp8_ds_mla" and head_size != 576:
            return f"fp8_ds_mla holds rows of 576 columns, not {head_size}"
        return None


class LatentImpl:
    """The parts of a layer that dense and sparse latent attention share, with the write of a step's new latents."""

    BACKEND: ClassVar[type[RaggedBackend]]
    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        self.BACKEND.expect_layer(
            attn_type, kv_cache_dtype, alibi_slopes=alibi_slopes, sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap or None,
        )  # fmt: skip
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank: int = mla_args["kv_lora_rank"]

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write latents [tokens, L] with rotary keys [tokens, 1, R] to their slots; a slot of -1 is skipped."""
        if kv_cache.numel() == 0:  # in vLLM's profiling run
            return
        slots = slot_mapping.flatten()
        rows = torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1)[: slots.shape[0]]
        cache, cache_format = stored(kv_cache, kv_cache_dtype)
        write_mla_cache(
            rows, cache, slots, kv_scale=k_scale if kv_cache_dtype in SCALED else None, power_of_two_scales=False,
            cache_format=cache_format,
        )  # fmt: skip


class RaggedMLAMetadataBuilder(_mla.MLACommonMetadataBuilder):
    """vLLM's own builder, set up so that requests with different numbers of queries can count as decodes."""

    _cudagraph_support = _vllm.AttentionCGSupport.UNIFORM_BATCH
    query_len_support = _mla.QueryLenSupport.VARLEN
    reorder_batch_threshold = ABSORBED

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, *others: Any,
        **named: Any,
    ) -> None:  # fmt: skip
        if is_batch_invariant():
            # Whether a short request counts as a decode depends on the requests before it in the batch, and the chunks
            # of a long request's context depend on the other requests. So all requests count as decodes.
            if vllm_config.parallel_config.decode_context_parallel_size > 1:
                raise Unsupported("expected no context parallelism for RAGGED_MLA with VLLM_BATCH_INVARIANT=1")
            self.reorder_batch_threshold = vllm_config.scheduler_config.max_num_batched_tokens
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *others, **named)


class RaggedMLAImpl(LatentImpl, _mla.MLACommonImpl):
    """One layer's latent attention."""

    def __init__(self, *layer_args: Any, **mla_args: Any) -> None:
        LatentImpl.__init__(self, *layer_args, **mla_args)
        _mla.MLACommonImpl.__init__(self, *layer_args, **mla_args)
        self.supports_quant_query_input = False

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of short requests: absorbed queries attend to the cached latents.

        Args:
            q: [tokens, H, L + R], or a tuple of its two parts.
            kv_c_and_k_pe_cache: [blocks, block, L + R], or bytes [blocks, block, 656].
            attn_metadata: vLLM's `MLACommonMetadata`, in which these requests come first; under context parallelism
                their lengths and tables describe this rank's part of the cache.
            layer: vLLM's layer; its `_k_scale` is the scale of an `fp8` cache.

        Returns:
            out [tokens, H, L], and lse [tokens, H] float32, by which vLLM merges ranks. It is a natural logarithm.
        """
        q = joined(q)
        decode, tokens = attn_metadata.decode, q.shape[0]
        requests = decode.seq_lens.shape[0]
        if tokens > requests and attn_metadata.causal and self.dcp_world_size > 1:
            raise Unsupported("expected one decode query per request under context parallelism, got several")
        cache, cache_format = stored(kv_c_and_k_pe_cache, self.kv_cache_dtype)
        with as_vllm_asks():
            out, lse = ragged_mla_attention(
                q, cache, decode.seq_lens, decode.block_table, attn_metadata.query_start_loc[: requests + 1],
                max_q_len=min(attn_metadata.max_query_len, tokens), d_v=self.kv_lora_rank, sm_scale=self.scale,
                causal=bool(attn_metadata.causal), kv_scale=layer._k_scale if self.kv_cache_dtype in SCALED else None,
                return_lse=True, cache_format=cache_format,
            )  # fmt: skip
        return out, lse

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attention of long requests with keys and values of each head, over the new tokens and the cached context.

        Args:
            q: [tokens, H, nope + R] of the long requests.
            kv_c_normed, k_pe: [tokens, L] and [tokens, 1, R], the latents of these tokens.
            kv_c_and_k_pe_cache: as in `forward_mqa`; read if a request has earlier chunks or a shared prefix.
            attn_metadata: vLLM's `MLACommonMetadata`.
            k_scale: the scale of an `fp8` cache.
            output: [tokens, H * v_head_dim], written.
            output_scale: must be None.
        """
        if output_scale is not None:
            raise Unsupported("expected output_scale to be None, got a quantised output")
        if is_batch_invariant():
            raise Unsupported("expected all requests as decodes with VLLM_BATCH_INVARIANT=1, got a prefill")
        prefill = attn_metadata.prefill
        context = prefill.chunked_context
        if context is not None and self.dcp_world_size > 1:
            # The context is on several ranks. vLLM gathers it, and runs its own prefill backend.
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output)
            return
        k, v = self._keys_and_values(kv_c_normed, k_pe)
        edges = prefill.query_start_loc
        out = output.view(*v.shape)
        _, lse = varlen_attention(q, k, v, edges, edges, sm_scale=self.scale, causal=True, return_lse=True, out=out)
        for chunk in () if context is None else context.chunks:
            tables = prefill.block_table[chunk.request_slice]
            latents = self._gathered(kv_c_and_k_pe_cache, tables, chunk, k_scale, q.dtype)
            k, v = self._keys_and_values(*latents.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1))
            rows = chunk.token_slice
            part = varlen_attention(
                q[rows], k, v, chunk.query_start_loc, chunk.cu_seq_lens, sm_scale=self.scale, return_lse=True
            )
            _, lse[rows] = merge_attention_states([out[rows], part[0]], [lse[rows], part[1]], out=out[rows])

    def _keys_and_values(self, kv_c: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of every head, from latents [tokens, L] and rotary keys [tokens, R] or [tokens, 1, R]."""
        projected = self.kv_b_proj(kv_c)[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k_nope, v = projected.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        shared = k_pe.reshape(-1, 1, self.qk_rope_head_dim).expand(-1, self.num_heads, -1)
        return torch.cat((k_nope, shared), dim=-1), v

    def _gathered(
        self, cache: torch.Tensor, page_indices: torch.Tensor, chunk: Any, k_scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The cached latents [tokens, L + R] of a context chunk of vLLM. The host does not wait for the device."""
        sequence = chunk.token_to_seq.long()
        token = torch.arange(sequence.shape[0], device=cache.device)
        position = token - chunk.cu_seq_lens[sequence] + chunk.starts[sequence]
        page_size = cache.shape[1]
        page = page_indices[sequence, position // page_size].long()
        if self.kv_cache_dtype in SCALED:  # as bytes, because some torch devices cannot index 8-bit floats
            codes = cache.view(torch.uint8)[page, position % page_size].view(FP8[self.kv_cache_dtype])
            return (codes.float() * k_scale).to(dtype)
        rows = cache[page, position % page_size]
        if CACHE_FORMATS[self.kv_cache_dtype] == "plain":
            return rows
        return dequantize_mla_cache(rows[None, :, None], CACHE_FORMATS[self.kv_cache_dtype], dtype)[0, :, 0]


def joined(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The absorbed queries as one tensor. vLLM may pass a tuple of two parts."""
    return torch.cat(q, dim=-1) if isinstance(q, tuple) else q


def stored(cache: torch.Tensor, kv_cache_dtype: str) -> tuple[torch.Tensor, str]:
    """vLLM's cache [blocks, block, width] as a view [P, G, 1, width], and its format."""
    if kv_cache_dtype in SCALED:  # vLLM's cache has bytes or 8-bit floats, by platform
        return cache.view(FP8[kv_cache_dtype]).unsqueeze(2), "plain"
    return cache.unsqueeze(2), CACHE_FORMATS[kv_cache_dtype]


class RaggedMLABackend(LatentBackend, _mla.MLACommonBackend):
    """The properties by which vLLM selects this backend for dense latent attention."""

    NAME, IMPL, BUILDER = "RAGGED_MLA", RaggedMLAImpl, RaggedMLAMetadataBuilder
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*CACHE_FORMATS, *SCALED]


RaggedMLAImpl.BACKEND = RaggedMLABackend
