"""Cut packed sequences into chunks, and attend to the same keys in other calls, packed or in pages of any size.

This is what happens to a text in practice: its prompt is prefilled in chunks, its continuation is decoded token by
token in batches with other sequences, and all of it is packed again for training.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.paged.specs import Batch
from ragged_attention.testing.varlen.specs import VarlenBatch

SHARED = (
    "sm_scale", "sliding_window", "soft_cap", "sinks", "alibi_slopes", "relative_bias", "block_size", "strided",
    "dtype",
)  # fmt: skip
PAGE_SIZES = (1, 2, 4, 16, 64)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive queries of a sequence, and the sequence's length when the last of them is computed."""

    seq: int
    first: int  # rows [first, stop) of the packed batch
    stop: int
    kv_len: int

    @property
    def num_queries(self) -> int:
        return self.stop - self.first


def cut(rng: np.random.Generator, q_len: int) -> list[int]:
    """Random chunk edges for `q_len` queries, from 0 to `q_len`; many chunks have one query."""
    places = rng.integers(1, q_len, int(rng.integers(0, 7))) if q_len > 1 else []
    inner = {int(place) + more for place in places for more in (0, 1)}
    return [0, *sorted(edge for edge in inner if edge < q_len), q_len]


def chunks_of(batch: VarlenBatch, rng: np.random.Generator) -> list[Chunk]:
    """A batch's queries as chunks, in random order.

    If the batch is `causal`, a chunk has no keys after its last query, and a chunk that lies before the first key is
    left out. Otherwise each chunk has all keys, and a sequence is cut only if no argument depends on query positions.
    """
    placed = (batch.sliding_window, batch.alibi_slopes, batch.relative_bias, batch.selected)
    cuts = batch.causal or all(value is None for value in placed)
    chunks = []
    for seq, (rows, keys, _) in enumerate(batch.parts()):
        q_len, kv_len = rows.stop - rows.start, keys.stop - keys.start
        for first, stop in itertools.pairwise(cut(rng, q_len) if cuts else (0, q_len)):
            keys_after = q_len - stop if batch.causal else 0
            if keys_after <= kv_len:
                chunks.append(Chunk(seq, rows.start + first, rows.start + stop, kv_len - keys_after))
    return [chunks[index] for index in rng.permutation(len(chunks))]


def rows_of(chunks: list[Chunk]) -> NDArray[np.int64]:
    """The rows of the chunks' queries in the packed batch."""
    rows = [np.arange(chunk.first, chunk.stop) for chunk in chunks]
    return np.concatenate([np.zeros(0, np.int64), *rows])


def edges_of(lens: list[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lens], dtype=np.int32)


def of_queries(batch: VarlenBatch | Batch, rows: Any) -> dict[str, Any]:
    """The arguments that have one row per query, with only the rows `rows`."""
    names = ["q", "key_ranges", "selected", "relative_bias", *(["draft_mask"] if isinstance(batch, Batch) else [])]
    arrays = {name: array for name in names if (array := getattr(batch, name)) is not None}
    if arrays.get("relative_bias", batch.q).ndim == 2:  # one bias shared by all queries
        del arrays["relative_bias"]
    return {name: array[rows] for name, array in arrays.items()}


def packed(batch: VarlenBatch, chunks: list[Chunk]) -> VarlenBatch:
    """A packed call in which each chunk is a sequence with its own copy of the keys."""
    starts = [keys.start for _, keys, _ in batch.parts()]
    keys = [np.arange(starts[chunk.seq], starts[chunk.seq] + chunk.kv_len) for chunk in chunks]
    rows = np.concatenate([np.zeros(0, np.int64), *keys])
    return batch.change(
        **of_queries(batch, rows_of(chunks)),
        k=batch.k[rows],
        v=batch.v[rows],
        cu_q_lens=edges_of([chunk.num_queries for chunk in chunks]),
        cu_kv_lens=edges_of([chunk.kv_len for chunk in chunks]),
        max_q_len=None,
        max_kv_len=None,
    )


def paged(batch: VarlenBatch, chunks: list[Chunk], rng: np.random.Generator) -> Batch:
    """A paged call in which each chunk is a sequence.

    Pages have a random size and a random order. The chunks of a sequence share its pages.
    """
    size = int(rng.choice(PAGE_SIZES))
    lens = np.diff(batch.cu_kv_lens)
    counts = -(-lens // size)
    order = rng.permutation(int(counts.sum()) + 3).astype(np.int32)
    tables = np.full((len(lens), int(max(counts, default=0)) + int(rng.integers(0, 3))), -1, np.int32)
    pages = [np.zeros((len(order), size, *array.shape[1:]), np.float32) for array in (batch.k, batch.v)]
    for seq, ((_, keys, _), start) in enumerate(zip(batch.parts(), edges_of(counts.tolist()), strict=False)):
        tables[seq, : counts[seq]] = order[start : start + counts[seq]]
        position = np.arange(lens[seq])
        for target, array in zip(pages, (batch.k, batch.v), strict=True):
            target[tables[seq][position // size], position % size] = array[keys]
    return Batch(
        **{name: getattr(batch, name) for name in SHARED} | of_queries(batch, rows_of(chunks)),
        cache_dtype=batch.dtype,
        kv_pages=(pages[0], pages[1]),
        kv_lens=np.array([chunk.kv_len for chunk in chunks], np.int32),
        page_indices=tables[[chunk.seq for chunk in chunks]].reshape(len(chunks), tables.shape[1]),
        cu_q_lens=edges_of([chunk.num_queries for chunk in chunks]),
        causal=batch.causal or batch.key_ranges is not None,  # key ranges replace the causal mask
    )


def parts_of(batch: Batch, rng: np.random.Generator) -> list[tuple[slice, Batch]]:
    """The chunks of each sequence of a causal paged batch: each chunk's rows in the batch, and its call.

    Key ranges replace the causal mask, so with them every chunk has all keys. A sequence is not cut if it has more
    queries than keys, or if it has both key ranges and biases that depend on positions.
    """
    ranged = batch.key_ranges is not None
    placed = batch.alibi_slopes is not None or batch.relative_bias is not None
    parts = []
    for seq, (start, stop) in enumerate(batch.bounds()):
        alone, q_len = batch.alone(seq), stop - start
        kv_len = alone.kv_len(0)
        cuts = q_len <= kv_len and not (ranged and placed)
        for first, last in itertools.pairwise(cut(rng, q_len) if cuts else (0, q_len)):
            part = alone.change(**of_queries(alone, slice(first, last)), cu_q_lens=edges_of([last - first]))
            if cuts and not ranged:
                part = part.change(kv_lens=np.array([kv_len - (q_len - last)], np.int32))
            parts.append((slice(start + first, start + last), part))
    return parts
