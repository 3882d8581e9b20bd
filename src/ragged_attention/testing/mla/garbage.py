"""Calls on latent caches with arbitrary int32 values in every index array, including lengths and schedules."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ragged_attention.testing.integers import garbage, garbage_places
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla.cache_specs import (
    LatentWriteBatch,
    LatentWriteSpec,
    QuantizeSpec,
    ScheduleSpec,
    SlotsSpec,
    schedule_batch,
)
from ragged_attention.testing.mla.ragged import RaggedLatentBatch, RaggedLatentSpec
from ragged_attention.testing.mla.specs import DecodeBatch, DecodeSpec, PrefillBatch, PrefillSpec
from ragged_attention.testing.paged.specs import Spec
from ragged_attention.testing.runner import Runner

DTYPES = ("float32", "bfloat16", "float16")
QUANTISED = tuple(latents.LAID_OUT)
FORMATS = ("plain", "plain", *QUANTISED)


def _common(rng: np.random.Generator, seed: int) -> dict[str, Any]:
    return {
        "format": str(rng.choice(FORMATS)),
        "heads": int(rng.choice([1, 3, 17])),
        "d_qk": int(rng.choice([48, 80])),
        "d_v": int(rng.choice([16, 48])),
        "dtype": str(rng.choice(DTYPES)),
        "topk": int(rng.choice([1, 5, 20])),
        "sinks": [None, "normal"][int(rng.integers(0, 2))],
        "strided": bool(rng.random() < 0.3),
        "seed": seed,
    }


def _wild(rng: np.random.Generator, array: np.ndarray | None, near: int) -> np.ndarray | None:
    """Garbage of the array's shape or, with probability 0.2, the array, so batches mix garbage and valid arrays."""
    return array if array is None or rng.random() < 0.2 else garbage(rng, array.shape, near)


def garbage_prefill(seed: int) -> PrefillBatch:
    """A sparse prefill with arbitrary int32 values in its lists and lengths."""
    rng = np.random.default_rng(seed)
    common = _common(rng, seed)
    paged = common["format"] != "plain" or rng.random() < 0.5
    batch = PrefillSpec(
        **common,
        rows=int(rng.choice([0, 1, 9])),
        page_size=int(rng.choice([1, 3, 4])) if paged else None,
        lens="inside",
    ).build()
    slots = batch.selection.num_slots
    return batch.change(
        indices=garbage(rng, batch.indices.shape, slots), topk_lens=_wild(rng, batch.topk_lens, batch.indices.shape[2])
    )


def garbage_decode(seed: int) -> DecodeBatch:
    """A dense or sparse decode with arbitrary int32 values in its tables, lists and lengths."""
    rng = np.random.default_rng(seed)
    common, sparse = _common(rng, seed), bool(rng.random() < 0.5)
    extra = sparse and rng.random() < 0.5
    batch = DecodeSpec(
        **common | {"topk": common["topk"] * sparse},
        kv_lens=tuple(rng.integers(0, 20, rng.integers(1, 4)).tolist()),
        q_tokens=int(rng.integers(1, 4)),
        page_size=int(rng.choice([1, 3, 4])),
        causal=not sparse and bool(rng.random() < 0.5),
        spare_pages=int(rng.choice([0, 1])),
        lens="inside" if sparse else None,
        lens_by_query=bool(rng.random() < 0.5),
        extra_topk=7 * extra,
        extra_slots=int(rng.choice([0, 5])),
        extra_lens="inside" if extra else None,
    ).build()
    num_slots = batch.kv_cache.shape[0] * batch.kv_cache.shape[1]
    near = {"page_indices": len(batch.kv_cache), "kv_lens": 40, "indices": num_slots, "extra_indices": 6}
    near |= {"topk_lens": common["topk"], "extra_topk_lens": 7}
    return batch.change(**{name: _wild(rng, getattr(batch, name), limit) for name, limit in near.items()})


def garbage_write(seed: int) -> LatentWriteBatch:
    """A write with arbitrary integers in its slots or tables."""
    rng = np.random.default_rng(seed)
    spec = LatentWriteSpec(
        format=str(rng.choice(FORMATS)), tokens=int(rng.integers(0, 7)), num_pages=int(rng.choice([0, 1, 3])),
        page_size=int(rng.choice([1, 3])), dtype=str(rng.choice(DTYPES)), strided=bool(rng.random() < 0.3), seed=seed,
    )  # fmt: skip
    batch = spec.build()
    places = garbage_places(rng, len(batch.kv), *batch.cache.shape[:2])
    return batch.change(kv=np.nan_to_num(batch.kv), **places)


def garbage_ragged(seed: int) -> RaggedLatentBatch:
    """Ragged attention over latents with arbitrary int32 values in its index arrays."""
    rng = np.random.default_rng(seed)
    common = _common(rng, seed)
    tables = Spec(
        lens=tuple((int(rng.integers(0, 5)), int(rng.integers(0, 30))) for _ in range(rng.integers(1, 4))),
        page_size=int(rng.choice([1, 2, 3, 8])),
        group=common["heads"],
        dtype=common["dtype"],
        cache_dtype=[None, "float8_e4m3fn", "float8_e4m3fnuz", "int8"][int(rng.integers(0, 4))]
        if common["format"] == "plain"
        else None,
        count=str(rng.choice(["none", "array"])),
        padding=int(rng.integers(0, 3)),
        causal=bool(rng.random() < 0.7),
        sliding_window=[None, None, 1, 5, 2**31 - 1][int(rng.integers(0, 5))],
        sinks=common["sinks"],
        ranges=[None, None, "any", "many"][int(rng.integers(0, 4))],
        strided=common["strided"],
        seed=seed,
    )
    width = {name: common[name] for name in ("format", "d_qk", "d_v")}
    return RaggedLatentSpec(tables=tables, **width).build().with_any_tables(rng)


def _finite(*results: np.ndarray) -> None:
    out, *logs = results
    if not np.isfinite(out).all() or any(np.isnan(log).any() for log in logs):
        raise AssertionError("expected finite outputs from finite inputs, got others")


def _prefill(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    _finite(*runner.run("sparse_mla_prefill", garbage_prefill(seed), options=options))


def _decode(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    _finite(*runner.run("mla_decode", garbage_decode(seed), options=options))


def _decode_by_garbage(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    """Run `mla_decode` with a garbage schedule: results may be anything, but accesses must stay inside the arrays."""
    batch, rng = garbage_decode(seed), np.random.default_rng(seed)
    made = runner.schedule(schedule_batch(batch))
    wild = {
        name: garbage(rng, tuple(getattr(made, name).shape), batch.num_seqs + 3) for name in ("parts", "num_splits")
    }
    arrays = {
        name: runner.front.bring(array, "int32", layout="", place=runner.place, device=runner.device)
        for name, array in wild.items()
    }
    runner.run("mla_decode", batch, options=options, schedule=dataclasses.replace(made, **arrays))


def _ragged(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    _finite(*runner.run("ragged_mla_attention", garbage_ragged(seed), options=options, return_lse=True))


def _write(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    del options
    runner.run("write_mla_cache", garbage_write(seed))


def _quantize(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    del options
    runner.run(
        "quantize_mla_cache", QuantizeSpec(format=QUANTISED[seed % len(QUANTISED)], special=True, seed=seed).build()
    )


def _schedule(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    del options
    rng = np.random.default_rng(seed)
    batch = ScheduleSpec(seqs=int(rng.choice([1, 3, 17])), seed=seed).build()
    runner.schedule(batch.change(kv_lens=garbage(rng, (batch.batch_size,), 300)))


def _slots(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    del options
    runner.run("page_indices_to_slots", SlotsSpec(seed=seed).build())
    batch = SlotsSpec(q_lens=(1, 5, 2), spare_rows=2, count="array", seed=seed).build()
    rng = np.random.default_rng(seed)
    num_seqs = garbage(rng, (1,), 5)
    runner.run("page_indices_to_slots", batch.change(cu_q_lens=garbage(rng, (4,), 10), num_seqs=num_seqs))


# Each operation with a function that runs it on garbage.
EXAMPLES: tuple[tuple[str, Callable[[Runner, int, Mapping[str, Any]], None]], ...] = (
    ("sparse_mla_prefill", _prefill),
    ("mla_decode", _decode),
    ("mla_decode", _decode_by_garbage),
    ("ragged_mla_attention", _ragged),
    ("write_mla_cache", _write),
    ("quantize_mla_cache", _quantize),
    ("make_decode_schedule", _schedule),
    ("page_indices_to_slots", _slots),
)
