"""The backend `RAGGED`: prefill, decode and any mix of them in one call, over vLLM's own cache, without a copy.

`_vllm_caches` defines the formats of that cache. Two kinds of layers use `varlen_attention` to attend to the keys of
the current step: encoder layers, because they have no cache; and layers whose cache is divided among ranks by context
parallelism, because no rank's cache has all new keys.
"""

import dataclasses
import functools
import importlib
import math
from typing import Any, ClassVar

import torch

from ragged_attention.calls.sharding import dtype_of_parts
from ragged_attention.errors import Unsupported
from ragged_attention.integrations._vllm_caches import KINDS, Stored, customized, refusal, stored
from ragged_attention.integrations._vllm_invariance import as_vllm_asks
from ragged_attention.integrations._vllm_masks import Mask, ModelMasks, StepMasks, spans_of_step
from ragged_attention.integrations._vllm_ranks import Ranks, ranks_of
from ragged_attention.integrations._vllm_rope import FusedRope
from ragged_attention.integrations._vllm_rotation import norm, rotated, rotated_back
from ragged_attention.torch import merge_attention_states, ragged_paged_attention, varlen_attention, write_kv_pages

_vllm: Any = importlib.import_module("vllm.v1.attention.backend")

# vLLM's kinds of attention without a cache: in an encoder-decoder's encoder, and in an encoder-only model.
WITHOUT_CACHE = ("encoder", "encoder_only")


class RaggedBackend:
    """The properties that all our backends report to vLLM, and the check of a layer's arguments."""

    NAME: ClassVar[str]
    IMPL: ClassVar[type]
    BUILDER: ClassVar[type]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]]
    supported_attn_types: ClassVar[tuple[str, ...]] = ("decoder",)

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
        """Return True, for the `supports_*` methods of features that our backends support."""
        return True

    supports_batch_invariance = yes

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in cls.supported_attn_types

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [_vllm.MultipleOf(16)]

    @classmethod
    def expect_layer(cls, attn_type: str, kv_cache_dtype: str, **absent: Any) -> None:
        """Raise Unsupported for unsupported arguments. vLLM does not check this beforehand on every platform."""
        if not cls.supports_attn_type(attn_type):
            names, got = " or ".join(cls.supported_attn_types), getattr(attn_type, "value", attn_type)
            raise Unsupported(f"expected attn_type to be {names} for {cls.NAME}, got {got!r}")
        for name, value in absent.items():
            if value is not None:
                raise Unsupported(f"expected {name} to be None for {cls.NAME}, got {value!r}")
        if kv_cache_dtype not in cls.supported_kv_cache_dtypes:
            names = ", ".join(cls.supported_kv_cache_dtypes)
            raise Unsupported(f"expected kv_cache_dtype to be one of {names}, got {kv_cache_dtype!r}")


@dataclasses.dataclass
class RaggedMetadata(_vllm.AttentionMetadata):
    """The arguments of our operations for one step. The host reads no tensor. `max_q_len` bounds all query lengths."""

    num_actual_tokens: int
    max_q_len: int
    cu_q_lens: torch.Tensor
    kv_lens: torch.Tensor
    page_indices: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor
    masks: StepMasks
    # The spans of images, whose tokens see one another.
    mm_prefix_range: torch.Tensor | None  # vLLM's Gemma 4 sets it to None for layers that see images as text
    ranks: Ranks | None  # the ranks that share the cache, if this rank does not hold all of it
    context_lens: torch.Tensor | None  # with `ranks`: this rank's earlier keys per request; None if no rank has any

    @functools.cached_property
    def reversed_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of the queries, the rows of the keys, and the keys' edges, for attention to later tokens.

        The queries are the step's rows in reverse order within each request. The keys are in the same order, but
        without the last row of each request. Causal attention is aligned at the end. As a request has one key less than
        queries, a query sees only the keys before its own row in this order, which are the later tokens.
        """
        edges = self.cu_q_lens
        fewer = (edges[1:] - edges[:-1] - 1).clamp(min=0).cumsum(0, dtype=torch.int32)
        fewer_edges = torch.cat((edges.new_zeros(1), fewer))
        row = torch.arange(self.num_actual_tokens, device=edges.device)

        def rows(starts: torch.Tensor) -> torch.Tensor:
            request = torch.searchsorted(starts[1:], row, right=True).clamp(max=len(edges) - 2)
            return (edges[request + 1] - 1 - (row - starts[request])).clamp(0, len(row) - 1)

        return rows(edges), rows(fewer_edges), fewer_edges


class RaggedMetadataBuilder(_vllm.AttentionMetadataBuilder):
    """Builds a step's metadata from vLLM's tables, which have the same meaning as ours under other names."""

    # Launches depend on shapes alone, so a graph may be replayed with other lengths and tables.
    _cudagraph_support = _vllm.AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._ranks = ranks_of(kv_cache_spec, vllm_config)
        self._model_masks = ModelMasks.of(vllm_config.model_config)
        self._places: dict[Any, torch.Tensor] = {}
        if self._ranks is not None:
            # A replayed graph reads the addresses that it captured, so the lengths of all steps are in one tensor.
            most = vllm_config.scheduler_config.max_num_seqs
            self._context_lens = torch.zeros(most, dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RaggedMetadata:
        """The step's metadata; `common_prefix_len` is always 0 and nothing depends on `fast_build`."""
        common = common_attn_metadata
        context_lens = self._update_context_lens(common) if self._ranks is not None else None
        masks = self._step_masks(common)
        metadata = RaggedMetadata(
            num_actual_tokens=common.num_actual_tokens, max_q_len=common.max_query_len,
            cu_q_lens=common.query_start_loc, kv_lens=common.seq_lens, page_indices=common.block_table_tensor,
            slot_mapping=common.slot_mapping, causal=common.causal, ranks=self._ranks,
            context_lens=context_lens if _has_context(common) else None, masks=masks, mm_prefix_range=masks.spans,
        )  # fmt: skip
        self._make_ranges(metadata)
        return metadata

    def _step_masks(self, common: Any) -> StepMasks:
        spans, prefix_lens, kv_lens = None, None, common.seq_lens
        if common.mm_req_doc_ranges or self._model_masks.has_spans:
            spans = spans_of_step(common)
        if self._model_masks.prefix_window is not None and common.rswa_prefix_lens is not None:
            if self._ranks is not None:  # not every platform of vLLM checks this beforehand
                raise Unsupported("expected no R-SWA under context parallelism for RAGGED, got rswa_prefix_lens")
            prefix_lens = common.rswa_prefix_lens[: len(kv_lens)].to(kv_lens.device, torch.int32, non_blocking=True)
        if self._ranks is not None:
            # A separate call computes the attention of new tokens to one another. Its positions start at 0.
            new_lens = common.query_start_loc.diff()
            spans = None if spans is None else spans - (kv_lens - new_lens)[:, None, None]
            kv_lens = new_lens
        return StepMasks(
            common.query_start_loc, kv_lens, common.num_actual_tokens, common.causal, spans, prefix_lens,
            self._model_masks.prefix_window, self._places, self.vllm_config.scheduler_config.max_num_batched_tokens,
        )  # fmt: skip

    def _make_ranges(self, metadata: RaggedMetadata) -> None:
        """Compute the layers' key ranges before attention, which may run in a captured graph."""
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            layers[name].impl.key_ranges(layers[name], metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> RaggedMetadata:
        """The metadata for capture. Later replayed steps may have earlier keys, so it always has `context_lens`."""
        metadata = self.build(0, common_attn_metadata)
        if self._ranks is None:
            return metadata
        return dataclasses.replace(metadata, context_lens=self._context_lens[: len(metadata.kv_lens)])

    def _update_context_lens(self, common: Any) -> torch.Tensor:
        assert self._ranks is not None
        starts = common.query_start_loc
        lens = self._ranks.shard.lengths(common.seq_lens - (starts[1:] - starts[:-1]))
        return self._context_lens[: len(lens)].copy_(lens)

    def update_block_table(
        self, metadata: RaggedMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> RaggedMetadata:
        """The step's metadata for another group of layers, which has its own pages."""
        metadata = dataclasses.replace(metadata, page_indices=blk_table, slot_mapping=slot_mapping)
        self._make_ranges(metadata)
        return metadata


def _has_context(common: Any) -> bool:
    """Whether any request may have keys from earlier steps. The result is equal on all ranks."""
    longest, starts = getattr(common, "seq_lens_cpu_upper_bound", None), common.query_start_loc_cpu
    return longest is None or bool((longest[: len(starts) - 1] > starts[1:] - starts[:-1]).any())


class RaggedAttentionImpl(FusedRope, _vllm.AttentionImpl):
    """A layer's attention, and the write of its new keys and values to the cache."""

    can_return_lse_for_decode = True
    supports_dcp = True
    # New tokens attend to one another without the cache, so any interleaving of the cache over ranks is supported.
    supports_mtp_with_cp_non_trivial_interleave_size = True

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
        chunk_lookback: int = -1,
    ) -> None:
        RaggedAttentionBackend.expect_layer(attn_type, kv_cache_dtype)
        if (reason := refusal(kv_cache_dtype, head_size)) is not None:
            raise Unsupported(reason)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        # vLLM counts distances for the slopes from another position. This shifts all logits, which matters with sinks.
        if self.alibi_slopes is not None and sinks is not None:
            raise Unsupported("expected sinks to be None with alibi_slopes for RAGGED, got both")
        if sinks is not None and sinks.shape != (num_heads,):
            raise Unsupported(f"expected sinks of shape [num_heads={num_heads}], got {list(sinks.shape)}")
        self._expect_kind(
            attn_type, alibi_slopes, sliding_window=sliding_window,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        )  # fmt: skip
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.attn_type = attn_type
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None  # 0 means no cap
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.chunk_lookback = chunk_lookback

    def key_ranges(self, layer: Any, metadata: RaggedMetadata) -> torch.Tensor | None:
        """The key ranges of the step's tokens in this layer; None if `causal` and `sliding_window` express them."""
        if self.attn_type != "decoder":
            return None
        clamp_spans = getattr(layer, "mm_prefix_clamp_sliding_window", False)
        has_spans = metadata.mm_prefix_range is not None
        return metadata.masks.of(Mask(self.sliding_window, self.chunk_lookback, has_spans, clamp_spans))

    def _expect_kind(self, attn_type: str, alibi_slopes: Any, **whole_cache: Any) -> None:
        """Raise Unsupported for arguments that encoder layers, or layers whose cache is on several ranks, cannot take.

        `whole_cache` has the arguments that need all earlier keys on this rank.
        """
        kind, without_cache = getattr(attn_type, "value", attn_type), attn_type in WITHOUT_CACHE
        over_ranks = self.dcp_world_size > 1 and not without_cache
        if kind == "decoder" and not over_ranks:
            return
        where = "under context parallelism" if over_ranks else f"with attn_type={kind!r}"
        if over_ranks and kind != "decoder":
            raise Unsupported(f"expected attn_type to be decoder for RAGGED {where}, got {kind!r}")
        for name, value in {"alibi_slopes": alibi_slopes, **(whole_cache if over_ranks else {})}.items():
            if value is not None:
                raise Unsupported(f"expected {name} to be None for RAGGED {where}, got {value!r}")

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
            layer: vLLM's layer; its `_k_scale` and `_v_scale` are the scales of an 8-bit cache and of `nvfp4`.
            query: [tokens, H, D]; rows from `num_actual_tokens` on are padding.
            key, value: [tokens, K, D] and [tokens, K, D_v]. They are read only by layers without a cache and under
                context parallelism.
            kv_cache: [blocks, K, block, D + D_v] with any strides, or with scales (`_vllm_caches`); not read for a
                layer without a cache.
            attn_metadata: the result of our builder; None in vLLM's profiling run, in which the output is 0.
            output: [tokens, H, D_v], written and returned; padding rows are not written.
            output_scale, output_block_scale: must be None.
        """
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("expected output_scale and output_block_scale to be None, got a quantised output")
        if self.alibi_slopes is not None:  # vLLM's first call, the profiling run, moves them
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        if attn_metadata is None:
            if KINDS[self.kv_cache_dtype].is_rotated:
                rotated(query[:0])  # makes the rotation matrix now, because graph capture does not allow it
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        out = output[:tokens].view(tokens, self.num_heads, math.prod(output.shape[1:]) // self.num_heads)
        query = query[:tokens]
        with as_vllm_asks():
            if self.attn_type not in WITHOUT_CACHE and attn_metadata.ranks is None:
                self._paged(query, layer, kv_cache, attn_metadata, out)
                return output
            assert key is not None
            assert value is not None
            key, value = key[:tokens], value[:tokens]
            if self.attn_type in WITHOUT_CACHE:
                self._without_cache(query, key, value, attn_metadata, out)
            else:
                self._over_ranks(query, key, value, layer, kv_cache, attn_metadata, out)
        return output

    def _paged(
        self, query: torch.Tensor, layer: Any, kv_cache: torch.Tensor, metadata: RaggedMetadata, out: torch.Tensor
    ) -> None:
        """Attention over a cache that is entirely on this rank."""
        ranges = self.key_ranges(layer, metadata)
        if self.alibi_slopes is not None and (ranges is not None or not metadata.causal):
            got = "causal=False" if ranges is None else "ranges of keys"
            raise Unsupported(f"expected causal attention with alibi_slopes for RAGGED, got {got}")
        if ranges is None:
            mask: dict[str, Any] = {"causal": metadata.causal, "sliding_window": self.sliding_window}
        else:
            mask = {"key_ranges": ranges}
        self._over_pages(
            query, layer, kv_cache, metadata.kv_lens, metadata, sinks=self._sinks(), alibi_slopes=self.alibi_slopes,
            out=out, **mask,
        )  # fmt: skip

    def _over_pages(
        self, query: torch.Tensor, layer: Any, kv_cache: torch.Tensor, kv_lens: torch.Tensor, metadata: RaggedMetadata,
        **keywords: Any,
    ) -> Any:  # fmt: skip
        """Attention of the step's queries to the cached keys up to the given lengths."""
        arguments: dict[str, Any] = self._stored(layer, kv_cache)._asdict() | dict(
            kv_lens=kv_lens, page_indices=metadata.page_indices, cu_q_lens=metadata.cu_q_lens,
            max_q_len=metadata.max_q_len, soft_cap=self.logits_soft_cap, **keywords,
        )  # fmt: skip
        if not KINDS[self.kv_cache_dtype].is_rotated:
            return ragged_paged_attention(query, sm_scale=self.scale, **arguments)
        # The stored keys and values are rotated. So the queries are rotated too, and the result is rotated back. It
        # stays in float32 until then.
        out, dtype = arguments.pop("out", None), arguments.pop("out_dtype", query.dtype)
        results = ragged_paged_attention(
            rotated(query), sm_scale=self.scale / norm(self.head_size), out_dtype=torch.float32, **arguments
        )
        values, *lse = results if isinstance(results, tuple) else (results,)
        values = rotated_back(values)
        values = values.to(dtype) if out is None else out.copy_(values)
        return (values, *lse) if lse else values

    def _without_cache(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: RaggedMetadata, out: torch.Tensor
    ) -> None:
        """Attention of the step's tokens to one another, in both directions.

        vLLM's window has as many tokens after a query as before it, but the operation's window ends at the query. So
        there are two calls: one attends to the tokens up to the query's own, and the other, on reversed rows, attends
        to the tokens after it. Both calls are in float32, because otherwise their results would be rounded to the
        queries' dtype before they are merged.
        """
        window, sinks = self.sliding_window, self._sinks()
        if window is None or window == 1:
            self._packed(
                query, key, value, metadata, causal=window == 1, sliding_window=window, sinks=sinks, out=out
            )  # fmt: skip
            return
        query, key, value = query.float(), key.float(), value.float()
        rows, later, later_edges = metadata.reversed_rows
        before, before_lse = self._packed(
            query, key, value, metadata, causal=True, sliding_window=window, return_lse=True
        )
        # The later tokens do not include the query's own token, so their window is shorter by one.
        after, after_lse = self._packed(
            query[rows], key[later], value[later], metadata, later_edges, causal=True, sliding_window=window - 1,
            return_lse=True,
        )  # fmt: skip
        merge_attention_states(
            [before, after[rows]], [before_lse, after_lse[rows]], sinks=sinks, out_dtype=out.dtype, out=out
        )

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: RaggedMetadata,
        cu_kv_lens: torch.Tensor | None = None, **keywords: Any,
    ) -> Any:  # fmt: skip
        """Attention of the step's tokens to one another. `cu_kv_lens` are the keys' edges, if they differ."""
        edges, longest = metadata.cu_q_lens, metadata.max_q_len
        return varlen_attention(
            query, key, value, edges, edges if cu_kv_lens is None else cu_kv_lens, max_q_len=longest,
            max_kv_len=longest, sm_scale=self.scale, soft_cap=self.logits_soft_cap, **keywords,
        )  # fmt: skip

    def _over_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Any, kv_cache: torch.Tensor,
        metadata: RaggedMetadata, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Attention over the earlier keys, which are on several ranks, merged with attention over the step's own keys.

        Every new token sees all earlier keys of its request. A rank without keys of a request contributes out 0 and lse
        -inf, which has no weight in the merge. The ranks exchange float32 results.
        """
        ranks, ranges = metadata.ranks, self.key_ranges(layer, metadata)
        assert ranks is not None
        mask: dict[str, Any] = {"causal": metadata.causal} if ranges is None else {"key_ranges": ranges}
        if metadata.context_lens is None:
            self._packed(query, key, value, metadata, sinks=self._sinks(), out=out, **mask)
            return
        earlier = self._over_pages(
            ranks.with_all_heads(query), layer, kv_cache, metadata.context_lens, metadata, causal=False,
            return_lse=True, out_dtype=dtype_of_parts(query),
        )  # fmt: skip
        earlier, earlier_lse = ranks.merged(*earlier)
        new, new_lse = self._packed(query, key, value, metadata, return_lse=True, **mask)
        merge_attention_states(
            [earlier, new.to(earlier.dtype)], [earlier_lse, new_lse], sinks=self._sinks(), out_dtype=out.dtype, out=out
        )

    def _has_fused_steps(self) -> bool:
        if KINDS[self.kv_cache_dtype].keeps_scales:
            return False
        return self.attn_type == "decoder" and self.dcp_world_size == 1

    def _sinks(self) -> torch.Tensor | None:
        return None if self.sinks is None else self.sinks.detach().float()

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the step's keys and values to their slots; a slot of -1 is skipped.

        In cross attention, these are the keys and values of the encoder, in the first step of a request.
        """
        if self.attn_type in WITHOUT_CACHE:
            return
        tokens = slot_mapping.shape[0]  # keys and values may have padding rows, which have no slots
        key, value = key[:tokens], value[:tokens]
        if KINDS[self.kv_cache_dtype].is_rotated:
            key, value = rotated(key), rotated(value)
        write_kv_pages(key, value, slot_mapping=slot_mapping, **self._stored(layer, kv_cache)._asdict())

    def _stored(self, layer: Any, kv_cache: torch.Tensor) -> Stored:
        return stored(kv_cache, self.kv_cache_dtype, self.head_size, layer)


class RaggedAttentionBackend(RaggedBackend, _vllm.AttentionBackend):
    """The properties by which vLLM selects a backend; see `ragged_attention.integrations.vllm`."""

    NAME, IMPL, BUILDER = "RAGGED", RaggedAttentionImpl, RaggedMetadataBuilder
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*KINDS]
    supported_attn_types: ClassVar[tuple[str, ...]] = ("decoder", *WITHOUT_CACHE, "encoder_decoder")
    forward_includes_kv_cache_update = False

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return customized(spec)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **named: Any
    ) -> str | None:
        return None if kv_cache_dtype is None else refusal(kv_cache_dtype, head_size)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 16 <= head_size <= 512 and head_size % 8 == 0

    supports_sink = supports_sliding_window = supports_per_head_quant_scales = supports_non_causal = RaggedBackend.yes
    supports_mm_prefix = supports_rswa = RaggedBackend.yes
