"""Token positions of sequences as slots of the cache: from what an indexer selects to what sparse attention takes."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

SLOTS = 2**31  # that an int32 can number


def page_indices_to_slots(positions: ArrayLike, page_indices: ArrayLike, page_size: int) -> NDArray[np.int32]:
    """`page * G + offset` of each position [S, ...]; -1 for a position outside the table or that names no slot."""
    positions, page_indices = np.asarray(positions, np.int64), np.asarray(page_indices, np.int64)
    page_size = min(page_size, SLOTS)  # a larger one makes the same slots
    known = (positions >= 0) & (positions < page_indices.shape[1] * page_size)
    seq = np.broadcast_to(np.arange(len(positions)).reshape(-1, *(1,) * (positions.ndim - 1)), positions.shape)
    pages = page_indices[seq[known], positions[known] // page_size]
    slots = np.full(positions.shape, -1)
    slots[known] = np.where(pages < 0, -1, pages * page_size + positions[known] % page_size)
    return np.where(slots < SLOTS, slots, -1).astype(np.int32)


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(page_indices_to_slots, call, call.results())
