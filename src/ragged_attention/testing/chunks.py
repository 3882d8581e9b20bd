"""The same queries and keys in other calls: packed sequences cut into chunks, whose keys lie in pages of any size.

So a prompt is prefilled in parts, its continuation is decoded token by token beside other sequences, and all of it is
packed again for training.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.paged.specs import Batch
from ragged_attention.testing.varlen.specs import VarlenBatch

OPTIONS = (
    "sm_scale", "sliding_window", "soft_cap", "sinks", "alibi_slopes", "relative_bias", "key_ranges", "selected",
    "block_size", "strided", "dtype",
)  # fmt: skip
PAGE_SIZES = (1, 2, 4, 16, 64)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive queries of a sequence, and how many of its keys there are by the last of them."""

    seq: int
    rows: slice  # of the packed batch
    kv_len: int


def chunks_of(batch: VarlenBatch, rng: np.random.Generator) -> list[Chunk]:
    """All queries of a batch in chunks, in any order; many of them have one query.

    A later key can be left out where no query before it sees it, which is so if the batch is `causal`. Otherwise a
    sequence is cut only if positions do not matter.
    """
    fixed = (batch.sliding_window, batch.alibi_slopes, batch.relative_bias, batch.selected)
    chunks = []
    for seq, (rows, keys, _) in enumerate(batch.parts()):
        q_len, kv_len = rows.stop - rows.start, keys.stop - keys.start
        cut = batch.causal or all(value is None for value in fixed)
        count = int(rng.integers(0, min(q_len, 7))) if cut and q_len > 1 else 0
        places = rng.choice(np.arange(1, q_len), count, replace=False) if count else np.zeros(0, int)
        edges = [0, *sorted({*places.tolist(), *(place + 1 for place in places.tolist() if place + 1 < q_len)}), q_len]
        for first, last in zip(edges, edges[1:], strict=False):
            seen = max(kv_len - (q_len - last), 0) if batch.causal else kv_len
            # A chunk whose end lies before the first key would have other positions.
            if seen == kv_len - (q_len - last) or not batch.causal:
                chunks.append(Chunk(seq, slice(rows.start + first, rows.start + last), seen))
    return [chunks[index] for index in rng.permutation(len(chunks))]


def of_tokens(batch: VarlenBatch, rows: NDArray[np.int64]) -> dict[str, object]:
    """The arguments of a batch that have a row for each query, with some of these rows."""
    bias = batch.relative_bias
    return {
        "q": batch.q[rows],
        "relative_bias": bias[rows] if bias is not None and bias.ndim == 3 else bias,
        "key_ranges": None if batch.key_ranges is None else batch.key_ranges[rows],
        "selected": None if batch.selected is None else batch.selected[rows],
    }


def rows_of(chunks: list[Chunk]) -> NDArray[np.int64]:
    """The rows of the packed batch that the queries of chunks have."""
    return np.concatenate([np.arange(chunk.rows.start, chunk.rows.stop) for chunk in chunks] or [np.zeros(0, int)])


def edges_of(lens: list[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lens], dtype=np.int32)


def packed(batch: VarlenBatch, chunks: list[Chunk]) -> VarlenBatch:
    """A call of chunks as packed sequences, each with its own copy of the keys."""
    parts = batch.parts()
    keys = np.concatenate([np.arange(parts[c.seq][1].start, parts[c.seq][1].start + c.kv_len) for c in chunks]
                          or [np.zeros(0, int)])  # fmt: skip
    return batch.change(
        **of_tokens(batch, rows_of(chunks)),
        k=batch.k[keys],
        v=batch.v[keys],
        cu_q_lens=edges_of([chunk.rows.stop - chunk.rows.start for chunk in chunks]),
        cu_kv_lens=edges_of([chunk.kv_len for chunk in chunks]),
        max_q_len=None,
        max_kv_len=None,
    )


def paged(batch: VarlenBatch, chunks: list[Chunk], rng: np.random.Generator) -> Batch:
    """A call of chunks over pages of any size and order, which the chunks of a sequence share."""
    size = int(rng.choice(PAGE_SIZES))
    lens = np.diff(batch.cu_kv_lens)
    counts = -(-lens // size)
    order = rng.permutation(int(counts.sum()) + 3).astype(np.int32)
    tables = np.full((len(lens), int(max(counts, default=0)) + int(rng.integers(0, 3))), -1, np.int32)
    pages = [np.zeros((len(order), size, *array.shape[1:]), np.float32) for array in (batch.k, batch.v)]
    for seq, ((_, keys, _), start) in enumerate(zip(batch.parts(), edges_of(counts.tolist()), strict=False)):
        tables[seq, : counts[seq]] = order[start : start + counts[seq]]
        position = np.arange(lens[seq])
        for held, array in zip(pages, (batch.k, batch.v), strict=True):
            held[tables[seq][position // size], position % size] = array[keys]
    return Batch(
        **{name: getattr(batch, name) for name in OPTIONS} | of_tokens(batch, rows_of(chunks)),
        cache_dtype=batch.dtype,
        kv_pages=(pages[0], pages[1]),
        kv_lens=np.array([chunk.kv_len for chunk in chunks], np.int32),
        page_indices=tables[[chunk.seq for chunk in chunks]].reshape(len(chunks), tables.shape[1]),
        cu_q_lens=edges_of([chunk.rows.stop - chunk.rows.start for chunk in chunks]),
        causal=batch.causal or batch.key_ranges is not None,  # which replace it
    )


def parts_of(batch: Batch, rng: np.random.Generator) -> list[tuple[slice, Batch]]:
    """Each sequence of a causal batch over pages in a few parts, and the rows of each part among those of all.

    Ranges of keys replace the causal mask, so all keys are there from the first part on. A sequence stays whole if it
    has more queries than keys, or biases by position beside its ranges.
    """
    ranged = batch.key_ranges is not None
    whole = ranged and (batch.alibi_slopes is not None or batch.relative_bias is not None)
    parts = []
    for seq, (start, stop) in enumerate(batch.bounds()):
        alone, q_len = batch.alone(seq), stop - start
        old = alone.kv_len(0) - q_len
        count = min(q_len, 4) if old >= 0 and not whole else 1
        cuts = rng.choice(np.arange(1, q_len), count - 1, replace=False) if count > 1 else []
        for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), q_len], strict=True):
            own = {name: getattr(alone, name) for name in batch.OF_TOKENS}
            if (bias := own["relative_bias"]) is not None and bias.ndim == 2:
                del own["relative_bias"]
            own = {name: None if array is None else array[first:last] for name, array in own.items()}
            own |= {"cu_q_lens": edges_of([last - first])}
            if count > 1 and not ranged:
                own["kv_lens"] = np.array([old + last], np.int32)
            parts.append((slice(start + first, start + last), alone.change(**own)))
    return parts
