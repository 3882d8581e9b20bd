"""Whose calls these modules take."""

import jax

from ragged_attention.calls import Call


def why_not(call: Call) -> str | None:
    if call.device.framework != "jax":
        return f"runs on jax arrays, got a call from {call.device.framework}"
    for name, value in call.arguments().items():
        for array in jax.tree.leaves(value):
            if isinstance(array, jax.Array) and (axes := _explicit_axes(array)):
                return (
                    f"expected {name} on a mesh whose axes are Auto or Manual, got Explicit {', '.join(axes)}: "
                    "call it within jax.sharding.auto_axes or jax.shard_map"
                )
    return None


def _explicit_axes(array: jax.Array) -> tuple[str, ...]:
    """The mesh axes for which the loops here would have to name the sharding of every intermediate array.

    Where the array is replicated over a mesh that is also the one in force, arrays made here match it anyway.
    """
    sharding = jax.typeof(array).sharding
    replicated = all(axis is None for axis in sharding.spec)
    matched = replicated and sharding.mesh == jax.sharding.get_abstract_mesh()
    return () if matched else tuple(map(str, sharding.mesh.explicit_axes))
