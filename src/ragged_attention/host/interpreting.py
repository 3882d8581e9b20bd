"""Around a launch that Triton's interpreter runs on the host, whichever front end it comes from."""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ragged_attention.host import forking

_one_at_a_time = threading.RLock()  # the interpreter replaces parts of triton.language for as long as a launch runs
_running = False


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """One launch at a time, and without NumPy's warnings of infinities, which a GPU makes in silence.

    Raises `RuntimeError` within another one of the same thread, as where a signal's handler launches a kernel.
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
    """Let a kernel count by a scalar in Triton 3.6, whose interpreter fails at that with NumPy 2.4 and newer.

    To the interpreter a scalar is an array of one element, and NumPy no longer converts that by `int`, so that nearly
    every kernel with a loop raises a TypeError. Triton 3.7 mends it (triton-lang/triton#9171).
    """
    if not sys.modules["triton"].__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_index
