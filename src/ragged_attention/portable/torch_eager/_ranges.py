"""The keys that a block of queries sees, if each query sees ranges of keys; computed on the host, like all bounds."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragged_attention.portable.torch_eager._host import Ints, on_host


def ranges_on_host(call: Any) -> Ints | None:
    """The `key_ranges` of a call, [T, R, 2], if it has any."""
    return None if call.key_ranges is None else on_host(call.key_ranges)


def hull(ranges: Ints, kv_len: int) -> tuple[int, int]:
    """The first key that any row sees by its ranges [rows, R, 2], and one past the last; (0, 0) if there is none."""
    begins, ends = np.moveaxis(ranges.clip(0, kv_len), 2, 0)
    any_key = begins < ends
    return (int(begins[any_key].min()), int(ends[any_key].max())) if any_key.any() else (0, 0)


def runs_of(keys: Ints) -> list[tuple[int, int]]:
    """Ascending keys, at least one, as ranges of consecutive keys."""
    last = np.flatnonzero(np.diff(keys) > 1)
    return list(zip(keys[np.r_[0, last + 1]].tolist(), (keys[np.r_[last, -1]] + 1).tolist(), strict=True))


class Cover(NamedTuple):
    """The keys that some row of a block sees, and which of them each row sees.

    A column is the index of a key among these keys.
    """

    keys: Ints  # ascending
    whole: tuple[int, int]  # a range of columns that all rows see
    begins: Ints  # [rows, R], ranges of keys that do not overlap
    ends: Ints
    seen: NDArray[np.bool_]  # for each column, whether any row sees its key; False only in filled gaps
    blind: NDArray[np.bool_]  # for each row, whether it sees no key

    def hidden(self, low: int, high: int) -> NDArray[np.bool_]:
        """Whether a row does not see a key, [rows, high - low], for columns [low, high)."""
        keys, hidden = self.keys[low:high], np.ones((len(self.begins), high - low), bool)
        for begin, end in zip(self.begins.T[..., None], self.ends.T[..., None], strict=True):
            hidden &= (keys < begin) | (keys >= end)
        return hidden

    @property
    def runs(self) -> list[tuple[int, int]]:
        return runs_of(self.keys)


def cover_between(lows: Ints, highs: Ints) -> Cover:
    """The cover of rows, if row i sees the keys [lows[i], highs[i]). `lows` and `highs` must ascend."""
    keys = np.arange(lows[0], highs[-1])
    low = lows[-1] - lows[0]
    whole = int(low), max(int(highs[0] - lows[0]), int(low))
    return Cover(keys, whole, lows[:, None], highs[:, None], np.ones(len(keys), bool), lows >= highs)


def cover_of(ranges: Ints, count: int, gap: int = 0) -> Cover | None:
    """The cover of rows that see ranges [rows, R, 2] of `count` keys; None if they see none.

    Gaps of up to `gap` keys between visible keys are filled.
    """
    begins, ends = np.moveaxis(ranges.clip(0, count), 2, 0)
    order = begins.argsort(1)
    begins, ends = (np.take_along_axis(edges, order, 1) for edges in (begins, ends))
    # Let each range begin where the earlier ranges end, so that no key counts twice.
    begins[:, 1:] = np.maximum(begins[:, 1:], np.maximum.accumulate(ends, 1)[:, :-1])
    ends = np.maximum(begins, ends)
    starts, stops = (np.bincount(edges.ravel(), minlength=count + 1) for edges in (begins, ends))
    rows_that_see = (starts - stops).cumsum()[:count]
    keys = np.flatnonzero(rows_that_see)
    if not len(keys):
        return None
    for last in np.flatnonzero((np.diff(keys) > 1) & (np.diff(keys) <= gap + 1)):
        rows_that_see[keys[last] + 1 : keys[last + 1]] = -1
    keys = np.flatnonzero(rows_that_see)
    edges = np.flatnonzero(np.diff(rows_that_see[keys] == len(begins), prepend=False, append=False)).reshape(-1, 2)
    low, high = edges[np.diff(edges)[:, 0].argmax()].tolist() if len(edges) else (0, 0)
    return Cover(keys, (low, high), begins, ends, rows_that_see[keys] > 0, (begins == ends).all(1))
