"""Calls of block selection with arbitrary int32 values in every index array."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ragged_attention.testing.blocks.specs import BlocksBatch, BlocksSpec, TopKSpec
from ragged_attention.testing.indexer.garbage import ascends, garbage_spec, wild_arrays
from ragged_attention.testing.indexer.specs import BYTES
from ragged_attention.testing.runner import Runner


def garbage_call(seed: int) -> BlocksBatch:
    """A valid call whose index arrays are then filled with arbitrary int32 values."""
    rng = np.random.default_rng(seed)
    keys = garbage_spec(rng, seed)
    key_heads = 1 if keys.cache_dtype == BYTES else int(rng.choice([1, 2]))
    batch = BlocksSpec(
        keys=dataclasses.replace(keys, heads=key_heads * int(rng.choice([1, 3])), special=False),
        key_heads=key_heads,
        block_size=int(rng.choice([1, 2, 16])),
        top_k=int(rng.choice([2, 5, 100])),
        init_blocks=int(rng.integers(0, 2)),
        local_blocks=int(rng.integers(0, 2)),
    ).build()
    return batch.change(**wild_arrays(rng, batch))


def _scores(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    batch = garbage_call(seed)
    scores = runner.run("block_scores", batch.scores_call(), options=options)
    if ascends(batch) and np.isnan(scores).any():
        raise AssertionError("expected no NaN from finite inputs, got some")


def _selected(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    batch = garbage_call(seed)
    chosen = runner.run("select_blocks", batch, options=options)
    if ascends(batch) and not ((chosen >= -1) & (chosen < batch.num_blocks)).all():
        raise AssertionError(f"expected blocks from -1 to {batch.num_blocks - 1}, got others")


def _top_k(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    rng = np.random.default_rng(seed)
    batch = TopKSpec(
        blocks=int(rng.integers(0, 90)), values="special", init_blocks=1, local_blocks=2, seed=seed
    ).build()
    runner.run("top_k_blocks", batch, options=options)


# Each operation with a function that runs it on garbage.
EXAMPLES: tuple[tuple[str, Callable[[Runner, int, Mapping[str, Any]], None]], ...] = (
    ("block_scores", _scores),
    ("select_blocks", _selected),
    ("top_k_blocks", _top_k),
)
