"""Attention over a paged KV cache, its writing, and the merging of partial results, on torch tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ragged_attention.calls import documented, expect_bool, expect_num_seqs, expect_pages, expect_window, is_number
from ragged_attention.torch.execute import define, expect_runnable, invoke, number


@documented
def ragged_paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: int | torch.Tensor | None = None,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    return_lse: bool = False,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    form = attention_form(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale=sm_scale, causal=causal,
        sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
        return_lse=return_lse,
    )  # fmt: skip
    if new_kv is not None:
        _write_before(form, new_kv, kv_pages, backend, options)
    results = invoke("ragged_paged_attention", form, backend, options)
    given = () if new_kv is None else (kv_pages,)
    return (*results, *given) if return_lse or given else results[0]


@documented
def write_kv_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    *,
    page_indices: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    cu_q_lens: torch.Tensor | None = None,
    num_seqs: int | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    form = write_form(
        k, v, kv_pages, slot_mapping, page_indices=page_indices, kv_lens=kv_lens, cu_q_lens=cu_q_lens,
        num_seqs=num_seqs, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    invoke("write_kv_pages", form, backend, options)
    return kv_pages


@documented
def merge_attention_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    *,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return invoke("merge_attention_states", merge_form(outs, lses), backend, options)


def attention_form(
    q: Any, kv_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any = None, *,
    sm_scale: Any = None, causal: Any = True, sliding_window: Any = None, soft_cap: Any = None, sinks: Any = None,
    k_scale: Any = None, v_scale: Any = None, return_lse: Any = False, new_kv: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments in the order and form of the operator's schema, which leaves `new_kv` to another."""
    del new_kv
    expect_bool("causal", causal)  # a schema would take an int for it
    expect_bool("return_lse", return_lse)
    expect_window(sliding_window)  # and a bool for an int
    kv_lens, page_indices, cu_q_lens, num_seqs = _live(kv_lens, page_indices, cu_q_lens, num_seqs)
    return (
        q, *_pair(kv_pages), kv_lens, page_indices, cu_q_lens, num_seqs, number(sm_scale), causal, sliding_window,
        number(soft_cap), sinks, *_scale(k_scale), *_scale(v_scale), return_lse,
    )  # fmt: skip


def _write_before(form: tuple[Any, ...], new_kv: Any, kv_pages: Any, backend: Any, options: Any) -> None:
    """Write `new_kv` into the pages, as the attention's call whose form this is has it.

    Nothing is written for a call that will be refused. Under `torch.compile` the static law is checked by the
    operators' fake kernels, before anything runs.
    """
    if not torch.compiler.is_compiling():
        pair = tuple(new_kv) if isinstance(new_kv, list) else new_kv
        expect_runnable("ragged_paged_attention", form, backend, options, new_kv=pair)
    kv_lens, page_indices, cu_q_lens, num_seqs = form[3:7]
    scales = form[12:16]
    write = (new_kv[0], new_kv[1], *_pair(kv_pages), None, page_indices, kv_lens, cu_q_lens, num_seqs, *scales)
    invoke("write_kv_pages", write, backend, None)


def _attention_arguments(
    q: Any, kv_pages: Any, v_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any, sm_scale: Any,
    causal: Any, sliding_window: Any, soft_cap: Any, sinks: Any, k_scale: Any, k_factor: Any, v_scale: Any,
    v_factor: Any, return_lse: Any,
) -> dict[str, Any]:  # fmt: skip
    """The record's arguments from the schema's."""
    return {
        "q": q,
        "kv_pages": _pages(kv_pages, v_pages),
        "kv_lens": kv_lens,
        "page_indices": page_indices,
        "cu_q_lens": cu_q_lens,
        "num_seqs": num_seqs,
        "sm_scale": sm_scale,
        "causal": causal,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "k_scale": k_factor if k_scale is None else k_scale,
        "v_scale": v_factor if v_scale is None else v_scale,
        "return_lse": return_lse,
        "new_kv": None,  # written by another operator
    }


def _attention_fake(call: Any) -> list[torch.Tensor]:
    out = call.q.new_empty(call.out_shape)
    return [out, call.q.new_empty(call.q.shape[:2], dtype=torch.float32)] if call.return_lse else [out]


def write_form(
    k: Any, v: Any, kv_pages: Any, slot_mapping: Any = None, *, page_indices: Any = None, kv_lens: Any = None,
    cu_q_lens: Any = None, num_seqs: Any = None, k_scale: Any = None, v_scale: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments in the order and form of the operator's schema."""
    if isinstance(slot_mapping, tuple | list):
        page_indices, kv_lens, cu_q_lens = slot_mapping
        slot_mapping = None
    kv_lens, page_indices, cu_q_lens, num_seqs = _live(kv_lens, page_indices, cu_q_lens, num_seqs)
    return (
        k, v, *_pair(kv_pages), slot_mapping, page_indices, kv_lens, cu_q_lens, num_seqs,
        *_scale(k_scale), *_scale(v_scale),
    )  # fmt: skip


def _write_arguments(
    k: Any, v: Any, kv_pages: Any, v_pages: Any, slot_mapping: Any, page_indices: Any, kv_lens: Any, cu_q_lens: Any,
    num_seqs: Any, k_scale: Any, k_factor: Any, v_scale: Any, v_factor: Any,
) -> dict[str, Any]:  # fmt: skip
    """The record's arguments from the schema's."""
    return {
        "k": k,
        "v": v,
        "kv_pages": _pages(kv_pages, v_pages),
        "slot_mapping": slot_mapping,
        "page_indices": page_indices,
        "kv_lens": kv_lens,
        "cu_q_lens": cu_q_lens,
        "num_seqs": num_seqs,
        "k_scale": k_factor if k_scale is None else k_scale,
        "v_scale": v_factor if v_scale is None else v_scale,
    }


def merge_form(outs: Any, lses: Any) -> tuple[Any, ...]:
    """The arguments in the form of the operator's schema."""
    return tuple(torch.stack(list(parts)) if isinstance(parts, tuple | list) else parts for parts in (outs, lses))


def _merge_arguments(outs: Any, lses: Any) -> dict[str, Any]:
    return {"outs": outs, "lses": lses}


def _merge_fake(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return call.outs.new_empty(call.outs.shape[1:]), call.lses.new_empty(call.lses.shape[1:])


def _live(kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any) -> tuple[Any, Any, Any, Any]:
    """A Python count narrows the tables to the live sequences; a count on the device stays there."""
    if not isinstance(num_seqs, int) or isinstance(num_seqs, bool) or kv_lens is None:
        return kv_lens, page_indices, cu_q_lens, num_seqs
    expect_num_seqs(num_seqs, kv_lens.shape[0])
    return kv_lens[:num_seqs], page_indices[:num_seqs], cu_q_lens[: num_seqs + 1], None


def _pair(kv_pages: Any) -> tuple[Any, Any]:
    if isinstance(kv_pages, tuple | list):
        if len(kv_pages) != 2:
            expect_pages(kv_pages)
        return kv_pages[0], kv_pages[1]
    return kv_pages, None


def _pages(kv_pages: Any, v_pages: Any) -> Any:
    return kv_pages if v_pages is None else (kv_pages, v_pages)


def _scale(scale: Any) -> tuple[Any, Any]:
    """A scale as (array, number), one of them None."""
    return (None, float(scale)) if is_number(scale) else (scale, None)


define(
    "ragged_paged_attention",
    "Tensor q, Tensor kv_pages, Tensor? v_pages, Tensor kv_lens, Tensor page_indices, Tensor cu_q_lens, "
    "Tensor? num_seqs, float? sm_scale, bool causal, int? sliding_window, float? soft_cap, Tensor? sinks, "
    "Tensor? k_scale, float? k_factor, Tensor? v_scale, float? v_factor, bool return_lse",
    "Tensor[]",
    form=attention_form,
    arguments=_attention_arguments,
    results=lambda found: list(found) if isinstance(found, tuple | list) else [found],
    fake=_attention_fake,
)
define(
    "write_kv_pages",
    "Tensor k, Tensor v, Tensor(a!) kv_pages, Tensor(b!)? v_pages, Tensor? slot_mapping, Tensor? page_indices, "
    "Tensor? kv_lens, Tensor? cu_q_lens, Tensor? num_seqs, Tensor? k_scale, float? k_factor, Tensor? v_scale, "
    "float? v_factor",
    "()",
    form=write_form,
    arguments=_write_arguments,
    results=lambda pages: None,
    fake=lambda call: None,
)
define(
    "merge_attention_states",
    "Tensor outs, Tensor lses",
    "(Tensor, Tensor)",
    form=merge_form,
    arguments=_merge_arguments,
    results=tuple,
    fake=_merge_fake,
)
