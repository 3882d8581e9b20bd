"""What the drop-ins on jax arrays share: dtypes that operations do not mix, tunables that only some backends have."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragged_attention import dispatch, tuning
from ragged_attention.calls import CALLS, FLOATS, dtype_name, is_array, is_number
from ragged_attention.errors import BackendMissing, InvalidInput
from ragged_attention.jax import _lower
from ragged_attention.jax._launcher import device_facts
from ragged_attention.jax._lower import to_jax

DEFAULT_MASK_VALUE = -0.7 * float(np.finfo(np.float32).max)


def as_int32(name: str, value: Any) -> jax.Array:
    """An integer array of any width as int32; what does not fit is clamped to int32's range."""
    if not is_array(value):
        raise TypeError(f"expected {name} to be an array, got {type(value).__name__}")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise InvalidInput(f"expected {name}.dtype to be an integer one, got {dtype_name(value)}")
    limits, own = jnp.iinfo(jnp.int32), jnp.iinfo(value.dtype)
    least, most = max(limits.min, own.min), min(limits.max, own.max)
    held = value.clip(least, most) if (least, most) != (own.min, own.max) else value  # before jax narrows it
    return jnp.asarray(held.astype(jnp.int32))


def held_as_int32(**tables: Any) -> list[Any]:
    """Index arrays that jax holds; NumPy's of wider integers, which the other projects' functions wrap, are clamped."""
    held = {name: to_jax(value) for name, value in tables.items()}
    return [as_int32(name, value) if isinstance(value, np.ndarray) else value for name, value in held.items()]


def even(soft_cap: Any) -> Any:
    """A cap without its sign, since the other projects allow negative ones: `c * tanh(x / c)` is even in c."""
    return abs(soft_cap) if is_number(soft_cap) else soft_cap


def expect_number_or_none(name: str, value: Any) -> None:
    if value is not None and not is_number(value):
        raise TypeError(f"expected {name} to be a number or None, got {type(value).__name__}")


def widened(q: Any, *pages: Any) -> tuple[Any, ...]:
    """Queries and pages of different float dtypes, all as float32; of one dtype, or with 8-bit pages, as they are.

    The other projects multiply whatever dtypes meet. This is exact, but pages narrower than float32 are copied whole.
    """
    arrays = (q, *pages)
    if not all(is_array(array) and dtype_name(array) in FLOATS for array in arrays):
        return arrays
    if len({dtype_name(array) for array in arrays}) == 1:
        return arrays
    return tuple(jnp.asarray(array).astype(jnp.float32) for array in arrays)


def known_options(
    operation: str,
    arguments: Mapping[str, Any],
    backend: str | Sequence[str] | None,
    tunables: Mapping[str, Any],
) -> dict[str, Any] | None:
    """The given tunables that the backend of this call has; None if there are none.

    The backend is the one chosen for jax's default device, or, if none can run there, the first requested one.
    """
    given = {name: value for name, value in tunables.items() if value is not None}
    if not given:
        return None
    call = CALLS[operation](**arguments, device=device_facts(_lower.default_platform()))  # type: ignore[call-arg]
    names = dispatch.candidates(operation, call.device, backend)
    verdicts = dispatch.verdicts(call, names, dispatch.by_default(operation, call.device, backend))
    chosen = next((name for name in names if verdicts[name] is None), names[0])
    try:
        known = tuning.options_of(dispatch.load(operation, chosen).Tile)
    except BackendMissing:
        return None  # the call itself says so
    return {name: value for name, value in given.items() if name in known} or None
