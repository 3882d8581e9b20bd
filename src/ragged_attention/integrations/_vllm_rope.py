"""vLLM's fused steps before attention: rotary embedding and cache write, with or without norms of each head.

vLLM's compiler passes find these steps in a model's graph, and ask the layer's implementation whether it has a fused
version of them. The fused version writes rotated keys only to the cache. So a layer that needs them also outside the
cache has no fused version. A layer whose cache stores scales has no fused version either.
"""

import abc
from typing import Any

import torch

from ragged_attention.integrations._vllm_caches import Stored
from ragged_attention.torch import norm_rope_write


class FusedRope(abc.ABC):
    """The mixin that gives a layer's implementation the fused steps."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    def fused_rope_kvcache_supported(self) -> bool:
        return self._has_fused_steps()

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return self._has_fused_steps()

    def do_rope_and_kv_cache_update(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate the step's queries in place, and write rotated keys and values to their slots.

        Args:
            layer: vLLM's layer, with the scales of an 8-bit cache.
            query: [tokens, H, D], or [tokens, H * D]; rows after the last slot are padding and stay unchanged.
            key, value: [tokens, K, D] and [tokens, K, D_v], or flat. Rotated keys are only written to the cache.
            positions: [tokens].
            cos_sin_cache: [positions, R], cosines before sines.
            is_neox: whether rotary column i is paired with column i + R / 2; otherwise adjacent columns are paired.
            kv_cache: [blocks, K, block, D + D_v] with any strides.
            layer_slot_mapping: [tokens]; -1 is skipped.
        """
        rows = query.view(query.shape[0], self.num_heads, self.head_size)
        key, value = (tensor.reshape(tensor.shape[0], self.num_kv_heads, -1) for tensor in (key, value))
        new = self._prepare(layer, rows, key, value, positions, cos_sin_cache, is_neox, kv_cache, layer_slot_mapping)
        rows[: len(new)] = new

    def do_qk_norm_rope_kvcache_update(
        self,
        layer: Any,
        qkv: torch.Tensor,
        q_out: torch.Tensor,
        k_out: torch.Tensor,
        positions: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        rms_norm_eps: float,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Normalise and rotate queries into `q_out`, and write normalised, rotated keys and values to their slots.

        Args:
            qkv: [tokens, H * D + K * D + K * D_v].
            q_out: [tokens, H * D] or [tokens, H, D], written.
            k_out: set to 0. The rotated keys are only written to the cache, from which our attention reads them.
            q_weight, k_weight: [D], the weights of the norms.
            rms_norm_eps: added to the mean of squares.
        """
        split = [self.num_heads * self.head_size, self.num_kv_heads * self.head_size]
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        parts = qkv.split([*split, qkv.shape[-1] - sum(split)], dim=-1)
        q, k, v = (part.unflatten(-1, (count, -1)) for part, count in zip(parts, heads, strict=True))
        new = self._prepare(
            layer, q, k, v, positions, cos_sin_cache, is_neox, kv_cache, layer_slot_mapping,
            q_weight=q_weight.detach(), k_weight=k_weight.detach(), eps=rms_norm_eps,
        )  # fmt: skip
        q_out.view(q_out.shape[0], self.num_heads, self.head_size)[: len(new)] = new
        k_out.zero_()

    def _prepare(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor,
        cos_sin: torch.Tensor, is_neox: bool, kv_cache: torch.Tensor, slots: torch.Tensor, **norms: Any,
    ) -> torch.Tensor:  # fmt: skip
        """The new queries of the tokens that have a slot, whose keys and values are written to the cache."""
        cache = self._stored(layer, kv_cache)
        tokens = slots.shape[0]  # there may be padding rows, which have no slots
        q, _ = norm_rope_write(
            q[:tokens], k[:tokens], v[:tokens], cache.kv_pages, slots, positions=positions[:tokens], cos_sin=cos_sin,
            interleaved=not is_neox, k_scale=cache.k_scale, v_scale=cache.v_scale, **norms,
        )  # fmt: skip
        return q

    @abc.abstractmethod
    def _has_fused_steps(self) -> bool:
        """Whether attention reads all keys from the cache, and the fused steps can write to this cache."""

    @abc.abstractmethod
    def _stored(self, layer: Any, kv_cache: torch.Tensor) -> Stored:
        """vLLM's cache as arguments of our operations."""
