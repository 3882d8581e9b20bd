"""Masks as ranges of visible keys, the `key_ranges` of our operations.

A mask of any origin is read row by row: a run of visible keys begins or ends where neighbours differ. So the ranges
are exact. A mask that needs more runs than our operations take has no ranges.
"""

from collections.abc import Iterable, Iterator

import torch

from ragged_attention.calls.fields import MAX_KEY_RANGES

BLOCK = 2**24  # maximum number of mask elements read at once, which bounds the memory


def blocks(rows: int, q_len: int, kv_len: int) -> Iterator[slice]:
    """Yield slices of a mask's queries. A slice has at most `BLOCK` elements, unless it is a single query."""
    step = max(1, BLOCK // max(1, rows * kv_len))
    for first in range(0, q_len, step):
        yield slice(first, min(q_len, first + step))


def ranges_of(parts: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The ranges int32 [B, L_q, R, 2] of bool masks [B, queries, L_k], or None if a query has too many runs of keys.

    R is the maximum number of runs of a query, at least 1. Queries with fewer runs get empty ranges at the end.
    """
    made = []
    for part in parts:
        ranges = _runs(part)
        if ranges is None:
            return None
        made.append(ranges)
    needed = max(ranges.shape[2] for ranges in made)
    return torch.cat([torch.nn.functional.pad(ranges, (0, 0, 0, needed - ranges.shape[2])) for ranges in made], 1)


def _runs(sees: torch.Tensor) -> torch.Tensor | None:
    ended = torch.nn.functional.pad(sees.flatten(0, 1), (1, 1))
    row, place = (ended[:, 1:] != ended[:, :-1]).nonzero(as_tuple=True)
    row, place = row[::2], place.view(-1, 2)  # in each row, begins and ends of runs alternate
    counts = torch.bincount(row, minlength=ended.shape[0])
    needed = max(1, int(counts.max())) if row.numel() else 1
    if needed > MAX_KEY_RANGES:
        return None
    rank = torch.arange(row.shape[0], device=row.device) - (counts.cumsum(0) - counts)[row]
    ranges = torch.zeros(ended.shape[0], needed, 2, dtype=torch.int32, device=sees.device)
    ranges[row, rank] = place.int()
    return ranges.unflatten(0, sees.shape[:2])


def shown_by(ranges: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The mask of ranges [B, L_q, R, 2], bool [B, L_q, kv_len]."""
    key = torch.arange(kv_len, device=ranges.device)
    sees = torch.zeros(*ranges.shape[:2], kv_len, dtype=torch.bool, device=ranges.device)
    for begin, end in (edges.unbind(-1) for edges in ranges.unbind(2)):  # one range at a time bounds memory
        sees = sees | ((key >= begin[..., None]) & (key < end[..., None]))
    return sees
