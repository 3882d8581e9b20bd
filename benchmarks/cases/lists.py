"""Lists of blocks of benchmark cases: those of each query and KV head, and how many keys they show."""

from typing import Any

import numpy as np

from ragged_attention.reference.ragged_paged_attention import of_head, seen_by_heads, visible


def lists_of(case: Any) -> np.ndarray:
    """The lists of a case, i32 [T, K, N]: the block of the query itself, the first block, and others at equal steps.

    Each KV head steps a little differently. Lists of neighbouring queries are much alike, as those of models are. A
    query that has fewer blocks names some of them twice.
    """
    lengths = zip(case.q_lens, case.kv_lens, strict=True)
    positions = np.concatenate([np.arange(kv_len - q_len, kv_len) for q_len, kv_len in lengths])
    own = (np.maximum(positions, 0) // case.block_size)[:, None, None]
    step = np.arange(case.selected)[None, None, :] / max(case.selected - 1, 1)
    bend = 1 + np.arange(case.num_kv_heads)[None, :, None] / 8
    return (own - own * step**bend).astype(np.int32)


def list_table(case: Any) -> dict[str, np.ndarray]:
    """The lists of a case as an entry of its tables, if it has any."""
    return {"selected": lists_of(case)} if case.selected else {}


def list_entries(case: Any) -> int:
    """The number of entries in all lists of a case."""
    return case.num_tokens * case.num_kv_heads * (case.selected or 0)


def named_pairs(case: Any, *, causal: bool) -> tuple[int, int]:
    """(pairs of a query and a key that it sees, keys that some query sees), each a mean over the KV heads."""
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
    """The keys of a block in a case that is scaled down: so few that short sequences have several blocks."""
    return case.block_size and min(case.block_size, 8)
