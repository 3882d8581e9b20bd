"""Records the launches of a call once, and replays them on the tensors of later calls with equal static facts.

The launches of a backend depend only on static facts, which `_plan.py` describes. To record them, the backend runs on
stand-ins for tensors, and a `LaunchRecording` keeps its launches. A later call with equal facts replays the recording
on its own tensors. After the first launch of a kernel through Triton, a replay enqueues the compiled kernel directly.
This saves Triton's inspection of the arguments. A `NativeRecording` keeps calls of functions that are compiled for
CPUs. It stores the record of each call's arguments without the addresses of arrays.
"""

import ctypes
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ragged_attention.calls import Call
from ragged_attention.protocols import OPTIONS, Shaped
from ragged_attention.torch._launcher import DTYPES, Launcher, on, to_bits


class Unrecorded(Exception):
    """Raised when a backend requests something that a replay could not repeat."""


class StandIn:
    """Replaces a tensor while launches are recorded. The backend sees only its shape and dtype."""

    def __init__(self, index: int, tensor: torch.Tensor) -> None:
        self.index, self.tensor = index, tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The compiled kernel of one step, which can be enqueued on other operands."""

    kernel: Any
    run: Any
    function: Any
    metadata: Any
    grid: tuple[int, ...]
    constants: tuple[Any, ...]  # the arguments after the operands

    def __call__(self, operands: Sequence[int], stream: Any, hooks: tuple[Any, Any]) -> None:
        """Enqueue the kernel as `kernel[grid](...)` does after compilation. `operands` are addresses."""
        launch_metadata = (
            None if hooks is NO_HOOKS else self.kernel.launch_metadata(self.grid, stream, *operands, *self.constants)
        )
        self.run(*self.grid, stream, self.function, self.metadata, launch_metadata, *hooks, *operands, *self.constants)


NO_HOOKS = (None, None)


def _triton() -> Any:
    """The module `triton`, which the backend that launches the kernel has imported."""
    return sys.modules["triton"]


def _is_jitted(kernel: Any) -> bool:
    """Whether Triton compiles the kernel and does not interpret or autotune it."""
    return "triton" in sys.modules and type(kernel) is _triton().JITFunction


def _driver() -> Any:
    """Triton's driver, or None if a tool watches or changes how kernels are compiled."""
    knobs = _triton().knobs
    if knobs.runtime.debug or knobs.compilation.instrumentation_mode or knobs.runtime.add_stages_inspection_hook:
        return None
    return _triton().runtime.driver.active


def _hooks() -> tuple[Any, Any]:
    """The hooks that profilers have installed around launches, usually none."""
    knobs = _triton().knobs.runtime
    hooks = knobs.launch_enter_hook, knobs.launch_exit_hook
    return hooks if any(getattr(hook, "calls", hook) for hook in hooks) else NO_HOOKS


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One launch: its operands as indices of tensors in the recording, and its other arguments as values."""

    kernel: Any
    grid: tuple[int, ...]
    indices: tuple[int, ...]
    arguments: Mapping[str, Any]
    compiled: dict[Any, Compiled] = dataclasses.field(default_factory=dict)  # kernels by Triton's current device

    def through_triton(self, tensors: Sequence[torch.Tensor], device: Any) -> None:
        """Launch through Triton, and keep the compiled kernel for later calls on `device`, unless that is None."""
        kernel = self.kernel[self.grid](*(to_bits(tensors[index]) for index in self.indices), **self.arguments)
        # A kernel with `launch_metadata` reports its arguments to tools at each launch, so it is not kept.
        if device is not None and type(kernel) is _triton().compiler.CompiledKernel and not self.kernel.launch_metadata:
            constants = tuple(self.arguments.get(p.name, p.default) for p in self.kernel.params[len(self.indices) :])
            self.compiled[device] = Compiled(
                kernel=kernel, run=kernel.run, function=kernel.function, metadata=kernel.packed_metadata,
                grid=(*self.grid, 1, 1)[:3], constants=constants,
            )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class New:
    """A tensor that a backend allocates; `allocation` is the index of the memory that holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    allocation: int
    offset: int = 0  # bytes

    def within(self, allocations: Sequence[torch.Tensor]) -> torch.Tensor:
        memory = allocations[self.allocation]
        if memory.shape == self.shape and memory.dtype == self.dtype:
            return memory
        size = math.prod(self.shape) * self.dtype.itemsize
        return memory[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class LaunchRecording:
    """The launches of a backend for all calls with equal static facts and `alignments`.

    Tensors have indices: first the call's tensors in the order of its arguments, then the allocated tensors in the
    order of `requests`, which are their shapes and dtypes. `results` are indices in nested tuples.
    """

    def __init__(
        self, inputs: int, requests: Sequence[tuple[tuple[int, ...], torch.dtype]], steps: Sequence[Step], results: Any
    ) -> None:
        self.steps = [step for step in steps if 0 not in step.grid]
        self.jitted = bool(self.steps) and all(_is_jitted(step.kernel) for step in self.steps)
        whole = [index for index in range(len(requests)) if inputs + index in _flat(results) or not self.jitted]
        self.allocations = [requests[index] for index in whole]
        self.new: list[New] = []
        end = 0  # bytes so far in the allocation that all tensors except results share
        for index, (shape, dtype) in enumerate(requests):
            if index in whole:
                self.new.append(New(shape, dtype, whole.index(index)))
            else:
                self.new.append(New(shape, dtype, len(whole), end))
                end += -(-math.prod(shape) * dtype.itemsize // GRANULE) * GRANULE
        if len(whole) < len(requests):
            self.allocations.append(((end,), torch.uint8))
        indices = [*range(inputs), *[inputs + new.allocation for new in self.new]]
        self.results = _renamed(results, indices.__getitem__)
        self.out = next((index - inputs for index in _flat(self.results)), -1)  # the first result's allocation

    def replay(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], out: torch.Tensor | None = None) -> Any:
        """Launch every step on the tensors of a call, and return the results. `out` is memory for the first result."""
        device = tensors[0].device
        with on(device, interpreted=not self.jitted):
            made: Any = [
                out if out is not None and index == self.out else torch.empty(shape, dtype=dtype, device=device)
                for index, (shape, dtype) in enumerate(self.allocations)
            ]
            starts = [tensor.data_ptr() for tensor in made]
            addresses = [*addresses, *[starts[new.allocation] + new.offset for new in self.new]]
            current, stream, hooks = self._current(starts)
            for step in self.steps:
                compiled = step.compiled.get(current)
                if compiled is None or step.kernel.pre_run_hooks:
                    step.through_triton([*tensors, *[new.within(made) for new in self.new]], current)
                else:
                    compiled([addresses[index] for index in step.indices], stream, hooks)
        return _renamed(self.results, [*tensors, *made].__getitem__)

    def _current(self, starts: Sequence[int]) -> tuple[Any, Any, tuple[Any, Any]]:
        """Triton's current device, its stream and the hooks around launches. The device is None if Triton must launch.

        Kept kernels were compiled for aligned allocations, so Triton must launch if an allocation is not aligned.
        """
        driver = _driver() if self.jitted and not any(start % ALIGNMENT for start in starts) else None
        if driver is None:
            return None, None, NO_HOOKS
        device = driver.get_current_device()
        return device, driver.get_current_stream(device), _hooks()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NativeStep:
    """One call of a function that is compiled for CPUs."""

    function: Any  # as `protocols.Launcher.native` describes it
    template: bytes  # the record of its arguments, in which no address is set
    indices: tuple[tuple[str, int], ...]  # the fields that hold addresses, and the tensors' indices in the recording

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        record = self.function.record.from_buffer_copy(self.template)
        for name, index in self.indices:
            setattr(record, name, addresses[index])
        if code := self.function.on("cpu")(ctypes.byref(record), None):
            raise self.function.error(code, "cpu", {name: tensors[index].shape for name, index in self.indices})


class NativeRecording:
    """The calls of compiled functions by a backend for all calls with equal static facts and `native_facts`.

    Tensors have indices as in a `LaunchRecording`. A replay raises the same errors as the backend.
    """

    def __init__(
        self, inputs: int, requests: Sequence[tuple[tuple[int, ...], torch.dtype]], steps: Sequence[NativeStep],
        results: Any,
    ) -> None:  # fmt: skip
        self.steps, self.requests, self.results = steps, requests, results
        self.out = next((index - inputs for index in _flat(results)), -1)  # the first result's request

    def replay(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], out: torch.Tensor | None = None) -> Any:
        """Call every function on a call's tensors, and return the results. `out` is memory for the first result."""
        device = tensors[0].device
        made = [torch.empty(shape, dtype=dtype, device=device) if out is None or index != self.out else out
                for index, (shape, dtype) in enumerate(self.requests)]  # fmt: skip
        tensors = [*tensors, *made]
        addresses = [*addresses, *[tensor.data_ptr() for tensor in made]]
        for step in self.steps:
            step(tensors, addresses)
        return _renamed(self.results, tensors.__getitem__)


def _flat(results: Any) -> list[int]:
    """The indices in nested tuples, without absent results, which are None."""
    if isinstance(results, tuple):
        return [index for result in results for index in _flat(result)]
    return [] if results is None else [results]


def _renamed(results: Any, name: Callable[[Any], Any]) -> Any:
    """Nested tuples with `name` applied to every item that is not None."""
    if isinstance(results, tuple):
        return tuple([_renamed(result, name) for result in results])
    return None if results is None else name(results)


GRANULE = 256  # bytes: tensors in a shared allocation start at multiples of it
ALIGNMENT = 16  # bytes: Triton specialises kernels for addresses with this alignment
WORD = 4  # bytes


def alignments(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> tuple[int, ...]:
    """The facts about tensors in memory on which the launches of a call depend.

    They are the alignment of each address, on which Triton and `words` depend, and on AMD whether 32-bit offsets reach
    the whole storage.
    """
    facts = tuple(address % ALIGNMENT for address in addresses)
    if torch.version.hip:
        facts += tuple(tensor.untyped_storage().nbytes() < 2**31 for tensor in tensors)
    return facts


def native_facts(addresses: Sequence[int]) -> tuple[int, ...]:
    """The facts about tensors and threads on which the calls of compiled functions depend.

    They are the number of threads and each address modulo the size of a word, on which `words` depends.
    """
    return torch.get_num_threads(), *[address % WORD for address in addresses]


class ReplayRecorder(Launcher):
    """A launcher that launches nothing and records the steps of a `LaunchRecording` or of a `NativeRecording`.

    Unlike the recorder in `tools/recording.py`, which keeps launches for people to read, it identifies each operand, so
    that the steps can run again on other tensors. It also uses the real strides and alignments, and refuses work that a
    replay could not repeat.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs = 0
        self.requests: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.steps: list[Any] = []

    def stand_in(self, tensor: torch.Tensor) -> Any:
        """The stand-in for the next tensor of the call. All tensors of the call come before the first launch."""
        self.inputs += 1
        return StandIn(self.inputs - 1, tensor)

    def _request(self, shape: Sequence[int], dtype: Any) -> Any:
        tensor = torch.empty(tuple(shape), dtype=DTYPES.get(dtype, dtype), device="meta")
        self.requests.append((tuple(shape), tensor.dtype))
        return StandIn(self.inputs + len(self.requests) - 1, tensor)

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], inputs: Sequence[Any], outputs: Sequence[Shaped], *,
        inplace: Sequence[int] = (), **arguments: Any,
    ) -> list[Any]:  # fmt: skip
        new = [self._request(*output) for output in outputs] + [inputs[index] for index in inplace]
        indices = tuple(array.index for array in (*inputs, *new))
        self.steps.append(Step(kernel, grid, indices, OPTIONS | arguments))
        return new

    def native(
        self, function: Any, operands: Mapping[str, Any], outputs: Mapping[str, Shaped | str | None],
        numbers: Mapping[str, int | float],
    ) -> dict[str, Any]:  # fmt: skip
        def memory(given: Shaped | str | None) -> Any:
            if given is None or isinstance(given, str):
                return None if given is None else operands[given]
            return self._request(*given)

        results = {name: memory(given) for name, given in outputs.items()}
        arrays = {name: array for name, array in {**operands, **results}.items() if array is not None}
        if not all(array.tensor.device.type in ("cpu", "meta") for array in arrays.values()):
            raise Unrecorded
        indices = tuple((name, array.index) for name, array in arrays.items())
        self.steps.append(NativeStep(function, bytes(function.record(**numbers)), indices))
        return results

    def strides(self, tensor: Any) -> tuple[int, ...]:
        return super().strides(tensor.tensor)

    def contiguous(self, tensor: Any) -> Any:
        return self._uncopied(tensor, super().contiguous(tensor.tensor))

    def packed(self, tensor: Any) -> Any:
        return self._uncopied(tensor, super().packed(tensor.tensor))

    def words(self, tensor: Any, *, packed_rows: bool) -> Any:
        return self._uncopied(tensor, super().words(tensor.tensor, packed_rows=packed_rows))

    def _uncopied(self, array: Any, prepared: torch.Tensor) -> Any:
        """Refuse to record a call that needs a copy: a copy is not a launch, and costs more than a launch."""
        if prepared is not array.tensor:
            raise Unrecorded
        return array

    def _refused(self, *given: Any, **options: Any) -> Any:
        raise Unrecorded

    sorted = aligned = on_host = _refused  # type: ignore[assignment]


Recording = LaunchRecording | NativeRecording


def record(call: Call, run: Callable[[Any, Any], Any]) -> Recording | None:
    """The recording of a call's launches by a backend's `run`, or None if it does more than launch kernels."""
    recorder = ReplayRecorder()
    try:
        results = _indices(run(call.map(recorder.stand_in), recorder))
    except Unrecorded:
        return None
    native = [isinstance(step, NativeStep) for step in recorder.steps]
    if any(native) and not all(native):
        return None
    recording = NativeRecording if any(native) else LaunchRecording
    return recording(recorder.inputs, recorder.requests, recorder.steps, results)


def _indices(results: Any) -> Any:
    if isinstance(results, (tuple, list)):
        return tuple(map(_indices, results))
    if results is None:
        return None
    if not isinstance(results, StandIn):
        raise Unrecorded
    return results.index
