"""Calls of the operations around the indexer: top-k of given logits, and quantising and writing keys."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing import formats
from ragged_attention.testing.integers import garbage
from ragged_attention.testing.paged.specs import Arrays

# There are no subnormal numbers, because some devices read them as 0.
KINDS = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2e-38, -2e-38, 3e38, -3e38], np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SelectBatch(Arrays):
    """The arguments of one `top_k_indices` call in NumPy."""

    logits: NDArray[np.float32]
    top_k: int
    starts: NDArray[np.int32] | None = None
    stops: NDArray[np.int32] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantizeKeysBatch(Arrays):
    """The arguments of one `quantize_indexer_keys` call in NumPy."""

    k: NDArray[np.float32]
    power_of_two: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WriteKeysBatch(Arrays):
    """The arguments of one `write_indexer_cache` call in NumPy."""

    k: NDArray[np.float32]
    cache: NDArray[np.uint8]
    slot_mapping: NDArray[np.integer[Any]] | None = None
    power_of_two: bool = False
    page_indices: NDArray[np.int32] | None = None
    kv_lens: NDArray[np.int32] | None = None
    cu_q_lens: NDArray[np.int32] | None = None
    num_seqs: int | NDArray[np.int32] | None = None

    def layout_of(self, name: str) -> str:
        return "blocks" if name == "cache" else "rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectSpec:
    """The parameters of a `top_k_indices` call."""

    rows: int = 3
    columns: int = 40
    top_k: int = 5
    values: str = "normal"  # normal, few, one (equal), zeros (of both signs), special (NaN), close (neighbours), wide
    edges: str = "both"  # the edges in the call: none, starts, stops, both, or wild (both, with any int32)
    strided: bool = False
    seed: int = 0

    def build(self) -> SelectBatch:
        rng = np.random.default_rng(self.seed)
        shape = (self.rows, self.columns)
        logits = rng.standard_normal(shape).astype(np.float32)
        if self.values == "few":
            logits = rng.integers(-2, 3, shape).astype(np.float32) * rng.choice([1.0, -1.0], shape).astype(np.float32)
        elif self.values == "one":
            logits = np.full(shape, -0.5, np.float32)
        elif self.values == "zeros":
            logits = rng.choice(np.array([0.0, -0.0], np.float32), shape)
        elif self.values == "special":
            logits = np.where(rng.random(shape) < 0.6, rng.choice(KINDS, shape), logits)
        elif self.values == "close":
            logits = (np.float32(-1.0).view(np.int32) + rng.integers(0, 9, shape).astype(np.int32)).view(np.float32)
        elif self.values == "wide":
            logits = (rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-120, 120, shape)).astype(np.float32)
        starts, stops = self._edges(rng, "starts"), self._edges(rng, "stops")
        columns = np.arange(self.columns)
        for edge, outside in ((starts, np.less), (stops, np.greater_equal)):
            if edge is not None:  # +inf outside the edges, where nothing may be selected
                logits = np.where(outside(columns, edge[:, None]), np.float32(np.inf), logits)
        return SelectBatch(logits=logits, top_k=self.top_k, starts=starts, stops=stops, strided=self.strided)

    def _edges(self, rng: np.random.Generator, name: str) -> NDArray[np.int32] | None:
        if self.edges not in (name, "both", "wild"):
            return None
        if self.edges == "wild":
            return garbage(rng, self.rows, self.columns)
        low, high = (0, self.columns // 2) if name == "starts" else (self.columns // 3, self.columns)
        return rng.integers(low, high + 1, self.rows, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeKeysSpec:
    """The parameters of a `quantize_indexer_keys` call."""

    rows: int = 5
    head_dim: int = 32
    power_of_two: bool = False
    reach: int = 0  # rows are scaled by up to this power of ten, up or down
    special: bool = False
    dtype: str = "float32"
    strided: bool = False
    seed: int = 0

    def build(self) -> QuantizeKeysBatch:
        return QuantizeKeysBatch(
            k=self.numbers(), power_of_two=self.power_of_two, dtype=self.dtype, strided=self.strided
        )

    def numbers(self) -> NDArray[np.float32]:
        rng = np.random.default_rng(self.seed)
        shape = (self.rows, self.head_dim)
        k = rng.standard_normal(shape) * 10.0 ** rng.uniform(-self.reach, self.reach, (self.rows, 1))
        if self.special:
            k = np.where(rng.random(shape) < 0.02, rng.choice([*KINDS, 448.0, 0.0448], shape), k)
        return formats.rounded(k, self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteKeysSpec:
    """The parameters of a `write_indexer_cache` call in which all tokens have different slots."""

    keys: QuantizeKeysSpec = QuantizeKeysSpec()
    num_pages: int = 3
    page_size: int = 4
    slots: str = "int32"

    def build(self) -> WriteKeysBatch:
        new_keys = self.keys.build()
        rng, count = np.random.default_rng(self.keys.seed + 1), len(new_keys.k)
        num_slots = self.num_pages * self.page_size
        slots = rng.permutation(max(count, num_slots))[:count].astype(np.int64)
        outside = garbage(rng, count, 3).astype(np.int64)
        outside = np.where((outside >= 0) & (outside < num_slots), -1, outside)
        if self.slots == "int64":
            outside = np.where(rng.random(count) < 0.3, outside << 31, outside)
            outside = np.where((outside >= 0) & (outside < num_slots), -1, outside)
        lost = (slots >= num_slots) | (rng.random(count) < 0.3)
        k = new_keys.k.copy()
        k[lost] = np.nan
        cache = rng.integers(0, 256, (self.num_pages, self.page_size, 1, k.shape[1] + 4)).astype(np.uint8)
        return WriteKeysBatch(
            k=k, cache=cache, slot_mapping=np.where(lost, outside, slots).astype(self.slots),
            power_of_two=new_keys.power_of_two, dtype=new_keys.dtype, strided=new_keys.strided,
        )  # fmt: skip
