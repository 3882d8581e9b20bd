"""NumPy batches through the torch front end and back."""

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
    """Why torch cannot have tensors on a device here, or None."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # RuntimeError, AssertionError or NotImplementedError, by device and build of torch
        return f"torch has no device {device!r} here: {str(error).partition(chr(10))[0]}"
    return None


def raw(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The array as its dtype's bytes, in a dtype that NumPy and torch both know."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    return array.view(dtype) if array.dtype == np.uint8 and dtype == "int8" else array


def with_gaps(array: NDArray[Any], dtype: str, layout: str) -> tuple[NDArray[Any], tuple[slice, ...]]:
    """A larger array full of garbage that holds `array` at the slices returned.

    Pages keep a last stride of 1, as their law has it; blocks are pages that lie apart, each of them whole.
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
    """One array as a tensor, in memory that `place` lays out; with gaps if there is a `layout` for them."""
    array, where = raw(array, dtype), ()
    if layout:
        array, where = with_gaps(array, dtype, layout)
    array = place(np.array(array))  # a copy, for tensors may be written
    tensor = torch.from_numpy(array)
    tensor = tensor.view(BITS[dtype]) if dtype in BITS else tensor
    return tensor.to(device or "cpu")[where]


def once(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """The tensor with a stride of 0 along an axis over which it is alike."""
    return tensor.narrow(axis, 0, min(1, tensor.shape[axis])).expand_as(tensor)


def take_back(tensor: torch.Tensor) -> NDArray[Any]:
    """Floats as float32, 8-bit floats as bits, integers as they are."""
    tensor = tensor.detach().cpu()
    if is_bits(tensor.dtype):
        return tensor.view(torch.uint8).numpy()
    return (tensor.to(torch.float32) if tensor.dtype.is_floating_point else tensor).numpy()


@contextlib.contextmanager
def careful() -> Iterator[None]:
    """Fresh memory is NaN inside, so that an output left unwritten shows."""
    before, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=only_warns)


def differentiate(
    function: Callable[..., Any], arguments: dict[str, Any], names: Sequence[str], d_out: Any, d_lse: Any
) -> tuple[Any, list[torch.Tensor]]:
    """What a function returns, and the gradients with respect to arguments; of its results those of out and lse."""
    given = [arguments[name].detach().requires_grad_() for name in names]
    results = function(**arguments | dict(zip(names, given, strict=True)))
    out, lse = (results[0], results[-1]) if isinstance(results, tuple) else (results, None)
    asked = [out] if d_lse is None else [out, lse]
    return results, list(torch.autograd.grad(asked, given, [d_out, d_lse][: len(asked)]))


def write(
    function: Callable[..., Any], arguments: dict[str, Any], name: str, num_results: int = 0
) -> list[NDArray[Any]]:
    """Call an operation that writes its argument `name` in place, and check that it wrote nothing beside it.

    Returns the other results, of which there are `num_results`, and the arrays of that argument, with its scale pages.
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
    """All of the memory that a tensor is a view of, as integers."""
    bits = _bits(tensor)
    return bits.as_strided((bits.untyped_storage().nbytes() // bits.element_size(),), (1,), 0)
