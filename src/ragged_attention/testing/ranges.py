"""Key ranges for the queries of batches: those of models' masks, and random ones."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ragged_attention import key_ranges
from ragged_attention.calls.fields import MAX_KEY_RANGES
from ragged_attention.testing.integers import garbage

KINDS = ("causal", "window", "prefix", "chunks", "spans", "one", "few", "many", "any")
Ranges = NDArray[np.int32]


def ranges_of(
    rng: np.random.Generator, lens: Sequence[tuple[int, int]], tokens: int, kind: str | None
) -> Ranges | None:
    """Key ranges [tokens, N, 2] of a kind, or None if `kind` is None.

    `lens` has each sequence's (q_len, kv_len). The remaining rows are padding, with meaningless ranges. "causal",
    "window", "prefix", "chunks" and "spans" are the masks of models. With "one", "few" and "many", each query has its
    own ranges within its keys; "any" has meaningless integers.
    """
    if kind is None:
        return None
    cu_q_lens = np.cumsum([0, *(q_len for q_len, _ in lens)], dtype=np.int32)
    kv_lens = np.array([kv_len for _, kv_len in lens], np.int32)
    ranges = _of_models(rng, kind, cu_q_lens, kv_lens, tokens)
    if ranges is None:
        count = {"one": 1, "few": int(rng.integers(2, 4)), "many": MAX_KEY_RANGES}.get(kind)
        ranges = np.zeros((tokens, count or int(rng.integers(1, MAX_KEY_RANGES + 1)), 2), np.int32)
        for start, (q_len, kv_len) in zip(cu_q_lens, lens, strict=False):
            shape = q_len, *ranges.shape[1:]
            sequence_ranges = anything(rng, shape, kv_len + 3) if kind == "any" else _within(rng, shape, kv_len)
            ranges[start : start + q_len] = sequence_ranges
    padding = ranges[cu_q_lens[-1] :]
    padding[...] = anything(rng, padding.shape, 40)
    return ranges


def anything(rng: np.random.Generator, shape: tuple[int, ...], near: int) -> Ranges:
    """Random int32; most lie close to [-near, near], so that many ranges contain keys."""
    close = rng.integers(-near - 1, near + 2, shape).astype(np.int32)
    return np.where(rng.random(shape) < 0.5, close, garbage(rng, shape, near))


def _within(rng: np.random.Generator, shape: tuple[int, int, int], kv_len: int) -> Ranges:
    """Ranges within the keys, in any order; some overlap and some are empty."""
    edges = np.sort(rng.integers(0, kv_len + 1, shape), axis=-1)
    edges[rng.random(shape[:2]) < 0.15] = rng.integers(0, kv_len + 1)
    return edges.astype(np.int32)


def _of_models(
    rng: np.random.Generator, kind: str, cu_q_lens: NDArray[np.int32], kv_lens: NDArray[np.int32], tokens: int
) -> Ranges | None:
    longest = max(int(kv_lens.max(initial=1)), 1)
    spans = np.sort(rng.integers(0, longest + 1, (len(kv_lens), 2, 2)), axis=-1).astype(np.int32)
    window = int(rng.integers(1, longest + 2))
    make: dict[str, tuple[Callable[..., Ranges], dict[str, object]]] = {
        "causal": (key_ranges.causal_ranges, {}),
        "window": (key_ranges.causal_ranges, {"sliding_window": window}),
        "prefix": (key_ranges.prefix_window_ranges, {"prefix": longest // 4 + 1, "sliding_window": longest // 8 + 1}),
        "chunks": (key_ranges.chunked_ranges, {"chunk": window}),
        "spans": (key_ranges.span_ranges, {"spans": spans, "sliding_window": window}),
    }
    if kind not in make:
        return None
    function, keywords = make[kind]
    return function(cu_q_lens, kv_lens, tokens, **keywords)
