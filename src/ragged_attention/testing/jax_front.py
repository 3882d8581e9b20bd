"""Call the jax front end with NumPy batches, and convert its results back."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import ragged_attention.jax as operations  # noqa: F401  (what a runner calls)
from ragged_attention.calls import Device
from ragged_attention.jax._launcher import device_facts, is_bits
from ragged_attention.jax._lower import default_platform
from ragged_attention.testing import formats, triton_interpreter
from ragged_attention.testing.collecting import leaves, written_arrays

INT32 = np.iinfo(np.int32)

triton_interpreter.quicken()


def facts(device: str | None) -> Device:
    del device  # arrays are on jax's default device
    return device_facts(default_platform())


def bring(array: NDArray[Any], dtype: str, *, layout: str, place: Any, device: str | None) -> Any:
    """A jax array with the values of `array`. `layout` and `place` do not apply, because jax chooses the memory itself.

    It uses `device_put`, because `asarray` compiles a program for each shape.
    """
    del layout, place, device
    if dtype in (*formats.QUANTIZED, "float8_e8m0fnu"):
        return jax.device_put(np.ascontiguousarray(array).copy().view(jnp.dtype(dtype)))
    if dtype == "int64":  # jax has no int64 by default; values out of range stay so when they are clipped
        return jax.device_put(np.clip(array, INT32.min, INT32.max).astype(np.int32))
    with np.errstate(over="ignore"):
        return jax.device_put(array.astype(jnp.dtype(dtype)))


def expand(array: jax.Array, axis: int) -> jax.Array:
    """The array itself, because jax arrays have no strides."""
    del axis
    return array


def take_back(array: jax.Array) -> NDArray[Any]:
    """A NumPy array with floats as float32 and 8-bit floats as their bits; integers stay unchanged."""
    values = np.array(array)
    if is_bits(values.dtype):
        return values.view(np.uint8)
    return values.astype(np.float32) if jnp.issubdtype(values.dtype, jnp.floating) else values


@contextlib.contextmanager
def careful() -> Iterator[None]:
    """Do nothing: the launcher already fills outputs with NaN before a kernel writes them."""
    yield


def differentiate(
    function: Callable[..., Any], arguments: dict[str, Any], names: Sequence[str], d_out: Any, d_lse: Any
) -> tuple[Any, list[jax.Array]]:
    """A function's results, and the gradients of its out and lse with respect to the named arguments."""

    def of(*arrays: jax.Array) -> Any:
        return function(**arguments | dict(zip(names, arrays, strict=True)))

    results, transposed = jax.vjp(of, *(arguments[name] for name in names))
    if not isinstance(results, tuple):
        return results, list(transposed(d_out))
    towards = [d_out, *(jnp.zeros_like(result) for result in results[1:])]
    towards[-1] = towards[-1] if d_lse is None else d_lse
    return results, list(transposed(tuple(towards)))


def write(
    function: Callable[..., Any], arguments: dict[str, Any], name: str, num_results: int = 0
) -> list[NDArray[Any]]:
    """Call an operation that returns an updated copy of its argument `name`, and check that the original is unchanged.

    Returns the other results, then the updated arrays with their scale pages.
    """
    del num_results
    originals = written_arrays(arguments, name)
    before = [take_back(pages) for pages in originals]
    results = leaves(function(**arguments))
    for pages, old in zip(originals, before, strict=True):
        now = take_back(pages)
        if not np.array_equal(now, old, equal_nan=old.dtype.kind == "f"):
            raise AssertionError(f"{name}: expected the arrays given to stay as they were, got other values")
    return list(map(take_back, results))
