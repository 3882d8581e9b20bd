"""Conversions of arguments for the jax drop-ins: index arrays of any width, mixed dtypes, backend-specific tunables."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragged_attention import dispatch, tuning
from ragged_attention import jax as operations
from ragged_attention.calls import CALLS, FLOATS, dtype_name, is_array, is_number
from ragged_attention.calls.fields import INT8
from ragged_attention.errors import BackendMissing, InvalidInput
from ragged_attention.jax import _lower
from ragged_attention.jax._launcher import device_facts
from ragged_attention.jax._lower import to_jax

DEFAULT_MASK_VALUE = -0.7 * float(np.finfo(np.float32).max)


def as_int32(name: str, value: Any) -> jax.Array:
    """An integer array of any width as int32, with values clamped to int32's range."""
    if not is_array(value):
        raise TypeError(f"expected {name} to be an array, got {type(value).__name__}")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise InvalidInput(f"expected {name}.dtype to be an integer one, got {dtype_name(value)}")
    limits, source = jnp.iinfo(jnp.int32), jnp.iinfo(value.dtype)
    if source.min < limits.min or source.max > limits.max:  # clamp before jax narrows the array
        value = value.clip(max(limits.min, source.min), min(limits.max, source.max))
    return jnp.asarray(value.astype(jnp.int32))


def held_as_int32(**tables: Any) -> list[Any]:
    """Index arrays for jax. NumPy arrays of wider integers are clamped to int32.

    The other projects' functions wrap their values around instead.
    """
    arrays = {name: to_jax(value) for name, value in tables.items()}
    return [as_int32(name, value) if isinstance(value, np.ndarray) else value for name, value in arrays.items()]


def even(soft_cap: Any) -> Any:
    """The absolute value of a soft cap. The other projects allow negative caps, and `c * tanh(x / c)` is even in c."""
    return abs(soft_cap) if is_number(soft_cap) else soft_cap


def expect_number_or_none(name: str, value: Any) -> None:
    if value is not None and not is_number(value):
        raise TypeError(f"expected {name} to be a number or None, got {type(value).__name__}")


def widened(q: Any, *pages: Any) -> tuple[Any, ...]:
    """Queries and pages as float32 if their float dtypes differ; otherwise, or if a dtype has 8 bits, unchanged.

    The other projects multiply arrays of different dtypes. This is exact, but copies all pages narrower than float32.
    """
    arrays = (q, *pages)
    dtypes = {dtype_name(array) if is_array(array) else "" for array in arrays}
    if len(dtypes) == 1 or not dtypes.issubset(FLOATS):
        return arrays
    return tuple(jnp.asarray(array).astype(jnp.float32) for array in arrays)


def scales_of(pages: Any, **scales: Any) -> dict[str, Any]:
    """The scales of pages by name; those of int8 pages are 1 by default, as in the other projects."""
    is_int8 = is_array(pages) and dtype_name(pages) == INT8
    return {name: 1.0 if scale is None and is_int8 else scale for name, scale in scales.items()}


def heads_first_pages(k_pages: Any, v_pages: Any) -> tuple[Any, Any]:
    """Heads-first pages; int8 arrays without scales get scales of 1, which they have in the other projects."""
    if not all(is_array(pages) and dtype_name(pages) == INT8 and len(pages.shape) == 4 for pages in (k_pages, v_pages)):
        return k_pages, v_pages
    k_scales, v_scales = (jnp.ones((*pages.shape[:3], 1), jnp.float32) for pages in (k_pages, v_pages))
    return (k_pages, k_scales), (v_pages, v_scales)


def run(
    operation: str, arguments: Mapping[str, Any], backend: str | Sequence[str] | None, tunables: Mapping[str, Any]
) -> Any:
    """Run an operation with those tunables that its backend has."""
    options = known_options(operation, arguments, backend, tunables)
    return getattr(operations, operation)(**arguments, backend=backend, options=options)


def known_options(
    operation: str, arguments: Mapping[str, Any], backend: str | Sequence[str] | None, tunables: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The tunables that are not None and that the call's backend has; None if there are no such tunables.

    The backend is the one that runs the call on jax's default device, or, if no requested backend takes the call there,
    the first requested backend.
    """
    settings = {name: value for name, value in tunables.items() if value is not None}
    if not settings:
        return None
    call = CALLS[operation](**arguments, device=device_facts(_lower.default_platform()))  # type: ignore[call-arg]
    names = dispatch.candidates(operation, call.device, backend)
    verdicts = dispatch.verdicts(call, names, dispatch.by_default(operation, call.device, backend))
    selected = next((name for name in names if verdicts[name] is None), names[0])
    try:
        known = tuning.options_of(dispatch.load(operation, selected).Tile)
    except BackendMissing:
        return None  # the call itself raises the error
    return {name: value for name, value in settings.items() if name in known} or None
