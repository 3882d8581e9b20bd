"""jax's attention, and its Pallas kernel for paged decode in jax's TPU interpreter."""

from collections.abc import Mapping
from typing import Any

from benchmarks.judged import FILLED, OPEN, Recipe


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
    """`jax.nn.dot_product_attention` over packed rows. A mask separates the sequences."""
    import jax
    import jax.numpy as jnp

    def numbers(edges: Any, count: int) -> Any:
        return jnp.searchsorted(edges, jnp.arange(count), side="right") - 1

    of_query, of_key = numbers(cu_q_lens, len(q)), numbers(cu_kv_lens, len(k))
    shift = (cu_kv_lens[1:] - cu_q_lens[1:])[of_query]
    distance = jnp.arange(len(k))[None] - (jnp.arange(len(q)) + shift)[:, None]
    mask = of_query[:, None] == of_key[None]
    mask = mask & (distance <= 0) if causal else mask
    mask = mask if sliding_window is None else mask & (distance > -sliding_window)
    return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=mask[None, None], scale=sm_scale)[0]


def pallas_paged(
    q: Any, k_pages: Any, v_pages: Any, lengths: Any, page_indices: Any, sm_scale: float | None = None,
    soft_cap: float | None = None,
) -> Any:  # fmt: skip
    """jax's `paged_attention`, interpreted. It expects scaled queries, so they are scaled in float32 first."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    from ragged_attention.testing.tpu_interpreter import watched

    if isinstance(k_pages, tuple):
        raise NotImplementedError("pages without scales only")
    scaled = q.astype("float32") * (q.shape[2] ** -0.5 if sm_scale is None else sm_scale)
    with watched("eager"):
        out = paged_attention(
            scaled, k_pages, v_pages, lengths, page_indices, pages_per_compute_block=1, attn_logits_soft_cap=soft_cap
        )
        return out.block_until_ready()


RECIPES: Mapping[str, Recipe] = {
    "dot_product": Recipe(
        "jax",
        dot_product,
        "varlen_attention",
        {"framework": "jax", "declines": (*FILLED, "other value sizes"), "gradients": True},
    ),
    "pallas_paged": Recipe("jax", pallas_paged, "paged_attention", {"framework": "jax", "declines": OPEN}),
}
