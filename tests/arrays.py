"""NumPy arrays of small numbers, which tests use as arguments."""

from typing import Any

import numpy as np


def ints(*values: Any) -> np.ndarray:
    """An int32 array whose elements are the given numbers or rows."""
    return np.array(values, np.int32)
