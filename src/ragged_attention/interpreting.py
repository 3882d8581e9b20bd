"""Around a launch that Triton's interpreter runs on the host, whichever front end it comes from."""

import contextlib
import threading
from collections.abc import Iterator

import numpy as np

_one_at_a_time = threading.Lock()  # the interpreter replaces parts of triton.language for as long as a launch runs


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """One launch at a time, and without NumPy's warnings of infinities, which a GPU makes in silence."""
    with _one_at_a_time, np.errstate(all="ignore"):
        yield
