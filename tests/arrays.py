"""NumPy arrays of small numbers, from which tests build their arguments."""

from typing import Any

import numpy as np


def ints(*values: Any) -> np.ndarray:
    """An int32 array of numbers or rows."""
    return np.array(values, np.int32)
