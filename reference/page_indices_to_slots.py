"""Converts token positions, which an indexer selects, to slots of the cache, which sparse attention takes."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

SLOTS = 2**31  # the number of slots that int32 can index


def page_indices_to_slots(positions: ArrayLike, page_indices: ArrayLike, page_size: int) -> NDArray[np.int32]:
    """The slot `page * G + offset` of each position [S, ...]; -1 if no page holds it or the slot exceeds int32."""
    positions, page_indices = np.asarray(positions, np.int64), np.asarray(page_indices, np.int64)
    page_size = min(page_size, SLOTS)  # any larger page size has the same result
    listed = (positions >= 0) & (positions < page_indices.shape[1] * page_size)
    seq = np.broadcast_to(np.arange(len(positions)).reshape(-1, *(1,) * (positions.ndim - 1)), positions.shape)
    pages = page_indices[seq[listed], positions[listed] // page_size]
    slots = np.full(positions.shape, -1)
    slots[listed] = np.where(pages < 0, -1, pages * page_size + positions[listed] % page_size)
    return np.where(slots < SLOTS, slots, -1).astype(np.int32)


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(page_indices_to_slots, call, call.results())
