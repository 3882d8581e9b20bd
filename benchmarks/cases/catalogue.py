"""All named shapes, of paged, of latent and of uncached attention, and what is asked of each kind."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks.cases import mla as mla_cases
from benchmarks.cases import paged as paged_cases
from benchmarks.cases import varlen as varlen_cases
from benchmarks.cases.mla import LatentCase
from benchmarks.cases.paged import Case
from benchmarks.cases.varlen import VarlenCase
from ragged_attention.calls import Call, Device

AnyCase = Case | LatentCase | VarlenCase
CASES: dict[str, AnyCase] = {**paged_cases.CASES, **mla_cases.CASES, **varlen_cases.CASES}
COMPILED_ONLY: dict[str, AnyCase] = {
    **paged_cases.COMPILED_ONLY,
    **mla_cases.COMPILED_ONLY,
    **varlen_cases.COMPILED_ONLY,
}
MODULES: dict[type, Any] = {Case: paged_cases, LatentCase: mla_cases, VarlenCase: varlen_cases}


def _module(case: AnyCase) -> Any:
    return MODULES[type(case)]


def find(name: str) -> Any:
    """A case by name; `<name>_small` is its scaled-down version."""
    known = CASES | COMPILED_ONLY
    if name in known:
        return known[name]
    if name.removesuffix("_small") in known:
        return scaled_down(known[name.removesuffix("_small")])
    raise KeyError(f"expected a case among {', '.join(known)}, got {name!r}")


def scaled_down(case: AnyCase, **sizes: int) -> Any:
    """The same kind of batch, small enough for any machine."""
    return _module(case).scaled_down(case, **sizes)


def attention_call(case: AnyCase, device: Device) -> Call:
    """The case's own operation as a record over fake arrays."""
    return _module(case).attention_call(case, device)


def calls_of(case: AnyCase, device: Device) -> Iterable[Call]:
    """Every operation that a serving step with this case runs, as records over fake arrays."""
    return _module(case).calls_of(case, device)


def judged(case: AnyCase, result: Any) -> Any:
    """What of a call's result is checked: out, or a list of the gradients."""
    if case.backward:
        return [array for array in result if array is not None]
    return result[0] if isinstance(result, tuple | list) else result


def changed(case: AnyCase) -> list[tuple[AnyCase, dict[str, np.ndarray]]]:
    """Other lengths for a case, or other lists, then its own again: cases and the arrays that index them."""
    return _module(case).changed(case)


def torch_inputs(case: AnyCase, seed: int = 0, device: Any = "cpu") -> dict[str, Any]:
    """Arguments for the torch front end, on `device`."""
    return _module(case).torch_inputs(case, seed, device)


def jax_inputs(case: AnyCase, seed: int = 0) -> dict[str, Any]:
    """Arguments for the jax front end, on its default device."""
    return _module(case).jax_inputs(case, seed)


def numpy_inputs(case: AnyCase, seed: int = 0) -> dict[str, Any]:
    """Arguments for the definition in `reference/`."""
    return _module(case).numpy_inputs(case, seed)
