"""A comparison of attention whose heads are sharded over eight simulated devices with unsharded attention.

Run it as a script. `python -m tests.sharded xla` prints whether the results have the same bits, and their largest
difference. With a mode of the TPU interpreter instead of `xla`, it runs the Pallas kernel. The interpreter needs one
thread per device, all at the same time. `python -m tests.sharded explicit` calls attention on a mesh of explicit axes.
It prints the error messages of each backend and the largest difference.
"""

import contextlib
import functools
import json
import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["PJRT_NPROC"] = "32"

from ragged_attention.testing import environment

environment.prepare("cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

import ragged_attention.jax as ra  # noqa: E402
from ragged_attention import explain  # noqa: E402
from ragged_attention.errors import Unsupported  # noqa: E402
from ragged_attention.testing import Spec, jax_front, tpu_interpreter  # noqa: E402

NAMES = ("q", "kv_pages", "kv_lens", "page_indices", "cu_q_lens")


def inputs() -> list[Any]:
    """A mixed batch with eight KV heads."""
    batch = Spec(lens=((3, 11), (1, 13), (0, 2)), num_kv_heads=8, group=2, head_dim=16, page_size=4, seed=3).build()
    given = batch.arguments()
    return [
        jax_front.bring(given[name], batch.dtype_of(name, given[name]), layout="", place=None, device=None)
        for name in NAMES
    ]


def explicit() -> None:
    """Attention whose queries and pages are sharded over heads by explicit axes, which are part of an array's type."""
    heads, mesh = PartitionSpec(None, "heads"), jax.make_mesh((8,), ("heads",), axis_types=(AxisType.Explicit,))
    specs = heads, PartitionSpec(None, None, "heads"), *[PartitionSpec()] * 3

    def attention(*arrays: Any, backend: str | None = "xla") -> Any:
        return ra.ragged_paged_attention(*arrays, return_lse=True, backend=backend)

    whole = inputs()
    parts = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(whole, specs, strict=True)]
    expected = attention(*whole)
    messages: dict[str, list[str]] = {}
    differences = []
    for backend in (None, "xla", "numba", "triton", "reference"):
        requested = functools.partial(attention, backend=backend)
        for context in (contextlib.nullcontext(), jax.set_mesh(mesh)):
            with context:
                for function in (requested, jax.jit(requested)):
                    try:
                        function(*parts)
                    except Unsupported as error:
                        messages.setdefault(backend or "numba", []).append(str(error))
    explained = str(explain("ragged_paged_attention", *parts))
    with jax.set_mesh(mesh):
        within = jax.sharding.auto_axes(attention, out_sharding=(heads, heads))
        mapped = jax.shard_map(attention, in_specs=specs, out_specs=(heads, heads), check_vma=False)
        for function in (within, mapped):
            pairs = zip(jax.jit(function)(*parts), expected, strict=True)
            differences += [float(np.nanmax(np.abs(np.subtract(*pair)[np.isfinite(pair[1])]))) for pair in pairs]
        replicated = [jax.device_put(array, NamedSharding(mesh, PartitionSpec())) for array in whole]
        np.testing.assert_array_equal(jax.jit(attention)(*replicated)[0], expected[0])
    for context in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with context:  # the default backend takes a replicated array on any mesh
            found = jax.jit(functools.partial(attention, backend=None))(*replicated)
            np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    result = {"said": messages, "explained": explained, "difference": max(differences)}
    sys.stdout.write(json.dumps(result) + "\n")


def main(how: str) -> None:
    if how == "explicit":
        return explicit()
    backend = "xla" if how == "xla" else "pallas"

    def attention(*arrays: Any) -> Any:
        return ra.ragged_paged_attention(*arrays, return_lse=True, backend=backend)

    heads = PartitionSpec(None, "heads")
    mesh = Mesh(np.array(jax.devices()), ("heads",))
    sharded = jax.shard_map(
        attention, mesh=mesh, in_specs=(heads, PartitionSpec(None, None, "heads"), *[PartitionSpec()] * 3),
        out_specs=(heads, heads), check_vma=False,
    )  # fmt: skip
    results = []
    for function in (attention, jax.jit(sharded)):
        with contextlib.nullcontext() if backend == "xla" else tpu_interpreter.watched(how):
            results.append([np.asarray(part) for part in jax.block_until_ready(function(*inputs()))])
    whole, parts = results
    difference = max(float(np.abs(a - b)[np.isfinite(a)].max()) for a, b in zip(whole, parts, strict=True))
    same = all(a.tobytes() == b.tobytes() for a, b in zip(whole, parts, strict=True))
    sys.stdout.write(json.dumps({"devices": len(jax.devices()), "same": same, "difference": difference}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
