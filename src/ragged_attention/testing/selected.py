"""Lists of the key blocks that queries see, in any order, with duplicates and invalid entries."""

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
    """The parameters of the lists of key blocks in a call."""

    kind: str  # see `lists_of`
    size: int  # keys in a block
    shared: bool = False  # whether all KV heads share one list
    length: int = 4  # entries in each list, except for the kinds "all" and "none"


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
    """Lists [tokens, `heads` or 1, N] of key blocks, or None if `selection` is None.

    `lens` has each sequence's (q_len, kv_len). The remaining rows are padding, with meaningless lists. The kinds are
    "all": every block, in any order; "few": some blocks, with duplicates and invalid entries; "own": like "few", with
    the block of the query's own position; "any": meaningless integers; "none": empty lists.
    """
    if selection is None:
        return None
    heads = 1 if selection.shared else heads
    blocks = [-(-kv_len // selection.size) for _, kv_len in lens]
    length = {"all": max(blocks, default=0), "none": 0}.get(selection.kind, selection.length)
    lists = garbage(rng, (tokens, heads, length), 3 + max(blocks, default=0))
    start = 0
    for (q_len, kv_len), count in zip(lens, blocks, strict=True):
        rows = lists[start : start + q_len]
        if selection.kind == "all":
            rows[...] = rng.permuted(np.broadcast_to(np.arange(length, dtype=np.int32), rows.shape), axis=2)
        elif selection.kind in ("few", "own") and length:
            rows[...] = _few(rng, rows.shape, count)
            if selection.kind == "own":
                rows[..., int(rng.integers(length))] = _own_blocks(q_len, kv_len, selection.size)[:, None]
        start += q_len
    return lists


def garbage_lists(rng: np.random.Generator) -> Selection | None:
    """A selection of meaningless integers with probability 1/2, else None."""
    size, shared, length = int(rng.choice([1, 4, 128, 256])), bool(rng.random() < 0.5), int(rng.integers(0, 4))
    lists = Selection(kind="any", size=size, shared=shared, length=length)
    return lists if rng.random() < 0.5 else None


def _own_blocks(q_len: int, kv_len: int, size: int) -> NDArray[np.integer]:
    """The block of each query's own position; -1 if the query precedes the first key."""
    position = kv_len - q_len + np.arange(q_len)
    return np.where(position < 0, -1, position // size)


def _few(rng: np.random.Generator, shape: tuple[int, ...], count: int) -> Lists:
    """Blocks of a sequence that has `count` blocks, with duplicates and entries outside the sequence."""
    named = rng.integers(0, max(count, 1), shape)
    # The large entries are invalid, but become valid positions if their product with the block size overflows 32 bits.
    outside = rng.choice(
        np.array([-1, -1, -1, count, INT32.min, INT32.max, 2**24, 2**30, 2**31 - 2**24], np.int64), shape
    )
    return np.where(rng.random(shape) < 0.3, outside, named).astype(np.int32)
