"""Attention over heads-first pages on torch tensors: paged decode, and the chunked prefill of one sequence."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ragged_attention.calls import (
    JAX_LARGEST,
    documented,
    expect_heads_first,
    expect_length,
    expect_window,
    is_jax_quantized,
    taken_align,
)
from ragged_attention.torch.execute import define, invoke, number

Pages = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@documented
def paged_attention(
    q: torch.Tensor,
    k_pages: Pages,
    v_pages: Pages,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
    *,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    form = decode_form(q, k_pages, v_pages, lengths, page_indices, sm_scale=sm_scale, soft_cap=soft_cap)
    return invoke("paged_attention", form, backend, options)


@documented
def prefill_attention(
    q: torch.Tensor,
    k_pages: Pages,
    v_pages: Pages,
    length: int | torch.Tensor,
    page_indices: torch.Tensor,
    *,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    align, options = taken_align(options)
    form = prefill_form(
        q, k_pages, v_pages, length, page_indices, sm_scale=sm_scale, soft_cap=soft_cap, sliding_window=sliding_window,
        align=align,
    )  # fmt: skip
    return invoke("prefill_attention", form, backend, options)


def decode_form(
    q: Any, k_pages: Any, v_pages: Any, lengths: Any, page_indices: Any, *, sm_scale: Any = None, soft_cap: Any = None
) -> tuple[Any, ...]:
    """The arguments in the order and form of the operator's schema."""
    pages = _pages("k_pages", k_pages), _pages("v_pages", v_pages)
    return q, *pages, lengths, page_indices, number(sm_scale), number(soft_cap)


def prefill_form(
    q: Any, k_pages: Any, v_pages: Any, length: Any, page_indices: Any, *, sm_scale: Any = None, soft_cap: Any = None,
    sliding_window: Any = None, align: Any = "chunk",
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments in the order and form of the operator's schema."""
    expect_window(sliding_window)  # a schema would take a bool for an int
    if expect_length(length):
        length = torch.full((1,), length, dtype=torch.int32, device=getattr(q, "device", None))
    pages = _pages("k_pages", k_pages), _pages("v_pages", v_pages)
    return q, *pages, length, page_indices, number(sm_scale), number(soft_cap), sliding_window, align


def _pages(name: str, pages: Any) -> Any:
    """Pages as the list that the schema takes: the array, and behind it its scales where it has such."""
    if is_jax_quantized(pages):
        return [pages.weight, pages.scales.to(torch.float32) / JAX_LARGEST]
    if not isinstance(pages, tuple | list):
        return [pages]
    if len(pages) != 2:
        expect_heads_first(name, pages, (), {})
    return list(pages)


def _given(pages: Any) -> Any:
    return pages[0] if len(pages) == 1 else tuple(pages)


def _decode_arguments(
    q: Any, k_pages: Any, v_pages: Any, lengths: Any, page_indices: Any, sm_scale: Any, soft_cap: Any
) -> dict[str, Any]:
    """The record's arguments from the schema's."""
    return {
        "q": q,
        "k_pages": _given(k_pages),
        "v_pages": _given(v_pages),
        "lengths": lengths,
        "page_indices": page_indices,
        "sm_scale": sm_scale,
        "soft_cap": soft_cap,
    }


def _prefill_arguments(
    q: Any, k_pages: Any, v_pages: Any, length: Any, page_indices: Any, sm_scale: Any, soft_cap: Any,
    sliding_window: Any, align: Any,
) -> dict[str, Any]:  # fmt: skip
    """The record's arguments from the schema's."""
    return {
        "q": q,
        "k_pages": _given(k_pages),
        "v_pages": _given(v_pages),
        "length": length,
        "page_indices": page_indices,
        "sm_scale": sm_scale,
        "soft_cap": soft_cap,
        "sliding_window": sliding_window,
        "align": align,
    }


def _only(results: Any) -> torch.Tensor:
    return results[0] if isinstance(results, tuple | list) else results


def _fake(call: Any) -> torch.Tensor:
    return call.q.new_empty(call.out_shape)


define(
    "paged_attention",
    "Tensor q, Tensor[] k_pages, Tensor[] v_pages, Tensor lengths, Tensor page_indices, float? sm_scale, "
    "float? soft_cap",
    "Tensor",
    form=decode_form,
    arguments=_decode_arguments,
    results=_only,
    fake=_fake,
)
define(
    "prefill_attention",
    "Tensor q, Tensor[] k_pages, Tensor[] v_pages, Tensor length, Tensor page_indices, float? sm_scale, "
    "float? soft_cap, int? sliding_window, str align",
    "Tensor",
    form=prefill_form,
    arguments=_prefill_arguments,
    results=_only,
    fake=_fake,
)
