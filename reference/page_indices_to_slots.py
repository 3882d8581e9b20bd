"""Converts token positions, which an indexer selects, to slots of the cache, which sparse attention takes."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._kv_layout import sequence_bounds

SLOTS = 2**31  # the number of slots that int32 can index
FEATURES = frozenset({"cu_q_lens", "num_seqs"})


def page_indices_to_slots(
    positions: ArrayLike,
    page_indices: ArrayLike,
    page_size: int,
    *,
    cu_q_lens: ArrayLike | None = None,
    num_seqs: ArrayLike | None = None,
) -> NDArray[np.int32]:
    """The slot `page * G + offset` of each position; -1 if no page holds it or the slot exceeds int32.

    `positions` is [S, ...]. With `cu_q_lens` it is [T, ...], and a row of no live sequence has no slots.
    """
    positions, page_indices = np.asarray(positions, np.int64), np.asarray(page_indices, np.int64)
    page_size = min(page_size, SLOTS)  # any larger page size has the same result
    seq_of_row = np.arange(len(positions))
    if cu_q_lens is not None:
        seq_of_row = np.full(len(positions), -1)
        for seq, (start, stop) in enumerate(sequence_bounds(cu_q_lens, num_seqs, len(positions))):
            seq_of_row[start:stop] = seq
    seq = np.broadcast_to(seq_of_row.reshape(-1, *(1,) * (positions.ndim - 1)), positions.shape)
    listed = (positions >= 0) & (positions < page_indices.shape[1] * page_size) & (seq >= 0)
    pages = page_indices[seq[listed], positions[listed] // page_size]
    slots = np.full(positions.shape, -1)
    slots[listed] = np.where(pages < 0, -1, pages * page_size + positions[listed] % page_size)
    return np.where(slots < SLOTS, slots, -1).astype(np.int32)


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(page_indices_to_slots, call, call.results())
