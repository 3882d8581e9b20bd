"""Lists of the blocks of keys that batches' queries see: any order, duplicates, and entries that name nothing."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragged_attention.testing.integers import INT32, garbage

KINDS = ("all", "few", "own", "any", "none")
Lists = NDArray[np.int32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The structure of a call's lists of blocks."""

    kind: str  # see `lists_of`
    size: int  # keys in a block
    shared: bool = False  # whether all KV heads have one list
    length: int = 4  # entries of a list, except of kind "all" and "none"


selections = st.builds(
    Selection,
    kind=st.sampled_from(["all", *KINDS]),
    size=st.sampled_from([1, 2, 4, 8, 16, 64, 256]),
    shared=st.booleans(),
    length=st.sampled_from([1, 2, 3, 5, 9]),
)


def lists_of(
    rng: np.random.Generator, lens: Sequence[tuple[int, int]], tokens: int, heads: int, selection: Selection | None
) -> Lists | None:
    """The lists [T, K or 1, N] of `tokens` queries, the first of which belong to sequences of (q_len, kv_len).

    "all": every block, in any order; "few": some blocks, of which some occur twice, among entries that name nothing;
    "own": the same, with the block of the query's own position; "any": integers without sense; "none": lists without
    entries. The lists of rows of padding are without sense.
    """
    if selection is None:
        return None
    heads = 1 if selection.shared else heads
    blocks = [-(-kv_len // selection.size) for _, kv_len in lens]
    length = {"all": max(blocks, default=0), "none": 0}.get(selection.kind, selection.length)
    made = garbage(rng, (tokens, heads, length), 3 + max(blocks, default=0))
    start = 0
    for (q_len, kv_len), count in zip(lens, blocks, strict=True):
        rows = made[start : start + q_len]
        if selection.kind == "all":
            rows[...] = rng.permuted(np.broadcast_to(np.arange(length, dtype=np.int32), rows.shape), axis=2)
        elif selection.kind in ("few", "own") and length:
            rows[...] = _few(rng, rows.shape, count)
            if selection.kind == "own":
                rows[..., int(rng.integers(length))] = _own_blocks(q_len, kv_len, selection.size)[:, None]
        start += q_len
    return made


def garbage_lists(rng: np.random.Generator) -> Selection | None:
    """In every other call, lists of integers without sense."""
    size, shared, length = int(rng.choice([1, 4, 128, 256])), bool(rng.random() < 0.5), int(rng.integers(0, 4))
    lists = Selection(kind="any", size=size, shared=shared, length=length)
    return lists if rng.random() < 0.5 else None


def _own_blocks(q_len: int, kv_len: int, size: int) -> NDArray[np.integer]:
    """The block of each query's own position; -1 if it precedes the first key."""
    position = kv_len - q_len + np.arange(q_len)
    return np.where(position < 0, -1, position // size)


def _few(rng: np.random.Generator, shape: tuple[int, ...], count: int) -> Lists:
    """Blocks of a sequence of `count`, with duplicates, and entries outside of it."""
    named = rng.integers(0, max(count, 1), shape)
    # Entries that a product with the size of a block in 32 bits would turn into blocks of the sequence.
    outside = rng.choice(
        np.array([-1, -1, -1, count, INT32.min, INT32.max, 2**24, 2**30, 2**31 - 2**24], np.int64), shape
    )
    return np.where(rng.random(shape) < 0.3, outside, named).astype(np.int32)
