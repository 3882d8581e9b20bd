"""Block lists of benchmark cases for each query and KV head, and the number of keys that they cover."""

from typing import Any

import numpy as np

from ragged_attention.reference.ragged_paged_attention import of_head, seen_by_heads, visible


def lists_of(case: Any) -> np.ndarray:
    """The block lists of a case, i32 [T, K, N]: the query's own block, the first block, and blocks between them.

    The steps between blocks differ slightly from one KV head to the next. As in real models, neighbouring queries have
    similar lists. A query with fewer than N blocks lists some of them twice.
    """
    lengths = zip(case.q_lens, case.kv_lens, strict=True)
    positions = np.concatenate([np.arange(kv_len - q_len, kv_len) for q_len, kv_len in lengths])
    own_block = (np.maximum(positions, 0) // case.block_size)[:, None, None]
    step = np.arange(case.selected)[None, None, :] / max(case.selected - 1, 1)
    exponent = 1 + np.arange(case.num_kv_heads)[None, :, None] / 8
    return (own_block - own_block * step**exponent).astype(np.int32)


def list_table(case: Any) -> dict[str, np.ndarray]:
    """The `selected` entry of the case's tables, or an empty dict if the case has no lists."""
    return {"selected": lists_of(case)} if case.selected else {}


def list_entries(case: Any) -> int:
    """The total number of entries in all lists of a case."""
    return case.num_tokens * case.num_kv_heads * (case.selected or 0)


def named_pairs(case: Any, *, causal: bool) -> tuple[int, int]:
    """(visible pairs of a query and a key, keys that any query sees), as averages over the KV heads."""
    pairs = keys = 0
    lists, start = lists_of(case), 0
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        seen = visible(q_len, kv_len, np.ones(kv_len, bool), causal, case.sliding_window)
        for kv_head in range(case.num_kv_heads):
            rows = lists[start : start + q_len, kv_head : kv_head + 1]
            shown = of_head(seen_by_heads(seen, rows, case.block_size), 0)
            pairs += int(shown.sum())
            keys += int(shown.any(0).sum())
        start += q_len
    return pairs // case.num_kv_heads, keys // case.num_kv_heads


def small_block(case: Any) -> int | None:
    """The block size of a scaled-down case, small enough that short sequences have several blocks."""
    return case.block_size and min(case.block_size, 8)
