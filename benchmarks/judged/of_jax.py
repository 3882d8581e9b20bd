"""Attention of jax, and its own Pallas TPU kernels by its interpreter of them."""

from collections.abc import Mapping
from typing import Any

from benchmarks.judged import OPEN, Recipe


def dot_product(
    q: Any,
    k: Any,
    v: Any,
    cu_q_lens: Any,
    cu_kv_lens: Any,
    sm_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
) -> Any:
    """`jax.nn.dot_product_attention` over the packed rows, which a mask keeps apart."""
    import jax
    import jax.numpy as jnp

    if k.shape[2] != v.shape[2]:
        raise NotImplementedError("keys and values of one width")

    def numbers(edges: Any, count: int) -> Any:
        return jnp.searchsorted(edges, jnp.arange(count), side="right") - 1

    of_query, of_key = numbers(cu_q_lens, len(q)), numbers(cu_kv_lens, len(k))
    shift = (cu_kv_lens[1:] - cu_q_lens[1:])[of_query]
    apart = jnp.arange(len(k))[None] - (jnp.arange(len(q)) + shift)[:, None]
    mask = of_query[:, None] == of_key[None]
    mask = mask & (apart <= 0) if causal else mask
    mask = mask if sliding_window is None else mask & (apart > -sliding_window)
    return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=mask[None, None], scale=sm_scale)[0]


def pallas_ragged(
    q: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    max_q_len: int | None = None,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """jax's `ragged_paged_attention`, interpreted."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    from ragged_attention.testing.tpu_interpreter import watched

    if isinstance(kv_pages, tuple):
        raise NotImplementedError("combined pages only")
    if any(hasattr(scale, "shape") for scale in (k_scale, v_scale)):
        raise NotImplementedError("scales that are numbers only")
    with watched("eager"):
        out = ragged_paged_attention(
            q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs,
            sm_scale=q.shape[2] ** -0.5 if sm_scale is None else sm_scale, sliding_window=sliding_window,
            soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale, num_kv_pages_per_block=1, num_queries_per_block=8,
        )  # fmt: skip
        return out.block_until_ready()


def pallas_paged(
    q: Any, k_pages: Any, v_pages: Any, lengths: Any, page_indices: Any, sm_scale: float | None = None,
    soft_cap: float | None = None,
) -> Any:  # fmt: skip
    """jax's `paged_attention`, interpreted. It leaves the scale to its caller."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    from ragged_attention.testing.tpu_interpreter import watched

    if isinstance(k_pages, tuple):
        raise NotImplementedError("pages without scales only")
    scaled = (q * (q.shape[2] ** -0.5 if sm_scale is None else sm_scale)).astype(q.dtype)
    with watched("eager"):
        out = paged_attention(
            scaled, k_pages, v_pages, lengths, page_indices, pages_per_compute_block=1, attn_logits_soft_cap=soft_cap
        )
        return out.block_until_ready()


RAGGED: Mapping[str, Any] = {"framework": "jax", "declines": OPEN}
RECIPES: Mapping[str, Recipe] = {
    "dot_product": Recipe(
        "jax", dot_product, "varlen_attention", RAGGED | {"declines": (*OPEN, "empty sequences"), "gradients": True}
    ),
    "pallas_ragged": Recipe("jax", pallas_ragged, "ragged_paged_attention", RAGGED),
    "pallas_paged": Recipe("jax", pallas_paged, "paged_attention", RAGGED),
}
