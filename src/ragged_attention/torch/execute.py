"""How a call of any operation runs: from a schema's arguments to the record, to the backend chosen, to its results.

The public functions only bring their arguments into a schema's form. Everything else (static law, choice of
backend, launch) happens inside the operator, out of sight of `torch.compile`.
"""

import ast
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ragged_attention import config, dispatch
from ragged_attention.calls import CALLS, NOWHERE, Call, Device, is_number
from ragged_attention.config import expect_options, parse_names
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import tape as tapes
from ragged_attention.torch.launcher import LAUNCHER, device_facts, indices_to_numpy
from ragged_attention.torch.tape import Tape, alignments

_library = torch.library.Library("ragged_attention", "DEF")

CACHES = {  # the arguments whose rows must lie in one piece
    "ragged_paged_attention": ("kv_pages",),
    "write_kv_pages": ("kv_pages",),
    "paged_attention": ("k_pages", "v_pages"),
    "prefill_attention": ("k_pages", "v_pages"),
    "mla_decode": ("kv_cache", "extra_kv_cache"),
    "dequantize_mla_cache": ("cache",),
    "write_mla_cache": ("cache",),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """What one operation is made of on this side."""

    form: Callable[..., tuple[Any, ...]]  # the public function's arguments in the order and form of the schema
    arguments: Callable[..., dict[str, Any]]  # the record's arguments from those


OPERATIONS: dict[str, Operation] = {}


def define(
    name: str,
    signature: str,
    returns: str,
    *,
    form: Callable[..., tuple[Any, ...]],
    arguments: Callable[..., dict[str, Any]],
    results: Callable[[Any], Any],
    fake: Callable[[Any], Any],
    gradient: tuple[Callable[..., Any], Callable[..., None]] | None = None,
) -> None:
    """Define `torch.ops.ragged_attention.<name>`.

    `results` makes what the schema returns from what a backend does, `fake` makes it from the record alone. `gradient`
    is the backward function and what saves for it, as `torch.library.register_autograd` takes them.
    """
    record = CALLS[name]

    def implementation(*values: Any) -> Any:
        return results(execute(record, arguments(*values[:-2]), *values[-2:]))

    def fake_kernel(*values: Any) -> Any:
        return fake(checked(record, arguments(*values[:-2])))

    schema = f"{name}({signature}, str? backend, str? options) -> {returns}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ragged_attention::{name}", fake_kernel, lib=_library)
    backward, save = gradient or (_not_differentiable(name), None)
    if returns != "()":
        torch.library.register_autograd(f"ragged_attention::{name}", backward, setup_context=save, lib=_library)
    OPERATIONS[name] = Operation(form, arguments)


def _not_differentiable(name: str) -> Any:
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx, gradients
        reason = "it is a gradient itself" if name.endswith("_backward") else "it works on a KV cache, for inference"
        raise RuntimeError(f"{name} has no gradient: {reason}")

    return backward


def gradient_results(found: Any, of: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """A schema has no tensor that may be missing among its results: without sinks, the last of `of`, it is empty."""
    return tuple(found) if len(found) == len(of) else (*found, found[0].new_empty(0))


def by_name(operation: str) -> Callable[..., dict[str, Any]]:
    """The record's arguments where the schema has them one by one and in the record's order."""
    names = CALLS[operation].argument_names()
    return lambda *values: dict(zip(names, values, strict=True))


def gradient_fake(call: Any, of: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Tensors like the arguments `of` that there are gradients of."""
    given = (getattr(call, name) for name in of)
    return tuple(call.q.new_empty(0) if array is None else array.new_empty(array.shape) for array in given)


def invoke(operation: str, form: tuple[Any, ...], backend: Any, options: Any) -> Any:
    """Run an operator on arguments that are in its schema's form."""
    operator = getattr(torch.ops.ragged_attention, operation)
    try:
        if _may_differentiate(form):
            return operator(*form, _names(backend), encode_options(options))
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*form, _names(backend), encode_options(options))
    except (RuntimeError, TypeError):
        # A schema's complaint does not name our argument; the record's does.
        record_of(operation, form)
        raise


def _may_differentiate(form: tuple[Any, ...]) -> bool:
    """Whether autograd may have to do with a call; it would find out for itself, at the price of a second dispatch."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:  # type: ignore[attr-defined]
        return True
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*form)


def _names(backend: Any) -> str | None:
    return None if backend is None else ",".join(parse_names(backend))


def record_of(operation: str, form: tuple[Any, ...]) -> Any:
    """The checked record of arguments that are in a schema's form."""
    return checked(CALLS[operation], OPERATIONS[operation].arguments(*form))


def encode_options(options: Any) -> str | None:
    """The options mapping as the string that a schema can carry, in a way that `torch.compile` can follow."""
    if options is None:
        return None
    return "{" + ", ".join([f"{name!r}: {value!r}" for name, value in expect_options(options).items()]) + "}"


def number(value: Any) -> Any:
    """Any kind of number as the float that a schema takes."""
    return float(value) if is_number(value) else value


def _static(value: Any, tensors: list[torch.Tensor]) -> Any:
    """All of an argument that a plan may rest on, everything but a tensor's contents; adds its tensors to a list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple):
        return tuple([_static(item, tensors) for item in value])
    return repr(value) if type(value) is float and not value else value  # -0.0 is equal to 0.0 and not the same


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What calls alike share: the choice, and what it launches by how the tensors lie in memory."""

    device: Device
    choice: dispatch.Choice
    validates: bool  # whether values are to be checked
    tapes: dict[tuple[int, ...], Tape | None] = dataclasses.field(default_factory=dict)


_NONE_YET: Any = object()
_plans: dict[Any, Plan] = {}
_MOST_PLANS = 4096
_MOST_TAPES = 64  # of a plan
RECORDED = ("triton",)  # the rooms known to do nothing but launch kernels


def execute(record: type[Call], arguments: dict[str, Any], backend: str | None, options: str | None) -> Any:
    """Run a call: by the plan of an earlier one like it where there is one, else after checks and choice."""
    plan, tensors = _plan(record, arguments, backend, options)
    if plan.validates:
        _call(record, arguments, plan).map(indices_to_numpy).check_values()  # type: ignore[attr-defined]
    if plan.choice.backend in RECORDED:
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = alignments(tensors, addresses)
        tape = plan.tapes.get(key, _NONE_YET)
        if tape is _NONE_YET:
            if len(plan.tapes) >= _MOST_TAPES:
                plan.tapes.clear()
            tape = plan.tapes[key] = tapes.record(_call(record, arguments, plan), plan.choice.run)
        if tape is not None:
            return tape.play(tensors, addresses)
    return plan.choice.run(_call(record, arguments, plan), LAUNCHER)


def _call(record: type[Call], arguments: Mapping[str, Any], plan: Plan) -> Call:
    return record.unchecked(**arguments, device=plan.device)


def _plan(
    record: type[Call], arguments: dict[str, Any], backend: str | None, options: str | None
) -> tuple[Plan, list[torch.Tensor]]:
    """The plan of a call, and its tensors in the order of its arguments."""
    tensors: list[torch.Tensor] = []
    statics = [_static(value, tensors) for value in arguments.values()]
    key = (record, backend, options, config.state(), dispatch.state(), *statics)
    plan = _plans.get(key)
    if plan is None or plan.choice.module is not dispatch.load(record.OPERATION, plan.choice.backend):
        call = checked(record, arguments)
        names = backend.split(",") if backend else None
        choice = dispatch.choose(call, backend=names, options=ast.literal_eval(options) if options else None)
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = Plan(call.device, choice, config.validates_values())
    return plan, tensors


def expect_runnable(operation: str, form: tuple[Any, ...], backend: Any, options: Any, **more: Any) -> None:
    """Raise what running an operator would raise before anything is launched.

    `more` are further arguments, which are checked here and which another operator will take care of.
    """
    arguments = OPERATIONS[operation].arguments(*form)
    checked(CALLS[operation], arguments | more)
    _plan(CALLS[operation], arguments, _names(backend), encode_options(options))


def checked(record: type[Call], arguments: Mapping[str, Any]) -> Any:
    """The call's record, by which its static law is checked; for fake tensors and wrong kinds of values too."""
    first = next((value for value in arguments.values() if isinstance(value, torch.Tensor)), None)
    call = record(**arguments, device=NOWHERE if first is None else device_facts(first.device))  # type: ignore[call-arg]
    _check_tensors(call, torch.device("cpu") if first is None else first.device)
    return call


def _check_tensors(call: Call, device: torch.device) -> None:
    """Every array must be a torch tensor on the same device, and the caches' rows contiguous."""
    for name, value in call.arguments().items():
        for item in value if isinstance(value, tuple | list) else (value,):
            if item is None or isinstance(item, bool | int | float | str):
                continue
            if not isinstance(item, torch.Tensor):
                raise TypeError(f"expected {name} to be a torch.Tensor, got {type(item).__name__}")
            if item.device != device:
                raise InvalidInput(f"expected {name} on the device of the others, {device}, got {item.device}")
    for name in CACHES.get(call.OPERATION, ()):
        value = getattr(call, name)
        for item in value if isinstance(value, tuple | list) else (value,):
            if item is not None and item.shape[-1] > 1 and item.stride(-1) != 1 and item.numel():
                raise InvalidInput(f"expected {name} with a last stride of 1, got {item.stride(-1)}")
    if call.OPERATION == "write_mla_cache":
        _check_packed_pages(call)


def _check_packed_pages(call: Any) -> None:
    """A page of `fp8_v4` is addressed by its bytes, not by rows; what cannot be written in place is refused."""
    cache = call.cache
    if call.format == "fp8_v4" and cache.shape[1] > 1 and cache.stride(1) != cache.shape[3] and cache.numel():
        wanted, got = cache.shape[3], cache.stride(1)
        raise InvalidInput(f"expected cache with rows packed in each page (stride {wanted}) for 'fp8_v4', got {got}")
