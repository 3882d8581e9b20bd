"""The operations as `torch.ops.ragged_attention.*`: schemas, implementations, fake kernels.

The public functions only bring their arguments into a schema's form. Everything else (static law, choice of
backend, launch) happens inside the operator, out of sight of `torch.compile`.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch

from ragged_attention import config, dispatch
from ragged_attention.calls import NOWHERE, Call, Device, MergeAttentionStates, RaggedPagedAttention, WriteKvPages
from ragged_attention.errors import InvalidInput
from ragged_attention.torch.launcher import LAUNCHER, device_facts, to_numpy

_library = torch.library.Library("ragged_attention", "DEF")
_CHOICE = "str? backend, str? options"

_library.define(
    "ragged_paged_attention(Tensor q, Tensor kv_pages, Tensor? v_pages, Tensor kv_lens, Tensor page_indices, "
    "Tensor cu_q_lens, Tensor? num_seqs, float? sm_scale, bool causal, int? sliding_window, float? soft_cap, "
    "Tensor? sinks, Tensor? k_scale, float? k_factor, Tensor? v_scale, float? v_factor, bool return_lse, "
    f"{_CHOICE}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "write_kv_pages(Tensor k, Tensor v, Tensor(a!) kv_pages, Tensor(b!)? v_pages, Tensor? slot_mapping, "
    "Tensor? page_indices, Tensor? kv_lens, Tensor? cu_q_lens, Tensor? num_seqs, "
    f"Tensor? k_scale, float? k_factor, Tensor? v_scale, float? v_factor, {_CHOICE}) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"merge_attention_states(Tensor outs, Tensor lses, {_CHOICE}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def encode_options(options: Any) -> str | None:
    """The options mapping as the string that a schema can carry."""
    return None if options is None else json.dumps(dict(config.requested_options("*", options)))


def _facts(tensor: Any) -> Device:
    return device_facts(tensor.device) if isinstance(tensor, torch.Tensor) else NOWHERE


def _check_tensors(call: Call, device: torch.device) -> None:
    """Every array must be a torch tensor on the same device, and the pages' rows contiguous."""
    for name, value in call.arguments().items():
        for item in value if isinstance(value, tuple | list) else (value,):
            if item is None or isinstance(item, bool | int | float):
                continue
            if not isinstance(item, torch.Tensor):
                raise TypeError(f"expected {name} to be a torch.Tensor, got {type(item).__name__}")
            if item.device != device:
                raise InvalidInput(f"expected {name} on the device of the others, {device}, got {item.device}")
    if (pages := getattr(call, "kv_pages", None)) is not None:
        for item in pages if isinstance(pages, tuple | list) else (pages,):
            if item.shape[-1] > 1 and item.stride(-1) != 1 and item.numel():
                raise InvalidInput(f"expected kv_pages with a last stride of 1, got {item.stride(-1)}")


def _execute(call: Call, device: torch.device, backend: str | None, options: str | None) -> Any:
    _check_tensors(call, device)
    if config.validates_values():
        call.map(to_numpy).check_values()  # type: ignore[attr-defined]
    names = backend.split(",") if backend else None
    choice = dispatch.choose(call, backend=names, options=json.loads(options) if options else None)
    return choice.run(call, LAUNCHER)


def _pages(kv_pages: torch.Tensor, v_pages: torch.Tensor | None) -> Any:
    return kv_pages if v_pages is None else (kv_pages, v_pages)


def attention_call(
    q: torch.Tensor, kv_pages: torch.Tensor, v_pages: torch.Tensor | None, kv_lens: torch.Tensor,
    page_indices: torch.Tensor, cu_q_lens: torch.Tensor, num_seqs: torch.Tensor | None, sm_scale: float | None,
    causal: bool, sliding_window: int | None, soft_cap: float | None, sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None, k_factor: float | None, v_scale: torch.Tensor | None, v_factor: float | None,
    return_lse: bool,
) -> RaggedPagedAttention:  # fmt: skip
    return RaggedPagedAttention(
        q=q, kv_pages=_pages(kv_pages, v_pages), kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens,
        num_seqs=num_seqs, sm_scale=sm_scale, causal=causal, sliding_window=sliding_window, soft_cap=soft_cap,
        sinks=sinks, k_scale=k_factor if k_scale is None else k_scale, v_scale=v_factor if v_scale is None else v_scale,
        return_lse=return_lse, device=_facts(q),
    )  # fmt: skip


def _attention(*arguments: Any) -> list[torch.Tensor]:
    *values, backend, options = arguments
    call = attention_call(*values)
    result = _execute(call, call.q.device, backend, options)
    return list(result) if call.return_lse else [result]


def _attention_fake(*arguments: Any) -> list[torch.Tensor]:
    *values, _, _ = arguments
    call = attention_call(*values)
    out = call.q.new_empty(call.out_shape)
    return [out, call.q.new_empty(call.q.shape[:2], dtype=torch.float32)] if call.return_lse else [out]


def write_call(
    k: torch.Tensor, v: torch.Tensor, kv_pages: torch.Tensor, v_pages: torch.Tensor | None,
    slot_mapping: torch.Tensor | None, page_indices: torch.Tensor | None, kv_lens: torch.Tensor | None,
    cu_q_lens: torch.Tensor | None, num_seqs: torch.Tensor | None, k_scale: torch.Tensor | None,
    k_factor: float | None, v_scale: torch.Tensor | None, v_factor: float | None,
) -> WriteKvPages:  # fmt: skip
    return WriteKvPages(
        k=k, v=v, kv_pages=_pages(kv_pages, v_pages), slot_mapping=slot_mapping, page_indices=page_indices,
        kv_lens=kv_lens, cu_q_lens=cu_q_lens, num_seqs=num_seqs, k_scale=k_factor if k_scale is None else k_scale,
        v_scale=v_factor if v_scale is None else v_scale, device=_facts(k),
    )  # fmt: skip


def _write(*arguments: Any) -> None:
    *values, backend, options = arguments
    call = write_call(*values)
    _execute(call, call.k.device, backend, options)


def _write_fake(*arguments: Any) -> None:
    write_call(*arguments[:-2])


def merge_call(outs: torch.Tensor, lses: torch.Tensor) -> MergeAttentionStates:
    return MergeAttentionStates(outs=outs, lses=lses, device=_facts(outs))


def _merge(
    outs: torch.Tensor, lses: torch.Tensor, backend: str | None, options: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    call = merge_call(outs, lses)
    out, lse = _execute(call, outs.device, backend, options)
    return out, lse


def _merge_fake(
    outs: torch.Tensor, lses: torch.Tensor, backend: str | None, options: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    merge_call(outs, lses)
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _not_differentiable(name: str) -> Any:
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx, gradients
        raise RuntimeError(f"{name} has no gradient: it reads a KV cache and is meant for inference")

    return backward


_IMPLEMENTATIONS: Sequence[tuple[str, Any, Any]] = (
    ("ragged_paged_attention", _attention, _attention_fake),
    ("write_kv_pages", _write, _write_fake),
    ("merge_attention_states", _merge, _merge_fake),
)
for _name, _implementation, _fake in _IMPLEMENTATIONS:
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ragged_attention::{_name}", _fake, lib=_library)
for _name in ("ragged_paged_attention", "merge_attention_states"):
    torch.library.register_autograd(f"ragged_attention::{_name}", _not_differentiable(_name), lib=_library)
