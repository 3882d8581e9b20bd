"""Declines calls whose arrays are not jax arrays, or have explicit sharding."""

import jax

from ragged_attention.calls import Call
from ragged_attention.jax_shared.axes import refusal_of_axes


def why_not(call: Call) -> str | None:
    if call.device.framework != "jax":
        return f"runs on jax arrays, got a call from {call.device.framework}"
    for name, value in call.arguments().items():
        for array in jax.tree.leaves(value):
            if isinstance(array, jax.Array) and (axes := _explicit_axes(array)):
                return refusal_of_axes(name, axes)
    return None


def _explicit_axes(array: jax.Array) -> tuple[str, ...]:
    """The Explicit mesh axes of an array. They would force this backend to name the sharding of all intermediates.

    A replicated array on the current mesh counts as having none, because intermediate arrays are replicated by default.
    """
    sharding = jax.typeof(array).sharding
    replicated = all(axis is None for axis in sharding.spec)
    on_current_mesh = sharding.mesh == jax.sharding.get_abstract_mesh()
    return () if replicated and on_current_mesh else tuple(map(str, sharding.mesh.explicit_axes))
