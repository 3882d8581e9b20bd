"""ejKernel's XLA implementations. ejKernel uses them if it has no kernel for a device."""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.judged import FILLED, FLOATS, Recipe, not_causal, pages_of


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
    """`page_attention`. It guesses the layout of the pages from their shape."""
    return kernel("page_attention")(q, k_pages, v_pages, lengths, page_indices, attn_scale=sm_scale)


def paged_latents(
    q: Any,
    kv_cache: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    d_v: int = 512,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Any:
    """`multi_latent_ragged_page_attention`.

    The kernel first writes the new rows of this step. They are copied from the cache, which already contains them.
    """
    import jax.numpy as jnp

    num_pages, page_size, _, d_qk = kv_cache.shape
    seq = jnp.searchsorted(cu_q_lens, jnp.arange(len(q)), side="right") - 1
    position = kv_lens[seq] - cu_q_lens[seq + 1] + jnp.arange(len(q))
    rows = kv_cache[page_indices[seq, position // page_size], position % page_size, 0]
    parts = (kv_cache[..., :d_v], kv_cache[..., d_v:])
    wide = [jnp.pad(part, ((0, 0), (0, 0), (0, 0), (0, -part.shape[3] % 128))) for part in parts]
    packing = 4 // kv_cache.dtype.itemsize
    cache = jnp.concatenate(wide, axis=3).reshape(num_pages, page_size // packing, packing, -1)
    return kernel("multi_latent_ragged_page_attention")(
        q[..., :d_v], q[..., d_v:], rows[:, :d_v], rows[:, d_v:], cache, kv_lens, page_indices.flatten(), cu_q_lens,
        jnp.array([0, 0, len(kv_lens)], jnp.int32), softmax_scale=d_qk**-0.5 if sm_scale is None else sm_scale,
        sliding_window=sliding_window, logits_soft_cap=soft_cap,
    )[0]  # fmt: skip


def flash_latents(
    q: Any,
    kv_cache: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    d_v: int = 512,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
) -> Any:
    """`flash_mla`, one sequence at a time. Queries are padded to the number of keys.

    The projections are identity matrices, so that the latents do not change.
    """
    import jax.numpy as jnp

    d_qk, ones, parts = q.shape[2], jnp.eye(d_v, dtype=q.dtype)[:, None], []
    for pages, kv_len, first, stop in zip(page_indices, kv_lens, cu_q_lens, cu_q_lens[1:], strict=False):
        rows = kv_cache[pages].reshape(1, -1, d_qk)[:, :kv_len]
        queries = jnp.pad(q[None, first:stop], ((0, 0), (kv_len - (stop - first), 0), (0, 0), (0, 0)))
        out = kernel("flash_mla")(
            queries, rows[..., :d_v], ones, ones, b_k=rows[..., d_v:] if d_v < d_qk else None, causal=causal,
            softmax_scale=d_qk**-0.5 if sm_scale is None else sm_scale, softmax_aux=sinks, logits_soft_cap=soft_cap,
            sliding_window=None if sliding_window is None else (sliding_window - 1, int(kv_len)),
        )  # fmt: skip
        parts.append(out[0, kv_len - (stop - first) :])
    return jnp.concatenate(parts)


def listed(q: Any, kv: Any, indices: Any, sm_scale: float | None = None, d_v: int = 512) -> Any:
    """`deepseek_attn`, one token at a time.

    Its indexer gets one-hot keys, so that it selects exactly the entries of the list. The kernel always adds a query's
    own position, so the query is placed at a position of its list.
    """
    import jax.numpy as jnp

    latents = kv.reshape(1, -1, q.shape[2])
    count, ones, parts = latents.shape[1], jnp.eye(d_v, dtype=q.dtype)[:, None], []
    for query, entries in zip(q, np.asarray(indices[:, 0]), strict=True):
        selected = entries[(entries >= 0) & (entries < count)]
        wanted = jnp.zeros((1, count, 1, count), q.dtype).at[0, selected[0], 0, selected].set(1)
        out = kernel("deepseek_attn")(
            jnp.zeros((1, count, *query.shape), q.dtype).at[0, selected[0]].set(query), latents[..., :d_v], ones, ones,
            wanted, jnp.eye(count, dtype=q.dtype)[None], jnp.ones((1, count, 1), q.dtype), len(selected),
            softmax_scale=q.shape[2] ** -0.5 if sm_scale is None else sm_scale, causal=False,
            b_k=latents[..., d_v:] if d_v < q.shape[2] else None,
        )  # fmt: skip
        parts.append(out[0, selected[0]])
    return jnp.stack(parts)


def several_kv_heads(operation: str, call: Any) -> bool:
    return call.indices.shape[1] != 1


def doubled_entries(operation: str, call: Any) -> bool:
    """Whether any list is empty or has repeated entries."""
    lists = [row[(row >= 0) & (row < np.prod(call.kv.shape[:-1]))] for row in call.indices[:, 0]]
    return any(not len(row) or len(row) > len({*row.tolist()}) for row in lists)


def pages_of_odd_sizes(operation: str, call: Any) -> bool:
    """Whether a page does not fill whole 32-bit words of the cache, each of which packs several positions."""
    return call.kv_cache.shape[1] % (4 // call.kv_cache.dtype.itemsize) != 0


LIMITS: Mapping[str, Any] = {"framework": "jax", "dtypes": FLOATS, "declines": FILLED}
COMBINED: Mapping[str, Any] = {**LIMITS, "declines": (*FILLED, "pages in a pair")}
PAIRED: Mapping[str, Any] = {**LIMITS, "declines": (*FILLED, "other value sizes")}
RECIPES: Mapping[str, Recipe] = {
    "ejkernel_ragged": Recipe("ejkernel", ragged, "ragged_paged_attention", COMBINED),
    "ejkernel_unified": Recipe("ejkernel", unified, "ragged_paged_attention", PAIRED),
    "ejkernel_latents": Recipe(
        "ejkernel",
        paged_latents,
        "ragged_mla_attention",
        {
            **LIMITS,
            "declines": (*FILLED, "more queries than keys", pages_of_odd_sizes, not_causal),
        },
    ),
    "ejkernel_flash_mla": Recipe(
        "ejkernel",
        flash_latents,
        "ragged_mla_attention",
        {
            **LIMITS,
            "declines": (*FILLED, "more queries than keys"),
        },
    ),
    "ejkernel_listed": Recipe(
        "ejkernel",
        listed,
        "sparse_mla_prefill",
        {
            **LIMITS,
            "declines": ("empty batches", several_kv_heads, doubled_entries),
        },
    ),
    "ejkernel_paged": Recipe("ejkernel", heads_first, "paged_attention", LIMITS),
}
