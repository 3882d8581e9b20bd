"""What a query of the indexer sees: for each token the keys, their scales, and the columns that they stand in."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._kv_layout import Float64, decode, encode, group_scales, sequence_bounds, widened

E4M3 = "float8_e4m3fn"


class Seen(NamedTuple):
    """What one token sees: n keys [n, D] with their scales [n], in ascending `columns` [n]."""

    token: int
    columns: NDArray[np.int64]
    keys: Float64
    scales: Float64


def seen_of_ranges(
    keys: NDArray[Any],
    key_dtype: str | None,
    key_scale: ArrayLike | None,
    starts: Any,
    stops: Any,
    relative: bool,
    max_keys: int | None,
) -> Iterator[Seen]:
    """Every token that sees a key, where each has its range of packed keys; nothing but what is seen is read."""
    limit = len(keys)
    for token, (start, stop) in enumerate(np.clip(np.stack([starts, stops], axis=-1).astype(np.int64), 0, limit)):
        rows = np.arange(start, stop if max_keys is None else min(stop, start + max_keys))
        if len(rows):
            scales = np.ones(len(rows)) if key_scale is None else widened(np.asarray(key_scale)[rows])
            yield Seen(token, rows - start if relative else rows, decode(keys[rows], key_dtype), scales)


def seen_in_pages(
    num_tokens: int,
    keys: NDArray[Any],
    key_dtype: str | None,
    key_scale: ArrayLike | None,
    tables: tuple[Any, Any, Any],
    num_seqs: ArrayLike | None,
    ratio: int,
) -> Iterator[Seen]:
    """Every token that sees a key, where sequences have pages; nothing but what is seen is read."""
    page_indices, kv_lens, cu_q_lens = map(np.asarray, tables)
    num_pages, page_size = keys.shape[:2]
    for seq, (start, stop) in enumerate(sequence_bounds(cu_q_lens, num_seqs, num_tokens)):
        kv_len = int(np.clip(kv_lens[seq], 0, page_indices.shape[1] * page_size * ratio))
        for token in range(start, stop):
            positions = np.arange(max(kv_len - (stop - token) + 1, 0) // ratio)
            page = page_indices[seq, positions // page_size]
            known = (page >= 0) & (page < num_pages)
            positions, page = positions[known], page[known]
            if len(positions):
                yield Seen(token, positions, *rows_of(keys, key_dtype, key_scale, page, positions % page_size))


def rows_of(
    keys: NDArray[Any], key_dtype: str | None, key_scale: ArrayLike | None, page: Any, offset: Any
) -> tuple[Float64, Float64]:
    """Keys in pages, and their scales."""
    if keys.ndim == 4:
        values, scales = planes(keys)
        return decode(values[page, offset], E4M3), widened(np.ascontiguousarray(scales[page, offset]).view("<f4")[:, 0])
    scales = np.ones(len(page)) if key_scale is None else widened(np.asarray(key_scale)[page, offset])
    return decode(keys[page, offset], key_dtype), scales


def planes(cache: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The bytes of the values [P, G, D] and of the scales [P, G, 4] of contiguous pages of bytes; views."""
    num_pages, page_size, _, row = cache.shape
    whole = cache.reshape(num_pages, page_size * row)
    values, scales = whole[:, : page_size * (row - 4)], whole[:, page_size * (row - 4) :]
    return values.reshape(num_pages, page_size, row - 4), scales.reshape(num_pages, page_size, 4)


def quantized(k: ArrayLike, power_of_two: bool) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Rows [N, D] as e4m3 codes and their scales [N]; all arithmetic is in float32.

    A NaN is stored as 0x7F whatever its sign, since hardware differs about the sign of one that a division makes.
    """
    rows = widened(k, np.float32)
    scales = group_scales(rows, power_of_two)
    with np.errstate(invalid="ignore"):  # infinity over infinity is NaN
        scaled = rows / scales[:, None]
    return encode(np.where(np.isnan(scaled), np.float32(np.nan), scaled), E4M3), scales


def largest(logits: Float64, top_k: int) -> NDArray[np.int32]:
    """The columns of the largest logits [T, N] in ascending order, then -1; of equal ones the larger column."""
    values = np.where(np.isnan(logits), -np.inf, logits)
    num_tokens, columns = values.shape
    chosen = np.full((num_tokens, top_k), -1, np.int32)
    for token, row in enumerate(values):
        best = np.lexsort((np.arange(columns), row))[::-1][:top_k]
        best = np.sort(best[row[best] != -np.inf])
        chosen[token, : len(best)] = best
    return chosen
