"""Calls of the indexer's logits and top-k: `IndexerSpec`, and the NumPy arrays built from it."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference._indexer import E4M3, planes
from ragged_attention.reference._kv_layout import sequence_bounds
from ragged_attention.testing import formats
from ragged_attention.testing.integers import count_as, garbage
from ragged_attention.testing.paged.specs import Arrays, misplaced, unread

BYTES = "uint8"  # the dtype of pages that hold e4m3 values followed by their scales


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KeysBatch(Arrays):
    """The arguments that calls of the indexer share: queries, and packed or paged keys."""

    OF_TOKENS: ClassVar[tuple[str, ...]] = ("q",)  # arguments with a row for each token

    q: NDArray[Any]
    keys: NDArray[Any]
    key_scale: NDArray[np.float32] | None = None
    starts: NDArray[np.int32] | None = None
    stops: NDArray[np.int32] | None = None
    max_keys: int | None = None
    page_indices: NDArray[np.int32] | None = None
    kv_lens: NDArray[np.int32] | None = None
    cu_q_lens: NDArray[np.int32] | None = None
    num_seqs: int | NDArray[np.int32] | None = None

    @property
    def from_own_start(self) -> bool:
        """Whether columns of packed keys are counted from the first key that a query sees."""
        return True

    @property
    def tokens_per_key(self) -> int:
        return 1

    def dtype_of(self, name: str, array: NDArray[Any]) -> str:
        return {"q": self.dtype, "keys": self.cache_dtype}.get(name) or str(array.dtype)

    def layout_of(self, name: str) -> str:
        return "rows" if name != "keys" else "blocks" if self.cache_dtype == BYTES else "pages"

    def definition(self) -> dict[str, Any]:
        """The keyword arguments for the reference function."""
        return self.arguments() | {"q_dtype": self.dtype, "key_dtype": self.cache_dtype}

    @property
    def paged(self) -> bool:
        return self.page_indices is not None

    @property
    def token_capacity(self) -> int:
        """The length, in tokens, of the longest sequence that a table can hold; the last tokens may have no key yet."""
        return (self.columns + 1) * self.tokens_per_key - 1

    @property
    def columns(self) -> int:
        if self.page_indices is not None:
            return self.page_indices.shape[1] * self.keys.shape[1]
        return len(self.keys) if self.max_keys is None else self.max_keys

    def bounds(self) -> list[tuple[int, int]]:
        """The first and the one-past-last query row of each live sequence of a paged call."""
        assert self.cu_q_lens is not None
        return sequence_bounds(self.cu_q_lens, self.num_seqs, len(self.q))

    def seen(self) -> Iterator[tuple[int, NDArray[np.int64], Any]]:
        """Yield, for each token that sees a key, the token, the columns that it sees, and their index into `keys`."""
        if self.page_indices is None:
            assert self.starts is not None and self.stops is not None  # noqa: PT018
            for token, edges in enumerate(zip(self.starts.tolist(), self.stops.tolist(), strict=True)):
                start, stop = (min(max(edge, 0), len(self.keys)) for edge in edges)
                rows = np.arange(start, max(start, stop))[: self.max_keys]
                if len(rows):
                    yield token, rows - start * self.from_own_start, rows
            return
        assert self.kv_lens is not None
        page_size = self.keys.shape[1]
        for seq, (first, stop) in enumerate(self.bounds()):
            kv_len = int(np.clip(self.kv_lens[seq], 0, self.token_capacity))
            for token in range(first, stop):
                columns = np.arange(max(kv_len - (stop - first) + token - first + 1, 0) // self.tokens_per_key)
                pages = self.page_indices[seq, columns // page_size]
                known = (pages >= 0) & (pages < len(self.keys))
                if known.any():
                    yield token, columns[known], (pages[known], columns[known] % page_size)

    def magnitudes(self) -> Self:
        """The batch with absolute values of queries, keys and scales, so that products do not cancel."""
        keys = self.keys.copy()
        if self.cache_dtype == BYTES:
            values, scales = planes(keys)
            values &= 0x7F
            scales[..., 3] &= 0x7F  # the byte that has the sign
        else:
            keys = keys & 0x7F if keys.dtype == np.uint8 else np.abs(keys)
        q = self.q & 0x7F if self.q.dtype == np.uint8 else np.abs(self.q)
        return self.change(q=q, keys=keys, key_scale=None if self.key_scale is None else np.abs(self.key_scale))

    def with_pages_moved(self, seed: int) -> Self:
        """The batch with the same keys in other pages."""
        assert self.page_indices is not None
        order = np.random.default_rng(seed).permutation(len(self.keys))
        table = np.argsort(order)[self.page_indices].astype(np.int32)
        scale = None if self.key_scale is None else self.key_scale[order]
        return self.change(keys=self.keys[order], key_scale=scale, page_indices=table)

    def parts(self) -> list[tuple[slice, Self]]:
        """The rows and the separate call of each sequence or, with packed keys, of each half of the queries."""

        def part(rows: slice, **others: Any) -> tuple[slice, Self]:
            return rows, self.change(**{name: getattr(self, name)[rows] for name in self.OF_TOKENS}, **others)

        if self.page_indices is None:
            cuts = [slice(0, len(self.q) // 2), slice(len(self.q) // 2, None)]
            ranges = {name: getattr(self, name, None) for name in ("starts", "stops", "indices", "topk_lens")}
            row_arrays = {name: array for name, array in ranges.items() if array is not None}
            return [part(rows, **{name: array[rows] for name, array in row_arrays.items()}) for rows in cuts]
        assert self.kv_lens is not None
        calls = []
        for seq, (start, stop) in enumerate(self.bounds()):
            tables = {"page_indices": self.page_indices[seq : seq + 1], "kv_lens": self.kv_lens[seq : seq + 1]}
            edges = np.array([0, stop - start], np.int32)
            calls.append(part(slice(start, stop), cu_q_lens=edges, num_seqs=None, **tables))
        return calls

    def poisoned(self) -> Self:
        """The batch with NaN in every key that no query sees, and in every query that sees no key."""
        unread = np.ones(self.keys.shape[: 2 if self.paged else 1], bool)
        idle = np.ones(len(self.q), bool)
        for token, _, where in self.seen():
            unread[where] = False
            idle[token] = False
        keys, q = self.keys.copy(), self.q.copy()
        scale = None if self.key_scale is None else self.key_scale.copy()
        if scale is not None:
            scale[unread] = np.nan
        if self.cache_dtype == BYTES:
            for plane in planes(keys):
                plane[unread] = 0xFF
        else:
            keys[unread] = np.nan if keys.dtype.kind == "f" else 0x7F
        q[idle] = np.nan if q.dtype.kind == "f" else 0x7F
        return self.change(keys=keys, q=q, key_scale=scale)

    def with_garbage_tails(self, seed: int) -> Self:
        """The batch with garbage in unused entries of its tables and lengths: any int32, or values that look valid."""
        if self.page_indices is None:
            return self
        assert self.kv_lens is not None
        assert self.cu_q_lens is not None
        capacity = self.token_capacity
        filling, bounds = unread(np.random.default_rng(seed)), self.bounds()
        table = filling(self.page_indices.shape, len(self.keys) - 1)
        for seq, (start, stop) in enumerate(bounds):
            rows = int(np.clip(self.kv_lens[seq], 0, capacity)) // self.tokens_per_key
            used = -(-rows // self.keys.shape[1]) * (stop > start)
            table[seq, :used] = self.page_indices[seq, :used]
        kv_lens, cu_q_lens = self.kv_lens.copy(), self.cu_q_lens.copy()
        kv_lens[len(bounds) :] = filling(len(kv_lens) - len(bounds), capacity)
        cu_q_lens[len(bounds) + 1 :] = filling(len(cu_q_lens) - len(bounds) - 1, len(self.q))
        return self.change(page_indices=table, kv_lens=kv_lens, cu_q_lens=cu_q_lens)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class IndexerBatch(KeysBatch):
    """The arguments of one `indexer_logits` call in NumPy."""

    OF_TOKENS: ClassVar[tuple[str, ...]] = ("q", "weights")

    weights: NDArray[np.float32]
    relative: bool = False
    ratio: int = 1
    indices: NDArray[np.int32] | None = None

    @property
    def columns(self) -> int:
        return super().columns if self.indices is None else self.indices.shape[1]

    def seen(self) -> Iterator[tuple[int, NDArray[np.int64], Any]]:
        if self.indices is None:
            yield from super().seen()
            return
        for token, entries in enumerate(self.indices.astype(np.int64)):
            columns = np.flatnonzero((entries >= 0) & (entries < len(self.keys)))
            if len(columns):
                yield token, columns, entries[columns]

    @property
    def from_own_start(self) -> bool:
        return self.relative

    @property
    def tokens_per_key(self) -> int:
        return self.ratio

    def logits_call(self) -> "IndexerBatch":
        """The `indexer_logits` call with the same arguments."""
        names = [field.name for field in dataclasses.fields(IndexerBatch)]
        return IndexerBatch(**{name: getattr(self, name) for name in names})

    def poisoned(self) -> Self:
        poisoned, idle = super().poisoned(), np.ones(len(self.q), bool)
        for token, _, _ in self.seen():
            idle[token] = False
        weights = np.where(idle[:, None], np.float32(np.nan), self.weights)
        return poisoned.change(weights=weights)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TopkBatch(IndexerBatch):
    """The arguments of one `indexer_topk` call in NumPy."""

    top_k: int
    candidate_blocks: NDArray[np.int32] | None = None
    candidate_block_size: int | None = None

    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in super().arguments().items() if name != "indices"}


def pages_of_bytes(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Pages in bytes with the e4m3 codes [P, G, D] and scales [P, G]."""
    num_pages, page_size, head_dim = codes.shape
    cache = np.empty((num_pages, page_size, 1, head_dim + 4), np.uint8)
    for plane, stored in zip(planes(cache), (codes, scales[..., None].astype("<f4").view(np.uint8)), strict=True):
        plane[...] = stored
    return cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """All parameters of a call except its values, which `build` draws from `seed`."""

    lens: tuple[tuple[int, int], ...] = ((1, 9),)  # (q_len, kv_len) of each sequence, also if keys are packed
    packed: bool = False
    heads: int = 3
    head_dim: int = 16
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: the same as `dtype`
    page_size: int = 4
    ratio: int = 1
    scaled: bool = False  # whether keys have separate scales; pages of bytes always contain scales
    exact: bool = False  # small integers, so that logits are exact and many are equal
    special: bool = False  # some visible keys hold NaN or infinities
    count: str = "none"  # the type of num_seqs: none, int or array
    spare_seqs: int = 0
    padding: int = 0  # query rows past the last sequence
    spare_columns: int = 0
    invalid_pages: bool = False
    repeated_pages: bool = False  # all table entries of a sequence are one page
    ranges: str = "causal"  # ranges of packed keys: causal, any, or wild (any int32)
    listed: int | None = None  # the number of entries in each token's list, which replaces its range of packed keys
    relative: bool = False
    max_keys: int | None = None
    top_k: int = 4
    candidate_block_size: int | None = None
    poison: bool = False
    garbage: bool = False
    strided: bool = False
    seed: int = 0

    @property
    def stored(self) -> str:
        return self.cache_dtype or self.dtype

    def build(self) -> IndexerBatch:
        rng = np.random.default_rng(self.seed)
        tables = self._ranges(rng) if self.packed else self._tables(rng)
        num_tokens = sum(q_len for q_len, _ in self.lens) + self.padding * (not self.packed)
        shape = (num_tokens, self.heads)
        batch = IndexerBatch(
            q=formats.stored(self._numbers(rng, (*shape, self.head_dim)), self.dtype),
            weights=self._numbers(rng, shape).astype(np.float32),
            **tables,
            dtype=self.dtype,
            cache_dtype=self.stored,
            strided=self.strided,
        )
        batch = batch.with_garbage_tails(self.seed) if self.garbage else batch
        return batch.poisoned() if self.poison else batch

    def build_topk(self) -> TopkBatch:
        batch, lists = self.build(), {}
        if self.candidate_block_size is not None:
            rng = np.random.default_rng(self.seed + 1)
            blocks = -(-batch.columns // self.candidate_block_size)
            listed = rng.integers(-1, blocks + 1, (len(batch.q), max(1, blocks // 2 + 1)), np.int32)
            wild = garbage(rng, listed.shape, blocks)
            lists = {
                "candidate_blocks": np.where(rng.random(listed.shape) < 0.2, wild, listed),
                "candidate_block_size": self.candidate_block_size,
            }
        values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        return TopkBatch(**values, top_k=self.top_k, **lists)

    def _numbers(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        return rng.integers(-2, 3, shape).astype(np.float32) if self.exact else rng.standard_normal(shape)

    def _keys(self, rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, Any]:
        """The keys [*shape, head_dim], and their scales if they have separate ones."""
        numbers = self._numbers(rng, (*shape, self.head_dim))
        if self.special:
            kinds = np.array([np.nan, np.inf, -np.inf], np.float32)
            numbers = np.where(rng.random((*shape, 1)) < 0.1, rng.choice(kinds, (*shape, 1)), numbers)
        scales = rng.uniform(0.5, 2.0, shape).astype(np.float32)
        if self.exact:
            scales = (2.0 ** rng.integers(-1, 2, shape)).astype(np.float32)
        if self.stored == BYTES:
            return {"keys": pages_of_bytes(formats.stored(numbers, E4M3), scales)}
        return {"keys": formats.stored(numbers, self.stored), "key_scale": scales if self.scaled else None}

    def _ranges(self, rng: np.random.Generator) -> dict[str, Any]:
        """The packed keys of consecutive sequences, and each query's range or list of keys."""
        edges = np.cumsum([0, *(kv_len for _, kv_len in self.lens)])
        starts, stops = [], []
        for (q_len, kv_len), first in zip(self.lens, edges.tolist(), strict=False):
            starts += [first] * q_len
            stops += [first + max(kv_len - q_len + row + 1, 0) for row in range(q_len)]
        ranges = {"starts": np.array(starts, np.int32), "stops": np.array(stops, np.int32)}
        limit = int(edges[-1])
        if self.ranges == "any":
            ranges = {name: rng.integers(-2, limit + 3, len(starts), np.int32) for name in ranges}
        elif self.ranges == "wild":
            ranges = {name: garbage(rng, len(starts), limit) for name in ranges}
        if self.listed is not None:
            return self._keys(rng, (limit,)) | {"indices": self._lists(rng, ranges["starts"], ranges["stops"], limit)}
        return self._keys(rng, (limit,)) | ranges | {"relative": self.relative, "max_keys": self.max_keys}

    def _lists(self, rng: np.random.Generator, starts: Any, stops: Any, limit: int) -> NDArray[np.int32]:
        """Lists of packed keys: a random choice from each token's causal range, padded with -1; or arbitrary ones."""
        shape = (len(starts), self.listed or 0)
        if self.ranges == "wild":
            return garbage(rng, shape, limit)
        if self.ranges == "any":
            return rng.integers(-1, limit + 2, shape, np.int32)
        lists = np.full(shape, -1, np.int32)
        for row, start, stop in zip(lists, starts, stops, strict=True):
            chosen = np.sort(rng.permutation(np.arange(start, stop))[: shape[1]])
            row[: len(chosen)] = chosen
        return lists

    def _tables(self, rng: np.random.Generator) -> dict[str, Any]:
        used = [-(-(kv_len // self.ratio) // self.page_size) for _, kv_len in self.lens]
        num_pages, spare = sum(used) + 2, self.spare_seqs * (self.count != "none")
        order = rng.permutation(num_pages)
        table = np.zeros((len(self.lens) + spare, max(used, default=0) + self.spare_columns), np.int32)
        for seq, (count, start) in enumerate(zip(used, np.cumsum([0, *used]), strict=False)):
            table[seq, :count] = order[start] if self.repeated_pages else order[start : start + count]
        if self.invalid_pages:
            table = misplaced(rng, table, num_pages)
        q_lens = [q_len for q_len, _ in self.lens]
        return self._keys(rng, (num_pages, self.page_size)) | {
            "page_indices": table,
            "kv_lens": np.array([kv_len for _, kv_len in self.lens] + [0] * spare, np.int32),
            "cu_q_lens": np.array([0, *np.cumsum(q_lens), *[sum(q_lens)] * spare], np.int32),
            "num_seqs": count_as(self.count, len(self.lens)),
            "ratio": self.ratio,
        }
