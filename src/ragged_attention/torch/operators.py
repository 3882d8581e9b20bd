"""The operations as `torch.ops.ragged_attention.*`: schemas, implementations, fake kernels.

The public functions only bring their arguments into a schema's form. Everything else (static law, choice of
backend, launch) happens inside the operator, out of sight of `torch.compile`.
"""

import ast
from collections.abc import Sequence
from typing import Any

import torch

from ragged_attention import config, dispatch
from ragged_attention.calls import NOWHERE, Call, Device, MergeAttentionStates, RaggedPagedAttention, WriteKvPages
from ragged_attention.config import expect_mapping
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
    """The options mapping as the string that a schema can carry, in a way that `torch.compile` can follow."""
    if options is None:
        return None
    return "{" + ", ".join([f"{name!r}: {value!r}" for name, value in expect_mapping(options).items()]) + "}"


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


def _static(value: Any) -> Any:
    """All of an argument that a plan may rest on: everything but a tensor's contents."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(_static, value)) if isinstance(value, tuple) else value


_plans: dict[Any, tuple[Device, dispatch.Choice, bool]] = {}  # and whether values are to be checked
_MOST_PLANS = 4096


def _execute(record: type[Call], arguments: dict[str, Any], backend: str | None, options: str | None) -> Any:
    """Run a call: by the plan of an earlier one like it where there is one, else after checks and choice."""
    key = (record, backend, options, config.state(), *map(_static, arguments.values()))
    plan = _plans.get(key)
    if plan is None or plan[1].module is not dispatch.load(record.OPERATION, plan[1].backend):
        call = checked(record, arguments)
        names = backend.split(",") if backend else None
        choice = dispatch.choose(call, backend=names, options=ast.literal_eval(options) if options else None)
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = call.device, choice, config.validates_values()
    else:
        call = record.unchecked(**arguments, device=plan[0])
    _, choice, validates = plan
    if validates:
        call.map(to_numpy).check_values()  # type: ignore[attr-defined]
    return choice.run(call, LAUNCHER)


def checked(record: type[Call], arguments: dict[str, Any]) -> Any:
    """The call's record, by which its static law is checked; for fake tensors and wrong kinds of values too."""
    first = next((value for value in arguments.values() if isinstance(value, torch.Tensor)), None)
    call = record(**arguments, device=NOWHERE if first is None else device_facts(first.device))  # type: ignore[call-arg]
    _check_tensors(call, torch.device("cpu") if first is None else first.device)
    return call


def _pages(kv_pages: Any, v_pages: Any) -> Any:
    return kv_pages if v_pages is None else (kv_pages, v_pages)


def attention_arguments(
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
    }


def _attention(*values: Any) -> list[torch.Tensor]:
    *form, backend, options = values
    arguments = attention_arguments(*form)
    result = _execute(RaggedPagedAttention, arguments, backend, options)
    return list(result) if arguments["return_lse"] else [result]


def _attention_fake(*values: Any) -> list[torch.Tensor]:
    call = checked(RaggedPagedAttention, attention_arguments(*values[:-2]))
    out = call.q.new_empty(call.out_shape)
    return [out, call.q.new_empty(call.q.shape[:2], dtype=torch.float32)] if call.return_lse else [out]


def write_arguments(
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


def _write(*values: Any) -> None:
    *form, backend, options = values
    _execute(WriteKvPages, write_arguments(*form), backend, options)


def _write_fake(*values: Any) -> None:
    checked(WriteKvPages, write_arguments(*values[:-2]))


def merge_arguments(outs: Any, lses: Any) -> dict[str, Any]:
    return {"outs": outs, "lses": lses}


def _merge(
    outs: torch.Tensor, lses: torch.Tensor, backend: str | None, options: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _execute(MergeAttentionStates, merge_arguments(outs, lses), backend, options)
    return out, lse


def _merge_fake(
    outs: torch.Tensor, lses: torch.Tensor, backend: str | None, options: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    checked(MergeAttentionStates, merge_arguments(outs, lses))
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
