"""The backend `RAGGED`: prefill, decode and any mix of them in one call, over vLLM's own cache, without a copy.

vLLM's cache of a layer is [blocks, K, block, D + D_v], in any order of memory. K and V of a head are side by side, so
its two halves are views that serve as our pair of pages.
"""

import contextlib
import dataclasses
import importlib
import os
from typing import Any, ClassVar

import torch

from ragged_attention.config import use_backend
from ragged_attention.errors import Unsupported
from ragged_attention.integrations._vllm_rope import FusedRope
from ragged_attention.torch import ragged_paged_attention, write_kv_pages

_vllm: Any = importlib.import_module("vllm.v1.attention.backend")
_INVARIANT = use_backend(batch_invariant=True)

# vLLM stores 8-bit caches as bytes, and names their dtype apart.
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PLAIN = ("auto", "float16", "bfloat16")


class RaggedBackend:
    """The properties that all our backends report to vLLM, and the check of a layer's arguments."""

    NAME: ClassVar[str]
    IMPL: ClassVar[type]
    BUILDER: ClassVar[type]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]]

    @classmethod
    def get_name(cls) -> str:
        return cls.NAME

    @classmethod
    def get_impl_cls(cls) -> type:
        return cls.IMPL

    @classmethod
    def get_builder_cls(cls) -> type:
        return cls.BUILDER

    @classmethod
    def yes(cls) -> bool:
        """The answer to each of vLLM's `supports_*` questions that our backends affirm."""
        return True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [_vllm.MultipleOf(16)]

    @classmethod
    def expect_layer(cls, attn_type: str, kv_cache_dtype: str, **absent: Any) -> None:
        """Refuse arguments that the operations do not support; vLLM does not ask beforehand on every platform."""
        if attn_type != "decoder":
            got = getattr(attn_type, "value", attn_type)
            raise Unsupported(f"expected attn_type='decoder' for {cls.NAME}, got {got!r}")
        for name, value in absent.items():
            if value is not None:
                raise Unsupported(f"expected {name} to be None for {cls.NAME}, got {value!r}")
        if kv_cache_dtype not in cls.supported_kv_cache_dtypes:
            names = ", ".join(cls.supported_kv_cache_dtypes)
            raise Unsupported(f"expected kv_cache_dtype to be one of {names}, got {kv_cache_dtype!r}")


def as_vllm_asks() -> contextlib.AbstractContextManager[Any]:
    """The context of an attention call, which is batch-invariant if vLLM's own variable asks for it."""
    return _INVARIANT if os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1" else contextlib.nullcontext()


@dataclasses.dataclass
class RaggedMetadata(_vllm.AttentionMetadata):
    """One step's tables by our names. The host reads only the two numbers; `max_q_len` bounds all query lengths."""

    num_actual_tokens: int
    max_q_len: int
    cu_q_lens: torch.Tensor
    kv_lens: torch.Tensor
    page_indices: torch.Tensor
    slot_mapping: torch.Tensor


class RaggedMetadataBuilder(_vllm.AttentionMetadataBuilder):
    """Hands on vLLM's tables under our names; they have the same meaning."""

    # Launches depend on shapes alone, so a graph may be replayed with other lengths and tables.
    _cudagraph_support = _vllm.AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RaggedMetadata:
        """The step's metadata; `common_prefix_len` is always 0 and nothing depends on `fast_build`."""
        common = common_attn_metadata
        # vLLM's CPU platform does not ask `supports_*` beforehand.
        if common.causal is not True:
            got = "a flag for each request" if isinstance(common.causal, torch.Tensor) else common.causal
            raise Unsupported(f"expected causal attention from vLLM (causal=True), got {got}")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(common, name, None) is not None:
                raise Unsupported(f"expected vLLM's {name} to be None, got {type(getattr(common, name)).__name__}")
        return RaggedMetadata(
            num_actual_tokens=common.num_actual_tokens, max_q_len=common.max_query_len,
            cu_q_lens=common.query_start_loc, kv_lens=common.seq_lens, page_indices=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )  # fmt: skip

    def update_block_table(
        self, metadata: RaggedMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> RaggedMetadata:
        """The metadata of the same step for another group of layers, which has its own pages."""
        return dataclasses.replace(metadata, page_indices=blk_table, slot_mapping=slot_mapping)


class RaggedAttentionImpl(FusedRope, _vllm.AttentionImpl):
    """One layer's attention, and the write of its new keys and values."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        RaggedAttentionBackend.expect_layer(attn_type, kv_cache_dtype, alibi_slopes=alibi_slopes)
        if sinks is not None and sinks.shape != (num_heads,):
            raise Unsupported(f"expected sinks of shape [num_heads={num_heads}], got {list(sinks.shape)}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None  # 0 stands for none
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: RaggedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the step's queries over the cache, which already holds the new keys and values.

        Args:
            layer: vLLM's layer; its `_k_scale` and `_v_scale` are the scales of an 8-bit cache.
            query: [tokens, H, D]; rows from `num_actual_tokens` on are padding.
            key, value: not read, because they are in the cache.
            kv_cache: [blocks, K, block, D + D_v] in any order of memory.
            attn_metadata: None in vLLM's profiling run, which gets zeros.
            output: [tokens, H, D_v], written and returned; padding rows are not written.
            output_scale, output_block_scale: must be None.
        """
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("expected output_scale and output_block_scale to be None, got a quantised output")
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        k_scale, v_scale = self._scales(layer)
        pages = self._pages(kv_cache)
        with as_vllm_asks():
            ragged_paged_attention(
                query[:tokens], pages, attn_metadata.kv_lens, attn_metadata.page_indices, attn_metadata.cu_q_lens,
                max_q_len=attn_metadata.max_q_len, sm_scale=self.scale, sliding_window=self.sliding_window,
                soft_cap=self.logits_soft_cap, sinks=None if self.sinks is None else self.sinks.detach().float(),
                k_scale=k_scale, v_scale=v_scale, out=output[:tokens].view(tokens, self.num_heads, pages[1].shape[-1]),
            )  # fmt: skip
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the step's keys and values to their slots; a slot of -1 is skipped."""
        k_scale, v_scale = self._scales(layer)
        tokens = slot_mapping.shape[0]  # keys and values may be padded when slots are not
        write_kv_pages(
            key[:tokens], value[:tokens], self._pages(kv_cache), slot_mapping, k_scale=k_scale, v_scale=v_scale
        )

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[blocks, K, block, D + D_v] as our pair of [P, G, K, D] and [P, G, K, D_v]; nothing is copied."""
        if self.kv_cache_dtype in FP8:
            kv_cache = kv_cache.view(FP8[self.kv_cache_dtype])
        both = kv_cache.transpose(1, 2)
        return both[..., : self.head_size], both[..., self.head_size :]

    def _scales(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (layer._k_scale, layer._v_scale) if self.kv_cache_dtype in FP8 else (None, None)


class RaggedAttentionBackend(RaggedBackend, _vllm.AttentionBackend):
    """The answers to vLLM's questions before it selects a backend; see `ragged_attention.integrations.vllm`."""

    NAME, IMPL, BUILDER = "RAGGED", RaggedAttentionImpl, RaggedMetadataBuilder
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*PLAIN, *FP8]
    forward_includes_kv_cache_update = False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 16 <= head_size <= 512 and head_size % 8 == 0

    supports_sink = supports_sliding_window = supports_batch_invariance = supports_per_head_quant_scales = (
        RaggedBackend.yes
    )
