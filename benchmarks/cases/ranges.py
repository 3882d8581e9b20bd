"""Key ranges of benchmark cases for each query, and the number of keys that they cover."""

from typing import Any

import numpy as np


def ranges_of(case: Any) -> np.ndarray:
    """The key ranges of a case, i32 [T, key_ranges, 2]. No range extends beyond the query's own position.

    The keys up to the query's own are divided into 2 * key_ranges - 1 parts of equal length, and the query sees every
    second part, starting with the first. So a single range is a causal mask, and several ranges are disjoint.
    """
    count, lengths = case.key_ranges, zip(case.q_lens, case.kv_lens, strict=True)
    positions = [np.arange(kv_len - q_len, kv_len) for q_len, kv_len in lengths]
    visible = np.maximum(np.concatenate(positions) + 1, 0)
    edges = visible[:, None] * np.arange(2 * count) // (2 * count - 1)
    return edges.reshape(len(visible), count, 2).astype(np.int32)


def range_table(case: Any) -> dict[str, np.ndarray]:
    """The `key_ranges` entry of the case's tables, or an empty dict if the case has no ranges."""
    return {"key_ranges": ranges_of(case)} if case.key_ranges else {}


def num_pairs(case: Any) -> int:
    """The number of visible pairs of a query and a key."""
    ranges = ranges_of(case).astype(np.int64)
    return int((ranges[..., 1] - ranges[..., 0]).sum())


def num_keys(case: Any) -> int:
    """The number of keys, over all sequences, that at least one query sees."""
    total = 0
    for rows in np.split(ranges_of(case), np.cumsum(case.q_lens)[:-1]):
        change = np.zeros(rows.max(initial=0) + 1, np.int64)
        np.add.at(change, rows[..., 0], 1)
        np.add.at(change, rows[..., 1], -1)
        total += int(np.count_nonzero(np.cumsum(change)))
    return total
