"""Batches of the operations around latent attention, and the specs from which they are built.

These operations quantise and dequantise caches, write latents, convert positions to slots, and schedule decode steps.
"""

import dataclasses
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing import formats
from ragged_attention.testing.integers import INT32, count_as, garbage
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla.latents import Cache
from ragged_attention.testing.mla.specs import AnyLatents, DecodeBatch, LatentArrays, lens_of


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantizeBatch(LatentArrays):
    """The arguments of one `quantize_mla_cache` call in NumPy."""

    kv: NDArray[np.float32]
    format: str
    power_of_two_scales: bool = True
    cache_layout: str | None = None

    @property
    def laid_out(self) -> str:
        """The name that `latents` has for this format and layout."""
        return self.format if self.cache_layout is None else f"{self.format}, {self.cache_layout}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DequantizeBatch(LatentArrays):
    """The arguments of one `dequantize_mla_cache` call in NumPy; `dtype` is the result's dtype."""

    PAGES: ClassVar[tuple[str, ...]] = ("cache",)

    cache: latents.Bytes
    format: str | None = None
    cache_layout: str | None = None

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"dtype": self.dtype}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LatentWriteBatch(AnyLatents):
    """The arguments of one `write_mla_cache` call in NumPy."""

    CACHE: ClassVar[str] = "cache"
    ROWS: ClassVar[str] = "kv"

    kv: NDArray[np.float32]
    cache: Cache
    slot_mapping: NDArray[np.integer[Any]] | None = None
    page_indices: NDArray[np.int32] | None = None
    kv_lens: NDArray[np.int32] | None = None
    cu_q_lens: NDArray[np.int32] | None = None
    num_seqs: int | NDArray[np.int32] | None = None
    kv_scale: float | NDArray[np.float32] | None = None
    rope_scale: float | NDArray[np.float32] | None = None
    d_v: int | None = None
    power_of_two_scales: bool = True

    def layout_of(self, name: str) -> str:
        return "blocks" if name == "cache" else "rows"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlotsBatch(LatentArrays):
    """The arguments of one `page_indices_to_slots` call in NumPy."""

    positions: NDArray[np.int32]
    page_indices: NDArray[np.int32]
    page_size: int
    cu_q_lens: NDArray[np.int32] | None = None
    num_seqs: int | NDArray[np.int32] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleBatch(LatentArrays):
    """The arguments of one `make_decode_schedule` call in NumPy."""

    kv_lens: NDArray[np.int32] | None  # only in a dense call
    batch_size: int
    num_q_tokens: int = 1
    num_q_heads: int = 1
    num_kv_heads: int = 1
    topk: int | None = None  # only in a sparse call
    topk_lens: NDArray[np.int32] | None = None
    extra_topk: int | None = None
    extra_topk_lens: NDArray[np.int32] | None = None
    num_parts: int | None = None
    overhead: int = 5


def schedule_batch(batch: DecodeBatch, num_parts: int = 3, overhead: int = 5) -> ScheduleBatch:
    """The arguments for making the schedule of a decode call."""
    _, num_q_tokens, num_q_heads, _ = batch.q.shape
    lens: dict[str, Any] = {"kv_lens": batch.kv_lens}
    if batch.indices is not None:
        extra = None if batch.extra_indices is None else batch.extra_indices.shape[-1]
        lens = {
            "kv_lens": None,
            "topk": batch.indices.shape[-1],
            "topk_lens": batch.topk_lens,
            "extra_topk": extra,
            "extra_topk_lens": batch.extra_topk_lens,
        }
    return ScheduleBatch(
        batch_size=batch.num_seqs,
        num_q_tokens=num_q_tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=batch.kv_cache.shape[2],
        num_parts=num_parts,
        overhead=overhead,
        **lens,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeSpec:
    """The parameters of a `quantize_mla_cache` call; rows may hold values of any size and special values."""

    format: str = "fp8_v32"
    num_pages: int = 2
    page_size: int = 3
    power_of_two_scales: bool = True
    reach: int = 0  # groups are scaled by up to this power of ten, up or down
    special: bool = False
    dtype: str = "float32"
    strided: bool = False
    seed: int = 0

    def build(self) -> QuantizeBatch:
        rng = np.random.default_rng(self.seed)
        layout = latents.LAID_OUT[self.format]
        shape = (self.num_pages, self.page_size, 1, layout.width)
        groups = -(-layout.width // layout.group)
        sizes = 10.0 ** rng.uniform(-self.reach, self.reach, (*shape[:3], groups))
        rows = rng.standard_normal(shape) * np.repeat(sizes, layout.group, axis=-1)[..., : layout.width]
        if self.special:
            kinds = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 448.0, 3e38, -1e-40, 1e-4 * 448], np.float32)
            rows = np.where(rng.random(shape) < 0.004, rng.choice(kinds, shape), rows)
        return QuantizeBatch(
            kv=formats.rounded(rows, self.dtype),
            format=layout.name,
            cache_layout=latents.layout_of(self.format),
            power_of_two_scales=self.power_of_two_scales,
            dtype=self.dtype,
            strided=self.strided,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantizeSpec:
    """The parameters of a `dequantize_mla_cache` call: a quantised cache, or arbitrary bytes."""

    format: str = "fp8_v32"
    num_pages: int = 2
    page_size: int = 3
    scales: str | None = "arbitrary"  # None: arbitrary bytes
    dtype: str = "float32"
    cache_dtype: str = "uint8"
    strided: bool = False
    seed: int = 0

    def build(self) -> DequantizeBatch:
        rng = np.random.default_rng(self.seed)
        layout = latents.LAID_OUT[self.format]
        shape = (self.num_pages, self.page_size, 1)
        if self.scales is None:
            cache = rng.integers(0, 256, (*shape, layout.token_bytes), np.uint8)
            # Exclude numbers that are so small that devices may flush them, or products with them, to zero.
            fields = latents.fields_of(cache, self.format)
            if layout.scales != "float8_e4m3fn":
                exponents = fields.scales[..., 3::4] if layout.scales == "float32" else fields.scales
                exponents |= 0x20
            fields.rotary[..., 1::2] |= 0x20
        else:
            rows = rng.standard_normal((*shape, layout.width)).astype(np.float32)
            cache = latents.quantised(rows, self.format, self.scales, rng)
        return DequantizeBatch(
            cache=cache,
            cache_layout=latents.layout_of(self.format),
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            strided=self.strided,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentWriteSpec:
    """The parameters of a `write_mla_cache` call in which all tokens have different slots."""

    format: str = "plain"
    tokens: int = 5
    num_pages: int = 3
    page_size: int = 4
    kv_heads: int = 1
    d_qk: int = 48
    power_of_two_scales: bool = True
    slots: str = "int32"
    dtype: str = "float32"
    cache_dtype: str = "uint8"
    stored: str | None = None  # the dtype of a plain 8-bit cache
    scale: str | None = None  # kind of `kv_scale` for a plain cache: float, array, heads (as in `Spec.scales`) or power
    rope: str | None = None  # kind of `rope_scale` for a plain cache, as for `scale`
    d_v: int | None = None  # number of columns before the rotary ones; None: two thirds of them
    reach: float = 1.0  # scale of the values; 1000 exceeds the range of e4m3
    strided: bool = False
    seed: int = 0

    def build(self) -> LatentWriteBatch:
        rng = np.random.default_rng(self.seed)
        plain = self.format == "plain"
        width = self.d_qk if plain else latents.LAID_OUT[self.format].width
        shape = (self.num_pages, self.page_size, self.kv_heads)
        if plain:
            cache = formats.stored(rng.standard_normal((*shape, width)), self.stored or self.dtype)
        else:
            cache = rng.integers(0, 256, (*shape, latents.LAID_OUT[self.format].token_bytes), np.uint8)
        num_slots = self.num_pages * self.page_size
        kv = formats.rounded(rng.standard_normal((self.tokens, self.kv_heads, width)) * self.reach, self.dtype)
        slots = np.full(self.tokens, -1, np.int64)
        count = min(self.tokens, num_slots)
        slots[:count] = rng.permutation(num_slots)[:count]
        beyond = np.array([-1, -2, num_slots, num_slots + 1, INT32.max, INT32.min])
        if self.slots == "int64":
            beyond = np.concatenate([beyond, [2**32, 2**32 + 1, -(2**63), 2**63 - 1]])
        lost = (slots < 0) | (rng.random(self.tokens) < 0.3)
        slots = rng.permutation(np.where(lost, rng.choice(beyond, self.tokens), slots))
        kv[(slots < 0) | (slots >= num_slots)] = np.nan
        return LatentWriteBatch(
            kv=kv,
            cache=cache,
            slot_mapping=slots.astype(self.slots),
            cache_layout=latents.layout_of(self.format),
            kv_scale=self._kv_scale(rng) if plain else None,
            rope_scale=self._scale(rng, self.rope) if plain else None,
            d_v=(width // 3 * 2 if self.d_v is None else self.d_v) if plain and self.rope else None,
            power_of_two_scales=self.power_of_two_scales,
            dtype=self.dtype,
            cache_dtype=(self.stored or self.dtype) if plain else self.cache_dtype,
            strided=self.strided,
        )

    def _kv_scale(self, rng: np.random.Generator) -> Any:
        """The `kv_scale` of the rows. An int8 cache needs one."""
        return 1.0 if self.scale is None and self.stored == "int8" else self._scale(rng, self.scale)

    def _scale(self, rng: np.random.Generator, scale: str | None) -> Any:
        if scale in (None, "power"):
            return scale and 0.25
        values = (rng.uniform(0.5, 1.5, self.kv_heads) / (40 if self.stored == "int8" else 1)).astype(np.float32)
        return {"float": float(values[0]), "array": values[:1].reshape(()), "heads": values}[scale]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotsSpec:
    """The parameters of a `page_indices_to_slots` call; if `wild`, positions and page indices may be any int32.

    With `q_lens`, the rows of each sequence, the batch is ragged: `spare_rows` rows and `spare_seqs` sequences follow
    the live ones, and `count` says in which form `num_seqs` is passed.
    """

    shape: tuple[int, ...] = (3, 7)
    q_lens: tuple[int, ...] | None = None
    spare_rows: int = 0
    spare_seqs: int = 0
    count: str = "none"  # none | int | array
    columns: int = 4
    page_size: int = 3
    wild: bool = True
    strided: bool = False
    seed: int = 0

    def build(self) -> SlotsBatch:
        rng = np.random.default_rng(self.seed)
        limit = min(self.columns * self.page_size, INT32.max // 2)
        shape, num_seqs, rows = self.shape, self.shape[0], {}
        if self.q_lens is not None:
            live = len(self.q_lens)
            num_seqs = live + (self.spare_seqs if self.count != "none" else 0)
            edges = garbage(rng, (num_seqs + 1,), 50)
            edges[: live + 1] = np.cumsum((0, *self.q_lens))
            rows = {"cu_q_lens": edges, "num_seqs": count_as(self.count, live)}
            shape = (sum(self.q_lens) + self.spare_rows, *shape[1:])
        table = rng.integers(0, 50, (num_seqs, self.columns), np.int32)
        wild = np.where(rng.random(table.shape) < 0.5, garbage(rng, table.shape, 50), -table)
        inside = rng.integers(-1, limit + 2, shape, np.int32)
        garbled = np.where(rng.random(shape) < 0.5, garbage(rng, shape, limit), inside)
        return SlotsBatch(
            **rows,
            positions=garbled if self.wild else inside,
            page_indices=np.where(rng.random(table.shape) < 0.3 * self.wild, wild, table),
            page_size=self.page_size,
            strided=self.strided,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """The parameters of a `make_decode_schedule` call, which is dense if `topk` is 0."""

    seqs: int = 3
    longest: int = 700
    topk: int = 0
    lens: str | None = None
    lens_by_query: bool = False
    extra_topk: int | None = None
    extra_lens: str | None = None
    q_tokens: int = 2
    heads: int = 6
    num_parts: int | None = 4
    overhead: int = 5
    seed: int = 0

    def build(self) -> ScheduleBatch:
        rng = np.random.default_rng(self.seed)
        shape = (self.seqs, self.q_tokens)[: 1 + self.lens_by_query]
        common = {"num_q_tokens": self.q_tokens, "num_q_heads": self.heads, "num_parts": self.num_parts}
        extra_lens = lens_of(rng, shape, self.extra_topk or 0, self.extra_lens) if self.extra_topk else None
        dense_lens = rng.integers(0, self.longest + 1, self.seqs, np.int32) * (rng.random(self.seqs) < 0.8)
        return ScheduleBatch(
            kv_lens=None if self.topk else dense_lens.astype(np.int32),
            batch_size=self.seqs,
            topk=self.topk or None,
            topk_lens=lens_of(rng, shape, self.topk, self.lens) if self.topk else None,
            extra_topk=self.extra_topk,
            extra_topk_lens=extra_lens,
            overhead=self.overhead,
            **common,
        )
