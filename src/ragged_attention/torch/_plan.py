"""Runs an operator's call by the plan of an earlier, similar call. Making a plan checks the call and selects a backend.

A plan holds for all calls with equal *static facts*: the shapes, strides, dtypes and devices of tensors, all other
arguments, the requests and the configuration.
"""

import ast
import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ragged_attention import config, dispatch
from ragged_attention.calls import NOWHERE, Call, Device, Result
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import _replay
from ragged_attention.torch._launcher import DTYPES, LAUNCHER, Launcher, device_facts, indices_to_numpy
from ragged_attention.torch._replay import ALIGNMENT, NativeRecording, Recording, alignments, native_facts


def _static(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The static facts of an argument, on which a plan may depend. Appends its tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple):
        return tuple([_static(item, tensors) for item in value])
    return repr(value) if type(value) is float and not value else value  # distinguishes -0.0 from 0.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The backend for calls with equal static facts, and its recorded launches by facts such as alignments."""

    device: Device
    choice: dispatch.Choice
    validates: bool  # whether to check the values of index arrays
    result: Result | None  # the first result, if the operation takes `out`
    extents: tuple[int, ...]  # the bytes that each tensor spans
    written: tuple[tuple[str, int], ...]  # the written tensors' names and their indices among the call's tensors
    # The addresses, relative to the first written tensor, at which the written tensors are known to share no byte.
    distinct: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    recordings: dict[tuple[int, ...], Recording | None] = dataclasses.field(default_factory=dict)


_UNKNOWN: Any = object()
_plans: dict[Any, Plan] = {}
_MAX_PLANS = 4096
_MAX_RECORDINGS = 64  # per plan
_MAX_DISTINCT = 1024  # per plan
_MAX_CANDIDATES: Any = 100_000  # in the search for a byte that two written tensors share
NATIVE = "numba"  # the backend that calls functions compiled for CPUs
RECORDED = {"triton", NATIVE}  # backends that only launch kernels; "triton" is removed to stop replaying it


def execute(
    record: type[Call], arguments: dict[str, Any], backend: str | None, options: str | None,
    out: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Run a call on the backend of its plan.

    Kernels write the first result to `out` if its layout suits them. Otherwise the caller copies the result there.
    """
    plan, tensors = _plan(record, arguments, backend, options)
    addresses = [tensor.data_ptr() for tensor in tensors]
    if plan.device.platform == "cpu" or 0 in addresses:
        _expect_memory(arguments, tensors, addresses, plan.extents)
    if len(plan.written) > 1:
        _expect_distinct(plan, tensors, addresses)
    if out is not None:
        expect_out(plan.result, out, tensors[0].device)
        _expect_memory({"out": out}, [out], [out.data_ptr()], [extent_of(out)])
        out = out if _takes_results(out, tensors) else None
    if plan.validates:
        _call(record, arguments, plan).map(indices_to_numpy).check_values()
    recording = _recording(record, arguments, plan, tensors, addresses) if plan.choice.backend in RECORDED else None
    if recording is None:
        return plan.choice.run(_call(record, arguments, plan), LAUNCHER if out is None else Launcher(out))
    try:
        return recording.replay(tensors, addresses, out)
    except Exception as error:
        if isinstance(recording, NativeRecording):
            raise
        results = plan.choice.run(_call(record, arguments, plan), LAUNCHER)  # raises if this fails too
        _stop_replaying(error)
        return results


def _takes_results(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether kernels may write a result to `out`: it is packed, aligned, and shares no storage with inputs."""
    first = out.data_ptr()
    if not out.is_contiguous() or first % ALIGNMENT:
        return False
    storages = [tensor.untyped_storage() for tensor in tensors]
    end = first + out.nbytes
    return all(end <= each.data_ptr() or each.data_ptr() + each.nbytes() <= first for each in storages)


def extent_of(tensor: torch.Tensor) -> int:
    """The bytes that a tensor spans, from its address."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((size - 1) * step for size, step in steps))


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the address after the last one."""
    first = tensor.data_ptr()
    return first, first + extent_of(tensor)


def meet(span: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two spans share an address."""
    return span[0] < other[1] and other[0] < span[1]


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A tuple unchanged; any other value as the only item of a tuple."""
    return value if isinstance(value, tuple) else (value,)


def _expect_memory(
    arguments: Mapping[str, Any], tensors: Sequence[torch.Tensor], addresses: Sequence[int], extents: Sequence[int]
) -> None:
    """Raise unless each tensor lies within its storage. A storage that was resized to 0 contains no tensor."""
    for tensor, address, extent in zip(tensors, addresses, extents, strict=True):
        storage = tensor.untyped_storage()
        if extent and not address + extent <= storage.data_ptr() + storage.nbytes():
            name = next(name for name, value in arguments.items() if any(each is tensor for each in as_tuple(value)))
            raise InvalidInput(f"expected {name} with memory for {list(tensor.shape)}, got {storage.nbytes()} bytes")


def _written(record: type[Call], arguments: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """The names of the written tensors, such as `kv_pages[0]` in a pair, and their indices among all tensors."""
    written, count = [], 0
    for name, value in arguments.items():
        tensors = [each for each in as_tuple(value) if isinstance(each, torch.Tensor)]
        if name in record.written_by(arguments):
            names = [f"{name}[{index}]" if isinstance(value, tuple) else name for index in range(len(tensors))]
            written += [(each, count + index) for index, each in enumerate(names)]
        count += len(tensors)
    return tuple(written)


def _expect_distinct(plan: Plan, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
    """Raise if two written tensors share a byte. Interleaved views share none.

    The plan fixes shapes and strides, so a check is valid for all calls with equal relative addresses.
    """
    first = addresses[plan.written[0][1]]
    relative = tuple([addresses[index] - first for _, index in plan.written])
    if relative in plan.distinct:
        return
    for (name, index), (other, another) in itertools.combinations(plan.written, 2):
        _expect_apart(name, tensors[index], other, tensors[another])
    if len(plan.distinct) >= _MAX_DISTINCT:
        plan.distinct.clear()
    plan.distinct.add(relative)


def _expect_apart(name: str, tensor: torch.Tensor, other: str, another: torch.Tensor) -> None:
    if meet(span_of(tensor), span_of(another)) and share_bytes(tensor, another):
        raise InvalidInput(f"expected {name} and {other} without overlapping memory, got tensors that share bytes")


class _Place:
    """A tensor's place in memory, in NumPy's array interface. Nothing reads that memory, which may be a device's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(size * step for step in tensor.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


def share_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share a byte.

    NumPy's test is exact, and takes microseconds for the layouts of caches. For other layouts its search can be long,
    so tensors count as distinct if it finds no shared byte among `_MAX_CANDIDATES` candidates.
    """
    if not tensor.numel() or not other.numel():
        return False
    with contextlib.suppress(np.exceptions.TooHardError):
        return np.shares_memory(np.asarray(_Place(tensor)), np.asarray(_Place(other)), max_work=_MAX_CANDIDATES)
    return False


def _recording(
    record: type[Call], arguments: Mapping[str, Any], plan: Plan, tensors: Sequence[torch.Tensor],
    addresses: Sequence[int],
) -> Recording | None:  # fmt: skip
    """The recording for tensors at these addresses; None if the backend's work cannot be recorded."""
    key = native_facts(addresses) if plan.choice.backend == NATIVE else alignments(tensors, addresses)
    recording = plan.recordings.get(key, _UNKNOWN)
    if recording is _UNKNOWN:
        if len(plan.recordings) >= _MAX_RECORDINGS:
            plan.recordings.clear()
        recording = plan.recordings[key] = _replay.record(_call(record, arguments, plan), plan.choice.run)
    return recording


def _stop_replaying(error: Exception) -> None:
    """Stop replaying and warn. A launch through Triton worked after a replay failed, so Triton's internals changed."""
    RECORDED.discard("triton")
    text = "kernels are launched through Triton from now on, since replaying launches failed"
    warnings.warn(f"{text}: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)


def _call(record: type[Call], arguments: Mapping[str, Any], plan: Plan) -> Call:
    return record.unchecked(**arguments, device=plan.device)


def _plan(
    record: type[Call], arguments: dict[str, Any], backend: str | None, options: str | None
) -> tuple[Plan, list[torch.Tensor]]:
    """The plan of a call, and its tensors in the order of its arguments."""
    tensors: list[torch.Tensor] = []
    try:
        statics = [None if value is None else _static(value, tensors) for value in arguments.values()]
        key = (record, backend, options, config.state(), dispatch.state(), *statics)
        plan = _plans.get(key)
    except (RuntimeError, TypeError):
        if (error := fault(record, arguments)) is not None:
            raise error from None  # an argument is invalid: it has no strides or is not hashable
        raise
    if plan is None or plan.choice.module is not dispatch.load(record.OPERATION, plan.choice.backend):
        call = checked(record, arguments)
        names = backend.split(",") if backend else None
        choice = dispatch.choose(call, backend=names, options=ast.literal_eval(options) if options else None)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        result = call.results()[0] if record.TAKES_OUT else None
        extents = tuple(map(extent_of, tensors))
        written = _written(record, arguments)
        plan = _plans[key] = Plan(call.device, choice, config.validates_values(), result, extents, written)
    return plan, tensors


def expect_runnable(
    record: type[Call], arguments: dict[str, Any], backend: str | None, options: str | None, out: torch.Tensor | None
) -> bool:
    """Raise the errors that an operator's call raises before any launch.

    Returns whether a write of `new_kv` before the call may change another argument of the call.
    """
    plan, tensors = _plan(record, arguments, backend, options)
    if out is not None:
        expect_out(plan.result, out, tensors[0].device)
    if not plan.written or not have_addresses(tensors):
        return False
    if out is not None:
        for name, index in plan.written:
            _expect_apart(name, tensors[index], "out", out)
    addresses = [tensor.data_ptr() for tensor in tensors]
    spans = [(first, first + extent) for first, extent in zip(addresses, plan.extents, strict=True)]
    targets = [spans.pop(index) for _, index in reversed(plan.written)]
    return any(meet(span, target) for span in spans for target in targets)


_WITH_ADDRESSES = {torch.Tensor, torch.nn.Parameter}


def have_addresses(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are in memory, unlike those of function transforms, of fake modes and of the device "meta"."""
    in_transform = torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined]
    return not in_transform and _WITH_ADDRESSES.issuperset(map(type, tensors)) and not tensors[0].is_meta


def checked(record: type[Call], arguments: Mapping[str, Any]) -> Any:
    """The call's record, checked without reading an array. The tensors may be fake."""
    if (error := fault_of_layout(arguments)) is not None:
        raise error
    first = next((value for value in arguments.values() if isinstance(value, torch.Tensor)), None)
    call = record(**arguments, device=NOWHERE if first is None else device_facts(first.device))
    _check_tensors(call, torch.device("cpu") if first is None else first.device)
    return call


def fault(
    record: type[Call], arguments: Mapping[str, Any], out: torch.Tensor | None = None
) -> InvalidInput | TypeError | None:
    """The record's error for a call's arguments, or None."""
    try:
        call = checked(record, arguments)
        if out is not None:
            first = next(each for each in arguments.values() if isinstance(each, torch.Tensor))
            expect_out(call.results()[0], out, first.device)
    except (InvalidInput, TypeError) as error:
        return error
    return None


def fault_of_layout(arguments: Mapping[str, Any]) -> InvalidInput | None:
    """The error for a sparse or nested tensor, which has no strides, or None."""
    for name, value in arguments.items():
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor) and (tensor.is_nested or tensor.layout is not torch.strided):
                got = "a nested one" if tensor.is_nested else tensor.layout
                return InvalidInput(f"expected {name} to be a dense tensor, got {got}")
    return None


def _check_tensors(call: Call, device: torch.device) -> None:
    """Check that arrays are tensors on one device, rows of caches contiguous, and written tensors not expanded."""
    for name, kind in call.KINDS.items():
        value = getattr(call, name)
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if item is None or isinstance(item, (bool, int, float, str)):
                continue
            if not isinstance(item, torch.Tensor):
                raise TypeError(f"expected {name} to be a torch.Tensor, got {type(item).__name__}")
            if item.device != device:
                raise InvalidInput(f"expected {name} on the device of the others, {device}, got {item.device}")
            if kind.unit_stride and item.shape[-1] > 1 and item.stride(-1) != 1 and item.numel():
                raise InvalidInput(f"expected {name} with a last stride of 1, got {item.stride(-1)}")
            if kind.written:
                expect_memory(name, item)
    call.check_strides(lambda tensor: tensor.stride())


def expect_memory(name: str, tensor: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """Raise unless each element of a written tensor has its own address, where its value is stored without negation."""
    if isinstance(tensor, tuple):
        for item in tensor:
            expect_memory(name, item)
        return
    if tensor.is_neg():
        raise InvalidInput(f"expected {name} to hold its values, got a view that negates them: call its resolve_neg()")
    repeated = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    if repeated and tensor.numel():
        raise InvalidInput(f"expected {name} without overlapping memory, got strides {tensor.stride()}")


def expect_out(result: Result | None, out: Any, device: torch.device) -> None:
    """Raise unless a result can be written to `out`."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"expected out to be a torch.Tensor, got {type(out).__name__}")
    assert result is not None
    dtype = DTYPES.get(result.dtype, result.dtype)
    if out.dtype != dtype:
        raise InvalidInput(f"expected out.dtype to be {dtype}, got {out.dtype}")
    if tuple(out.shape) != tuple(result.shape):
        raise InvalidInput(f"expected out.shape to be {list(result.shape)}, got {list(out.shape)}")
    if out.device != device:
        raise InvalidInput(f"expected out on the device of the others, {device}, got {out.device}")
    expect_memory("out", out)
