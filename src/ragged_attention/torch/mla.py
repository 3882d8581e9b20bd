"""Multi-head latent attention on torch tensors: the attentions, the schedule of a decode step, the quantised cache."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ragged_attention.calls import DecodeSchedule, documented
from ragged_attention.torch import mla_operators as forms
from ragged_attention.torch.execute import invoke


@documented
def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float | None = None,
    d_v: int = 512,
    sinks: torch.Tensor | None = None,
    topk_lens: torch.Tensor | None = None,
    cache_format: str | None = None,
    deterministic: bool = False,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    form = forms.prefill_form(
        q, kv, indices, sm_scale=sm_scale, d_v=d_v, sinks=sinks, topk_lens=topk_lens, cache_format=cache_format,
        deterministic=deterministic,
    )  # fmt: skip
    return invoke("sparse_mla_prefill", form, backend, options)


@documented
def sparse_mla_prefill_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    d_lse: torch.Tensor | None = None,
    sm_scale: float | None = None,
    d_v: int = 512,
    sinks: torch.Tensor | None = None,
    topk_lens: torch.Tensor | None = None,
    deterministic: bool = False,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    form = forms.backward_form(
        d_out, q, kv, indices, out, lse, d_lse=d_lse, sm_scale=sm_scale, d_v=d_v, sinks=sinks, topk_lens=topk_lens,
        deterministic=deterministic,
    )  # fmt: skip
    dq, dkv, d_sinks = invoke("sparse_mla_prefill_backward", form, backend, options)
    return dq, dkv, None if sinks is None else d_sinks


@documented
def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_indices: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    *,
    indices: torch.Tensor | None = None,
    d_v: int = 512,
    sm_scale: float | None = None,
    causal: bool = False,
    sinks: torch.Tensor | None = None,
    topk_lens: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_lens: torch.Tensor | None = None,
    schedule: DecodeSchedule | None = None,
    cache_format: str | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    form = forms.decode_form(
        q, kv_cache, page_indices, kv_lens, indices=indices, d_v=d_v, sm_scale=sm_scale, causal=causal, sinks=sinks,
        topk_lens=topk_lens, extra_kv_cache=extra_kv_cache, extra_indices=extra_indices,
        extra_topk_lens=extra_topk_lens, schedule=schedule, cache_format=cache_format,
    )  # fmt: skip
    return invoke("mla_decode", form, backend, options)


@documented
def make_decode_schedule(
    kv_lens: torch.Tensor | int,
    batch_size: int,
    num_q_tokens: int,
    num_q_heads: int,
    num_kv_heads: int = 1,
    *,
    topk_lens: torch.Tensor | None = None,
    extra_topk: int | None = None,
    extra_topk_lens: torch.Tensor | None = None,
    num_parts: int | None = None,
    overhead: int = 5,
    device: torch.device | str | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> DecodeSchedule:
    form = forms.schedule_form(
        kv_lens, batch_size, num_q_tokens, num_q_heads, num_kv_heads, topk_lens=topk_lens, extra_topk=extra_topk,
        extra_topk_lens=extra_topk_lens, num_parts=num_parts, overhead=overhead, device=device,
    )  # fmt: skip
    parts, num_splits = invoke("make_decode_schedule", form, backend, options)
    topk = 0 if isinstance(kv_lens, torch.Tensor) else kv_lens
    return DecodeSchedule(
        parts=parts,
        num_splits=num_splits,
        lens=form[0],
        extra_lens=form[1],
        made_for=(batch_size, num_q_tokens, num_q_heads, num_kv_heads, topk, extra_topk or 0),
    )


@documented
def quantize_mla_cache(
    kv: torch.Tensor,
    format: str,
    power_of_two_scales: bool = True,
    *,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    return invoke("quantize_mla_cache", forms.quantize_form(kv, format, power_of_two_scales), backend, options)


@documented
def dequantize_mla_cache(
    cache: torch.Tensor,
    format: str | None = None,
    dtype: torch.dtype | str = "bfloat16",
    *,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    return invoke("dequantize_mla_cache", forms.dequantize_form(cache, format, dtype), backend, options)


@documented
def write_mla_cache(
    kv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    power_of_two_scales: bool = True,
    cache_format: str | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    form = forms.write_form(kv, cache, slot_mapping, power_of_two_scales=power_of_two_scales, cache_format=cache_format)
    invoke("write_mla_cache", form, backend, options)
    return cache


@documented
def page_indices_to_slots(
    positions: torch.Tensor,
    page_indices: torch.Tensor,
    page_size: int,
    *,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    return invoke("page_indices_to_slots", forms.slots_form(positions, page_indices, page_size), backend, options)
