"""Runs the work of backends on torch tensors: Triton kernels on the current stream, NumPy functions on the host."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ragged_attention.calls import FLOAT8, Call, Device
from ragged_attention.calls.base import shared_memory_of
from ragged_attention.calls.cache_formats import E8M0
from ragged_attention.errors import TooLarge
from ragged_attention.host.interpreting import interpreting
from ragged_attention.protocols import OPTIONS, Shaped

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "int32", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz",
        "float8_e5m2", "float8_e8m0fnu",
    )
}  # fmt: skip

# Caches do not store values in E8M0, but some formats have scales of this 8-bit dtype.
FLOAT8_DTYPES = tuple(getattr(torch, name) for name in (*FLOAT8, E8M0))


@functools.cache
def device_facts(device: torch.device) -> Device:
    """The static facts about a torch device, by which a backend is selected."""
    if device.type != "cuda":
        return Device(framework="torch", platform=device.type)
    facts = torch.cuda.get_device_properties(device)
    arch = facts.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{facts.major}{facts.minor}"
    return Device(
        framework="torch", platform="rocm" if torch.version.hip else "cuda", name=facts.name, arch=arch,
        num_multiprocessors=facts.multi_processor_count, shared_memory=shared_memory_of(arch),
    )  # fmt: skip


def is_bits(dtype: torch.dtype) -> bool:
    """Whether a dtype is an 8-bit float, which kernels and NumPy take as uint8."""
    return dtype in FLOAT8_DTYPES


def to_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of 8-bit floats or bools as uint8, any other tensor unchanged."""
    return tensor.view(torch.uint8) if is_bits(tensor.dtype) or tensor.dtype == torch.bool else tensor


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor in NumPy: floats as float64, 8-bit floats as their bits, integers unchanged."""
    tensor = tensor.detach()
    if is_bits(tensor.dtype):
        return to_bits(tensor).cpu().numpy()
    return (tensor.to(torch.float64) if tensor.dtype.is_floating_point else tensor).cpu().numpy()


def indices_to_numpy(tensor: torch.Tensor) -> Any:
    """An index array in NumPy, any other tensor unchanged: checks of values read only index arrays."""
    return to_numpy(tensor) if tensor.dtype in (torch.int32, torch.int64) else tensor


_HERE = contextlib.nullcontext()


def on(device: torch.device, *, interpreted: bool = True) -> contextlib.AbstractContextManager[Any]:
    """The context for launches on a device, which need not be the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return interpreting() if device.type == "cpu" and interpreted else _HERE


class Launcher:
    """Runs kernels on torch tensors, on the current stream; `protocols.Launcher` describes the methods.

    `out` is the caller's memory for the result that a backend names "out", or None.
    """

    def __init__(self, out: torch.Tensor | None = None) -> None:
        self.out = out

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], inputs: Sequence[torch.Tensor], outputs: Sequence[Shaped], *,
        inplace: Sequence[int] = (), **arguments: Any,
    ) -> list[torch.Tensor]:  # fmt: skip
        device = inputs[0].device
        new = [torch.empty(tuple(shape), dtype=DTYPES.get(dtype, dtype), device=device) for shape, dtype in outputs]
        new += [inputs[index] for index in inplace]
        if 0 not in grid:
            with on(device):
                try:
                    kernel[grid](*map(to_bits, inputs), *map(to_bits, new), **OPTIONS | arguments)
                except Exception as error:
                    if type(error).__name__ != "OutOfResources":  # a class of Triton, which may not be installed
                        raise
                    raise TooLarge(f"expected options that fit this device: {error}") from error
        return new

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    def native(
        self, function: Any, operands: Mapping[str, torch.Tensor | None], outputs: Mapping[str, Shaped | str | None],
        numbers: Mapping[str, int | float],
    ) -> dict[str, torch.Tensor | None]:  # fmt: skip
        device = next(tensor.device for tensor in operands.values() if tensor is not None)

        def memory(name: str, given: Shaped | str | None) -> torch.Tensor | None:
            if given is None or isinstance(given, str):
                return None if given is None else operands[given]
            shape, dtype = tuple(given[0]), DTYPES.get(given[1], given[1])
            if name == "out" and self.out is not None and (self.out.shape, self.out.dtype) == (shape, dtype):
                return self.out
            return torch.empty(shape, dtype=dtype, device=device)

        results = {name: memory(name, given) for name, given in outputs.items()}
        arrays = {name: tensor for name, tensor in {**operands, **results}.items() if tensor is not None}
        if code := self._enqueue(function, function.record(**numbers), arrays):
            shapes = {name: tensor.shape for name, tensor in arrays.items()}
            raise function.error(code, device.type, shapes)
        return results

    def _enqueue(self, function: Any, record: Any, arrays: Mapping[str, torch.Tensor]) -> int:
        """The error code of a compiled function, called with a record of these arrays."""
        device = next(iter(arrays.values())).device
        for name, tensor in arrays.items():
            setattr(record, name, tensor.data_ptr())
        launch = function.on(device.type)
        if device.type != "cuda":
            return launch(ctypes.byref(record), None)
        with torch.cuda.device(device):
            return launch(ctypes.byref(record), torch.cuda.current_stream(device).cuda_stream)

    def sorted(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.sort(numbers, stable=True)
        return values, places.to(torch.int32)

    def strides(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tensor.stride()

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous()

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dim() == 0 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()

    def aligned(self, tensor: torch.Tensor, bytes: int = 16) -> torch.Tensor:
        if tensor.data_ptr() % bytes == 0:
            if tensor.is_contiguous():
                return tensor
            used = [step for step, count in zip(tensor.stride()[:-1], tensor.shape, strict=False) if count > 1]
            rows = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
            if rows and not any(step * tensor.element_size() % bytes for step in used):
                return tensor
        return tensor.clone(memory_format=torch.contiguous_format)

    def words(self, tensor: torch.Tensor, *, packed_rows: bool) -> torch.Tensor:
        page, row, _, byte = tensor.stride()
        gaps = packed_rows and tensor.shape[1] > 1 and row != tensor.shape[3]
        unaligned = page % 4 or row % 4 or tensor.data_ptr() % 4
        return tensor.clone(memory_format=torch.contiguous_format) if gaps or unaligned or byte != 1 else tensor

    def on_host(
        self, function: Callable[..., Any], call: Call, outputs: str | Sequence[Shaped | str], **extra: Any
    ) -> Any:
        results = function(**call.map(to_numpy).arguments(), **extra)
        results = results if isinstance(results, tuple) else (results,)
        device = next(value for value in call.arguments().values() if isinstance(value, torch.Tensor)).device
        new: list[torch.Tensor] = []
        for output in (outputs,) if isinstance(outputs, str) else outputs:
            if isinstance(output, str):
                given = getattr(call, output)
                new += given if isinstance(given, (tuple, list)) else [given]
            else:
                shape, dtype = output
                new.append(torch.empty(tuple(shape), dtype=DTYPES.get(dtype, dtype), device=device))
        for tensor, values in zip(new, results, strict=True):
            to_bits(tensor).copy_(torch.from_numpy(np.asarray(values)))
        return new


LAUNCHER = Launcher()  # for all calls without `out`
