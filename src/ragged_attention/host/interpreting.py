"""The context in which Triton's interpreter runs a launch on the host, for torch and jax."""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ragged_attention.host import forking

_one_at_a_time = threading.RLock()  # the interpreter replaces parts of triton.language during a launch
_running = False


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """A context for one launch at a time, without NumPy's floating-point warnings, since a GPU gives none.

    Raises `RuntimeError` if this thread is already inside a launch, for example in a signal handler.
    """
    global _running
    with forking.postponed(), _one_at_a_time, np.errstate(all="ignore"):
        if _running:
            raise RuntimeError("expected no launch within one that Triton's interpreter runs")
        if (interpreter := sys.modules.get("triton.runtime.interpreter")) is not None:
            let_scalars_be_indices(interpreter)
        _running = True
        try:
            yield
        finally:
            _running = False


@functools.cache
def let_scalars_be_indices(interpreter: Any) -> None:
    """Make loops up to a scalar work in Triton 3.6, whose interpreter fails on them with NumPy 2.4 and newer.

    The interpreter stores a scalar as an array of one element. `int` no longer accepts such an array, so nearly
    every kernel with a loop raises a TypeError. Triton 3.7 fixes this (triton-lang/triton#9171).
    """
    if not sys.modules["triton"].__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_index
