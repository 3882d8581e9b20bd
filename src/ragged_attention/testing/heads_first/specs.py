"""Batches over heads-first pages. They are special cases of ragged attention and are built from its batches."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference.paged_attention import paged_attention, values_of
from ragged_attention.reference.prefill_attention import prefill_attention, rows_of_the_last_chunk
from ragged_attention.testing import compare
from ragged_attention.testing.paged.specs import Arrays, Batch, Spec, split
from ragged_attention.testing.rounded_weights import allowance
from ragged_attention.testing.runner import HeadsFirstPages, Runner


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeadsFirstArrays(Arrays):
    """The arguments that `paged_attention` and `prefill_attention` share."""

    q: NDArray[np.float32]
    k_pages: HeadsFirstPages
    v_pages: HeadsFirstPages
    page_indices: NDArray[np.int32]
    sm_scale: float | None = None
    soft_cap: float | None = None

    @property
    def num_kv_heads(self) -> int:
        return self._k_shape[0]

    @property
    def page_size(self) -> int:
        return self._k_shape[2]

    @property
    def _k_shape(self) -> tuple[int, ...]:
        """The shape of the pages of K, [K, P, page_size, D]."""
        return (self.k_pages[0] if isinstance(self.k_pages, tuple) else self.k_pages).shape

    def dtype_of(self, name: str, array: NDArray[Any]) -> str:
        if name in ("k_pages", "v_pages"):
            return "float32" if array.shape[-1] == 1 else self.cache_dtype  # scales have a last axis of 1
        return super().dtype_of(name, array)

    def layout_of(self, name: str) -> str:
        return "pages" if name in ("k_pages", "v_pages") else "rows"

    def changed_pages(self, change: Any) -> Self:
        """The batch with `change` applied to every array of the cache."""
        new = {}
        for name in ("k_pages", "v_pages"):
            pages = getattr(self, name)
            new[name] = tuple(map(change, pages)) if isinstance(pages, tuple) else change(pages)
        return self.change(**new)

    def widened(self) -> Self:
        """The batch with its values in float32, dequantised if the cache is quantised."""
        cache_dtype = self.cache_dtype if self.quantized else None
        pages = {
            name: np.moveaxis(values_of(getattr(self, name), cache_dtype), 2, 0).astype(np.float32)
            for name in ("k_pages", "v_pages")
        }
        return self.change(**pages, dtype="float32", cache_dtype="float32")

    @abc.abstractmethod
    def expected(self) -> NDArray[np.float64]:
        """The reference's out."""

    def mean_magnitudes(self) -> NDArray[np.float64]:
        """The weighted means of the values' magnitudes, in out's shape."""
        wide = self.widened()
        return wide.change(v_pages=np.abs(wide.v_pages)).expected()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PagedBatch(HeadsFirstArrays):
    """The arguments of one `paged_attention` call in NumPy."""

    OPERATION: ClassVar[str] = "paged_attention"

    lengths: NDArray[np.int32]

    def expected(self) -> NDArray[np.float64]:
        return paged_attention(**self.arguments(), cache_dtype=self.cache_dtype if self.quantized else None)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChunkBatch(HeadsFirstArrays):
    """The arguments of one `prefill_attention` call in NumPy."""

    OPERATION: ClassVar[str] = "prefill_attention"

    length: int | NDArray[np.int32]
    sliding_window: int | None = None
    align: str = "chunk"

    def expected(self) -> NDArray[np.float64]:
        return prefill_attention(**self.arguments(), cache_dtype=self.cache_dtype if self.quantized else None)

    @property
    def live(self) -> int:
        """The number of the chunk's rows that belong to the sequence; the others are padding."""
        return rows_of_the_last_chunk(int(np.asarray(self.length).reshape(())), len(self.q))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedSpec:
    """The parameters of a `paged_attention` call, given as those of a ragged call with one query for each sequence."""

    spec: Spec
    scaled: bool = True  # whether 8-bit pages have random scales; if not, scales of int8 pages are 1

    def ragged(self) -> Batch:
        """The ragged batch with the same numbers, without the pages' scales."""
        lens = tuple((1, kv_len) for _, kv_len in self.spec.lens)
        return _plain(self.spec, lens=lens, padding=0, sliding_window=None).build()

    def build(self) -> PagedBatch:
        batch = self.ragged()
        return PagedBatch(**_common(batch, self.spec, self.scaled), lengths=batch.kv_lens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkSpec:
    """The parameters of a `prefill_attention` call. The `lens` and `padding` of `spec` are ignored."""

    spec: Spec
    length: int
    chunk: int
    align: str = "chunk"
    given: str = "array"  # the type of `length`: int, array or scalar
    scaled: bool = True

    def ragged(self) -> Batch:
        """The ragged batch with the same numbers, without the pages' scales."""
        live = self.chunk if self.align == "end" else rows_of_the_last_chunk(self.length, self.chunk)
        return _plain(self.spec, lens=((live, self.length),), padding=self.chunk - live).build()

    def build(self) -> ChunkBatch:
        batch = self.ragged()
        length = {"int": self.length, "array": np.array([self.length], np.int32)}
        common = _common(batch, self.spec, self.scaled)
        return ChunkBatch(
            **common | {"page_indices": batch.page_indices[0]},
            length=length.get(self.given, np.array(self.length, np.int32)),
            sliding_window=batch.sliding_window,
            align=self.align,
        )


def _plain(spec: Spec, **changes: Any) -> Spec:
    """The spec without arguments that these operations lack."""
    none = dict.fromkeys(("sinks", "alibi", "bias", "ranges", "selection", "draft", "scales", "v_head_dim"))
    return dataclasses.replace(spec, **none, count="none", causal=True, combined=False, **changes)


def _common(batch: Batch, spec: Spec, scaled: bool) -> dict[str, Any]:
    """The arguments of a heads-first batch that come from a ragged batch."""
    rng = np.random.default_rng(spec.seed + 1)
    k_pages, v_pages = (np.ascontiguousarray(np.moveaxis(pages, 2, 0)) for pages in split(batch.kv_pages))
    pages: dict[str, Any] = {"k_pages": k_pages, "v_pages": v_pages}
    if not scaled and batch.cache_dtype == "int8":
        pages = {name: (array, np.ones((*array.shape[:3], 1), np.float32)) for name, array in pages.items()}
    elif scaled and batch.quantized:
        size = 1 / 40 if batch.cache_dtype == "int8" else 1.0  # int8 codes use their whole range
        unread = ~np.moveaxis(batch.read_slots(), 2, 0)[..., None]
        poison = {"nan": np.nan, "inf": np.inf}.get(spec.poison or "", 1.0)
        for name, array in pages.items():
            scales = (rng.uniform(0.5, 1.5, (*array.shape[:3], 1)) * size).astype(np.float32)
            pages[name] = (array, np.where(unread, np.float32(poison) * scales, scales))
    names = ("q", "page_indices", "sm_scale", "soft_cap", "dtype", "cache_dtype", "strided")
    return pages | {name: getattr(batch, name) for name in names}


def check_paged(runner: Runner, batch: PagedBatch, options: Mapping[str, Any] | None = None) -> None:
    """The backend's out agrees with the reference's."""
    got = runner.run("paged_attention", batch, options=options)
    compare.agrees(got, batch.expected(), batch.kind, allowance=allowance(runner, batch))


def check_chunk(runner: Runner, batch: ChunkBatch, options: Mapping[str, Any] | None = None) -> None:
    """The backend's out agrees with the reference's."""
    got = runner.run("prefill_attention", batch, options=options)
    compare.agrees(got, batch.expected(), batch.kind, allowance=allowance(runner, batch))
