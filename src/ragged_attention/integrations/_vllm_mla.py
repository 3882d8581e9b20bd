"""The classes behind `RAGGED_MLA`: decode over the cached latents, prefill of whole prompts and of later chunks.

vLLM's own classes split a batch into decoding and prefilling requests, absorb W_UK into the queries that decode, and
plan in which pieces a prefill reads the context that is already cached. What runs here are the attentions, the
gathering of cached latents, and the merge.
"""

import importlib
from typing import Any, ClassVar

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations._vllm_attention import (
    PLAIN,
    AnyPages,
    expect_cache_dtype,
    expect_plain_decoder,
)
from ragged_attention.torch import (
    dequantize_mla_cache,
    merge_attention_states,
    mla_decode,
    varlen_attention,
    write_mla_cache,
)

_vllm: Any = importlib.import_module("vllm.v1.attention.backend")
_mla: Any = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")

CACHE_FORMATS = dict.fromkeys(PLAIN, "plain") | {"fp8_ds_mla": "fp8_v32"}


class LatentPages(AnyPages):
    """What vLLM asks our backends for latents about the formats of their pages."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [*CACHE_FORMATS]

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **named: Any
    ) -> str | None:
        if kv_cache_dtype == "fp8_ds_mla" and head_size != 576:
            return f"fp8_ds_mla holds rows of 576 columns, not {head_size}"
        return None


class RaggedMLABackend(LatentPages, _mla.MLACommonBackend):
    """What vLLM asks about us before it chooses us for dense latent attention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "RAGGED_MLA"

    @staticmethod
    def get_impl_cls() -> type["RaggedMLAImpl"]:
        return RaggedMLAImpl

    @staticmethod
    def get_builder_cls() -> type["RaggedMLAMetadataBuilder"]:
        return RaggedMLAMetadataBuilder


class RaggedMLAMetadataBuilder(_mla.MLACommonMetadataBuilder):
    """vLLM's own builder, told that a decode may have several queries, as many for each request."""

    _cudagraph_support = _vllm.AttentionCGSupport.UNIFORM_BATCH
    query_len_support = _mla.QueryLenSupport.UNIFORM


class RaggedMLAImpl(_mla.MLACommonImpl):
    """One layer's latent attention, and the write of its new latents."""

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
        expect_latent_decoder("RAGGED_MLA", alibi_slopes, sliding_window, logits_soft_cap, attn_type)
        expect_cache_dtype(kv_cache_dtype, RaggedMLABackend.supported_kv_cache_dtypes)
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self.supports_quant_query_input = False

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode by absorbed queries over the cached latents.

        Args:
            q: [tokens, H, L + R], or its two parts; as many tokens for each request.
            kv_c_and_k_pe_cache: [blocks, block, L + R], or bytes [blocks, block, 656].
            attn_metadata: vLLM's `MLACommonMetadata`; under context parallelism its lengths and tables are those of
                this rank's share of the cache.
            layer: not read.

        Returns:
            out [tokens, H, L] and lse [tokens, H] float32, natural, by which vLLM merges ranks.
        """
        q = joined(q)
        decode = attn_metadata.decode
        requests = decode.seq_lens.shape[0]
        tokens, heads, d_qk = q.shape
        if requests == 0 or tokens % requests:
            raise Unsupported(f"expected as many decode queries for each request, got {tokens} for {requests} requests")
        if tokens > requests and attn_metadata.causal and self.dcp_world_size > 1:
            raise Unsupported("expected one decode query per request under context parallelism, got several")
        out, lse = mla_decode(
            q.view(requests, tokens // requests, heads, d_qk),
            kv_c_and_k_pe_cache.unsqueeze(2),
            decode.block_table,
            decode.seq_lens,
            d_v=self.kv_lora_rank,
            sm_scale=self.scale,
            causal=bool(attn_metadata.causal),
            cache_format=CACHE_FORMATS[self.kv_cache_dtype],
        )
        return out.view(tokens, heads, self.kv_lora_rank), lse.transpose(1, 2).reshape(tokens, heads)

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
        """Prefill by materialised keys and values: the new tokens, then what is cached before them, merged.

        Args:
            q: [tokens, H, nope + R] of the prefilling requests.
            kv_c_normed, k_pe: [tokens, L] and [tokens, 1, R], their latents.
            kv_c_and_k_pe_cache: as in `forward_mqa`; read where a request has earlier chunks or a shared prefix.
            attn_metadata: vLLM's `MLACommonMetadata`.
            k_scale: not read, for no format that we take has it.
            output: [tokens, H * v_head_dim], written.
            output_scale: must be None.
        """
        if output_scale is not None:
            raise Unsupported("expected output_scale to be None, got a quantised output")
        prefill = attn_metadata.prefill
        context = prefill.chunked_context
        if context is not None and self.dcp_world_size > 1:
            # The context lies on several ranks; gathering it is vLLM's, with the prefill backend it has chosen.
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output)
            return
        k, v = self._keys_and_values(kv_c_normed, k_pe)
        edges = prefill.query_start_loc
        out = output.view(*v.shape)
        _, lse = varlen_attention(q, k, v, edges, edges, sm_scale=self.scale, causal=True, return_lse=True, out=out)
        for chunk in () if context is None else context.chunks:
            latents = self._gathered(kv_c_and_k_pe_cache, prefill.block_table[chunk.request_slice], chunk, q.dtype)
            k, v = self._keys_and_values(*latents.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1))
            rows = chunk.token_slice
            part = varlen_attention(
                q[rows], k, v, chunk.query_start_loc, chunk.cu_seq_lens, sm_scale=self.scale, return_lse=True
            )
            _, lse[rows] = merge_attention_states([out[rows], part[0]], [lse[rows], part[1]], out=out[rows])

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
        """Write the step's latents to their slots; a slot of -1 is skipped."""
        write_latents(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype)

    def _keys_and_values(self, kv_c: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [tokens, L] and rotary keys [tokens, (1,) R] as keys and values of every head."""
        projected = self.kv_b_proj(kv_c)[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k_nope, v = projected.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        shared = k_pe.reshape(-1, 1, self.qk_rope_head_dim).expand(-1, self.num_heads, -1)
        return torch.cat((k_nope, shared), dim=-1), v

    def _gathered(
        self, cache: torch.Tensor, page_indices: torch.Tensor, chunk: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        """The cached latents [tokens, L + R] of one of vLLM's pieces of context, found without asking the device."""
        sequence = chunk.token_to_seq.long()
        token = torch.arange(sequence.shape[0], device=cache.device)
        position = token - chunk.cu_seq_lens[sequence] + chunk.starts[sequence]
        page_size = cache.shape[1]
        page = page_indices[sequence, position // page_size].long()
        rows = cache[page, position % page_size]
        if CACHE_FORMATS[self.kv_cache_dtype] == "plain":
            return rows
        return dequantize_mla_cache(rows[None, :, None], CACHE_FORMATS[self.kv_cache_dtype], dtype)[0, :, 0]


def joined(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The absorbed query, of which vLLM may hand the two parts."""
    return torch.cat(q, dim=-1) if isinstance(q, tuple) else q


def write_latents(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_cache_dtype: str
) -> None:
    """Latents [tokens, L] with rotary keys [tokens, 1, R] into the slots of a cache [blocks, block, width]."""
    if kv_cache.numel() == 0:  # as in vLLM's profiling run
        return
    slots = slot_mapping.flatten()
    rows = torch.cat((kv_c, k_pe.squeeze(1)), dim=-1)[: slots.shape[0]]
    write_mla_cache(
        rows,
        kv_cache.unsqueeze(2),
        slots,
        power_of_two_scales=False,
        cache_format=CACHE_FORMATS[kv_cache_dtype],
    )


def expect_latent_decoder(
    backend: str,
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    attn_type: str,
) -> None:
    """Refuse what no latent attention of ours can do."""
    expect_plain_decoder(
        backend,
        attn_type=attn_type,
        alibi_slopes=alibi_slopes,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap or None,
    )
