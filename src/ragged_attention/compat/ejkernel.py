"""ejKernel's `ragged_page_attention_v2`, with its names and defaults, on every device.

Unlike ejKernel's portable version, it is correct for tables wider than 64 pages, for a window that hides a whole block
of keys, and for NaN in slots that no query sees. All sums are in float32 for any `compute_dtype`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import dtype_name, expect_count, is_array
from ragged_attention.calls.fields import Count, Sizes
from ragged_attention.compat.jax_arguments import as_int32, even, expect_number_or_none, run, scales_of, widened
from ragged_attention.compat.names import named_as
from ragged_attention.errors import InvalidInput
from ragged_attention.jax._lower import to_jax

__all__ = ["ragged_page_attention_v2"]

NAMES = {
    "q": "queries", "kv_lens": "context_lens", "page_indices": "block_tables", "cu_q_lens": "query_start_loc",
    "sm_scale": "softmax_scale", "soft_cap": "logits_soft_cap", "sinks": "softmax_aux",
}  # fmt: skip


def ragged_page_attention_v2(
    queries: jax.Array,
    kv_pages: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array | int,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    compute_dtype: Any = jnp.bfloat16,
    optimized: bool = False,
    sliding_window: int | None = None,
    softmax_aux: jax.Array | None = None,
    mask_value: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    backend: str | Sequence[str] | None = None,
) -> jax.Array:
    """Causal attention of ragged queries over a paged cache, with one sink per head.

    Args:
        queries: [total_tokens, num_q_heads, head_dim].
        kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim], K of head h at 2h and V at 2h + 1.
        context_lens: [max_num_seqs], the lengths in the cache, including the new tokens; of any integer dtype, like the
            next two tables.
        block_tables: [max_num_seqs, pages_per_seq].
        query_start_loc: [max_num_seqs + 1].
        num_seqs: number of live sequences, an int or an array of one element; another value does not recompile.
        softmax_scale: factor on q . k; default `head_dim ** -0.5`.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`, before masking.
        compute_dtype, optimized, mask_value: without effect.
        sliding_window: maximum number of keys that a query sees, including its own position's.
        softmax_aux: float [num_q_heads], one logit per head that joins the softmax's denominator but has no value.
        num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes, num_warps, num_stages: tunables of the TPU
            kernel and of the Triton kernel; checked, but without effect on backends that lack them.
        backend: a name or an ordered list of them, as everywhere in `ragged_attention`.

    Returns:
        [total_tokens, num_q_heads, head_dim] of the queries' dtype; rows that belong to no sequence are 0.

    Raises:
        InvalidInput: (a ValueError) shapes, dtypes or tunables contradict each other.
    """
    del optimized
    jnp.dtype(compute_dtype)
    expect_number_or_none("mask_value", mask_value)
    tunables = dict(
        num_kv_pages_per_block=num_kv_pages_per_block, num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    for name, value in tunables.items():
        if value is not None:
            expect_count(name, value, 1)
    q, kv_pages, softmax_aux = to_jax((queries, kv_pages, softmax_aux))
    wide_q, kv_pages = widened(q, kv_pages)
    tables = {"context_lens": context_lens, "block_tables": block_tables, "query_start_loc": query_start_loc}
    kv_lens, page_indices, cu_q_lens = (as_int32(name, to_jax(table)) for name, table in tables.items())
    with named_as(NAMES):
        arguments = dict(
            q=wide_q, kv_pages=kv_pages, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens,
            num_seqs=_count(num_seqs, kv_lens), sm_scale=softmax_scale, soft_cap=even(logits_soft_cap),
            sliding_window=sliding_window, sinks=_sinks(softmax_aux),
            **scales_of(kv_pages, k_scale=None, v_scale=None),
        )  # fmt: skip
        return run("ragged_paged_attention", arguments, backend, tunables).astype(q.dtype)


def _count(num_seqs: Any, kv_lens: Any) -> jax.Array:
    """The number of sequences as an array, so that another number does not recompile."""
    if is_array(num_seqs := to_jax(num_seqs)):
        return as_int32("num_seqs", num_seqs)
    if num_seqs is None:
        raise TypeError("expected num_seqs to be an int or an array, got NoneType")
    Count().check("num_seqs", num_seqs, None, Sizes(S=kv_lens.shape[0] if kv_lens.ndim else 0))
    return jnp.full(1, num_seqs, jnp.int32)


def _sinks(softmax_aux: Any) -> Any:
    if is_array(softmax_aux):
        if not jnp.issubdtype(softmax_aux.dtype, jnp.floating):
            raise InvalidInput(f"expected softmax_aux.dtype to be a float one, got {dtype_name(softmax_aux)}")
        return softmax_aux.astype(jnp.float32)
    return softmax_aux
