"""Grouped queries over pages of keys and values."""

from collections.abc import Mapping
from typing import Any

from ragged_attention.demo.engine import Limits
from ragged_attention.demo.transformer import Transformer, Weights
from ragged_attention.tools.samples import FakeArray


class GroupedQueries(Transformer):
    """The transformer that caches keys and values. Several query heads share each KV head."""

    def heads(self, weights: Weights, layer: int, h: Any, positions: Any) -> tuple[Any, Any, Any]:
        q, k, v = (self.xp.einsum("...e,ehd->...hd", h, weights[name][layer]) for name in "qkv")
        return self.rope(q, positions), self.rope(k, positions), v

    def cache(self, weights: Weights, limits: Limits) -> FakeArray:
        _, _, num_kv_heads, head_dim = weights["k"].shape
        return FakeArray((limits.num_pages, limits.page_size, 2 * num_kv_heads, head_dim), "float32")

    def served(
        self, weights: Weights, layer: int, h: Any, positions: Any, cache: Any, shared: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        q, k, v = self.heads(weights, layer, h, positions)
        written = self.framework.operations.write_kv_pages(k, v, cache, **shared)
        return self.framework.operations.ragged_paged_attention(q, written, **shared), written

    def calls(self, weights: Weights, limits: Limits) -> dict[str, dict[str, Any]]:
        q, k = (FakeArray((limits.max_tokens, *weights[name].shape[2:]), "float32") for name in "qk")
        pages = self.cache(weights, limits)
        return {
            "ragged_paged_attention": {"q": q, "kv_pages": pages},
            "write_kv_pages": {"k": k, "v": k, "kv_pages": pages},
        }
