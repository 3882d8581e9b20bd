"""Checks that compare the operations on latent caches with the reference."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ragged_attention.calls.mla_schedule import scheduled_lens
from ragged_attention.reference.dequantize_mla_cache import dequantize_mla_cache
from ragged_attention.reference.make_decode_schedule import make_decode_schedule
from ragged_attention.reference.page_indices_to_slots import page_indices_to_slots
from ragged_attention.reference.quantize_mla_cache import quantize_mla_cache
from ragged_attention.reference.write_mla_cache import write_mla_cache
from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla.cache_specs import (
    DequantizeBatch,
    LatentWriteBatch,
    QuantizeBatch,
    ScheduleBatch,
    SlotsBatch,
    schedule_batch,
)
from ragged_attention.testing.mla.latents import Cache
from ragged_attention.testing.mla.specs import DecodeBatch, PrefillBatch
from ragged_attention.testing.paged.oracle import between, inexact, nudged
from ragged_attention.testing.rounded_weights import Allowance, allowance
from ragged_attention.testing.runner import Runner


def prefill_agrees(got: Any, want: Any, what: str = "", *, rounding: Allowance = 0.0) -> None:
    """Raise AssertionError unless out, max_logits and lse of a call agree with those expected."""
    for name, mine, theirs in zip(("out", "max_logits", "lse"), got, want, strict=True):
        agrees(mine, theirs, f"prefill {name}", f"{name}{what}", allowance=rounding if name == "out" else 0.0)


def decode_agrees(got: Any, want: Any, what: str = "", *, rounding: Allowance = 0.0) -> None:
    for name, mine, theirs in zip(("out", "lse"), got, want, strict=True):
        agrees(mine, theirs, f"decode {name}", f"{name}{what}", allowance=rounding if name == "out" else 0.0)


def check_prefill(runner: Runner, batch: PrefillBatch, options: Mapping[str, Any] | None = None) -> None:
    got = runner.run("sparse_mla_prefill", batch, options=options)
    prefill_agrees(got, batch.expected(), rounding=allowance(runner, batch))


def check_decode(runner: Runner, batch: DecodeBatch, options: Mapping[str, Any] | None = None) -> None:
    got = runner.run("mla_decode", batch, options=options)
    decode_agrees(got, batch.expected(), rounding=allowance(runner, batch))


def check_decode_by_schedule(runner: Runner, batch: DecodeBatch) -> None:
    schedule = runner.schedule(schedule_batch(batch))
    got = runner.run("mla_decode", batch, schedule=schedule)
    decode_agrees(got, batch.expected(), rounding=allowance(runner, batch))


def check_schedule(runner: Runner, batch: ScheduleBatch) -> None:
    """The schedule equals FlashMLA's, number by number."""
    lens, extra_lens, sparse = batch.kv_lens, None, batch.topk is not None
    if batch.topk is not None:
        lens = np.broadcast_to(scheduled_lens(batch.topk_lens, batch.topk), (batch.batch_size,))
    if batch.extra_topk is not None:
        extra_lens = np.broadcast_to(scheduled_lens(batch.extra_topk_lens, batch.extra_topk), (batch.batch_size,))
    got = runner.schedule(batch)
    parts = runner.front.take_back(got.parts)
    want = make_decode_schedule(np.asarray(lens), extra_lens, sparse, len(parts), batch.overhead)
    identical(parts, want[0], "parts")
    identical(runner.front.take_back(got.num_splits), want[1], "num_splits")
    if batch.num_parts not in (None, len(parts)):
        raise AssertionError(f"expected {batch.num_parts} parts, got {len(parts)}")


def canonical(cache: Cache, name: str) -> Cache:
    """The cache with the same bits for every NaN, because payloads and signs of NaN do not matter."""
    if name == "plain":
        return cache
    cache = cache.copy()
    fields = latents.fields_of(cache, name)
    if latents.LAID_OUT[name].codes == "float8_e4m3fn":
        fields.values[fields.values == 0xFF] = 0x7F
    nan = np.isnan(latents.from_bfloat16(fields.rotary))
    fields.rotary[np.repeat(nan, 2, axis=-1)] = 0xFF
    if name == "fp8_v32":
        fields.scales[np.repeat(np.isnan(latents.scales_of(fields.scales, name)), 4, axis=-1)] = 0xFF
    return cache


def check_quantize(runner: Runner, batch: QuantizeBatch) -> None:
    """The bytes equal the reference's."""
    want = quantize_mla_cache(**batch.arguments())
    name = batch.laid_out
    identical(canonical(runner.run("quantize_mla_cache", batch), name), canonical(want, name), "bytes")


def check_dequantize(runner: Runner, batch: DequantizeBatch) -> None:
    """The values equal the reference's, rounded once."""
    want = dequantize_mla_cache(**batch.arguments())
    identical(runner.run("dequantize_mla_cache", batch), formats.rounded(want, batch.dtype), "rows")


def check_latent_write(runner: Runner, batch: LatentWriteBatch) -> None:
    """The tokens are in their slots with the reference's bits, and nothing else has changed.

    For scales that are not powers of two, see `check_write`.
    """
    if batch.format == "plain":
        lower, upper = (
            _written(batch, step)
            for step in ((-2, 2) if inexact(batch.kv_scale) or inexact(batch.rope_scale) else (0, 0))
        )
        between(runner.run("write_mla_cache", batch), lower, upper, batch.cache_dtype, "cache")
        return
    want = write_mla_cache(**batch.arguments())
    name = batch.format
    identical(canonical(runner.run("write_mla_cache", batch), name), canonical(want, name), "cache")


def _written(batch: LatentWriteBatch, step: int) -> Cache:
    """The reference's plain cache for rows whose elements are moved by `step` units in the last place of float32."""
    arguments = batch.change(kv=nudged(batch.kv, step)).arguments()
    written = write_mla_cache(**arguments, code_dtype=batch.code_dtype)
    return written if batch.code_dtype else formats.rounded(written, batch.dtype)


def check_slots(runner: Runner, batch: SlotsBatch) -> None:
    identical(runner.run("page_indices_to_slots", batch), page_indices_to_slots(**batch.arguments()), "slots")
