"""Attention over heads-first pages on jax arrays: paged decode, and the chunked prefill of one sequence."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import JAX_LARGEST, documented, expect_length, is_jax_quantized, taken_align
from ragged_attention.jax import execute
from ragged_attention.jax.execute import brought

Pages = jax.Array | tuple[jax.Array, jax.Array]


@documented
def paged_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    lengths: jax.Array,
    page_indices: jax.Array,
    *,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array:
    arguments = _form(
        q=q, k_pages=k_pages, v_pages=v_pages, lengths=lengths, page_indices=page_indices, sm_scale=sm_scale,
        soft_cap=soft_cap,
    )  # fmt: skip
    return execute.run("paged_attention", arguments, backend, options)[0]


@documented
def prefill_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    length: int | jax.Array,
    page_indices: jax.Array,
    *,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array:
    align, options = taken_align(options)
    arguments = _form(
        q=q, k_pages=k_pages, v_pages=v_pages, length=length, page_indices=page_indices, sm_scale=sm_scale,
        soft_cap=soft_cap, sliding_window=sliding_window, align=align,
    )  # fmt: skip
    return execute.run("prefill_attention", arguments, backend, options)[0]


def _form(**arguments: Any) -> dict[str, Any]:
    """The record's arguments: quantised pages as pairs, and a length that is a number as an array."""
    for name in ("k_pages", "v_pages"):
        arguments[name] = _pages(arguments.get(name))
    if expect_length(arguments.get("length")):
        arguments["length"] = jnp.full(1, arguments["length"], jnp.int32)
    return {name: brought(value) for name, value in arguments.items()}


def _pages(pages: Any) -> Any:
    if is_jax_quantized(pages):
        return pages.weight, jnp.asarray(pages.scales, jnp.float32) / JAX_LARGEST
    return tuple(pages) if isinstance(pages, list) else pages


FORMS = {"paged_attention": _form, "prefill_attention": _form}
