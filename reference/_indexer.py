"""The keys that each query token of the indexer sees, and the top-k selection."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._kv_layout import Float64, decode, sequence_bounds, widened

E4M3 = "float8_e4m3fn"


class Keys(NamedTuple):
    """Stored keys: packed rows [N, D], pages [P, G, D], or pages of bytes [P, G, 1, D + 4], which hold scales too.

    Packed rows [N, K, D] and pages [P, G, K, D] have several heads.
    """

    stored: NDArray[Any]
    dtype: str | None  # the format of `stored` if it holds 8-bit floats as bits
    scale: ArrayLike | None  # a scale per key and head
    head_dim: int

    def at(self, *index: Any) -> tuple[Float64, Float64]:
        """The keys [n, ..., D] and their scales [n, ...] at indices [n], or at pages [n] and offsets [n]."""
        if self.stored.shape[-1] != self.head_dim:
            values, scales = planes(self.stored)
            return decode(values[index], E4M3), widened(np.ascontiguousarray(scales[index]).view("<f4")[:, 0])
        scales = np.ones(len(index[0])) if self.scale is None else widened(np.asarray(self.scale)[index])
        return decode(self.stored[index], self.dtype), scales


class Seen(NamedTuple):
    """The n keys that one token sees."""

    token: int
    columns: NDArray[np.int64]  # [n], ascending
    keys: Float64  # [n, ..., D]
    scales: Float64  # [n, ...]
    rows: NDArray[np.int64]  # [n], each key's row if keys are packed, and otherwise its page


def seen_of_ranges(keys: Keys, starts: Any, stops: Any, relative: bool, max_keys: int | None) -> Iterator[Seen]:
    """Yield the keys of each token that sees any, from ranges of packed keys. Keys that no token sees are not read."""
    edges = np.clip(np.stack([starts, stops], axis=-1).astype(np.int64), 0, len(keys.stored))
    for token, (start, stop) in enumerate(edges):
        rows = np.arange(start, stop if max_keys is None else min(stop, start + max_keys))
        if len(rows):
            yield Seen(token, rows - start if relative else rows, *keys.at(rows), rows)


def seen_of_lists(keys: Keys, indices: NDArray[np.int32]) -> Iterator[Seen]:
    """Yield the keys of each token that sees any, from lists [T, L] of packed keys. Unlisted keys are not read."""
    for token, entries in enumerate(indices):
        columns = np.flatnonzero((entries >= 0) & (entries < len(keys.stored)))
        if len(columns):
            rows = entries[columns]
            yield Seen(token, columns, *keys.at(rows), rows)


def seen_in_pages(
    num_tokens: int, keys: Keys, tables: tuple[Any, Any, Any], num_seqs: ArrayLike | None, ratio: int
) -> Iterator[Seen]:
    """Yield the keys of each token that sees any, from pages. Keys that no token sees are not read."""
    page_indices, kv_lens, cu_q_lens = map(np.asarray, tables)
    num_pages, page_size = keys.stored.shape[:2]
    for seq, (start, stop) in enumerate(sequence_bounds(cu_q_lens, num_seqs, num_tokens)):
        kv_len = int(np.clip(kv_lens[seq], 0, (page_indices.shape[1] * page_size + 1) * ratio - 1))
        for token in range(start, stop):
            positions = np.arange(max(kv_len - (stop - token) + 1, 0) // ratio)
            page = page_indices[seq, positions // page_size]
            valid = (page >= 0) & (page < num_pages)
            positions, page = positions[valid], page[valid]
            if len(positions):
                yield Seen(token, positions, *keys.at(page, positions % page_size), page)


def planes(cache: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Views of the bytes of the values [P, G, D] and of the scales [P, G, 4] in contiguous pages [P, G, 1, D + 4]."""
    num_pages, page_size, _, row = cache.shape
    whole = cache.reshape(num_pages, page_size * row)
    values, scales = whole[:, : page_size * (row - 4)], whole[:, page_size * (row - 4) :]
    return values.reshape(num_pages, page_size, row - 4), scales.reshape(num_pages, page_size, 4)


def largest(logits: Float64, top_k: int, forced: NDArray[np.bool_] | None = None) -> NDArray[np.int32]:
    """Columns [T, top_k] of the largest logits [T, N], ascending, then -1; of equal logits the larger column wins.

    Columns that are `forced` [T, N] come before all others, even if their logit is NaN, but not if it is -inf.
    """
    num_tokens, columns = logits.shape
    is_forced = np.zeros(logits.shape, bool) if forced is None else forced & (logits != -np.inf)
    values = np.where(np.isnan(logits), -np.inf, logits)
    selected = np.full((num_tokens, top_k), -1, np.int32)
    for token, (row, forced_row) in enumerate(zip(values, is_forced, strict=True)):
        best = np.lexsort((np.arange(columns), row, forced_row))[::-1][:top_k]
        best = np.sort(best[forced_row[best] | (row[best] != -np.inf)])
        selected[token, : len(best)] = best
    return selected
