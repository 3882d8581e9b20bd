"""EasyDeL's decode and chunked prefill over heads-first pages, with its names and defaults, on every device.

Its pages are those of `compat.jax_pallas.paged_attention`, and its `paged_attention` is that function with a scale.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention import jax as operations
from ragged_attention.calls import PagedAttention, expect_bool, expect_count, is_array, is_jax_quantized
from ragged_attention.compat import jax_arguments
from ragged_attention.compat.names import named_as
from ragged_attention.errors import InvalidInput
from ragged_attention.jax._lower import FRONT_END, to_jax

__all__ = ["DEFAULT_MASK_VALUE", "paged_attention", "prefill_attention"]

DEFAULT_MASK_VALUE = jax_arguments.DEFAULT_MASK_VALUE


def paged_attention(
    q: jax.Array,
    k_pages: Any,
    v_pages: Any,
    lengths: jax.Array,
    page_indices: jax.Array,
    *,
    sm_scale: float | None = 1,
    mask_value: float = DEFAULT_MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
    pages_per_compute_block: int,
    megacore_mode: str | None = None,
    inline_seq_dim: bool = True,
    backend: str | Sequence[str] | None = None,
) -> jax.Array:
    """Decode over a paged cache: `compat.jax_pallas.paged_attention` with a scale.

    Args:
        sm_scale: factor on q . k; None is `head_dim ** -0.5`.

    The other arguments are those of `compat.jax_pallas.paged_attention`.
    """
    jax_arguments.expect_number_or_none("mask_value", mask_value)
    arguments: dict[str, Any] = FRONT_END.prepare(PagedAttention, dict(
        q=q, k_pages=k_pages, v_pages=v_pages, lengths=lengths, page_indices=page_indices, sm_scale=sm_scale,
        soft_cap=attn_logits_soft_cap,
    ))  # fmt: skip
    (arguments["lengths"],) = jax_arguments.held_as_int32(lengths=arguments["lengths"])
    tunables: dict[str, Any] = dict(
        pages_per_compute_block=to_jax(pages_per_compute_block), megacore_mode=to_jax(megacore_mode),
        inline_seq_dim=to_jax(inline_seq_dim),
    )  # fmt: skip
    q = arguments["q"]
    rows = ("q", "k_pages", "v_pages")
    arguments |= dict(zip(rows, jax_arguments.widened(*(arguments[name] for name in rows)), strict=True))
    arguments["k_pages"], arguments["v_pages"] = jax_arguments.heads_first_pages(
        arguments["k_pages"], arguments["v_pages"]
    )
    arguments["page_indices"] = jax_arguments.as_int32("page_indices", arguments["page_indices"])
    arguments["soft_cap"] = jax_arguments.even(arguments["soft_cap"])
    with named_as({"soft_cap": "attn_logits_soft_cap"}):
        _expect_tunables(PagedAttention(**arguments), **tunables)
        return jax_arguments.run("paged_attention", arguments, backend, tunables).astype(q.dtype)


def _expect_tunables(
    call: PagedAttention, pages_per_compute_block: Any, megacore_mode: Any, inline_seq_dim: Any
) -> None:
    expect_count("pages_per_compute_block", pages_per_compute_block, 1)
    if (pages_per_seq := call.pages_per_seq) % pages_per_compute_block:
        raise InvalidInput(
            f"expected pages_per_compute_block to divide {pages_per_seq=} of page_indices, "
            f"got {pages_per_compute_block}"
        )
    expect_bool("inline_seq_dim", inline_seq_dim)
    divided = {None: 2, "kv_head": call.num_kv_heads, "batch": call.num_tokens}
    if megacore_mode not in divided:
        raise InvalidInput(f"expected megacore_mode to be 'kv_head', 'batch' or None, got {megacore_mode!r}")
    if (count := divided[megacore_mode]) % 2:
        what = "the number of KV heads" if megacore_mode == "kv_head" else "the batch size"
        raise InvalidInput(f"expected {what} to be even with {megacore_mode=}, got {count}")


def prefill_attention(
    q: jax.Array,
    k_pages: Any,
    v_pages: Any,
    length: int | jax.Array,
    page_indices: jax.Array,
    sm_scale: float | None = None,
    *,
    backend: str | Sequence[str] | None = None,
) -> jax.Array:
    """Causal attention of one chunk of a sequence's queries over its pages.

    The sequence is divided into chunks of q's size from position 0 on; this chunk holds position `length - 1`.

    Args:
        q: [chunk_size, num_q_heads, head_dim].
        k_pages, v_pages: [num_kv_heads, num_pages, page_size, head_dim], or JAX's `QuantizedTensor` of that shape. The
            page size need not divide the chunk's size.
        length: number of the sequence's positions, including this chunk's; an int or an array of one element. Another
            value does not recompile.
        page_indices: [pages] of any integer dtype.
        sm_scale: factor on q . k; default `head_dim ** -0.5`.
        backend: a name or an ordered list of them, as everywhere in `ragged_attention`.

    Returns:
        [chunk_size, num_q_heads * head_dim] of q's dtype; rows at or past `length` are 0.
    """
    q, length = to_jax((q, length))
    k_pages, v_pages = (pages if is_jax_quantized(pages) else to_jax(pages) for pages in (k_pages, v_pages))
    wide_q, k_pages, v_pages = jax_arguments.widened(q, k_pages, v_pages)
    k_pages, v_pages = jax_arguments.heads_first_pages(k_pages, v_pages)
    length = jax_arguments.as_int32("length", length) if is_array(length) else length
    table = jax_arguments.as_int32("page_indices", to_jax(page_indices))
    out = operations.prefill_attention(wide_q, k_pages, v_pages, length, table, sm_scale=sm_scale, backend=backend)
    return jnp.reshape(out, (out.shape[0], -1)).astype(q.dtype)
