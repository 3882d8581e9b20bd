"""Calls of the indexer with arbitrary int32 values in every index array."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.indexer.gradients import LogitsGradientSpec
from ragged_attention.testing.indexer.key_specs import (
    QuantizeKeysSpec,
    SelectBatch,
    SelectSpec,
    WriteKeysBatch,
    WriteKeysSpec,
)
from ragged_attention.testing.indexer.specs import BYTES, E4M3, IndexerBatch, IndexerSpec, KeysBatch, TopkBatch
from ragged_attention.testing.indexer.targets import TargetSpec
from ragged_attention.testing.integers import garbage, garbage_places
from ragged_attention.testing.runner import Runner

DTYPES = ("float32", "bfloat16", "float16")


def garbage_spec(rng: np.random.Generator, seed: int) -> IndexerSpec:
    """A spec of a random valid call."""
    packed = bool(rng.random() < 0.4)
    return IndexerSpec(
        lens=tuple((int(rng.integers(0, 5)), int(rng.integers(0, 30))) for _ in range(rng.integers(1, 4))),
        packed=packed,
        heads=int(rng.choice([1, 3, 17])),
        head_dim=int(rng.choice([16, 48])),
        dtype=str(rng.choice(DTYPES)),
        cache_dtype=[None, E4M3, E4M3 if packed else BYTES][int(rng.integers(0, 3))],
        page_size=int(rng.choice([1, 2, 3, 8])),
        ratio=1 if packed else int(rng.choice([1, 4])),
        scaled=bool(rng.random() < 0.5),
        relative=packed and bool(rng.random() < 0.5),
        count=str(rng.choice(["none", "array"])),
        padding=int(rng.integers(0, 3)),
        top_k=int(rng.choice([1, 5, 100])),
        candidate_block_size=[None, 1, 4][int(rng.integers(0, 3))],
        strided=bool(rng.random() < 0.3),
        seed=seed,
    )


def garbage_call(seed: int) -> TopkBatch:
    """A valid call with some of its index arrays filled with arbitrary int32 values."""
    rng = np.random.default_rng(seed)
    batch = garbage_spec(rng, seed).build_topk()
    return batch.change(**wild_arrays(rng, batch))


def wild_arrays(rng: np.random.Generator, batch: KeysBatch) -> dict[str, NDArray[np.int32]]:
    """Garbage for a random choice of a call's index arrays, by name."""
    near = dict.fromkeys(("starts", "stops", "indices", "page_indices"), len(batch.keys))
    near |= {"kv_lens": 40, "cu_q_lens": len(batch.q), "num_seqs": 3, "candidate_blocks": 9}
    wild = {}
    for name, limit in near.items():
        array = getattr(batch, name, None)
        if isinstance(array, np.ndarray) and rng.random() < 0.7:  # so that garbage is also tried beside valid arrays
            wild[name] = garbage(rng, array.shape, limit)
    return wild


def ascends(batch: KeysBatch) -> bool:
    """Whether `cu_q_lens` ascends. If not, it is undefined which rows belong to which sequence."""
    if batch.cu_q_lens is None:
        return True
    count = len(batch.bounds())
    return bool((np.diff(batch.cu_q_lens[: count + 1].astype(np.int64)) >= 0).all())


def garbage_write(seed: int) -> WriteKeysBatch:
    """A write with arbitrary integers in its slots or tables."""
    rng = np.random.default_rng(seed)
    keys = QuantizeKeysSpec(rows=int(rng.integers(0, 7)), strided=bool(rng.random() < 0.3), seed=seed)
    batch = WriteKeysSpec(keys=keys, num_pages=int(rng.choice([0, 1, 3])), page_size=int(rng.choice([1, 3]))).build()
    places = garbage_places(rng, len(batch.k), *batch.cache.shape[:2])
    return batch.change(k=np.nan_to_num(batch.k), **places)


def garbage_select(seed: int) -> SelectBatch:
    return SelectSpec(rows=3, columns=int(np.random.default_rng(seed).integers(0, 90)), edges="wild", seed=seed).build()


def garbage_logits(seed: int) -> IndexerBatch:
    """A call of `indexer_logits` with garbage; every third seed gives one over lists."""
    if seed % 3:
        return garbage_call(seed).logits_call()
    rng = np.random.default_rng(seed)
    spec = dataclasses.replace(garbage_spec(rng, seed), packed=True, ratio=1, relative=False, cache_dtype=None)
    batch = dataclasses.replace(spec, listed=int(rng.choice([1, 5, 20]))).build()
    return batch.change(**wild_arrays(rng, batch))


def _logits(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    batch = garbage_logits(seed)
    logits = runner.run("indexer_logits", batch, options=options)
    if ascends(batch) and np.isnan(logits).any():
        raise AssertionError("expected no NaN from finite inputs, got some")


def _logits_backward(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    rng = np.random.default_rng(seed)
    relative = bool(rng.random() < 0.5)
    spec = dataclasses.replace(garbage_spec(rng, seed), packed=True, ratio=1, relative=relative, cache_dtype=None)
    if rng.random() < 0.5:
        spec = dataclasses.replace(spec, relative=False, listed=int(rng.choice([1, 5, 20])))
    batch = LogitsGradientSpec(of=spec).build()
    gradients = runner.run("indexer_logits_backward", batch.change(**wild_arrays(rng, batch)), options=options)
    if not all(np.isfinite(array).all() for array in gradients):
        raise AssertionError("expected finite gradients from finite inputs, got others")


def _target(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    rng = np.random.default_rng(seed)
    spec = dataclasses.replace(garbage_spec(rng, seed), packed=True, ratio=1, cache_dtype=None, scaled=False)
    if listed := bool(rng.random() < 0.5):
        spec = dataclasses.replace(spec, relative=False, listed=int(rng.choice([1, 5, 20])))
    batch = TargetSpec(of=spec, wider=True, lens="wild" if listed and rng.random() < 0.5 else None).build()
    # The true lse of garbage lists is unknown. The lse here is finite, and larger than that of the valid lists.
    batch = batch.change(lse=np.where(batch.lse == -np.inf, 9, batch.lse + 9), **wild_arrays(rng, batch))
    if not np.isfinite(runner.run("attention_target", batch, options=options)).all():
        raise AssertionError("expected finite numbers from finite inputs, got others")


def _topk(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    batch = garbage_call(seed)
    chosen = runner.run("indexer_topk", batch, options=options)
    if ascends(batch) and not ((chosen >= -1) & (chosen < batch.columns)).all():
        raise AssertionError(f"expected positions from -1 to {batch.columns - 1}, got others")


def _select(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    runner.run("top_k_indices", garbage_select(seed), options=options)


def _quantize(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    del options
    runner.run("quantize_indexer_keys", QuantizeKeysSpec(special=True, seed=seed).build())


def _write(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    del options
    runner.run("write_indexer_cache", garbage_write(seed))


# Each operation with a function that runs it on garbage.
EXAMPLES: tuple[tuple[str, Callable[[Runner, int, Mapping[str, Any]], None]], ...] = (
    ("indexer_logits", _logits),
    ("indexer_logits_backward", _logits_backward),
    ("attention_target", _target),
    ("indexer_topk", _topk),
    ("top_k_indices", _select),
    ("quantize_indexer_keys", _quantize),
    ("write_indexer_cache", _write),
)
