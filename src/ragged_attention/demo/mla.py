"""Multi-head latent attention over pages of 8-bit latents.

A head's key is the latent times `k`, and its value is the latent times `v`. Serving computes neither: since q . (c k)
= (q k^T) . c, each query is multiplied by k^T and attends to the latents themselves. The result is multiplied by `v`
afterwards. So all heads read one cached row per token.
"""

from collections.abc import Mapping
from typing import Any

from ragged_attention.demo.engine import Limits
from ragged_attention.demo.model import LARGEST_CODE
from ragged_attention.demo.transformer import Transformer, Weights
from ragged_attention.tools.samples import FakeArray


class LatentAttention(Transformer):
    """The transformer that caches one 8-bit row of latents per token."""

    def latent_rows(self, weights: Weights, layer: int, h: Any, positions: Any) -> Any:
        """The cached row of each token [..., T, C + R]: its latent, and the rotary key that all heads share."""
        latent, key = _split_row(weights, h @ weights["latent"][layer])
        rotated = self.rope(key[..., None, :], positions)[..., 0, :]
        return self.xp.concatenate((self.norm(latent, weights["latent_norm"][layer]), rotated), -1)

    def queries(self, weights: Weights, layer: int, h: Any, positions: Any) -> tuple[Any, Any]:
        """The two parts of each head's query.

        The first part is multiplied with the key that is computed from the latent, the second with the rotary key.
        """
        q = self.xp.einsum("...e,ehd->...hd", h, weights["q"][layer])
        size = weights["k"].shape[-1]
        return q[..., :size], self.rope(q[..., size:], positions)

    def heads(self, weights: Weights, layer: int, h: Any, positions: Any) -> tuple[Any, Any, Any]:
        rows = self.latent_rows(weights, layer, h, positions)
        if "kv_scale" in weights:  # absent in training, which computes the scales at its end
            rows = self.rounded(rows, weights["kv_scale"][layer])
        latent, key = _split_row(weights, rows)
        k, v = (self.xp.einsum("...c,chn->...hn", latent, weights[name][layer]) for name in "kv")
        shared = self.xp.broadcast_to(key[..., None, :], (*k.shape[:-1], key.shape[-1]))
        q = self.xp.concatenate(self.queries(weights, layer, h, positions), -1)
        return q, self.xp.concatenate((k, shared), -1), v

    def rounded(self, rows: Any, kv_scale: Any) -> Any:
        """Rows, rounded as an 8-bit cache rounds them."""
        codes = self.xp.asarray((rows / kv_scale).clip(-LARGEST_CODE, LARGEST_CODE), dtype=self.xp.float8_e4m3fn)
        return self.xp.asarray(codes, dtype=rows.dtype) * kv_scale

    def cache(self, weights: Weights, limits: Limits) -> FakeArray:
        return FakeArray((limits.num_pages, limits.page_size, 1, weights["latent"].shape[-1]), "float8_e4m3fn")

    def served(
        self, weights: Weights, layer: int, h: Any, positions: Any, cache: Any, shared: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        operations, shared = self.framework.operations, {**shared, "kv_scale": weights["kv_scale"][layer]}
        part, rotated = self.queries(weights, layer, h, positions)
        absorbed = self.xp.einsum("thn,chn->thc", part, weights["k"][layer])
        rows = self.latent_rows(weights, layer, h, positions)
        written = operations.write_mla_cache(rows, cache, **shared)
        q, scale = self.xp.concatenate((absorbed, rotated), -1), weights["q"].shape[-1] ** -0.5
        latents = operations.ragged_mla_attention(q, written, **shared, d_v=absorbed.shape[-1], sm_scale=scale)
        return self.xp.einsum("thc,chn->thn", latents, weights["v"][layer]), written

    def calls(self, weights: Weights, limits: Limits) -> dict[str, dict[str, Any]]:
        d_v, width = weights["k"].shape[1], weights["latent"].shape[-1]
        q = FakeArray((limits.max_tokens, weights["q"].shape[2], width), "float32")
        rows, kv_scale = self.cache(weights, limits), FakeArray((), "float32")
        new = FakeArray((limits.max_tokens, 1, width), "float32")
        return {
            "ragged_mla_attention": {"q": q, "kv_cache": rows, "d_v": d_v, "kv_scale": kv_scale},
            "write_mla_cache": {"kv": new, "cache": rows, "kv_scale": kv_scale},
        }


def _split_row(weights: Weights, row: Any) -> tuple[Any, Any]:
    """The latent of C numbers, and the rotary key of R numbers."""
    size = weights["k"].shape[1]
    return row[..., :size], row[..., size:]
