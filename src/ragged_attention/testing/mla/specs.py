"""Batches of latent attention, and the specs from which they are built: `PrefillSpec` and `DecodeSpec`.

As with `Spec`, Hypothesis draws the fields and one seed, and NumPy fills in the values. Queries lie within
[-magnitude, magnitude]. Latents are a tenth of standard normal numbers, as is typical for models.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference.mla_decode import mla_decode
from ragged_attention.reference.sparse_mla_prefill import sparse_mla_prefill
from ragged_attention.testing import formats
from ragged_attention.testing.integers import INT32, garbage
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla.latents import Cache
from ragged_attention.testing.paged.specs import Arrays, Contradiction

BYTES = ("uint8", "int8", "float8_e4m3fn")
CACHES = ("kv", "kv_cache", "extra_kv_cache", "cache")
ENTRIES = ("distinct", "any", "repeated", "none")
WILD = (-1, -2, -123456, INT32.min, INT32.max, 114514, 2147480000)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LatentArrays(Arrays):
    """The base of batches over latent caches."""

    PAGES: ClassVar[tuple[str, ...]] = ()  # the names of the caches among the arguments

    cache_dtype: str = "uint8"

    def layout_of(self, name: str) -> str:
        return "pages" if name in self.PAGES else "rows"

    def dtype_of(self, name: str, array: NDArray[Any]) -> str:
        if name in CACHES and array.dtype == np.uint8:
            return self.cache_dtype
        if name == "q":
            return self.q_dtype or self.dtype
        return self.dtype if name in CACHES else str(array.dtype)


def magnitudes_first(batch: Any) -> Any:
    """A batch in float32 with the same logits, whose out is the weighted mean of the values' magnitudes.

    Its latents begin with columns of these magnitudes, for which queries are 0.
    """
    wide, d_v = batch.widened(), batch.d_v
    caches = {name: rows for name in batch.PAGES if (rows := getattr(wide, name)) is not None}
    rows = {name: np.concatenate([np.abs(cache[..., :d_v]), cache], axis=-1) for name, cache in caches.items()}
    q = np.concatenate([np.zeros((*wide.q.shape[:-1], d_v), np.float32), wide.q], axis=-1)
    scale = batch.q.shape[-1] ** -0.5 if batch.sm_scale is None else batch.sm_scale
    return wide.change(**rows, q=q, sm_scale=scale)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AnyLatents(LatentArrays):
    """The base of batches whose cache may also be a plain 8-bit cache, with one byte for each column of a row."""

    CACHE: ClassVar[str]  # the name of the cache argument
    ROWS: ClassVar[str]  # the name of an argument whose last dimension is a row's width

    cache_format: str | None = None
    cache_layout: str | None = None

    @property
    def code_dtype(self) -> str | None:
        """The dtype of a plain 8-bit cache; None for any other cache."""
        cache, rows = getattr(self, self.CACHE), getattr(self, self.ROWS)
        return self.cache_dtype if cache.itemsize == 1 and cache.shape[-1] == rows.shape[-1] else None

    @property
    def format(self) -> str:
        if self.code_dtype is not None:
            return "plain"
        return latents.format_of(getattr(self, self.CACHE), self.cache_format, self.cache_layout)

    def dtype_of(self, name: str, array: NDArray[Any]) -> str:
        return self.cache_dtype if name == self.CACHE and self.code_dtype else super().dtype_of(name, array)


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """One cache of a call, and the index lists into it."""

    name: str
    cache: Cache
    format: str
    indices: NDArray[np.int32]  # [..., N]
    lens: NDArray[np.int32]  # the shape of `indices` without its last dimension

    @property
    def num_slots(self) -> int:
        return self.cache.shape[0] * self.cache.shape[1]

    @property
    def selects(self) -> NDArray[np.bool_]:
        """Whether each entry selects a slot, in the shape of `indices`."""
        inside = (self.indices >= 0) & (self.indices < self.num_slots)
        return inside & (np.arange(self.indices.shape[-1]) < self.lens[..., None])

    @property
    def unread(self) -> NDArray[np.bool_]:
        """Whether each slot is selected by no entry, bool [slots]."""
        unread = np.ones(self.num_slots, bool)
        unread[self.indices[self.selects]] = False
        return unread

    def poisoned(self, kind: str, seed: int) -> Cache:
        return latents.poisoned(self.cache, self.format, self.unread, kind, np.random.default_rng(seed))

    @property
    def widened(self) -> Cache:
        """The cache in float32, dequantised if it is quantised."""
        with np.errstate(all="ignore"):
            rows = latents.rows_of(self.cache, self.format).astype(np.float32)
        return rows.reshape(*self.cache.shape[:2], *rows.shape[1:])


def _lens(given: NDArray[np.int32] | None, indices: NDArray[np.int32]) -> NDArray[np.int32]:
    """The length of each list, from lengths in any of their accepted shapes."""
    if given is None:
        return np.full(indices.shape[:-1], indices.shape[-1], np.int32)
    given = given.reshape(*given.shape, *(1,) * (indices.ndim - 1 - given.ndim))
    return np.broadcast_to(given, indices.shape[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefillBatch(LatentArrays):
    """The arguments of one `sparse_mla_prefill` call in NumPy."""

    OPERATION: ClassVar[str] = "sparse_mla_prefill"
    PAGES: ClassVar[tuple[str, ...]] = ("kv",)

    q: NDArray[np.float32]
    kv: Cache  # rows [s_kv, K, d_qk], or pages
    indices: NDArray[np.int32]
    sm_scale: float | None = None
    d_v: int = 512
    sinks: NDArray[np.float32] | None = None
    topk_lens: NDArray[np.int32] | None = None
    cache_format: str | None = None
    cache_layout: str | None = None
    deterministic: bool = False
    out_dtype: str | None = None

    @property
    def selection(self) -> Selection:
        pages = self.kv[:, None] if self.kv.ndim == 3 else self.kv
        lens = _lens(self.topk_lens, self.indices)
        return Selection("kv", pages, self.format_of(pages), self.indices, lens)

    def format_of(self, pages: Cache) -> str:
        return latents.format_of(pages, self.cache_format, self.cache_layout)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.kv.shape[-2]

    def fully_masked_heads(self) -> NDArray[np.bool_]:
        """Whether a query head selects no row, bool [T, H]."""
        return np.repeat(~self.selection.selects.any(axis=-1), self.group, axis=1)

    def poisoned(self, kind: str, seed: int = 0) -> Self:
        """The batch with poison in every row that no query selects; `latents.poisoned` explains the kinds."""
        return self.change(kv=self.selection.poisoned(kind, seed).reshape(self.kv.shape))

    def widened(self) -> Self:
        """The batch with its caches in float32."""
        wide = self.selection.widened
        wide = wide[:, 0] if self.kv.ndim == 3 else wide
        return self.change(kv=wide, dtype="float32", cache_format=None, cache_layout=None, out_dtype=None)

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """The reference's out, max_logits and lse, computed in float64 from the rounded inputs."""
        return sparse_mla_prefill(**self.arguments())

    def mean_magnitudes(self) -> NDArray[np.float64]:
        """The weighted means of the values' magnitudes, in out's shape."""
        return magnitudes_first(self).expected()[0]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeBatch(LatentArrays):
    """The arguments of one `mla_decode` call in NumPy."""

    OPERATION: ClassVar[str] = "mla_decode"
    PAGES: ClassVar[tuple[str, ...]] = ("kv_cache", "extra_kv_cache")

    q: NDArray[np.float32]
    kv_cache: Cache
    page_indices: NDArray[np.int32] | None = None
    kv_lens: NDArray[np.int32] | None = None
    indices: NDArray[np.int32] | None = None
    d_v: int = 512
    sm_scale: float | None = None
    causal: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: NDArray[np.float32] | None = None
    topk_lens: NDArray[np.int32] | None = None
    extra_kv_cache: Cache | None = None
    extra_indices: NDArray[np.int32] | None = None
    extra_topk_lens: NDArray[np.int32] | None = None
    cache_format: str | None = None
    cache_layout: str | None = None
    out_dtype: str | None = None

    @property
    def sparse(self) -> bool:
        return self.indices is not None

    @property
    def num_seqs(self) -> int:
        return self.q.shape[0]

    @property
    def format(self) -> str:
        return latents.format_of(self.kv_cache, self.cache_format, self.cache_layout)

    def selections(self) -> Iterator[Selection]:
        """Each cache of the call with its lists. In a dense call, the lists follow from page table and lengths."""
        if self.indices is None:
            every = self.listed()
            yield Selection("kv_cache", self.kv_cache, self.format, every, _lens(None, every))
            return
        yield Selection("kv_cache", self.kv_cache, self.format, self.indices, _lens(self.topk_lens, self.indices))
        if self.extra_kv_cache is not None and self.extra_indices is not None:
            lens = _lens(self.extra_topk_lens, self.extra_indices)
            extra_format = latents.format_of(self.extra_kv_cache, None, self.cache_layout)
            yield Selection("extra_kv_cache", self.extra_kv_cache, extra_format, self.extra_indices, lens)

    def listed(self) -> NDArray[np.int32]:
        """The slots that each query of a dense call sees, [S, Q, longest]; -1 at positions that it does not see."""
        assert self.page_indices is not None
        assert self.kv_lens is not None
        num_pages, page_size = self.kv_cache.shape[:2]
        num_q_tokens = self.q.shape[1]
        position = np.arange(self.page_indices.shape[1] * page_size)
        pages = self.page_indices.astype(np.int64)[:, position // page_size]
        slots = np.where((pages >= 0) & (pages < num_pages), pages * page_size + position % page_size, -1)
        end = np.clip(self.kv_lens, 0, len(position))[:, None]
        query_position = end - (num_q_tokens - np.arange(num_q_tokens))  # the position of each query
        first = (
            np.zeros_like(query_position) if self.sliding_window is None else query_position - self.sliding_window + 1
        )
        stop = query_position + 1 if self.causal else np.broadcast_to(end, query_position.shape)
        seen = (position >= first[..., None]) & (position < stop[..., None])
        return np.where(seen, slots[:, None], -1).astype(np.int32)

    def fully_masked(self) -> NDArray[np.bool_]:
        """Whether a query sees no key, bool [S, Q]."""
        return ~np.any([selection.selects.any(axis=-1) for selection in self.selections()], axis=0)

    def poisoned(self, kind: str, seed: int = 0) -> Self:
        """The batch with poison in every slot that no query sees; `latents.poisoned` explains the kinds."""
        return self.change(**{selection.name: selection.poisoned(kind, seed) for selection in self.selections()})

    def widened(self) -> Self:
        """The batch with its caches in float32."""
        wide = {selection.name: selection.widened for selection in self.selections()}
        return self.change(**wide, dtype="float32", cache_format=None, cache_layout=None, out_dtype=None)

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The reference's out and lse, computed in float64 from the rounded inputs."""
        return mla_decode(**self.arguments())

    def mean_magnitudes(self) -> NDArray[np.float64]:
        """The weighted means of the values' magnitudes, in out's shape."""
        return magnitudes_first(self).expected()[0]

    def alone(self, seq: int) -> Self:
        """The call with only one of the sequences."""
        of_sequences = ("q", "page_indices", "kv_lens", "indices", "topk_lens", "extra_indices", "extra_topk_lens")
        arrays = {name: getattr(self, name) for name in of_sequences}
        return self.change(**{name: value[seq : seq + 1] for name, value in arrays.items() if value is not None})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """The parameters that calls of sparse prefill and of decode over latents share."""

    heads: int = 1
    kv_heads: int = 1
    d_qk: int = 48  # row width of a plain cache; quantised formats define theirs
    d_v: int = 32
    dtype: str = "float32"
    format: str = "plain"
    cache_dtype: str = "uint8"  # the dtype in which the bytes of a quantised cache are passed
    scales: str = "arbitrary"
    topk: int = 8
    entries: str = "any"
    sm_scale: float | None = None
    sinks: str | None = None  # kind of sinks: normal, -inf, +inf or mixed
    poison: str | None = None  # poison in slots that must not be read: nan or inf
    strided: bool = False
    magnitude: float = 1.0
    shrink: float = 10.0  # standard normal rows are divided by this
    seed: int = 0

    def fitted(self) -> Self:
        """The spec whose arrays `build` creates: this spec, or what an enclosing `fitting` makes of it."""
        return _fit.get()(self)  # type: ignore[return-value]

    @property
    def width(self) -> int:
        return self.d_qk if self.format == "plain" else latents.LAID_OUT[self.format].width

    def _queries(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        q = np.clip(rng.standard_normal((*shape, self.heads, self.width)), -1, 1) * self.magnitude
        return formats.rounded(q, self.dtype)

    def _pages(self, rng: np.random.Generator, num_pages: int, page_size: int, format: str | None = None) -> Cache:
        format = format or self.format
        if format != "plain" and self.kv_heads > 1:
            raise Contradiction("quantised rows have one head")
        rows = rng.standard_normal((num_pages, page_size, self.kv_heads, self.width)) / self.shrink
        rows = formats.rounded(rows, self.dtype)
        return rows if format == "plain" else latents.quantised(rows, format, self.scales, rng)

    def _common(self, rng: np.random.Generator) -> dict[str, Any]:
        if self.d_v > self.width:
            raise Contradiction("values are columns of the rows")
        return {
            "d_v": self.d_v,
            "sm_scale": self.sm_scale,
            "sinks": sinks_of(rng, self.heads, self.sinks),
            "dtype": self.dtype,
            "cache_dtype": self.cache_dtype,
            "cache_layout": latents.layout_of(self.format),
            "strided": self.strided,
        }


Fit = Callable[[Any], Any]  # takes a spec and returns the spec to build in its place


def as_it_is(spec: LatentSpec) -> LatentSpec:
    return spec


def at_tuned_widths(spec: LatentSpec) -> LatentSpec:
    """The spec with the widths and dtypes of real models, for kernels that support no others.

    In dense decodes, the page size 5 becomes 64, for which such kernels have a special path.
    """
    dense = isinstance(spec, DecodeSpec) and not spec.topk
    paged = isinstance(spec, DecodeSpec) and spec.page_size == 5
    changes: dict[str, Any] = {"page_size": 64} if dense and paged else {}
    return dataclasses.replace(
        spec,
        d_qk=512 if spec.d_qk == spec.d_v else 576,
        d_v=512,
        dtype="float16" if dense and spec.dtype == "float16" else "bfloat16",
        **changes,
    )


_fit: contextvars.ContextVar[Fit] = contextvars.ContextVar("fit", default=as_it_is)


@contextlib.contextmanager
def fitting(fit: Fit) -> Iterator[None]:
    """Inside this context, `build` builds `fit(spec)` in place of each spec."""
    token = _fit.set(fit)
    try:
        yield
    finally:
        _fit.reset(token)


def sinks_of(rng: np.random.Generator, heads: int, kind: str | None) -> NDArray[np.float32] | None:
    if kind is None:
        return None
    normal = rng.standard_normal(heads).astype(np.float32)
    if kind == "mixed":
        normal = np.where(rng.random(heads) < 0.3, np.float32(-np.inf), normal)
        normal = np.where(rng.random(heads) < 0.3, np.float32(np.inf), normal)
    return {"-inf": np.full_like(normal, -np.inf), "+inf": np.full_like(normal, np.inf)}.get(kind, normal)


def lists_of(
    rng: np.random.Generator, pools: list[NDArray[np.int32]], topk: int, entries: str, num_slots: int
) -> NDArray[np.int32]:
    """Lists [pools, topk] of slots, each drawn from one of the pools.

    The kinds of `entries` are "distinct": different slots of the pool, padded with -1 and shuffled; "any": like
    "distinct", but with some duplicates and some entries that select nothing; "repeated": one slot in every entry;
    "none": only entries that select nothing.
    """
    lists = np.full((len(pools), topk), -1, np.int64)
    nothing = np.array([*WILD, num_slots, num_slots + 1], np.int64)
    for row, pool in zip(lists, pools, strict=True):
        count = 0 if entries == "none" else min(len(pool), topk)
        row[:count] = rng.choice(pool, count, replace=False) if count else 0
        if entries == "repeated" and count:
            row[:] = rng.choice(pool)
        elif entries == "any" and count:
            duplicate = rng.random(topk) < 0.3
            row[duplicate] = rng.choice(row[:count], duplicate.sum())
    if entries in ("any", "none"):
        invalid = rng.random(lists.shape) < (0.3 if entries == "any" else 1.0)
        kind = rng.choice(nothing, lists.shape)
        lists = np.where(invalid, np.where(rng.random(lists.shape) < 0.5, -1, kind), lists)
    return rng.permuted(lists, axis=1).astype(np.int32)


def lens_of(rng: np.random.Generator, shape: tuple[int, ...], topk: int, kind: str | None) -> NDArray[np.int32] | None:
    """Lengths of lists: None, "inside" [0, topk], "zero", or "wild" (also negative or far too long)."""
    if kind is None:
        return None
    inside = rng.integers(0, topk + 1, shape, np.int32)
    if kind == "wild":
        beyond = np.array([0, -1, -2, INT32.min, topk + 1, 10**6, INT32.max], np.int32)
        return np.where(rng.random(shape) < 0.5, rng.choice(beyond, shape), inside)
    return {"zero": np.zeros_like(inside)}.get(kind, inside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillSpec(LatentSpec):
    """The parameters of a `sparse_mla_prefill` call."""

    tokens: int = 3
    rows: int = 20  # s_kv, or the number of slots, which is rounded up to whole pages
    page_size: int | None = None  # None for packed rows
    lens: str | None = None  # kind of list lengths: inside, zero or wild
    deterministic: bool = False
    out_dtype: str | None = None

    def build(self) -> PrefillBatch:
        return self.fitted()._built()

    def _built(self) -> PrefillBatch:
        rng = np.random.default_rng(self.seed)
        page_size = self.page_size or 1
        num_pages = -(-self.rows // page_size)
        kv = self._pages(rng, num_pages, page_size)
        kv = kv if self.page_size else kv[:, 0]
        num_slots = num_pages * page_size
        pools = [np.arange(num_slots, dtype=np.int32)] * (self.tokens * self.kv_heads)
        indices = lists_of(rng, pools, self.topk, self.entries, num_slots)
        batch = PrefillBatch(
            q=self._queries(rng, (self.tokens,)),
            kv=kv,
            indices=indices.reshape(self.tokens, self.kv_heads, self.topk),
            topk_lens=lens_of(rng, (self.tokens,), self.topk, self.lens),
            deterministic=self.deterministic,
            out_dtype=self.out_dtype,
            **self._common(rng),
        )
        return batch.poisoned(self.poison, self.seed) if self.poison else batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec(LatentSpec):
    """The parameters of an `mla_decode` call, which is dense if `topk` is 0."""

    kv_lens: tuple[int, ...] = (17, 5)
    q_tokens: int = 1
    page_size: int = 4
    causal: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    out_dtype: str | None = None
    spare_columns: int = 0  # columns of page_indices beyond the longest sequence
    spare_pages: int = 2
    invalid_pages: bool = False  # whether some page indices within the lengths are out of range
    garbage: bool = False  # whether unused page indices are garbage
    lens: str | None = None  # kind of list lengths: inside, zero or wild
    lens_by_query: bool = False  # whether lengths have the shape [S, Q] rather than [S]
    extra_topk: int = 0
    extra_format: str | None = None  # None: the first cache's format; any other must have the same layout
    extra_slots: int = 10
    extra_page_size: int = 3
    extra_lens: str | None = None
    extra_lens_by_query: bool = False

    def build(self) -> DecodeBatch:
        return self.fitted()._built()

    def _built(self) -> DecodeBatch:
        if self.topk and self.kv_heads > 1:
            raise Contradiction("lists are of rows of one head")
        rng = np.random.default_rng(self.seed)
        num_seqs = len(self.kv_lens)
        used = [-(-kv_len // self.page_size) for kv_len in self.kv_lens]
        num_pages = sum(used) + self.spare_pages
        table = self._table(rng, used, num_pages)
        batch = DecodeBatch(
            q=self._queries(rng, (num_seqs, self.q_tokens)),
            kv_cache=self._pages(rng, num_pages, self.page_size),
            page_indices=table,
            kv_lens=np.array(self.kv_lens, np.int32),
            causal=self.causal,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            out_dtype=self.out_dtype,
            **self._common(rng),
        )
        if self.topk:
            batch = batch.change(**self._sparse(rng, batch), page_indices=None, kv_lens=None)
        return batch.poisoned(self.poison, self.seed) if self.poison else batch

    def _table(self, rng: np.random.Generator, used: list[int], num_pages: int) -> NDArray[np.int32]:
        order = rng.permutation(num_pages)
        shape = (len(used), max(used, default=0) + self.spare_columns)
        table = garbage(rng, shape, num_pages) if self.garbage else np.zeros(shape, np.int32)
        for row, count, start in zip(table, used, np.cumsum([0, *used]), strict=False):
            row[:count] = order[start : start + count]
        if self.invalid_pages:
            beyond = np.array([-1, num_pages, INT32.min, INT32.max, 2147480000], np.int64)
            table = np.where(rng.random(shape) < 0.3, rng.choice(beyond, shape), table).astype(np.int32)
        return table

    def _sparse(self, rng: np.random.Generator, dense: DecodeBatch) -> dict[str, Any]:
        """The arguments of a sparse call. Each query's list has slots that the query sees in the dense call."""
        pools = [slots[slots >= 0] for seq in dense.listed() for slots in seq]
        num_slots = dense.kv_cache.shape[0] * self.page_size
        of_queries = dense.q.shape[:2]
        sparse: dict[str, Any] = {
            "indices": lists_of(rng, pools, self.topk, self.entries, num_slots).reshape(*of_queries, self.topk),
            "topk_lens": lens_of(rng, of_queries[: 1 + self.lens_by_query], self.topk, self.lens),
        }
        if self.extra_topk:
            num_pages = -(-self.extra_slots // self.extra_page_size)
            slots = np.arange(num_pages * self.extra_page_size, dtype=np.int32)
            lists = lists_of(rng, [slots] * len(pools), self.extra_topk, self.entries, len(slots))
            counted = of_queries[: 1 + self.extra_lens_by_query]
            sparse |= {
                "extra_kv_cache": self._pages(rng, num_pages, self.extra_page_size, self.extra_format),
                "extra_indices": lists.reshape(*of_queries, self.extra_topk),
                "extra_topk_lens": lens_of(rng, counted, self.extra_topk, self.extra_lens),
            }
        return sparse
