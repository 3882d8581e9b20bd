"""Attention over packed sequences, and its gradient, on torch tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ragged_attention import dispatch
from ragged_attention.calls import documented, expect_bool, expect_count, expect_window
from ragged_attention.torch.execute import by_name, define, gradient_fake, gradient_results, invoke, number
from ragged_attention.torch.launcher import DTYPES


@documented
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    sm_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    form = varlen_form(
        q, k, v, cu_q_lens, cu_kv_lens, max_q_len=max_q_len, max_kv_len=max_kv_len, sm_scale=sm_scale, causal=causal,
        sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks, return_lse=return_lse,
        deterministic=deterministic,
    )  # fmt: skip
    out, lse = invoke("varlen_attention", form, backend, options)
    return (out, lse) if return_lse else out


@documented
def varlen_attention_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    *,
    d_lse: torch.Tensor | None = None,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    sm_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    form = backward_form(
        d_out, q, k, v, out, lse, cu_q_lens, cu_kv_lens, d_lse=d_lse, max_q_len=max_q_len, max_kv_len=max_kv_len,
        sm_scale=sm_scale, causal=causal, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks,
        deterministic=deterministic,
    )  # fmt: skip
    dq, dk, dv, d_sinks = invoke("varlen_attention_backward", form, backend, options)
    return dq, dk, dv, None if sinks is None else d_sinks


def varlen_form(
    q: Any, k: Any, v: Any, cu_q_lens: Any, cu_kv_lens: Any, *, return_lse: Any = False, **keywords: Any
) -> tuple[Any, ...]:
    """The arguments in the order and form of the operator's schema."""
    expect_bool("return_lse", return_lse)
    return q, k, v, cu_q_lens, cu_kv_lens, *_keywords(**keywords)


def backward_form(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_q_lens: Any, cu_kv_lens: Any, *, d_lse: Any = None,
    **keywords: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments in the order and form of the operator's schema."""
    return d_out, q, k, v, out, lse, cu_q_lens, cu_kv_lens, d_lse, *_keywords(**keywords)


def _keywords(
    *, max_q_len: Any = None, max_kv_len: Any = None, sm_scale: Any = None, causal: Any = False,
    sliding_window: Any = None, soft_cap: Any = None, sinks: Any = None, deterministic: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
    for name, value in (("max_q_len", max_q_len), ("max_kv_len", max_kv_len)):
        if value is not None:
            expect_count(name, value, 0)
    expect_bool("causal", causal)  # a schema would take an int for it, and a bool for an int
    expect_bool("deterministic", deterministic)
    expect_window(sliding_window)
    return max_q_len, max_kv_len, number(sm_scale), causal, sliding_window, number(soft_cap), sinks, deterministic


def _arguments(operation: str) -> Any:
    """The record's arguments from the schema's; a length that is not known while tracing is no hint."""
    named = by_name(operation)
    return lambda *values: named(*(None if isinstance(value, torch.SymInt) else value for value in values))


def _fake(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return call.q.new_empty(call.out_shape), call.q.new_empty(call.q.shape[:2], dtype=DTYPES[call.lse_dtype])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_q_lens, cu_kv_lens, *keywords, sinks, deterministic, backend, _ = inputs
    ctx.set_materialize_grads(False)  # of a log-sum-exp that nobody uses there is no gradient
    ctx.save_for_backward(q, k, v, *output, cu_q_lens, cu_kv_lens, sinks)
    ctx.keywords, ctx.deterministic = keywords, deterministic
    ctx.backend = dispatch.backends_offering("varlen_attention_backward", backend)


def _differentiate(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_q_lens, cu_kv_lens, sinks = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    dq, dk, dv, d_sinks = torch.ops.ragged_attention.varlen_attention_backward(
        d_out, q, k, v, out, lse, cu_q_lens, cu_kv_lens, d_lse, *ctx.keywords, sinks, ctx.deterministic, ctx.backend,
        None,
    )  # fmt: skip
    without = (None,) * (2 + len(ctx.keywords))
    return dq, dk, dv, *without, None if sinks is None else d_sinks, None, None, None


GRADIENTS = ("q", "k", "v", "sinks")
KEYWORDS = (
    "SymInt? max_q_len, SymInt? max_kv_len, float? sm_scale, bool causal, SymInt? sliding_window, float? soft_cap, "
    "Tensor? sinks, bool deterministic"
)

define(
    "varlen_attention",
    f"Tensor q, Tensor k, Tensor v, Tensor cu_q_lens, Tensor cu_kv_lens, {KEYWORDS}",
    "(Tensor, Tensor)",
    form=varlen_form,
    arguments=_arguments("varlen_attention"),
    results=tuple,
    fake=_fake,
    gradient=(_differentiate, _save),
)
define(
    "varlen_attention_backward",
    "Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_q_lens, Tensor cu_kv_lens, "
    f"Tensor? d_lse, {KEYWORDS}",
    "(Tensor, Tensor, Tensor, Tensor)",
    form=backward_form,
    arguments=_arguments("varlen_attention_backward"),
    results=lambda found: gradient_results(found, GRADIENTS),
    fake=lambda call: gradient_fake(call, GRADIENTS),
)
