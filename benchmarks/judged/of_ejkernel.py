"""ejKernel's versions in XLA, which it takes where it has no kernel for a device."""

import importlib
from collections.abc import Mapping
from typing import Any

from benchmarks.judged import FILLED, FLOATS, Recipe, pages_of


def kernel(name: str) -> Any:
    return getattr(importlib.import_module(f"ejkernel.kernels._xla.{name}"), name)


def ragged(
    q: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
) -> Any:
    """`ragged_page_attention_v2`, computed in float32."""
    import jax.numpy as jnp

    return kernel("ragged_page_attention_v2")(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, jnp.array([len(kv_lens)], jnp.int32),
        softmax_scale=sm_scale, logits_soft_cap=soft_cap, compute_dtype=jnp.float32, sliding_window=sliding_window,
        softmax_aux=sinks,
    )  # fmt: skip


def unified(
    q: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
) -> Any:
    """`unified_attention`, over pages of keys and pages of values."""
    k_pages, v_pages = pages_of(kv_pages)
    return kernel("unified_attention")(
        q, k_pages, v_pages, kv_lens, page_indices, cu_q_lens, softmax_aux=sinks, softmax_scale=sm_scale, causal=causal,
        sliding_window=sliding_window, logits_soft_cap=soft_cap,
    )  # fmt: skip


def heads_first(
    q: Any, k_pages: Any, v_pages: Any, lengths: Any, page_indices: Any, sm_scale: float | None = None
) -> Any:
    """`page_attention`. Which of its two layouts the pages have, it guesses from their shape."""
    return kernel("page_attention")(q, k_pages, v_pages, lengths, page_indices, attn_scale=sm_scale)


LIMITS: Mapping[str, Any] = {"framework": "jax", "dtypes": FLOATS, "declines": FILLED}
COMBINED: Mapping[str, Any] = {**LIMITS, "declines": (*FILLED, "pages in a pair")}
PAIRED: Mapping[str, Any] = {**LIMITS, "declines": (*FILLED, "other value sizes")}
RECIPES: Mapping[str, Recipe] = {
    "ejkernel_ragged": Recipe("ejkernel", ragged, "ragged_paged_attention", COMBINED),
    "ejkernel_unified": Recipe("ejkernel", unified, "ragged_paged_attention", PAIRED),
    "ejkernel_paged": Recipe("ejkernel", heads_first, "paged_attention", LIMITS),
}
