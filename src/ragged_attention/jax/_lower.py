"""Turns calls on jax arrays into jax operations. A backend is selected for each platform when a call is lowered."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Never

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ragged_attention import config, dispatch
from ragged_attention.calls import CALLS, Call, DecodeSchedule, Device, WritingCall, is_array
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported
from ragged_attention.jax._launcher import PLATFORMS, Launcher, Statics, device_facts, join, split
from ragged_attention.jax_shared.axes import as_varied_as, dividing_axes, refusal_of_axes, varied_axes, varying
from ragged_attention.operations import Operations

PORTABLE = ("xla", "reference")  # backends that lower to the same operations on every platform


class JaxArrays:
    """Converts the public functions' arguments to the records', on jax arrays."""

    namespace = jnp

    def array(self, name: str, value: Any) -> Any:
        if not is_array(value):
            return value
        if not (isinstance(value, jax.Array | np.ndarray | np.generic) or hasattr(value, "__jax_array__")):
            raise TypeError(f"expected {name} to be an array of jax or NumPy, got {type(value).__name__}")
        if not all(isinstance(size, int) for size in value.shape):
            advice = "export the function once for each shape"
            raise InvalidInput(f"expected {name} of known sizes, got {list(value.shape)}: {advice}")
        return to_jax(value)

    def int32(self, shape: tuple[int, ...], value: int) -> jax.Array:
        return jnp.full(shape, value, jnp.int32)

    def cast(self, array: Any, dtype: str) -> jax.Array:
        return jnp.asarray(array, dtype)

    def constant(self, array: jax.Array) -> jax.Array:
        # A NumPy array is already a constant. Its dtype is not checked yet, so jax might not be able to convert it.
        return jax.lax.stop_gradient(array) if isinstance(array, jax.Array) else array

    def copy(self, array: jax.Array) -> jax.Array:
        return array


ARRAYS = JaxArrays()


def to_jax(value: Any) -> Any:
    """NumPy arrays as jax arrays, NumPy numbers as Python numbers, any other value unchanged.

    jax *holds* a dtype if, as configured, it has arrays of that dtype. A NumPy array of another dtype, such as int64
    without `jax_enable_x64`, stays unchanged, because jax would wrap or round its values.
    """
    if isinstance(value, tuple | list):
        return type(value)(to_jax(item) for item in value)
    if isinstance(value, np.ndarray) and _is_held(value.dtype):
        return jnp.asarray(value)
    return value.item() if isinstance(value, np.generic) else value


def _is_held(dtype: np.dtype) -> bool:
    """Whether jax, as configured, has arrays of a dtype. bfloat16 and 8-bit floats have the kind V in NumPy."""
    return dtype.kind in "biufV" and dtype.itemsize <= 8 and jax.dtypes.canonicalize_dtype(dtype) == dtype


def expect_held(**given: Any) -> None:
    """Raise `InvalidInput` for arrays whose values jax would wrap or round."""
    for name, value in given.items():
        for array in value if isinstance(value, tuple | list) else (value,):
            if is_array(array) and not _is_held(array.dtype):
                advice = "without jax_enable_x64"
                raise InvalidInput(f"expected {name}.dtype to be one that jax holds {advice}, got {array.dtype}")


def held_by_jax(call: Any, name: str, value: Any) -> Any:
    """A valid argument, with slots in a dtype that jax holds. Raises `InvalidInput` for values that do not fit."""
    if name != "slot_mapping" or not is_array(value) or _is_held(value.dtype):
        expect_held(**{name: value})
        return value
    limits = np.iinfo(np.int32)
    if isinstance(value, jax.core.Tracer):  # an int64 array made under jax_enable_x64
        with jax.enable_x64(True):
            return jnp.where((limits.min <= value) & (value <= limits.max), value, -1).astype(jnp.int32)
    slots = np.asarray(value)
    fits = (limits.min <= slots) & (slots <= limits.max)
    lost = slots[~fits & (slots >= 0) & (slots < call.num_slots)]
    if lost.size:
        raise InvalidInput(f"expected {name} within int32 without jax_enable_x64, got {lost[0]}")
    return jnp.asarray(np.where(fits, slots, -1).astype(np.int32))  # slots outside all pages are skipped, like -1


jax.tree_util.register_dataclass(
    DecodeSchedule, data_fields=["parts", "num_splits", "lens", "extra_lens"], meta_fields=["made_for"]
)


class JaxFrontEnd(Operations[jax.Array, Never]):
    """The operations on jax arrays."""

    def prepare(self, record: type[Call], arguments: Mapping[str, Any]) -> dict[str, Any]:
        _expect_absent(record, device=arguments.get("device"))
        return record.prepare(arguments, ARRAYS)

    def checked(self, record: type[Call], prepared: Mapping[str, Any]) -> Call:
        return record(**prepared, device=device_facts(default_platform()))

    def call_of(self, operation: str, arguments: Mapping[str, Any]) -> Call:
        call = super().call_of(operation, arguments)
        device = _device_for(default_platform(), call.arguments())
        return call if device == call.device else dataclasses.replace(call, device=device)

    def run_prepared(
        self, record: type[Call], prepared: Mapping[str, Any], backend: Any, options: Any, out: None = None
    ) -> Any:
        """Check the call, select its backend and run it. Under `jit`, requests are read at trace time."""
        _expect_absent(record, out=out)
        call = self.checked(record, prepared)
        if config.validates_values():
            _check_values(call)
        request = Request.of(record.OPERATION, backend, options)
        _load_candidates(record.OPERATION, request.names)
        gradient = None
        if record.DIFFERENTIABLE:
            name = f"{record.OPERATION}_backward"
            gradient = Request.of(name, dispatch.backends_offering(name, backend), None)
        held = {name: held_by_jax(call, name, value) for name, value in prepared.items()}
        arrays, statics = split(record.flatten(held))
        traced = any(isinstance(value, jax.core.Tracer) for value in arrays.values())
        with _default_promotion():
            results = _run(record, arrays, statics, request, gradient, traced, dispatch.state())
        return results[0] if record.NUM_RESULTS == 1 and not record.WRITES else results

    def run_with_write(
        self, record: type[WritingCall], arguments: Mapping[str, Any], backend: Any, options: Any,
        out: None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        prepared = self.prepare(record, arguments)
        results = self.run_prepared(record, prepared, backend, options, out)
        count = 1 + prepared["return_lse"] + prepared["return_max_logits"]
        given, prepared = record.arguments_of_write(arguments), record.arguments_of_write(prepared)
        return *results[:count], *_new_caches(record.WRITE, given, prepared, results[count:])

    def write(self, record: type[Call], arguments: Mapping[str, Any], backend: Any, options: Any) -> Any:
        prepared, count = self.prepare(record, arguments), record.NUM_RESULTS or 0
        results = self.run_prepared(record, prepared, backend, options)
        results = [*results[:count], *_new_caches(record, arguments, prepared, results[count:])]
        return tuple(results) if len(results) > 1 else results[0]


def _new_caches(
    record: type[Call], given: Mapping[str, Any], prepared: Mapping[str, Any], written: Sequence[jax.Array]
) -> Iterator[Any]:
    """The public results of a write: the `written` arrays in the shapes of the `given` arguments."""
    new = {**prepared, **record.regrouped(prepared, written)}
    for old, cache in zip(record.caches_of(given), record.caches_of(new), strict=True):
        yield cache.reshape(old.shape) if is_array(cache) else cache


def _expect_absent(record: type[Call], **arguments: Any) -> None:
    """Raise `TypeError` for an argument that only torch's function has."""
    for name, value in arguments.items():
        if value is not None:
            raise TypeError(f"{record.OPERATION}() got an unexpected keyword argument {name!r}")


FRONT_END = JaxFrontEnd()


@functools.cache
def _load_candidates(operation: str, names: tuple[str, ...] | None) -> None:
    """Import the backends that may run an operation, before jax traces it.

    A trace depends on the imported modules: Pallas adds a setting to jax, and Numba's package adds a `state`. If they
    were imported during the first trace, the second call would be traced again.
    """
    for platform in PLATFORMS:
        for backend in dispatch.candidates(operation, device_facts(platform), names or "auto"):
            with contextlib.suppress(BackendMissing):
                dispatch.load(operation, backend)


@contextlib.contextmanager
def _default_promotion() -> Iterator[None]:
    """A context with jax's default promotion rules, which this package needs. The caller may have set others."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


class Request(NamedTuple):
    """A call's request in hashable form: backend names in order, or None for the platform's order; and options."""

    names: tuple[str, ...] | None
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, operation: str, backend: Any, options: Any) -> "Request":
        tunables = config.requested_options(operation, options)
        return cls(config.requested(operation, backend), tuple(sorted(tunables.items())))

    def choose(self, call: Call) -> dispatch.Choice:
        return dispatch.choose(call, backend=self.names or "auto", options=dict(self.options))


def default_platform() -> str:
    return jax.default_backend().replace("gpu", "cuda")


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4, 5, 6))
def _run(
    record: type[Call], arrays: dict[int, Any], statics: Statics, request: Request, gradient: Request | None,
    traced: bool, state: Any,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The results of an operation. If it has no gradient, differentiating them raises this package's error."""

    @jax.custom_vjp
    def compute(arrays: dict[int, Any]) -> tuple[jax.Array, ...]:
        return _on_the_platform(record, arrays, statics, request, traced)

    def save(given: dict[int, Any]) -> Any:
        for index, primal in given.items():
            if gradient is not None and primal.perturbed and (reason := record.no_gradient_of(index)) is not None:
                raise RuntimeError(reason)
        arrays = jax.tree.map(lambda primal: primal.value, given, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))
        results = compute(arrays)
        # These names are static, so among the saved values they can only be keys, which belong to the tree's structure.
        differentiated = {record.name_of(index): () for index, primal in given.items() if primal.perturbed}
        saved = record.SAVED_RESULTS if gradient is not None else {}
        return results, (arrays, {name: results[index] for name, index in saved.items()}, differentiated)

    def differentiate(saved: Any, cotangents: Any) -> Any:
        if gradient is None:
            raise RuntimeError(record.no_gradient())
        arrays, results, differentiated = saved
        known = join(record, arrays, statics) | results
        record.expect_gradient(known)
        for name, index in record.RESULT_GRADIENTS.items():
            cotangent = cotangents[index]
            if isinstance(cotangent, SymbolicZero):  # the result is unused
                result: Any = cotangent.aval
                cotangent = None if index else jnp.zeros(result.shape, result.dtype)
            known[name] = cotangent
        known |= record.requests_of_gradients(differentiated)
        backward = CALLS[f"{record.OPERATION}_backward"]
        arguments = {name: known[name] for name in backward.KINDS}
        backward(**arguments)  # checks the arguments, so that errors name them
        given, others = split(backward.flatten(arguments))
        with _default_promotion():
            results = _run(backward, given, others, gradient, None, traced, state)
        gradients: dict[int, Any] = dict.fromkeys(arrays)
        for name, value in zip(record.DIFFERENTIABLE, results, strict=False):
            if (index := record.RANGES[name][0]) in arrays and value.shape == arrays[index].shape:
                gradients[index] = as_varied_as(value, arrays[index])
        return (gradients,)

    compute.defvjp(save, differentiate, symbolic_zeros=True)
    return compute(arrays)


def _device_for(platform: str, arguments: Mapping[str, Any]) -> Device:
    """The facts about a platform for a call with these arguments.

    No backend takes an array that Explicit axes of a mesh divide. XLA would silently gather such an array on each
    device, and the results would not be divided.
    """
    device = device_facts(platform)
    for name, value in arguments.items():
        for array in jax.tree.leaves(value):
            if isinstance(array, jax.Array) and (axes := dividing_axes(array)):
                reason = refusal_of_axes(name, axes)
                refusals = tuple((backend, reason) for backend in dispatch.PACKAGES)
                return dataclasses.replace(device, unavailable=(*refusals, *device.unavailable))
    return device


def _on_the_platform(
    record: type[Call], arrays: dict[int, Any], statics: Statics, request: Request, traced: bool
) -> tuple[jax.Array, ...]:
    """The results of the operation. jax gets a branch per platform, with the backend selected for that platform."""

    def on(platform: str) -> tuple[dispatch.Choice, Any]:
        """The selected backend for this call on a platform, and a function of the arrays that runs it."""
        device = _device_for(platform, join(record, arrays, statics))

        def build(values: dict[int, Any]) -> Call:
            return record(**join(record, values, statics), device=device)

        choice = request.choose(build(arrays))

        def run(values: dict[int, Any]) -> tuple[jax.Array, ...]:
            return varying(_results(choice, build(values), request, Launcher(device)), varied_axes(values))

        return choice, run

    here = default_platform()
    choices: dict[str, Any] = {}
    refusals: dict[str, Exception] = {}
    for platform in (here, *(name for name in PLATFORMS if name != here)):
        try:
            choices[platform] = on(platform)
        except (Unsupported, InvalidInput) as error:
            refusals[platform] = error  # the traced function cannot be lowered for this platform
    # A traced call may be lowered for another machine. Any other call runs on this machine at once.
    if here in refusals and not (choices and traced):
        raise refusals[here]
    if not traced:
        return choices[here][1](arrays)
    branches: dict[str, Any] = {}
    portable: dict[Any, Any] = {}  # platforms that share a branch trace it once
    for platform, (choice, branch) in choices.items():
        if choice.backend in PORTABLE:
            branch = portable.setdefault((choice.backend, choice.tile), branch)
        branches[platform] = branch
    if len(portable) == len(set(map(id, branches.values()))) == 1:
        return branches[next(iter(branches))](arrays)
    return jax.lax.platform_dependent(arrays, **branches)


def _results(choice: dispatch.Choice, call: Any, request: Request, launch: Launcher) -> tuple[jax.Array, ...]:
    """A backend's results. If the backend does not support `new_kv`, another operation writes it first."""
    written: tuple[Any, ...] = ()
    if choice.leaves(call):
        write = call.write_of_new_kv()
        written = _tuple(dispatch.choose(write, backend=request.names or "auto").run(write, launch))
        call = call.after_write(written)
    results = _tuple(choice.run(call, launch))
    results += (None,) * ((call.NUM_RESULTS or len(results)) - len(results))
    empty = jnp.zeros(0, jnp.float32)  # absent gradients are empty, as in torch
    return *(empty if result is None else result for result in results), *written


def _tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _check_values(call: Call) -> None:
    """Check the values of index arrays: now, or if some are traced, when the compiled function runs."""
    record = type(call)
    arrays, statics = split(record.flatten(call.arguments()))
    leaves, structure = jax.tree.flatten(arrays)
    shapes = {i: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)}
    indices = {i: leaf for i, leaf in enumerate(leaves) if str(leaf.dtype) in ("int32", "int64")}
    traced = {i: leaf for i, leaf in indices.items() if isinstance(leaf, jax.core.Tracer)}
    known = {i: leaf for i, leaf in indices.items() if i not in traced}

    def check(values: dict[int, Any]) -> None:
        held = shapes | {i: np.asarray(array) for i, array in (known | values).items()}
        record(**join(record, jax.tree.unflatten(structure, held.values()), statics)).check_values()

    if traced:
        jax.debug.callback(check, traced)
    else:
        check({})
