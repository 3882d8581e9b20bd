"""Attention over packed sequences, and its gradient, on jax arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ragged_attention.calls import documented, expect_bool
from ragged_attention.jax import execute
from ragged_attention.jax.execute import brought


@documented
def varlen_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    sm_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    arguments = _form(
        q=q, k=k, v=v, cu_q_lens=cu_q_lens, cu_kv_lens=cu_kv_lens, max_q_len=max_q_len, max_kv_len=max_kv_len,
        sm_scale=sm_scale, causal=causal, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks,
        return_lse=return_lse, deterministic=deterministic,
    )  # fmt: skip
    out, lse = execute.run_differentiable("varlen_attention", arguments, backend, options, of=("q", "k", "v", "sinks"))
    return (out, lse) if return_lse else out


@documented
def varlen_attention_backward(
    d_out: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    *,
    d_lse: jax.Array | None = None,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    sm_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    deterministic: bool = False,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    arguments = _form(
        d_out=d_out, q=q, k=k, v=v, out=out, lse=lse, cu_q_lens=cu_q_lens, cu_kv_lens=cu_kv_lens, d_lse=d_lse,
        max_q_len=max_q_len, max_kv_len=max_kv_len, sm_scale=sm_scale, causal=causal, sliding_window=sliding_window,
        soft_cap=soft_cap, sinks=sinks, deterministic=deterministic,
    )  # fmt: skip
    dq, dk, dv, *d_sinks = execute.run_gradient("varlen_attention_backward", arguments, backend, options)
    return dq, dk, dv, d_sinks[0] if d_sinks else None


def _form(*, return_lse: Any = False, **arguments: Any) -> dict[str, Any]:
    expect_bool("return_lse", return_lse)
    return {name: brought(value) for name, value in arguments.items()}


FORMS = {"varlen_attention": _form, "varlen_attention_backward": _form}
