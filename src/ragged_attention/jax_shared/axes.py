"""The mesh axes of an array: those that divide its type, and those over which it varies within `jax.shard_map`.

jax keeps track of varying axes only under `check_vma`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def dividing_axes(array: jax.Array) -> tuple[str, ...]:
    """The Explicit mesh axes that divide an array. They are part of its type."""
    sharding = jax.typeof(array).sharding
    parts = (part if isinstance(part, tuple) else (part,) for part in sharding.spec)
    return tuple(str(axis) for part in parts for axis in part if axis in sharding.mesh.explicit_axes)


def refusal_of_axes(name: str, axes: tuple[str, ...]) -> str:
    """The reason to refuse an argument on a mesh with these Explicit axes."""
    return (
        f"expected {name} on a mesh whose axes are Auto or Manual, got Explicit {', '.join(axes)}: "
        "call it by over_heads, or within jax.sharding.auto_axes or jax.shard_map"
    )


def varied_axes(arrays: Any) -> frozenset[Any]:
    """The axes over which at least one of the arrays varies; empty if jax does not keep track of varying axes."""
    leaves = jax.tree.leaves(arrays)
    return frozenset().union(*(_axes(leaf) for leaf in leaves))


def _axes(array: Any) -> frozenset[Any]:
    kind = array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)
    counted = getattr(kind, "manual_axis_type", None)  # jax before 0.10 has `vma` instead
    return (getattr(kind, "vma", None) if counted is None else counted.varying) or frozenset()


def varying(arrays: Any, axes: frozenset[Any]) -> Any:
    """The arrays, declared to vary over these axes."""

    def vary(array: Any) -> Any:
        missing = tuple(axes - _axes(array))
        return lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, arrays)


def as_varied_as(array: jax.Array, like: jax.Array) -> jax.Array:
    """A gradient with the varying axes of `like`: it is summed over the axes over which `like` does not vary."""
    missing = tuple(_axes(array) - _axes(like))
    return lax.psum(array, missing) if missing else varying(array, _axes(like))


def fori_loop(lower: Any, upper: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """`lax.fori_loop` that also works within `jax.shard_map`.

    There jax requires the initial and the final state to vary over the same axes. But a loop's initial state is often a
    constant, which varies over none.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return lax.fori_loop(lower, upper, body, state)
    axes = varied_axes(state) | varied_axes(jax.eval_shape(body, lower, state))
    return lax.fori_loop(lower, upper, lambda index, state: varying(body(index, state), axes), varying(state, axes))


def while_loop(goes_on: Callable[[Any], jax.Array], body: Callable[[Any], Any], state: Any) -> Any:
    """`lax.while_loop` that also works within `jax.shard_map`, like `fori_loop`."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return lax.while_loop(goes_on, body, state)
    axes = varied_axes(state) | varied_axes(jax.eval_shape(body, state)) | varied_axes(jax.eval_shape(goes_on, state))
    return lax.while_loop(goes_on, lambda state: varying(body(state), axes), varying(state, axes))


def cond(predicate: jax.Array, do: Callable[[], jax.Array], otherwise: jax.Array) -> jax.Array:
    """The result of `do` if the predicate holds, else an array of that type; it also works within `jax.shard_map`."""
    axes = varied_axes(jax.eval_shape(do)) if jax.sharding.get_abstract_mesh().manual_axes else frozenset()
    return lax.cond(predicate, do, lambda: varying(otherwise, axes))
