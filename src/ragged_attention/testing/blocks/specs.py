"""Calls of block scores and block selection: specs, and the NumPy arrays built from them."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.indexer.key_specs import KINDS
from ragged_attention.testing.indexer.specs import BYTES, IndexerSpec, KeysBatch
from ragged_attention.testing.paged.specs import Arrays


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScoresBatch(KeysBatch):
    """The arguments of one `block_scores` call in NumPy."""

    block_size: int

    @property
    def num_blocks(self) -> int:
        return -(-self.columns // self.block_size)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BlocksBatch(ScoresBatch):
    """The arguments of one `select_blocks` call in NumPy."""

    top_k: int
    init_blocks: int = 0
    local_blocks: int = 0

    def scores_call(self) -> ScoresBatch:
        """The `block_scores` call with the same arguments."""
        names = [field.name for field in dataclasses.fields(ScoresBatch)]
        return ScoresBatch(**{name: getattr(self, name) for name in names})

    def selection(self, scores: NDArray[np.float32]) -> "TopKBatch":
        """The `top_k_blocks` call that selects from these scores."""
        return TopKBatch(scores=scores, top_k=self.top_k, init_blocks=self.init_blocks, local_blocks=self.local_blocks)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TopKBatch(Arrays):
    """The arguments of one `top_k_blocks` call in NumPy."""

    scores: NDArray[np.float32]
    top_k: int
    init_blocks: int = 0
    local_blocks: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlocksSpec:
    """The parameters of a `block_scores` or `select_blocks` call: an indexer's keys, and the blocks."""

    keys: IndexerSpec
    key_heads: int = 1  # a divisor of the number of index heads
    block_size: int = 4
    top_k: int = 3
    init_blocks: int = 0
    local_blocks: int = 0

    def build(self) -> BlocksBatch:
        of_keys = dataclasses.replace(self.keys, poison=False, garbage=False, relative=self.keys.packed, ratio=1)
        if self.keys.stored != BYTES:
            fields = {field.name: getattr(of_keys, field.name) for field in dataclasses.fields(of_keys)}
            of_keys = _WithHeads(**fields, key_heads=self.key_heads)
        keys_batch = of_keys.build()
        names = {field.name for field in dataclasses.fields(KeysBatch)}
        batch = BlocksBatch(
            **{name: getattr(keys_batch, name) for name in names}, block_size=self.block_size, top_k=self.top_k,
            init_blocks=self.init_blocks, local_blocks=self.local_blocks,
        )  # fmt: skip
        batch = batch.with_garbage_tails(self.keys.seed) if self.keys.garbage else batch
        return batch.poisoned() if self.keys.poison else batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WithHeads(IndexerSpec):
    """An indexer spec whose keys have an axis of heads."""

    key_heads: int

    def _keys(self, rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, Any]:
        return super()._keys(rng, (*shape, self.key_heads))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKSpec:
    """The parameters of a `top_k_blocks` call."""

    tokens: int = 3
    heads: int = 2
    blocks: int = 40
    top_k: int = 5
    init_blocks: int = 0
    local_blocks: int = 0
    values: str = "normal"  # normal, few, one (equal), zeros (of both signs), special (like NaN), close (neighbours)
    seen: str = "some"  # the visible blocks: all, some (a different number for each token), none
    strided: bool = False
    seed: int = 0

    def build(self) -> TopKBatch:
        rng = np.random.default_rng(self.seed)
        shape = (self.tokens, self.heads, self.blocks)
        scores = rng.standard_normal(shape).astype(np.float32)
        if self.values == "few":
            scores = rng.integers(-2, 3, shape).astype(np.float32)
        elif self.values == "one":
            scores = np.full(shape, -0.5, np.float32)
        elif self.values == "zeros":
            scores = rng.choice(np.array([0.0, -0.0], np.float32), shape)
        elif self.values == "special":
            scores = np.where(rng.random(shape) < 0.6, rng.choice(KINDS, shape), scores)
        elif self.values == "close":
            scores = (np.float32(-1.0).view(np.int32) + rng.integers(0, 9, shape).astype(np.int32)).view(np.float32)
        if self.seen != "all":
            counts = rng.integers(0, self.blocks + 1, (self.tokens, 1, 1)) * (self.seen == "some")
            scores = np.where(np.arange(self.blocks) < counts, scores, np.float32(-np.inf))
        return TopKBatch(
            scores=scores, top_k=self.top_k, init_blocks=self.init_blocks,
            local_blocks=self.local_blocks, strided=self.strided,
        )  # fmt: skip
