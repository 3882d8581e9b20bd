"""The parameters of a batch (`Spec`, which Hypothesis draws) and the NumPy arrays built from them (`Batch`).

Hypothesis draws only the fields and one seed, and NumPy fills in the values. So a failing batch shrinks to few
sequences and features, and its printed `Spec(...)` builds the same arrays again.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference._kv_layout import per_head, sequence_bounds
from ragged_attention.reference._scaled_rows import quantized
from ragged_attention.reference.ragged_paged_attention import (
    ragged_paged_attention,
    rows_of,
    seen_by_heads,
    split_values,
    visible,
)
from ragged_attention.testing import formats
from ragged_attention.testing.formats import QUANTIZED
from ragged_attention.testing.integers import INT32, count_as, garbage
from ragged_attention.testing.ranges import ranges_of
from ragged_attention.testing.selected import Selection, lists_of

Pages = NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]


def pages_of(kv_pages: Pages) -> list[NDArray[Any]]:
    """The one or two arrays of the cache."""
    return list(kv_pages) if isinstance(kv_pages, tuple) else [kv_pages]


def like_pages(kv_pages: Pages, arrays: list[NDArray[Any]]) -> Pages:
    """`arrays` in the layout of `kv_pages`."""
    return (arrays[0], arrays[1]) if isinstance(kv_pages, tuple) else arrays[0]


def split(kv_pages: Pages) -> tuple[NDArray[Any], NDArray[Any]]:
    """The stored K and V, each [P, G, K, D], as views of the pages."""
    return kv_pages if isinstance(kv_pages, tuple) else (kv_pages[:, :, 0::2], kv_pages[:, :, 1::2])


def unread(rng: np.random.Generator) -> Callable[[int | tuple[int, ...], int], NDArray[np.int32]]:
    """A function that makes values for unused index entries, from their shape and a limit.

    The values are arbitrary int32, or lie in [0, limit] and therefore look valid.
    """
    if rng.random() < 0.5:
        return lambda shape, limit: rng.integers(0, limit + 1, shape, np.int32)
    return lambda shape, limit: garbage(rng, shape, limit)


def misplaced(rng: np.random.Generator, table: NDArray[np.int32], num_pages: int) -> NDArray[np.int32]:
    """The page table with some entries that name no page."""
    beyond = np.array([-1, num_pages, INT32.min, INT32.max, -num_pages, 2**30], np.int64)
    return np.where(rng.random(table.shape) < 0.3, rng.choice(beyond, table.shape), table).astype(np.int32)


class Contradiction(ValueError):
    """Raised if the fields of a spec contradict each other, so that no such call exists."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Arrays:
    """The base of all batches: the dtypes in which their arrays are passed, and their memory layout."""

    dtype: str = "float32"
    cache_dtype: str = "float32"
    stored: tuple[str, str] | None = (
        None  # the formats of keys and values, from `formats.KV_FORMATS`; replaces cache_dtype
    )
    q_dtype: str | None = None  # q's dtype if it differs from `dtype`, to which operations then widen q
    strided: bool = False  # in torch, whether every array is a view with garbage in its gaps
    # For each argument that has a stride of 0 in torch, the axis of this stride. Slices along the axis are equal.
    expanded: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        return self.stored is not None or self.cache_dtype in QUANTIZED

    @property
    def kind(self) -> str:
        """The kind of bounds for the results; 8-bit caches use those of bfloat16."""
        return "bfloat16" if self.quantized else self.dtype

    @property
    def formats(self) -> dict[str, Any]:
        """The keyword arguments with which the reference reads quantised pages."""
        if not self.quantized:
            return {}
        k_format, v_format = (formats.KV_FORMATS[name] for name in self.stored or (self.cache_dtype,) * 2)
        return {"k_format": k_format, "v_format": v_format}

    def change(self, **fields: Any) -> Self:
        return dataclasses.replace(self, **fields)

    def arguments(self) -> dict[str, Any]:
        """The call's arguments by name, with floats as float32 and 8-bit floats as bits."""
        base_fields = {field.name for field in dataclasses.fields(Arrays)}
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in base_fields
        }

    def dtype_of(self, name: str, array: NDArray[Any]) -> str:
        """The dtype in which an argument is passed to the front end."""
        if name in ("q", "k", "v", "outs"):
            return self.q_dtype or self.dtype if name == "q" else self.dtype
        if name == "kv_pages":
            return self.dtype_of_pages(array)
        if name.endswith("_scale_pages"):
            return self.formats[f"{name[0]}_format"].scales
        return str(array.dtype)

    def dtype_of_pages(self, pages: NDArray[Any]) -> str:
        """The dtype of one array of `kv_pages`."""
        if self.stored is None:
            return self.cache_dtype
        pair = getattr(self, "kv_pages")  # noqa: B009  (batches without formats have none)
        return formats.element_of(self.formats["v_format" if pages is pages_of(pair)[-1] else "k_format"])

    def layout_of(self, name: str) -> str:
        """How an argument may be strided.

        "rows": freely; "pages": not in the last dimension; "blocks": only between whole pages.
        """
        return "pages" if name == "kv_pages" else "rows"


def by_q_head(of_kv_heads: Any, heads: int) -> NDArray[np.bool_]:
    """Flags for each row and query head [rows, H], from flags for each KV head, or for all heads [K or 1, rows]."""
    return np.repeat(of_kv_heads, heads // len(of_kv_heads), axis=0).T


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RaggedTables(Arrays, abc.ABC):
    """The base of batches of ragged queries over pages: their tables, and the keys that each query sees."""

    OPERATION: ClassVar[str]
    OF_TOKENS: ClassVar[tuple[str, ...]] = ("q", "key_ranges")  # arguments with a row for each token

    q: NDArray[np.float32]
    kv_lens: NDArray[np.int32]
    page_indices: NDArray[np.int32]
    cu_q_lens: NDArray[np.int32]
    num_seqs: int | NDArray[np.int32] | None = None
    max_q_len: int | None = None
    sm_scale: float | None = None
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: NDArray[np.float32] | None = None
    key_ranges: NDArray[np.int32] | None = None
    q_scale: float | NDArray[np.float32] | None = None
    out_dtype: str | None = None

    @property
    def kind(self) -> str:
        """The kind of bounds: bfloat16 for 8-bit caches, else q's dtype or, if that is float32, the results' dtype."""
        if any(pages.itemsize == 1 for pages in self.pages):
            return "bfloat16"
        return self.dtype if self.dtype != "float32" else self.out_dtype or self.dtype

    @property
    @abc.abstractmethod
    def pages(self) -> list[NDArray[Any]]:
        """The arrays of the cache, each [P, G, ...]."""

    @abc.abstractmethod
    def with_pages(self, arrays: list[NDArray[Any]]) -> Self:
        """The batch with other arrays of the cache."""

    @abc.abstractmethod
    def pages_poisoned(self, kind: str, unread: NDArray[np.bool_], rng: np.random.Generator) -> list[NDArray[Any]]:
        """The cache's arrays with NaN or infinity in the slots `unread` [P, G, K or 1]."""

    @abc.abstractmethod
    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The reference's out and lse, computed in float64 from the rounded inputs."""

    @abc.abstractmethod
    def expected_max_logits(self) -> NDArray[np.float64]:
        """The reference's largest logits."""

    @abc.abstractmethod
    def mean_magnitudes(self) -> NDArray[np.float64]:
        """The weighted means of the values' magnitudes, in out's shape."""

    def drafted(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """The rows [start, stop) of the draft mask, or None."""
        del start, stop
        return None

    def lists(self, start: int, stop: int) -> tuple[NDArray[np.int32] | None, int | None]:
        """The rows [start, stop) of the lists of blocks, and the block size; None without lists."""
        del start, stop
        return None, None

    def masked(self, **mask: Any) -> Self:
        """The batch without key ranges and lists of blocks, and with the given mask arguments."""
        return self.change(key_ranges=None, **mask)

    @property
    def page_size(self) -> int:
        return self.pages[0].shape[1]

    @property
    def num_pages(self) -> int:
        return self.pages[0].shape[0]

    def bounds(self) -> list[tuple[int, int]]:
        """The first and the one-past-last query row of each live sequence."""
        return sequence_bounds(self.cu_q_lens, self.num_seqs, len(self.q))

    def alone(self, seq: int) -> Self:
        """The call with only one of the live sequences."""
        start, stop = self.bounds()[seq]
        of_tokens = {name: getattr(self, name) for name in self.OF_TOKENS}
        if (bias := of_tokens.get("relative_bias")) is not None and bias.ndim == 2:  # one bias shared by all queries
            del of_tokens["relative_bias"]
        return self.change(
            kv_lens=self.kv_lens[seq : seq + 1],
            page_indices=self.page_indices[seq : seq + 1],
            cu_q_lens=np.array([0, stop - start], np.int32),
            num_seqs=None,
            max_q_len=None,
            **{name: None if array is None else array[start:stop] for name, array in of_tokens.items()},
        )

    def kv_len(self, seq: int) -> int:
        return int(np.clip(self.kv_lens[seq], 0, self.page_indices.shape[1] * self.page_size))

    def seen(self, seq: int) -> NDArray[np.bool_]:
        """Whether each query of a sequence sees each key, by KV head or for all heads, bool [K or 1, q_len, kv_len]."""
        start, stop = self.bounds()[seq]
        kv_len = self.kv_len(seq)
        pages = self.page_indices[seq, : -(-kv_len // self.page_size)]
        valid = np.repeat((pages >= 0) & (pages < self.num_pages), self.page_size)[:kv_len]
        drafted, ranges = self.drafted(start, stop), rows_of(self.key_ranges, slice(start, stop))
        seen = visible(stop - start, kv_len, valid, self.causal, self.sliding_window, drafted, ranges)
        return seen_by_heads(seen, *self.lists(start, stop))

    def slots(self, seq: int) -> NDArray[np.int64]:
        """The slot of each position of a sequence; meaningless if the page index is out of range."""
        position = np.arange(self.kv_len(seq))
        return self.page_indices[seq].astype(np.int64)[position // self.page_size] * self.page_size + (
            position % self.page_size
        )

    def fully_masked(self) -> NDArray[np.bool_]:
        """Whether a query head sees no key, bool [T, H]; true in padding rows."""
        rows = np.ones(self.q.shape[:2], bool)
        for seq, (start, stop) in enumerate(self.bounds()):
            rows[start:stop] = by_q_head(~self.seen(seq).any(axis=2), self.q.shape[1])
        return rows

    def read_slots(self) -> NDArray[np.bool_]:
        """Whether any query sees a cache slot, by KV head or for all heads, bool [P, G, K or 1]."""
        seen: list[Any] = [self.seen(seq).any(axis=1) for seq in range(len(self.bounds()))]
        read = np.zeros((len(seen[0]) if seen else 1, self.num_pages * self.page_size), bool)
        for seq, of_heads in enumerate(seen):
            for of_head, keys in zip(read, of_heads, strict=True):
                of_head[self.slots(seq)[keys]] = True
        return read.T.reshape(self.num_pages, self.page_size, -1)

    def poisoned(self, kind: str, seed: int = 0) -> Self:
        """The batch with NaN or infinity in every slot that no query sees, and in query heads that see no key."""
        rng = np.random.default_rng(seed)
        arrays = self.pages_poisoned(kind, ~self.read_slots(), rng)
        q = np.where(self.fully_masked()[..., None], formats.poison(kind, "float32", self.q.shape, rng), self.q)
        return self.with_pages(arrays).change(q=q)

    def with_any_tables(self, rng: np.random.Generator) -> Self:
        """The batch with arbitrary int32 values in most index arrays. Each array stays valid with probability 0.3."""
        wild = {
            "kv_lens": garbage(rng, self.kv_lens.shape, 40),
            "page_indices": garbage(rng, self.page_indices.shape, self.num_pages),
            "cu_q_lens": garbage(rng, self.cu_q_lens.shape, len(self.q)),
            "num_seqs": None if self.num_seqs is None else garbage(rng, 1, len(self.bounds())),
        }
        valid = [name for name in wild if rng.random() < 0.3]
        return self.change(**{name: value for name, value in wild.items() if name not in valid})

    def with_garbage_tails(self, seed: int = 0) -> Self:
        """The batch with garbage in unused entries of its index arrays: any int32, or values that look valid."""
        filling = unread(np.random.default_rng(seed))
        bounds, capacity = self.bounds(), self.page_indices.shape[1] * self.page_size
        kv_lens, cu_q_lens = self.kv_lens.copy(), self.cu_q_lens.copy()
        page_indices = filling(self.page_indices.shape, max(self.num_pages - 1, 0))
        for seq, (start, stop) in enumerate(bounds):
            if start == stop:
                kv_lens[seq] = filling(1, capacity)[0]
            else:
                used = -(-self.kv_len(seq) // self.page_size)
                page_indices[seq, :used] = self.page_indices[seq, :used]
        kv_lens[len(bounds) :] = filling(len(kv_lens) - len(bounds), capacity)
        cu_q_lens[len(bounds) + 1 :] = filling(len(cu_q_lens) - len(bounds) - 1, len(self.q))
        return self.change(kv_lens=kv_lens, cu_q_lens=cu_q_lens, page_indices=page_indices)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch(RaggedTables):
    """The arguments of one `ragged_paged_attention` call in NumPy."""

    OPERATION: ClassVar[str] = "ragged_paged_attention"
    OF_TOKENS: ClassVar[tuple[str, ...]] = ("q", "draft_mask", "relative_bias", "key_ranges", "selected")

    kv_pages: Pages
    alibi_slopes: NDArray[np.float32] | None = None
    relative_bias: NDArray[np.float32] | None = None
    k_scale: float | NDArray[np.float32] | None = None
    v_scale: float | NDArray[np.float32] | None = None
    k_scale_pages: NDArray[Any] | None = None
    v_scale_pages: NDArray[Any] | None = None
    draft_mask: NDArray[np.bool_] | None = None
    selected: NDArray[np.int32] | None = None
    block_size: int | None = None

    @property
    def pages(self) -> list[NDArray[Any]]:
        return pages_of(self.kv_pages) + [scales for scales in self.scale_pages if scales is not None]

    @property
    def scale_pages(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        return self.k_scale_pages, self.v_scale_pages

    def with_pages(self, arrays: list[NDArray[Any]]) -> "Batch":
        count = len(pages_of(self.kv_pages))
        scales = iter(arrays[count:])
        k_scales, v_scales = (None if old is None else next(scales) for old in self.scale_pages)
        pages = like_pages(self.kv_pages, arrays[:count])
        return self.change(kv_pages=pages, k_scale_pages=k_scales, v_scale_pages=v_scales)

    def poisoned(self, kind: str, seed: int = 0) -> Self:
        """The batch poisoned as any batch with tables, and with poison in the biases of query heads that see no key."""
        batch = super().poisoned(kind, seed)
        if self.relative_bias is None or self.relative_bias.ndim == 2:
            return batch
        poison = formats.poison(kind, "float32", self.relative_bias.shape, np.random.default_rng(seed + 1))
        return batch.change(relative_bias=np.where(self.fully_masked()[..., None], poison, self.relative_bias))

    def pages_poisoned(self, kind: str, unread: NDArray[np.bool_], rng: np.random.Generator) -> list[NDArray[Any]]:
        arrays, count = [pages.copy() for pages in self.pages], len(pages_of(self.kv_pages))
        for original, pages in zip(pages_of(self.kv_pages), arrays, strict=False):
            # The number of page heads per head of `unread`. Combined pages alternate K and V.
            heads = pages.shape[2] // unread.shape[2]
            where = np.repeat(unread, heads, axis=2)
            pages[where] = formats.poison(kind, self.dtype_of_pages(original), pages[where].shape, rng)
        scaled = [form for form in self.formats.values() if form.scaled]
        for form, scales in zip(scaled, arrays[count:], strict=True):
            where = np.repeat(unread, scales.shape[2] // unread.shape[2], axis=2)
            scales[where] = formats.poisoned_scales(kind, form, scales[where].shape)
        return arrays

    def values(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The values of K [P, G, K, D] and V [P, G, K, D_v], without the factors `k_scale` and `v_scale`."""
        stored = (self.formats.get("k_format"), self.formats.get("v_format"))
        return split_values(self.kv_pages, self.scale_pages, stored)

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return ragged_paged_attention(**self.arguments(), return_lse=True, **self.formats, q_dtype=self.dtype)

    def expected_max_logits(self) -> NDArray[np.float64]:
        return ragged_paged_attention(
            **self.arguments(), return_max_logits=True, **self.formats, q_dtype=self.dtype
        )[1]  # fmt: skip

    def drafted(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        return None if self.draft_mask is None else self.draft_mask[start:stop]

    def lists(self, start: int, stop: int) -> tuple[NDArray[np.int32] | None, int | None]:
        return rows_of(self.selected, slice(start, stop)), self.block_size

    def masked(self, **mask: Any) -> "Batch":
        return super().masked(**{"selected": None, "block_size": None, **mask})

    @property
    def num_kv_heads(self) -> int:
        return split(self.kv_pages)[0].shape[2]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.num_kv_heads

    def widened(self) -> "Batch":
        """The batch with its cache in float32, dequantised if it is quantised."""
        arrays = list(self.values())
        if self.quantized:
            scales = (per_head(scale, self.num_kv_heads)[:, None] for scale in (self.k_scale, self.v_scale))
            arrays = [values * scale for values, scale in zip(arrays, scales, strict=True)]
        if not isinstance(self.kv_pages, tuple):
            num_pages, page_size, heads, width = arrays[0].shape
            arrays = [np.stack(arrays, axis=3).reshape(num_pages, page_size, 2 * heads, width)]
        wide = self.change(kv_pages=like_pages(self.kv_pages, [pages.astype(np.float32) for pages in arrays]))
        scale_names = ("k_scale", "v_scale", "k_scale_pages", "v_scale_pages") if self.quantized else ()
        plain = {"dtype": "float32", "cache_dtype": "float32", "stored": None, "out_dtype": None}
        return wide.change(**plain, **dict.fromkeys(scale_names))

    def mean_magnitudes(self) -> NDArray[np.float64]:
        wide = self.widened()
        wide = wide.with_pages([pages.copy() for pages in wide.pages])
        values = split(wide.kv_pages)[1]
        np.abs(values, out=values)
        return np.abs(wide.expected()[0])  # `v_scale` may be negative


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WriteBatch(Arrays):
    """The arguments of one `write_kv_pages` call in NumPy."""

    k: NDArray[Any]  # float32, or codes as the pages store them
    v: NDArray[Any]
    kv_pages: Pages
    slot_mapping: NDArray[np.integer[Any]] | None = None
    page_indices: NDArray[np.int32] | None = None
    kv_lens: NDArray[np.int32] | None = None
    cu_q_lens: NDArray[np.int32] | None = None
    num_seqs: int | NDArray[np.int32] | None = None
    k_scale: float | NDArray[np.float32] | None = None
    v_scale: float | NDArray[np.float32] | None = None
    k_scale_pages: NDArray[Any] | None = None
    v_scale_pages: NDArray[Any] | None = None

    @property
    def copies(self) -> bool:
        """Whether K and V are codes, which the write copies."""
        return self.k.itemsize == 1

    def dtype_of(self, name: str, array: NDArray[Any]) -> str:
        return self.cache_dtype if name in ("k", "v") and self.copies else super().dtype_of(name, array)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MergeBatch(Arrays):
    """The arguments of one `merge_attention_states` call in NumPy."""

    outs: NDArray[np.float32]
    lses: NDArray[np.float32]
    sinks: NDArray[np.float32] | None = None
    out_dtype: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """All parameters of a batch except its values, which `build` draws from `seed`."""

    lens: tuple[tuple[int, int], ...]  # (q_len, kv_len) of each live sequence
    page_size: int = 4
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 16
    v_head_dim: int | None = None  # None: equal to `head_dim`; another size needs pages in a pair
    combined: bool = True
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: the same as `dtype`
    stored: tuple[str, str] | None = None  # formats of keys and values, from `formats.KV_FORMATS`; replaces cache_dtype
    wild: bool = False  # whether scale pages hold scales of any sign and size
    count: str = "none"  # the type of num_seqs: none, int or array
    spare_seqs: int = 0  # rows of page_indices past num_seqs
    padding: int = 0  # query rows past the last sequence
    spare_columns: int = 0  # columns of page_indices beyond the longest sequence
    limit: str | None = None  # max_q_len: None, exact, loose, or wrongly 0 or 1
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    sm_scale: float | None = None
    sinks: str | None = None  # kind of sinks: normal, -inf, +inf or mixed
    alibi: str | None = None  # kind of ALiBi slopes: usual or mixed
    bias: str | None = None  # relative bias: one table for all queries (shared) or one for each (own)
    ranges: str | None = None  # kind of key ranges, see `ranges_of`; they replace the masks above
    selection: Selection | None = None  # lists of key blocks, within the masks above
    draft: int | None = None  # number of columns of a random draft mask
    scales: str | None = None  # the type of k_scale and v_scale: float, array or heads
    q_scales: str | None = None  # the type of q_scale, with e4m3 queries that are widened to `dtype`
    out_dtype: str | None = None
    sharing: str | None = None  # prefix: all sequences begin with the first one's pages; repeat: one page per sequence
    invalid_pages: bool = False  # whether some page indices within the lengths are out of range
    poison: str | None = None  # nan or inf in everything that must not be read
    garbage: bool = False  # whether unused index entries are garbage
    strided: bool = False
    magnitude: float = 1.0
    seed: int = 0

    def build(self) -> Batch:
        rng = np.random.default_rng(self.seed)
        cache_dtype = self.cache_dtype or self.dtype
        page_indices, num_pages = self._tables(rng)
        q_lens = [q_len for q_len, _ in self.lens]
        spare = [sum(q_lens)] * self.spare_seqs if self.count != "none" else []
        cu_q_lens = np.array([0, *np.cumsum(q_lens), *spare], np.int32)
        heads = self.num_kv_heads * self.group
        num_seqs = count_as(self.count, len(self.lens))
        q = rng.standard_normal((sum(q_lens) + self.padding, heads, self.head_dim)) * self.magnitude
        q_dtype = "float8_e4m3fn" if self.q_scales else None
        batch = Batch(
            q=formats.rounded(q, q_dtype or self.dtype),
            **self._cache(rng, num_pages, cache_dtype),
            kv_lens=np.array([kv_len for _, kv_len in self.lens] + [0] * len(spare), np.int32),
            page_indices=page_indices,
            cu_q_lens=cu_q_lens,
            num_seqs=num_seqs,
            max_q_len=self._limit(max(q_lens, default=0)),
            sm_scale=self.sm_scale,
            causal=self.causal if self.ranges is None else True,
            sliding_window=self.sliding_window if self.ranges is None else None,
            soft_cap=self.soft_cap,
            sinks=sinks_of(rng, heads, self.sinks),
            alibi_slopes=slopes_of(rng, heads, self.alibi),
            relative_bias=bias_table(rng, len(q), heads, self.bias),
            k_scale=self._scale(rng, cache_dtype, 0),
            v_scale=self._scale(rng, cache_dtype, 1),
            draft_mask=None if self.draft is None or self.ranges else rng.random((len(q), self.draft)) < 0.5,
            q_scale=scale_of(rng, self.q_scales, heads),
            out_dtype=self.out_dtype,
            key_ranges=ranges_of(rng, self.lens, len(q), self.ranges),
            selected=lists_of(rng, self.lens, len(q), self.num_kv_heads, self.selection),
            block_size=self.selection and self.selection.size,
            dtype=self.dtype,
            q_dtype=q_dtype,
            cache_dtype="float32" if self.stored else cache_dtype,
            stored=self.stored,
            strided=self.strided,
        )
        batch = batch.with_garbage_tails(self.seed) if self.garbage else batch
        return batch.poisoned(self.poison, self.seed) if self.poison else batch

    def _limit(self, longest: int) -> int | None:
        return {None: None, "exact": longest, "loose": longest + 7, "0": 0, "1": 1}[self.limit]

    def _tables(self, rng: np.random.Generator) -> tuple[NDArray[np.int32], int]:
        """Shuffled page tables, and the number of pages, of which two are in no table."""
        used = [-(-kv_len // self.page_size) for _, kv_len in self.lens]
        num_pages = sum(used) + 2
        order = rng.permutation(num_pages)
        rows = len(self.lens) + (self.spare_seqs if self.count != "none" else 0)
        table = np.zeros((rows, max(used, default=0) + self.spare_columns), np.int32)
        for seq, (count, start) in enumerate(zip(used, np.cumsum([0, *used]), strict=False)):
            table[seq, :count] = order[start : start + count]
            if self.sharing == "prefix":
                common = min(count, used[0]) // 2 + 1
                table[seq, : min(common, count, used[0])] = table[0, : min(common, count, used[0])]
            elif self.sharing == "repeat" and count:
                table[seq, :count] = table[seq, 0]
        if self.invalid_pages:
            table = misplaced(rng, table, num_pages)
        return table, num_pages

    def _cache(self, rng: np.random.Generator, num_pages: int, cache_dtype: str) -> dict[str, Any]:
        """The pages and the scale pages, as arguments of `Batch`."""
        names = self.stored or (cache_dtype, cache_dtype)
        sides = zip(names, (self.head_dim, self.v_head_dim or self.head_dim), strict=True)
        (k, k_scales), (v, v_scales) = (self._side(rng, num_pages, name, width) for name, width in sides)
        scales = {"k_scale_pages": k_scales, "v_scale_pages": v_scales}
        same_elements = len({formats.element_of(formats.KV_FORMATS[name]) for name in names}) == 1
        if not self.combined or not same_elements or k.shape != v.shape:
            return {"kv_pages": (k, v), **scales}
        pages = np.stack([k, v], axis=3).reshape(num_pages, self.page_size, 2 * self.num_kv_heads, k.shape[3])
        return {"kv_pages": pages, **scales}

    def _side(self, rng: np.random.Generator, num_pages: int, name: str, width: int) -> tuple[Any, Any]:
        """The pages of K or V, and their scale pages, or None if the format has none."""
        # Values in int8 pages are larger, to use more of the codes' range. `k_scale` and `v_scale` compensate for it.
        size = 40.0 if name == "int8" else self.magnitude
        shape, form = (num_pages, self.page_size, self.num_kv_heads, width), formats.KV_FORMATS[name]
        rows = rng.standard_normal(shape) * size
        if not form.scaled:
            return formats.stored(rows, form.codes), None
        pages, scales = quantized(rows.reshape(-1, *shape[2:]), np.ones(self.num_kv_heads, np.float32), form)
        pages, scales = (array.reshape(*shape[:2], *array.shape[1:]) for array in (pages, scales))
        if self.wild:
            scales = formats.any_scales(rng, scales.shape, form)
        return pages, scales if scales.dtype == np.uint8 else scales.astype(np.float32)

    def _scale(self, rng: np.random.Generator, cache_dtype: str, side: int) -> Any:
        """`k_scale` (side 0) or `v_scale` (side 1). int8 pages without scale pages need a scale."""
        size = 1 / 40 if cache_dtype == "int8" else 1.0
        scale = scale_of(rng, self.scales, self.num_kv_heads, size)
        return size if scale is None and (self.stored or (cache_dtype,) * 2)[side] == "int8" else scale


def scale_of(rng: np.random.Generator, kind: str | None, heads: int, size: float = 1.0) -> Any:
    """A scale near `size`: None, a float, an array without dimensions, or an array with one scale for each head."""
    if kind is None:
        return None
    values = (rng.uniform(0.5, 1.5, heads) * size).astype(np.float32)
    return {"float": float(values[0]), "array": values[:1].reshape(()), "heads": values}[kind]


def sinks_of(rng: np.random.Generator, heads: int, kind: str | None) -> NDArray[np.float32] | None:
    """Sinks for `heads` heads: normal, all -inf, all +inf, or mixed. If `kind` is None, `rng` is not used."""
    if kind is None:
        return None
    normal = rng.standard_normal(heads).astype(np.float32)
    if kind == "mixed":
        normal[rng.random(heads) < 0.4] = -np.inf
        normal[rng.random(heads) < 0.2] = np.inf
    return {"-inf": np.full_like(normal, -np.inf), "+inf": np.full_like(normal, np.inf)}.get(kind, normal)


def slopes_of(rng: np.random.Generator, heads: int, kind: str | None) -> NDArray[np.float32] | None:
    """The ALiBi slopes for `heads` heads: the usual powers of 1/2, or a mix of positive, negative and zero."""
    if kind is None:
        return None
    if kind == "usual":
        return (0.5 ** (1 + np.arange(heads) % 8)).astype(np.float32)
    mixed = (0.3 * rng.standard_normal(heads)).astype(np.float32)
    mixed[rng.random(heads) < 0.2] = 0
    return mixed


def bias_table(rng: np.random.Generator, tokens: int, heads: int, kind: str | None) -> NDArray[np.float32] | None:
    """A relative bias table with up to 40 columns, shared by all queries or with its own part for each query."""
    if kind is None:
        return None
    width = int(rng.choice([1, 2, 5, 12, 40]))
    shape = (heads, width) if kind == "shared" else (tokens, heads, width)
    return rng.standard_normal(shape).astype(np.float32)
