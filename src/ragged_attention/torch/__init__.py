"""The torch front end: every operation on torch tensors, on any device torch has.

Each function is a `torch.library` operator underneath (`torch.ops.ragged_attention.*`), so it works under
`torch.compile(fullgraph=True)` and in CUDA graphs. Nothing synchronises with the device unless the backend `eager`
or `reference`, or `validate="full"`, is in force.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ragged_attention import dispatch
from ragged_attention.calls import (
    CALLS,
    Call,
    documented,
    expect_bool,
    expect_num_seqs,
    expect_pages,
    expect_window,
    is_number,
)
from ragged_attention.config import parse_names
from ragged_attention.torch import operators


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
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    arguments = _attention_form(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale=sm_scale, causal=causal,
        sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
        return_lse=return_lse,
    )  # fmt: skip
    results = _call("ragged_paged_attention", arguments, backend, options)
    return (results[0], results[1]) if return_lse else results[0]


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
    arguments = _write_form(
        k, v, kv_pages, slot_mapping, page_indices=page_indices, kv_lens=kv_lens, cu_q_lens=cu_q_lens,
        num_seqs=num_seqs, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    _call("write_kv_pages", arguments, backend, options)
    return kv_pages


@documented
def merge_attention_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    *,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _call("merge_attention_states", _merge_form(outs, lses), backend, options)


def explain(operation: str, *arguments: Any, backend: str | Sequence[str] | None = None, **keywords: Any) -> str:
    """`ragged_attention.explain` for calls on torch tensors."""
    keywords.pop("options", None)
    form = _FORMS[operation][1](*arguments, **keywords)
    return dispatch.explanation(_checked(operation, form), backend=backend)


def _attention_form(
    q: Any, kv_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any = None, *,
    sm_scale: Any = None, causal: Any = True, sliding_window: Any = None, soft_cap: Any = None, sinks: Any = None,
    k_scale: Any = None, v_scale: Any = None, return_lse: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments in the order and form of the operator's schema."""
    expect_bool("causal", causal)  # a schema would take an int for it
    expect_bool("return_lse", return_lse)
    expect_window(sliding_window)  # and a bool for an int
    kv_lens, page_indices, cu_q_lens, num_seqs = _live(kv_lens, page_indices, cu_q_lens, num_seqs)
    return (
        q, *_pair(kv_pages), kv_lens, page_indices, cu_q_lens, num_seqs, _number(sm_scale), causal, sliding_window,
        _number(soft_cap), sinks, *_scale(k_scale), *_scale(v_scale), return_lse,
    )  # fmt: skip


def _write_form(
    k: Any, v: Any, kv_pages: Any, slot_mapping: Any = None, *, page_indices: Any = None, kv_lens: Any = None,
    cu_q_lens: Any = None, num_seqs: Any = None, k_scale: Any = None, v_scale: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    if isinstance(slot_mapping, tuple | list):
        page_indices, kv_lens, cu_q_lens = slot_mapping
        slot_mapping = None
    kv_lens, page_indices, cu_q_lens, num_seqs = _live(kv_lens, page_indices, cu_q_lens, num_seqs)
    return (
        k, v, *_pair(kv_pages), slot_mapping, page_indices, kv_lens, cu_q_lens, num_seqs,
        *_scale(k_scale), *_scale(v_scale),
    )  # fmt: skip


def _merge_form(outs: Any, lses: Any) -> tuple[Any, ...]:
    return tuple(torch.stack(list(parts)) if isinstance(parts, tuple | list) else parts for parts in (outs, lses))


_FORMS = {
    "ragged_paged_attention": (operators.attention_arguments, _attention_form),
    "write_kv_pages": (operators.write_arguments, _write_form),
    "merge_attention_states": (operators.merge_arguments, _merge_form),
}


def _checked(operation: str, form: tuple[Any, ...]) -> Call:
    return operators.checked(CALLS[operation], _FORMS[operation][0](*form))


def _call(operation: str, arguments: tuple[Any, ...], backend: Any, options: Any) -> Any:
    operator = getattr(torch.ops.ragged_attention, operation)
    names = None if backend is None else ",".join(parse_names(backend))
    try:
        return operator(*arguments, names, operators.encode_options(options))
    except (RuntimeError, TypeError):
        # A schema's complaint does not name our argument; the record's does.
        _checked(operation, arguments)
        raise


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


def _number(value: Any) -> Any:
    return float(value) if is_number(value) else value


def _scale(scale: Any) -> tuple[Any, Any]:
    """A scale as (array, number), one of them None."""
    return (None, float(scale)) if is_number(scale) else (scale, None)
