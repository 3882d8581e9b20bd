"""Runs the work of backends on jax arrays: Triton by jax-triton or its interpreter, NumPy functions on the host."""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as jax_config  # no public name says whether the TPU interpret mode is on

from ragged_attention.calls import FLOAT8, Call, Device, is_array
from ragged_attention.calls.base import shared_memory_of
from ragged_attention.calls.cache_formats import E8M0
from ragged_attention.host.interpreting import interpreting
from ragged_attention.protocols import OPTIONS, PackedArrays, Shaped

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# Caches do not store values in E8M0, but some formats have scales of this 8-bit dtype.
FLOAT8_DTYPES = tuple(jnp.dtype(name) for name in (*FLOAT8, E8M0))


@functools.cache
def jax_triton() -> Any:
    """The module jax_triton, or the exception that its import raised.

    The import clears TRITON_CACHE_DIR. Other users of Triton in this process need this variable, so it is restored.
    """
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        return importlib.import_module("jax_triton")
    except ImportError as error:
        return error
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before


def _why_no_triton(platform: str) -> str | None:
    if platform not in ("cuda", "rocm") or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if isinstance(error := jax_triton(), ImportError):
        return f"jax_triton cannot be imported: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def device_facts(platform: str) -> Device:
    """The static facts about a platform, by which a backend is selected.

    If this process has no such device and lowers for another machine, `cuda` means an H100 or H200, and `tpu` means
    the device of the current mesh (`jax.sharding.use_abstract_mesh`).
    """
    facts = _facts(platform)
    if (reason := _why_no_pallas(platform)) is not None:
        return dataclasses.replace(facts, unavailable=(*facts.unavailable, ("pallas", reason)))
    return dataclasses.replace(facts, **tpu_facts())


@functools.cache
def _facts(platform: str) -> Device:
    name, arch, count = "", "", 1
    if platform == jax.default_backend().replace("gpu", "cuda"):
        device = jax.devices()[0]
        name = device.device_kind
        capability = str(getattr(device, "compute_capability", ""))
        arch = "sm_" + capability.replace(".", "") if platform == "cuda" else capability
        count = getattr(device, "core_count", 1)
    elif platform == "cuda":
        arch, count = "sm_90", 132
    return Device(
        framework="jax", platform=platform, name=name, arch=arch, num_multiprocessors=count,
        shared_memory=shared_memory_of(arch),
        unavailable=() if (reason := _why_no_triton(platform)) is None else (("triton", reason),),
    )  # fmt: skip


def interpreted_tpu() -> Any:
    """The parameters of jax's TPU interpret mode if it is on, else None."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value


def _mesh_device() -> Any:
    """The abstract device of the current mesh, or None."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def _why_no_pallas(platform: str) -> str | None:
    if platform == "cpu" and interpreted_tpu() is None:
        return "runs on TPUs, and on a CPU only inside pltpu.force_tpu_interpret_mode()"
    if platform not in ("cpu", "tpu"):
        return f"runs on TPUs, got a call from {platform}"
    device = _mesh_device()
    if platform == "tpu" and jax.default_backend() != "tpu" and getattr(device, "platform", None) != "tpu":
        return "this machine has no TPU, and neither has the current mesh (jax.sharding.use_abstract_mesh)"
    return None


def tpu_facts() -> dict[str, Any]:
    """Facts about this machine's TPU, or about the current mesh's TPU, or else about a v5e."""
    pltpu = importlib.import_module("jax.experimental.pallas.tpu")
    parameters, device = interpreted_tpu(), _mesh_device()
    if jax.default_backend() == "tpu" or getattr(device, "platform", None) == "tpu":
        info = pltpu.get_tpu_info()
        name = device.device_kind if device is not None else jax.devices()[0].device_kind
    else:
        info, name = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1), ""
    return {
        "name": name,
        "num_multiprocessors": parameters.num_cores_or_threads if parameters is not None else info.num_cores,
        "shared_memory": info.vmem_capacity_bytes,
        "scalar_memory": info.smem_capacity_bytes,
    }


class HostArray:
    """A NumPy array with the tensor methods that Triton's interpreter calls. It never leaves the host."""

    def __init__(self, array: Any = None) -> None:
        self.array = array

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "HostArray":
        return self

    def cpu(self) -> "HostArray":
        return self

    def copy_(self, other: Any) -> "HostArray":
        return self

    def new_empty(self, *sizes: Any, **options: Any) -> "HostArray":
        return HostArray()

    def set_(self, storage: Any, *layout: Any) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)


def is_bits(dtype: Any) -> bool:
    """Whether a dtype is an 8-bit float, which kernels and NumPy take as uint8."""
    return dtype in FLOAT8_DTYPES


def to_numpy(array: Any) -> np.ndarray:
    """An array in NumPy: floats as float64, 8-bit floats as their bits, integers unchanged."""
    array = np.asarray(array)
    if is_bits(array.dtype):
        return array.view(np.uint8)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    with np.errstate(invalid="ignore"):  # a signaling NaN would cause a warning
        return array.astype(np.float64)


def to_bits(array: Any) -> Any:
    """An array of 8-bit floats or bools as uint8, any other array unchanged."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(array, jnp.uint8) if is_bits(array.dtype) else array


def _from_bits(array: Any, dtype: Any) -> Any:
    return jax.lax.bitcast_convert_type(array, dtype) if is_bits(dtype) else array


def _from_numpy(array: Any, like: jax.ShapeDtypeStruct) -> np.ndarray:
    array = np.asarray(array)
    if is_bits(like.dtype):
        return array.view(like.dtype)
    with np.errstate(over="ignore"):  # values beyond the narrower dtype's range become infinities, as intended
        return array.astype(like.dtype)


def unwritten(like: jax.ShapeDtypeStruct) -> np.ndarray:
    """New memory filled with NaN or the largest integer, which reveals elements that no kernel writes."""
    floating = jnp.issubdtype(like.dtype, jnp.floating)
    return np.full(like.shape, np.nan if floating else np.iinfo(like.dtype).max, like.dtype)


_registered: set[str] = set()


def _target(function: Any, platform: str) -> str:
    """XLA's name for a backend's compiled function. The function is registered unless another machine will run it."""
    if platform != "cpu" and jax.default_backend() != "gpu":
        return function.name
    name, handler = function.handler(platform, jax.ffi.include_dir())
    if name not in _registered:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform=platform.replace("cuda", "CUDA"))
        _registered.add(name)
    return name


class Launcher(PackedArrays):
    """Runs kernels on jax arrays, which may be traced. XLA keeps all arrays contiguous.

    `protocols.Launcher` describes the methods.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], inputs: Sequence[Any], outputs: Sequence[Shaped], *,
        inplace: Sequence[int] = (), **arguments: Any,
    ) -> list[Any]:  # fmt: skip
        """The outputs, then the written inputs as new arrays, which reuse the inputs' memory if it is donated."""
        dtypes = [jnp.dtype(dtype) for _, dtype in outputs]
        new = [
            jax.ShapeDtypeStruct(tuple(shape), jnp.uint8 if is_bits(dtype) else dtype)
            for (shape, _), dtype in zip(outputs, dtypes, strict=True)
        ]
        dtypes += [inputs[index].dtype for index in inplace]
        inputs = [to_bits(array) for array in inputs]
        if 0 in grid:
            results = [*(jnp.zeros(shape.shape, shape.dtype) for shape in new), *(inputs[index] for index in inplace)]
        else:
            results = self._launch(kernel, grid, inputs, new, inplace, OPTIONS | arguments)
        return [_from_bits(array, dtype) for array, dtype in zip(results, dtypes, strict=True)]

    def _launch(
        self, kernel: Any, grid: Any, inputs: Any, new: Any, inplace: Any, arguments: dict[str, Any]
    ) -> list[Any]:
        """Launch a grid that is not empty. In `inputs` and `new`, uint8 already replaces 8-bit floats."""
        shapes = [*new, *(jax.ShapeDtypeStruct(inputs[index].shape, inputs[index].dtype) for index in inplace)]
        aliases = {index: len(new) + output for output, index in enumerate(inplace)}
        if hasattr(kernel, "cache_key") and self.device.platform != "cpu":
            capability = int(self.device.arch.removeprefix("sm_")) if self.device.platform == "cuda" else None

            @jax.custom_batching.sequential_vmap
            def call(*arrays: Any) -> Any:
                return jax_triton().triton_call(
                    *arrays, kernel=kernel, out_shape=shapes, grid=grid, compute_capability=capability,
                    input_output_aliases=aliases, **arguments,
                )  # fmt: skip

            return list(call(*inputs))

        def host(*arrays: Any) -> list[np.ndarray]:
            copies = [np.array(array) for array in arrays]
            results = [unwritten(shape) for shape in new]
            results += [copies[index] for index in inplace]
            with interpreting():  # XLA may run independent callbacks in parallel
                kernel[grid](*map(HostArray, copies), *map(HostArray, results), **arguments)
            return results

        return list(jax.pure_callback(host, shapes, *inputs, vmap_method="sequential"))

    @property
    def num_threads(self) -> int:
        """0: XLA decides, and passes the number to a native kernel when it calls the kernel."""
        return 0

    def native(
        self, function: Any, operands: Mapping[str, Any], outputs: Mapping[str, Shaped | str | None],
        numbers: Mapping[str, int | float],
    ) -> dict[str, Any]:  # fmt: skip
        """Call a compiled function through XLA's FFI and return its results by name.

        An empty array replaces an absent operand. All integers are passed in one attribute, and every other number in
        an attribute of its own.
        """
        record, nothing = function.record, jnp.zeros(0, jnp.int32)
        shapes, aliases = [], {}
        for index, given in enumerate(map(outputs.__getitem__, record.RESULTS)):
            if isinstance(given, str):  # XLA overwrites the operand if it can, and otherwise a copy
                aliases[record.OPERANDS.index(given)] = index
                given = (operands[given].shape, operands[given].dtype)
            shape, dtype = ((0,), jnp.int32) if given is None else given
            shapes.append(jax.ShapeDtypeStruct(tuple(shape), dtype))
        arrays = [nothing if array is None else array for array in map(operands.__getitem__, record.OPERANDS)]
        call = jax.ffi.ffi_call(
            _target(function, self.device.platform), shapes, vmap_method="sequential", input_output_aliases=aliases
        )
        results = call(
            *arrays,
            numbers=np.array([numbers[name] for name in record.NUMBERS], np.int64),
            **{name: float(value) for name, value in numbers.items() if name not in record.NUMBERS},
        )
        named = zip(record.RESULTS, results, strict=True)
        return {name: None if outputs[name] is None else array for name, array in named}

    def sorted(self, numbers: Any) -> tuple[Any, Any]:
        indices = jax.lax.iota(jnp.int32, numbers.shape[0])
        values, order = jax.lax.sort((numbers, indices), num_keys=1, is_stable=True)
        return values, order

    def on_host(
        self, function: Callable[..., Any], call: Call, outputs: str | Sequence[Shaped | str], **extra: Any
    ) -> Any:
        shapes: list[jax.ShapeDtypeStruct] = []
        for output in (outputs,) if isinstance(outputs, str) else outputs:
            given = (
                getattr(call, output) if isinstance(output, str) else jax.ShapeDtypeStruct(tuple(output[0]), output[1])
            )
            for item in given if isinstance(given, tuple | list) else (given,):
                shapes.append(jax.ShapeDtypeStruct(item.shape, item.dtype))
        arrays, statics = split(call.flatten(call.arguments()))
        leaves, structure = jax.tree.flatten(arrays)
        record = type(call)  # the callback must not refer to the call, whose traced arrays are invalid later

        def host(*values: Any) -> list[np.ndarray]:
            given = join(record, jax.tree.unflatten(structure, list(map(to_numpy, values))), statics)
            results = function(**given, **extra)
            results = results if isinstance(results, tuple) else (results,)
            return [_from_numpy(result, shape) for result, shape in zip(results, shapes, strict=True)]

        return list(jax.pure_callback(host, shapes, *leaves, vmap_method="sequential"))


Statics = tuple[tuple[int, Any], ...]


def split(flat: list[Any]) -> tuple[dict[int, Any], Statics]:
    """The flat arguments by index, in two parts: the arrays and lists of arrays, and everything else."""
    hashable = [() if isinstance(value, list) and not value else value for value in flat]
    arrays = {index: value for index, value in enumerate(hashable) if is_array(value) or isinstance(value, list)}
    return arrays, tuple((index, value) for index, value in enumerate(hashable) if index not in arrays)


def join(record: type[Call], arrays: Mapping[int, Any], statics: Statics) -> dict[str, Any]:
    """The record's arguments, from the two parts that `split` returned."""
    flat = dict(statics) | dict(arrays)
    return record.unflatten([flat[index] for index in range(len(flat))])
