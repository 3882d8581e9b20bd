"""How an operator's call runs: by the plan of an earlier one like it, or after checks and the choice of a backend."""

import ast
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ragged_attention import config, dispatch
from ragged_attention.calls import NOWHERE, Call, Device
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import _replay
from ragged_attention.torch._launcher import LAUNCHER, device_facts, indices_to_numpy
from ragged_attention.torch._replay import LaunchRecording, alignments


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
    recordings: dict[tuple[int, ...], LaunchRecording | None] = dataclasses.field(default_factory=dict)


_NONE_YET: Any = object()
_plans: dict[Any, Plan] = {}
_MOST_PLANS = 4096
_MOST_RECORDINGS = 64  # of a plan
RECORDED = {"triton"}  # the backends known to do nothing but launch kernels; without any, nothing is replayed


def execute(record: type[Call], arguments: dict[str, Any], backend: str | None, options: str | None) -> Any:
    """Run a call on the backend that is chosen for it."""
    plan, tensors = _plan(record, arguments, backend, options)
    if plan.validates:
        _call(record, arguments, plan).map(indices_to_numpy).check_values()
    if plan.choice.backend in RECORDED:
        addresses = [tensor.data_ptr() for tensor in tensors]
        recording = _recording(record, arguments, plan, alignments(tensors, addresses))
        if recording is not None:
            try:
                return recording.replay(tensors, addresses)
            except Exception as error:
                results = plan.choice.run(_call(record, arguments, plan), LAUNCHER)  # raises if that is what is wrong
                _stop_replaying(error)
                return results
    return plan.choice.run(_call(record, arguments, plan), LAUNCHER)


def _recording(
    record: type[Call], arguments: Mapping[str, Any], plan: Plan, key: tuple[int, ...]
) -> LaunchRecording | None:
    found = plan.recordings.get(key, _NONE_YET)
    if found is _NONE_YET:
        if len(plan.recordings) >= _MOST_RECORDINGS:
            plan.recordings.clear()
        found = plan.recordings[key] = _replay.record(_call(record, arguments, plan), plan.choice.run)
    return found


def _stop_replaying(error: Exception) -> None:
    """Launch through Triton from now on: a replay failed where that did not, so this Triton is not as expected."""
    RECORDED.clear()
    warnings.warn(
        f"kernels are launched through Triton from now on, since replaying launches failed: "
        f"{type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=2,
    )


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


def expect_runnable(record: type[Call], arguments: dict[str, Any], backend: str | None, options: str | None) -> None:
    """Raise what running an operator would raise before anything is launched."""
    _plan(record, arguments, backend, options)


def checked(record: type[Call], arguments: Mapping[str, Any]) -> Any:
    """The call's record, which checks what can be known without reading an array; for fake tensors too."""
    first = next((value for value in arguments.values() if isinstance(value, torch.Tensor)), None)
    call = record(**arguments, device=NOWHERE if first is None else device_facts(first.device))
    _check_tensors(call, torch.device("cpu") if first is None else first.device)
    return call


def _check_tensors(call: Call, device: torch.device) -> None:
    """Arrays must be torch tensors on one device, rows of caches contiguous, what is written not expanded."""
    for name, kind in call.KINDS.items():
        value = getattr(call, name)
        for item in value if isinstance(value, tuple | list) else (value,):
            if item is None or isinstance(item, bool | int | float | str):
                continue
            if not isinstance(item, torch.Tensor):
                raise TypeError(f"expected {name} to be a torch.Tensor, got {type(item).__name__}")
            if item.device != device:
                raise InvalidInput(f"expected {name} on the device of the others, {device}, got {item.device}")
            if kind.unit_stride and item.shape[-1] > 1 and item.stride(-1) != 1 and item.numel():
                raise InvalidInput(f"expected {name} with a last stride of 1, got {item.stride(-1)}")
            if (
                kind.written
                and item.numel()
                and any(step == 0 and size > 1 for step, size in zip(item.stride(), item.shape, strict=True))
            ):
                raise InvalidInput(f"expected {name} without overlapping memory, got strides {item.stride()}")
    call.check_strides(lambda tensor: tensor.stride())
