"""The operators `torch.ops.ragged_attention.*`, derived from the records, and the front end that calls them.

A public function passes each argument by name, so that Dynamo in every version of torch, type checkers and readers can
follow it. The record converts its arguments to the operator's. Checks, selection of a backend and launches happen
inside the operator, where `torch.compile` does not look.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from ragged_attention import config, dispatch
from ragged_attention.calls import CALLS, Call, Result, WritingCall, is_array
from ragged_attention.config import expect_options, parse_names
from ragged_attention.operations import Operations
from ragged_attention.torch import _plan
from ragged_attention.torch._launcher import DTYPES

_library = torch.library.Library("ragged_attention", "DEF")


class TorchArrays:
    """Converts the public functions' arguments to the records', on torch tensors."""

    namespace = torch

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments

    def array(self, name: str, value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, torch.Tensor) and is_array(value):
            raise TypeError(f"expected {name} to be a torch.Tensor, got {type(value).__name__}")
        return value

    def int32(self, shape: tuple[int, ...], value: int) -> torch.Tensor:
        tensors = [given for given in self.arguments.values() if isinstance(given, torch.Tensor)]
        device = tensors[0].device if tensors else self.arguments.get("device")
        return torch.full(shape, value, dtype=torch.int32, device=device)

    def cast(self, array: torch.Tensor, dtype: str) -> torch.Tensor:
        return array.to(DTYPES[dtype])

    def constant(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach()

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        return array.clone()


# ---- calling an operator


class TorchFrontEnd(Operations[torch.Tensor, torch.Tensor]):
    """The operations on torch tensors, each of which is an operator `torch.ops.ragged_attention.<operation>`."""

    def prepare(self, record: type[Call], arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return record.prepare(arguments, TorchArrays(arguments))
        except RuntimeError:
            if (error := _plan.fault_of_layout(arguments)) is not None:
                raise error from None  # a nested tensor has no shape to check
            raise

    def checked(self, record: type[Call], prepared: Mapping[str, Any]) -> Call:
        return _plan.checked(record, prepared)

    def run_prepared(
        self, record: type[Call], prepared: Mapping[str, Any], backend: Any, options: Any,
        out: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Run an operator on the record's arguments. If `out` is given, the first result is written to it."""
        compiling = torch.compiler.is_compiling()
        direct = not compiling and _needs_no_dispatcher(record, prepared, out)
        if direct:  # plans expect the arguments in the order of KINDS
            flat, operator = [], functools.partial(_run, record, {name: prepared[name] for name in record.KINDS})
        else:
            flat, operator = record.flatten(prepared), getattr(torch.ops.ragged_attention, record.OPERATION)
            operator = operator if out is None else operator.out
        if out is not None:
            operator = functools.partial(_run_into, record, operator, out)
        if not compiling and forward_ad._current_level >= 0:
            _refuse_tangents(record.OPERATION, flat)
        try:
            if direct or compiling or _may_differentiate(flat if out is None else [*flat, out]):
                return operator(*flat, _names(backend), encode_options(options))
            with torch._C._AutoDispatchBelowAutograd():  # skipping autograd saves one dispatch
                return operator(*flat, _names(backend), encode_options(options))
        except (RuntimeError, TypeError):
            if (error := _plan.fault(record, prepared, out)) is not None:
                raise error from None  # it names our argument, while torch's error is about the schema
            raise

    def run_with_write(
        self, record: type[WritingCall], arguments: Mapping[str, Any], backend: Any, options: Any,
        out: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Write `new_kv` in place with another operation, then run the attention call without `new_kv`.

        A call that will be refused writes nothing. Under `torch.compile`, the operators' fake kernels make all checks
        except the backend's before anything runs.
        """
        prepared = self.prepare(record, arguments)
        if not torch.compiler.is_compiling():
            overlap = _plan.expect_runnable(record, prepared, _names(backend), encode_options(options), out)
            written = {name: prepared[name] for name in record.written_by(prepared) if prepared[name] is not None}
            for name, value in written.items():
                _plan.expect_memory(name, value)
            if out is not None:
                _refuse_gradient_into(record, record.flatten(prepared))
            if overlap:
                targets = [_plan.span_of(tensor) for value in written.values() for tensor in _plan.as_tuple(value)]
                prepared = {name: _without_overlap(value, targets) for name, value in prepared.items()} | written
        self.run_prepared(record.WRITE, record.arguments_of_write(prepared), backend, None)
        results = self.run_prepared(record, prepared | {"new_kv": None}, backend, options, out)
        # With `out`, results that are not requested are empty tensors.
        count = 1 + arguments["return_lse"] + arguments["return_max_logits"]
        return *results[:count], *record.WRITE.caches_of(record.arguments_of_write(arguments))

    def write(self, record: type[Call], arguments: Mapping[str, Any], backend: Any, options: Any) -> Any:
        result = self.run(record, arguments, backend, options)
        results = [*([result] if record.NUM_RESULTS else []), *record.caches_of(arguments)]
        return tuple(results) if len(results) > 1 else results[0]


FRONT_END = TorchFrontEnd()


def _needs_no_dispatcher(record: type[Call], arguments: Mapping[str, Any], out: torch.Tensor | None) -> bool:
    """Whether a call may skip torch's dispatcher, which would only call the operator's body. Skipping it saves 15 us.

    That is the case if no mode, transformation, trace or profiler is active, if all tensors are in memory, need no
    gradient and have no pending negation, and if an operator would accept all other arguments unchanged.
    """
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()  # pyright: ignore
    ):
        return False
    tensors = [] if out is None else [out]
    for name, value in arguments.items():
        if isinstance(value, (torch.Tensor, tuple)):
            tensors += _plan.as_tuple(value)
        elif value is not None and type(value) not in record.SCALARS[name]:
            return False
    if not tensors or not _plan.have_addresses(tensors) or _requires_gradient(tensors):
        return False
    return not any(tensor.is_neg() for tensor in tensors)


def _run_into(record: type[Call], operator: Any, out: torch.Tensor, *values: Any) -> Any:
    others = operator(*values, out=out)
    if record.NUM_RESULTS == 1:
        return out
    return out, *(others if isinstance(others, (tuple, list)) else (others,))


def _may_differentiate(flat: Sequence[Any]) -> bool:
    """Whether autograd or a functorch transformation may be involved in a call."""
    in_transform = torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined]
    return in_transform or _requires_gradient(flat)


def _requires_gradient(flat: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*flat)


def _refuse_tangents(operation: str, flat: Sequence[Any]) -> None:
    """Raise for forward-mode differentiation, in which torch would treat the result's tangent as zero."""
    for value in flat:
        if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"{operation} has no forward-mode derivative (jvp); use reverse mode if it has a gradient"
            )


def _names(backend: Any) -> str | None:
    return None if backend is None else ",".join(parse_names(backend))


def encode_options(options: Any) -> str | None:
    """The options as a string, since a schema has no type for them. `torch.compile` can trace this code."""
    if options is None:
        return None
    return "{" + ", ".join([f"{name!r}: {value!r}" for name, value in expect_options(options).items()]) + "}"


# ---- the body of an operator


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast, which would change dtypes within an operation."""
    if not torch._C._is_any_autocast_enabled():  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _mark_written(operation: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that cannot be written, and increment its version, as torch's own in-place operations do."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    elif not torch.is_inference_mode_enabled():
        raise RuntimeError(f"{operation} writes {name}, an inference tensor, in place outside torch.inference_mode()")


def _without_overlap(value: Any, targets: Sequence[tuple[int, int]]) -> Any:
    """An argument, with copies of its tensors that overlap the written memory.

    Kernels read and write in any order, so they could overwrite a row before they read it.
    """
    if isinstance(value, tuple):
        return tuple([_without_overlap(item, targets) for item in value])
    if not isinstance(value, torch.Tensor):
        return value
    span = _plan.span_of(value)
    return value.clone() if any(_plan.meet(span, target) for target in targets) else value


def _written(record: type[Call], arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a write operation writes, with the names of their arguments."""
    for name in record.WRITTEN:
        for tensor in _plan.as_tuple(arguments[name]):
            if tensor is not None:  # the record will refuse a missing cache
                yield name, tensor


def _implementation(record: type[Call]) -> Callable[..., Any]:
    def implementation(*values: Any, out: torch.Tensor | None = None) -> Any:
        return _run(record, record.unflatten(values[:-2]), *values[-2:], out=out)

    return implementation


def _run(
    record: type[Call], arguments: dict[str, Any], backend: str | None, options: str | None,
    out: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    items = (item for value in arguments.values() for item in _plan.as_tuple(value))
    first = next((item for item in items if isinstance(item, torch.Tensor)), None)
    if first is None:  # the schema accepts None for tensors, but the record raises
        _plan.checked(record, arguments)
    assert first is not None
    if record.WRITES:
        written = list(_written(record, arguments))
        targets = [_plan.span_of(tensor) for _, tensor in written]
        for name in arguments.keys() - {*record.WRITTEN}:
            arguments[name] = _without_overlap(arguments[name], targets)
        for name, tensor in written:
            _mark_written(record.OPERATION, name, tensor)
    if out is not None:
        _mark_written(record.OPERATION, "out", out)
    with _without_autocast(first.device):
        results = _plan.execute(record, arguments, backend, options, out=out)
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        if out is None:
            return _as_declared(results, record.NUM_RESULTS, first)
        result, *others = results
        if result.data_ptr() != out.data_ptr():
            out.copy_(result)
        return _as_declared(others, _num_others(record), first)


def _num_others(record: type[Call]) -> int:
    """The number of results that an operator with `out` returns: all except the first."""
    return (record.MOST_RESULTS if record.NUM_RESULTS is None else record.NUM_RESULTS) - 1


def _as_declared(results: Sequence[torch.Tensor | None], count: int | None, like: torch.Tensor) -> Any:
    """A backend's results in the form that the operator's schema declares, with empty tensors for absent results."""
    if count is None:
        return results
    if count == 0:
        return None
    given = [*results, *[None] * (count - len(results))]
    declared = [like.new_empty(0, dtype=torch.float32) if result is None else result for result in given]
    return declared[0] if count == 1 else tuple(declared)


def _fake(record: type[Call]) -> Callable[..., Any]:
    def fake(*values: Any, out: torch.Tensor | None = None) -> Any:
        call = _plan.checked(record, record.unflatten(values[:-2]))
        first = next(value for value in values if isinstance(value, torch.Tensor))

        def empty(result: Result) -> torch.Tensor:
            return first.new_empty(result.shape, dtype=DTYPES.get(result.dtype, result.dtype))

        results = call.results()
        if out is None:
            return _as_declared([empty(result) for result in results], record.NUM_RESULTS, first)
        _plan.expect_out(results[0], out, first.device)
        return _as_declared([empty(result) for result in results[1:]], _num_others(record), first)

    return fake


# ---- gradients


def _gradient(record: type[Call]) -> tuple[Callable[..., Any], Callable[..., None]]:
    """The backward function and the function that saves tensors for it, for `torch.library.register_autograd`.

    The gradient is the operation `<operation>_backward`, which takes the forward arguments by name. The results in
    RESULT_GRADIENTS have gradients, and all others are constants. The configuration during the forward pass selects the
    backend of the gradient.
    """
    gradient = CALLS[f"{record.OPERATION}_backward"]

    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        for index, needed in enumerate(ctx.needs_input_grad[: len(inputs)]):
            if needed and (reason := record.no_gradient_of(index)) is not None:
                raise RuntimeError(reason)
        results = output if isinstance(output, tuple) else (output,)
        ctx.set_materialize_grads(False)  # the gradient of an unused lse is None, not zeros
        differentiable = record.RESULT_GRADIENTS.values()
        ctx.mark_non_differentiable(*[each for index, each in enumerate(results) if index not in differentiable])
        ctx.indices = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        saved = [results[index] for index in record.SAVED_RESULTS.values()]
        ctx.save_for_backward(*(inputs[index] for index in ctx.indices), *saved)
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        ctx.request = _request(gradient.OPERATION, inputs[-2])

    def differentiate(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        inputs = list(ctx.others)
        if all(cotangent is None for cotangent in cotangents):
            return (None,) * len(inputs)
        tensors = ctx.saved_tensors
        for index, tensor in zip(ctx.indices, tensors, strict=False):
            inputs[index] = tensor
        arguments = record.unflatten(inputs[:-2])
        record.expect_gradient(arguments)
        arguments |= zip(record.SAVED_RESULTS, tensors[len(ctx.indices) :], strict=True)
        arguments |= {name: cotangents[index] for name, index in record.RESULT_GRADIENTS.items()}
        if cotangents[0] is None:  # the first result is unused, and it is the first of the saved results
            arguments[next(iter(record.RESULT_GRADIENTS))] = torch.zeros_like(tensors[len(ctx.indices)])
        differentiated = [name for name in record.DIFFERENTIABLE if ctx.needs_input_grad[record.RANGES[name][0]]]
        arguments |= record.requests_of_gradients(differentiated)
        results = getattr(torch.ops.ragged_attention, gradient.OPERATION)(*gradient.flatten(arguments), *ctx.request)
        gradients: list[Any] = [None] * len(inputs)
        for name, value in zip(record.DIFFERENTIABLE, results, strict=True):
            if name in differentiated:
                gradients[record.RANGES[name][0]] = value
        return tuple(gradients)

    return differentiate, save


def _request(operation: str, backend: str | None) -> tuple[str | None, str | None]:
    """The backend and options for a call's gradient. They are read in the forward pass, in which `use_backend` counts.

    Autograd's threads are outside any `with use_backend(...)`. A compiled function reads the options when it runs.
    """
    names = dispatch.backends_offering(operation, backend)
    if torch.compiler.is_compiling():
        return names, None
    return _names(config.requested(operation, names)), encode_options(config.requested_options(operation))


def _not_differentiable(record: type[Call]) -> Callable[..., Any]:
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(record.no_gradient())

    return backward


def _refuse_gradient_into(record: type[Call], flat: Sequence[Any], out: torch.Tensor | None = None) -> None:
    """Refuse gradients through `out=`, as torch's own operations do."""
    if _requires_gradient(flat):
        raise RuntimeError(f"{record.OPERATION} with out= has no gradient: expected arguments that do not require one")
    _refuse_gradient_of_memory(record.OPERATION, "out", out)


def _refuse_gradient_of_write(record: type[Call], flat: Sequence[Any]) -> None:
    arguments = record.unflatten(flat)
    for name, tensor in _written(record, arguments):
        _refuse_gradient_of_memory(record.OPERATION, name, tensor)
    for name, value in arguments.items():
        given = [each for each in _plan.as_tuple(value) if isinstance(each, torch.Tensor)]
        if name not in record.WRITTEN and any(each.requires_grad for each in given):
            reason = f"detach {name}, or write it under torch.no_grad()"
            raise RuntimeError(f"{record.no_gradient()}; {reason}")


def _refuse_gradient_of_memory(operation: str, name: str, tensor: torch.Tensor | None) -> None:
    if tensor is not None and _requires_gradient([tensor]):
        raise RuntimeError(f"{operation} writes {name} in place, and that has no gradient: expected it without one")


def _refusing(record: type[Call], overload: str, refuse: Callable[..., None]) -> Callable[..., Any]:
    """The autograd kernel of an operator that writes. It raises if a gradient would be lost silently."""

    def refusing(*values: Any, **out: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            refuse(record, values[:-2], **out)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(getattr(torch.ops.ragged_attention, record.OPERATION), overload)(*values, **out)

    return refusing


def _define(record: type[Call]) -> None:
    name, count = record.OPERATION, record.NUM_RESULTS
    _define_operator(record, name, "", "Tensor[]" if count is None else _tensors(count))
    if record.TAKES_OUT:
        _define_operator(record, f"{name}.out", ", *, Tensor(o!) out", _tensors(_num_others(record)))
        _library.impl(f"{name}.out", _refusing(record, "out", _refuse_gradient_into), "Autograd")
    if record.WRITES:
        _library.impl(name, _refusing(record, "default", _refuse_gradient_of_write), "Autograd")
    else:
        backward, save = _gradient(record) if record.DIFFERENTIABLE else (_not_differentiable(record), None)
        torch.library.register_autograd(f"ragged_attention::{name}", backward, setup_context=save, lib=_library)


def _tensors(count: int) -> str:
    tensors = ", ".join(["Tensor"] * count)
    return tensors if count == 1 else f"({tensors})"


def _define_operator(record: type[Call], name: str, more: str, returns: str) -> None:
    """Define an operator with the record's arguments and those in `more`."""
    declared = f"{name}({record.schema()}, str? backend, str? options{more}) -> {returns}"
    _library.define(declared, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _implementation(record), "CompositeExplicitAutograd")
    torch.library.register_fake(f"ragged_attention::{name}", _fake(record), lib=_library)


for _record in CALLS.values():
    _define(_record)
