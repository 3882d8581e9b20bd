"""From a call on jax arrays to jax operations, with the backend chosen per platform when the call is lowered."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ragged_attention import config, dispatch
from ragged_attention.calls import CALLS, Call, is_number
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.jax.launcher import PLATFORMS, Launcher, device_facts, join_arrays, split_arrays

PORTABLE = ("xla", "reference")  # the same operations on every platform


def brought(value: Any) -> Any:
    """NumPy arrays as jax arrays, NumPy numbers as Python's; anything else as it is, for the record to judge."""
    if isinstance(value, tuple | list):
        return type(value)(brought(item) for item in value)
    if isinstance(value, np.ndarray):
        return jnp.asarray(value)
    if is_number(value) and isinstance(value, np.generic):
        return value.item()
    return value


def run(operation: str, arguments: dict[str, Any], backend: Any, options: Any) -> tuple[jax.Array, ...]:
    """Check the call, choose its backend and run it; the wishes are read now, at trace time under `jit`."""
    call = CALLS[operation](**arguments, device=device_facts(default_platform()))  # type: ignore[call-arg]
    if config.validates_values():
        _check_values(call)
    arrays, rest = split_arrays(call.arguments())
    names = config.requested(operation, backend)
    tunables = json.dumps(dict(config.requested_options(operation, options)), sort_keys=True)
    traced = any(isinstance(value, jax.core.Tracer) for value in arrays.values())
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # whatever the caller's own rules
        return _run(operation, arrays, tuple(rest.items()), names, tunables, traced, dispatch.state())


def run_differentiable(
    operation: str, arguments: dict[str, Any], backend: Any, options: Any, of: Sequence[str]
) -> tuple[jax.Array, ...]:
    """`run`, in a way that reverse-mode differentiation gets its gradients from the operation `<operation>_backward`.

    The first and the last of the results, out and lse, have gradients; `of` names the arguments that the gradients are
    of, in the order in which that operation returns them.
    """
    arrays, rest = _lawful(operation, arguments)
    names = None if backend is None else ",".join(config.parse_names(backend))

    @jax.custom_vjp
    def compute(arrays: dict[str, Any]) -> tuple[jax.Array, ...]:
        return run(operation, join_arrays(arrays, rest), backend, options)

    def save(given: dict[str, Any]) -> Any:
        arrays = {name: primal.value for name, primal in given.items()}
        results = compute(arrays)
        return results, (arrays, results[0], results[-1])

    def differentiate(saved: Any, cotangents: Any) -> Any:
        arrays, out, lse = saved
        # A result that nobody uses has no gradient.
        d_out, d_lse = (None if isinstance(each, SymbolicZero) else each for each in (cotangents[0], cotangents[-1]))
        known = join_arrays(arrays, rest) | {"out": out, "lse": lse, "d_lse": d_lse}
        known["d_out"] = jnp.zeros_like(out) if d_out is None else d_out
        gradient = f"{operation}_backward"
        taken = {name: known[name] for name in CALLS[gradient].argument_names()}
        found = run_gradient(gradient, taken, dispatch.backends_offering(gradient, names))
        gradients = dict(zip(of, found, strict=False))  # without sinks there is none of theirs
        return ({name: gradients.get(name) for name in arrays},)

    compute.defvjp(save, differentiate, symbolic_zeros=True)
    return compute(arrays)


def run_gradient(operation: str, arguments: dict[str, Any], backend: Any, options: Any = None) -> tuple[jax.Array, ...]:
    """`run` of an operation that is a gradient itself, which says so where it is differentiated."""

    def refuse(*values: Any) -> Any:
        raise RuntimeError(f"{operation} has no gradient: it is a gradient itself")

    arrays, rest = _lawful(operation, arguments)
    compute = jax.custom_vjp(lambda arrays: run(operation, join_arrays(arrays, rest), backend, options))
    compute.defvjp(lambda arrays: (compute(arrays), None), refuse)
    return compute(arrays)


def _lawful(operation: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments as (arrays, everything else), after the static law has had its say about them as they came."""
    CALLS[operation](**arguments)  # type: ignore[call-arg]
    return split_arrays(arguments)


def default_platform() -> str:
    return jax.default_backend().replace("gpu", "cuda")


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4, 5, 6))
def _run(
    operation: str,
    arrays: dict[str, Any],
    rest: tuple[Any, ...],
    names: Any,
    tunables: str,
    traced: bool,
    state: tuple[Any, ...],
) -> Any:
    del state  # only to be traced anew where it is another

    def on(platform: str) -> tuple[dispatch.Choice, Any]:
        """What runs this call on a platform, and the function of its arrays that does."""
        device = device_facts(platform)

        def build(values: dict[str, Any]) -> Call:
            return CALLS[operation](**join_arrays(values, dict(rest)), device=device)  # type: ignore[call-arg]

        choice = dispatch.choose(build(arrays), backend=names or "auto", options=json.loads(tunables))

        def compute(values: dict[str, Any]) -> tuple[Any, ...]:
            results = choice.run(build(values), Launcher(device))
            return tuple(results) if isinstance(results, tuple | list) else (results,)

        return choice, compute

    here = default_platform()
    choices: dict[str, Any] = {}
    refusals: dict[str, Exception] = {}
    for platform in (here, *(name for name in PLATFORMS if name != here)):
        try:
            choices[platform] = on(platform)
        except (Unsupported, InvalidInput) as error:
            refusals[platform] = error  # then the traced function cannot be lowered for it
    # Traced by the caller, it may be meant for another machine; called plainly, it runs here and now.
    if here in refusals and not (choices and traced):
        raise refusals[here]
    if not traced:
        return choices[here][1](arrays)
    branches: dict[str, Any] = {}
    portable: dict[Any, Any] = {}  # one branch for all platforms that share it, so that it is traced once
    for platform, (choice, branch) in choices.items():
        if choice.backend in PORTABLE:
            branch = portable.setdefault((choice.backend, choice.tile), branch)
        branches[platform] = branch
    if len(portable) == len(set(map(id, branches.values()))) == 1:
        return branches[next(iter(branches))](arrays)
    return jax.lax.platform_dependent(arrays, **branches)


def _check_values(call: Call) -> None:
    """Check the index arrays' values, now where they are known, else when the compiled function runs."""
    arrays, rest = split_arrays(call.arguments())
    indices = {name: value for name, value in arrays.items() if str(value.dtype) in ("int32", "int64")}
    others = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in arrays.items() if name not in indices
    }

    def check(values: dict[str, Any]) -> None:
        held = {name: np.asarray(value) for name, value in values.items()}
        in_order = {name: held[name] if name in held else others[name] for name in arrays}
        type(call)(**join_arrays(in_order, rest)).check_values()  # type: ignore[call-arg, attr-defined]

    if any(isinstance(value, jax.core.Tracer) for value in indices.values()):
        jax.debug.callback(check, indices)
    else:
        check(indices)
