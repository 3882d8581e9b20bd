"""Meaningless integers, as index arrays may hold them."""

import numpy as np
from numpy.typing import NDArray

INT32 = np.iinfo(np.int32)


def garbage(rng: np.random.Generator, shape: int | tuple[int, ...], near: int) -> NDArray[np.int32]:
    """Random int32: one third close to [-near, near], one third the smallest or largest int32, one third anything."""
    kind = rng.integers(0, 6, shape)
    wild = rng.integers(INT32.min, INT32.max, shape, np.int32, endpoint=True)
    close = rng.integers(-near - 1, near + 2, shape).astype(np.int32)
    return np.select([kind < 2, kind == 2, kind == 3], [close, INT32.max, INT32.min], wild).astype(np.int32)
