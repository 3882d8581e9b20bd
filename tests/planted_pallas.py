"""A small correct Pallas kernel and its faulty variants, for tests of the checks of Pallas kernels.

As a script, `python -m tests.planted_pallas FAULT <arguments of testing.tpu_interpreter>` runs checks on one of them.
"""

import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention import dispatch
from ragged_attention.testing import tpu_interpreter

PACKAGE, BACKEND = "planted_pallas_room", "planted"
OPERATION = "merge_attention_states"
FAULTS = (
    "none", "no wait", "a wait too few", "a wait too many", "one semaphore for both slots", "a part too far",
    "a part too early", "a read of what is on its way", "wrong",
)  # fmt: skip


def _merge_kernel(lses: Any, outs: Any, out: Any, buffer: Any, semaphores: Any, *, parts: int, fault: str) -> None:
    """Sum partial results, weighted by their lse.

    The lse is in vector memory. The partial results arrive in double-buffered copies.
    """

    def copy(part: Any) -> Any:
        slot = 0 if fault == "one semaphore for both slots" else part % 2
        source = part + {"a part too far": 1, "a part too early": -1}.get(fault, 0)
        return pltpu.make_async_copy(outs.at[source], buffer.at[part % 2], semaphores.at[slot])

    highest = lses[...].max(axis=0)
    weights = jnp.where(lses[...] == -jnp.inf, 0.0, jnp.exp(lses[...] - jnp.where(jnp.isfinite(highest), highest, 0.0)))
    total = weights.sum(axis=0)
    copy(0).start()
    out[...] = jnp.zeros_like(out)
    for part in range(parts):
        if part + 1 < parts:
            copy(part + 1).start()
        early_values = buffer[part % 2].astype(jnp.float32) if fault == "a read of what is on its way" else None
        if fault == "no wait" or (fault == "a wait too few" and part == parts - 1):
            pass
        else:
            copy(part).wait()
        if fault == "a wait too many" and part == parts - 1:
            copy(part).wait()
        share = weights[part] / jnp.where(total > 0, total, 1.0)
        values = buffer[part % 2].astype(jnp.float32) if early_values is None else early_values
        out[...] += jnp.where(share > 0, share * values, 0.0) * (1.01 if fault == "wrong" else 1.0)


def merge(outs: jax.Array, lses: jax.Array, fault: str) -> tuple[jax.Array, jax.Array]:
    parts, tokens, heads, size = outs.shape
    lse = jax.nn.logsumexp(lses, axis=0)
    if 0 in outs.shape:
        return jnp.zeros(outs.shape[1:], outs.dtype), jnp.full((tokens, heads), -jnp.inf)
    rows = tokens * heads
    out = pl.pallas_call(
        lambda *refs: _merge_kernel(*refs, parts=parts, fault=fault),
        out_shape=jax.ShapeDtypeStruct((rows, size), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[pltpu.VMEM((2, rows, size), outs.dtype), pltpu.SemaphoreType.DMA((2,))],
        name="merge_kernel",
    )(lses.astype(jnp.float32).reshape(parts, rows, 1), outs.reshape(parts, rows, size))
    return out.astype(outs.dtype).reshape(outs.shape[1:]), lse


def plant(patch: pytest.MonkeyPatch, fault: str) -> None:
    """Register the kernel with this fault as a backend, and clear jax's caches of earlier planted kernels."""
    if fault not in FAULTS:
        raise ValueError(f"expected a fault among {', '.join(FAULTS)}, got {fault!r}")
    parent, module = types.ModuleType(PACKAGE), types.ModuleType(f"{PACKAGE}.{OPERATION}")
    parent.__spec__, module.__spec__ = ModuleSpec(PACKAGE, None, is_package=True), ModuleSpec(module.__name__, None)
    parent.__path__ = []  # type: ignore[attr-defined]

    def run(call: Any, tile: Any, launch: Any) -> list[jax.Array]:
        del tile, launch
        return list(merge(call.outs, call.lses, fault))

    vars(module).update(why_not=lambda call: call.device.why_unavailable("pallas"), run=run)
    jax.clear_caches()
    patch.setitem(sys.modules, PACKAGE, parent)
    patch.setitem(sys.modules, module.__name__, module)
    patch.setattr(dispatch, "third_party_packages", lambda: {BACKEND: PACKAGE})
    patch.setattr(dispatch, "load", dispatch.load.__wrapped__)  # bypass the cache, which may hold an earlier kernel


def main(arguments: Sequence[str]) -> int:
    plant(pytest.MonkeyPatch(), arguments[0])
    return tpu_interpreter.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
