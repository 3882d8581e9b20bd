"""Call the torch front end with NumPy batches, and convert its results back."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import ragged_attention.torch as operations  # noqa: F401  (what a runner calls)
from ragged_attention.calls import FLOAT8, Device
from ragged_attention.testing import formats, triton_interpreter
from ragged_attention.testing.collecting import leaves, written_arrays
from ragged_attention.testing.compare import identical
from ragged_attention.torch._launcher import device_facts, is_bits

Place = Callable[[NDArray[Any]], NDArray[Any]]
BITS = {name: getattr(torch, name) for name in ("bfloat16", "float8_e8m0fnu", *FLOAT8)}

triton_interpreter.quicken()


def facts(device: str | None) -> Device:
    return device_facts(torch.device(device or "cpu"))


def unusable(device: str) -> str | None:
    """The reason why torch cannot use a device here, or None."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # the type depends on the device and on torch's build
        return f"torch has no device {device!r} here: {str(error).partition(chr(10))[0]}"
    return None


def raw(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The array's values in `dtype`, viewed in a dtype that both NumPy and torch have."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    return array.view(dtype) if array.dtype == np.uint8 and dtype == "int8" else array


def with_gaps(array: NDArray[Any], dtype: str, layout: str) -> tuple[NDArray[Any], tuple[slice, ...]]:
    """A larger array that contains `array` among garbage, and the slices that select `array`.

    With the layout "pages", the last stride stays 1, as operations require of pages. With "blocks", pages are
    contiguous but have gaps between them.
    """
    if array.ndim == 0:
        return array, ()
    *lead, last = array.shape
    shape, where = list(array.shape), [slice(None)] * array.ndim
    if layout == "blocks":
        shape[1], where[1] = shape[1] + 1, slice(0, -1)
    else:
        shape[-1], where[-1] = (last + 8, slice(0, last)) if layout == "pages" else (2 * last + 1, slice(1, None, 2))
        if lead:
            shape[-2], where[-2] = 2 * shape[-2] + 1, slice(0, -1, 2)
    filling = np.array(np.iinfo(array.dtype).max if array.dtype.kind in "iu" else np.nan)
    if dtype == "bfloat16" or dtype in formats.NAN_CODES:
        filling = np.array(formats.NAN_CODES.get(dtype, (0x7FC0,))[0])
    wide = np.full(shape, filling.astype(array.dtype), array.dtype)
    wide[tuple(where)] = array
    return wide, tuple(where)


def bring(array: NDArray[Any], dtype: str, *, layout: str, place: Place, device: str | None) -> Any:
    """A tensor with the values of `array`, in memory that `place` allocates, with the gaps that `layout` names."""
    array, where = raw(array, dtype), ()
    if layout:
        array, where = with_gaps(array, dtype, layout)
    array = place(np.array(array))  # a copy, because operations may write the tensor
    tensor = torch.from_numpy(array)
    tensor = tensor.view(BITS[dtype]) if dtype in BITS else tensor
    return tensor.to(device or "cpu")[where]


def expand(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """The tensor with a stride of 0 along an axis on which all slices are equal."""
    return tensor.narrow(axis, 0, min(1, tensor.shape[axis])).expand_as(tensor)


def take_back(tensor: torch.Tensor) -> NDArray[Any]:
    """A NumPy array with floats as float32 and 8-bit floats as their bits; integers stay unchanged."""
    tensor = tensor.detach().cpu()
    if is_bits(tensor.dtype):
        return tensor.view(torch.uint8).numpy()
    return (tensor.to(torch.float32) if tensor.dtype.is_floating_point else tensor).numpy()


@contextlib.contextmanager
def careful() -> Iterator[None]:
    """A context in which torch fills new memory with NaN, so that unwritten outputs are noticed.

    NumPy's floating-point warnings are suppressed: Triton's interpreter computes with NumPy, but a GPU never warns.
    """
    before, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.filterwarnings("ignore", message=".*deterministic|All-NaN (slice|axis) encountered")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=only_warns)


def differentiate(
    function: Callable[..., Any], arguments: dict[str, Any], names: Sequence[str], d_out: Any, d_lse: Any
) -> tuple[Any, list[torch.Tensor]]:
    """A function's results, and the gradients of its out and lse with respect to the named arguments."""
    inputs = [arguments[name].detach().requires_grad_() for name in names]
    results = function(**arguments | dict(zip(names, inputs, strict=True)))
    out, lse = (results[0], results[-1]) if isinstance(results, tuple) else (results, None)
    outputs = [out] if d_lse is None else [out, lse]
    return results, list(torch.autograd.grad(outputs, inputs, [d_out, d_lse][: len(outputs)]))


def write(
    function: Callable[..., Any], arguments: dict[str, Any], name: str, num_results: int = 0
) -> list[NDArray[Any]]:
    """Call an operation that writes its argument `name` in place, and check that nothing else was written.

    Returns the `num_results` other results, then the written arrays with their scale pages.
    """
    tensors = written_arrays(arguments, name)
    around = [_storage_of(tensor) for tensor in tensors]
    before = [storage.clone() for storage in around]
    results = leaves(function(**arguments))
    others, results = results[:num_results], results[num_results:]
    if [t.data_ptr() for t in results] != [t.data_ptr() for t in tensors]:
        raise AssertionError(f"{name}: expected the tensors given, got new ones")
    for tensor, storage, old in zip(tensors, around, before, strict=True):
        old.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(_bits(tensor))
        identical(storage.cpu().numpy(), old.cpu().numpy(), "the memory between the pages' rows")
    return [take_back(tensor) for tensor in (*others, *results)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory behind a view, as a one-dimensional tensor of integers."""
    bits = _bits(tensor)
    return bits.as_strided((bits.untyped_storage().nbytes() // bits.element_size(),), (1,), 0)
