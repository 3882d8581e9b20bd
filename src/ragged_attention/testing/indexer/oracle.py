"""Checks that compare the indexer's operations with the reference."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference._indexer import planes
from ragged_attention.reference.indexer_logits import indexer_logits
from ragged_attention.reference.indexer_topk import indexer_topk
from ragged_attention.reference.quantize_indexer_keys import quantize_indexer_keys
from ragged_attention.reference.top_k_indices import top_k_indices
from ragged_attention.reference.write_indexer_cache import write_indexer_cache
from ragged_attention.testing.compare import chosen_agree, identical, logits_agree
from ragged_attention.testing.indexer.key_specs import QuantizeKeysBatch, SelectBatch, WriteKeysBatch
from ragged_attention.testing.indexer.specs import IndexerBatch, TopkBatch
from ragged_attention.testing.runner import Runner

Logits = NDArray[np.float64]


def expected(batch: IndexerBatch) -> tuple[Logits, Logits]:
    """The reference logits, and for each logit the sum of its products' magnitudes."""
    batch = batch.logits_call()
    whole = batch.magnitudes().change(weights=np.abs(batch.weights))
    return indexer_logits(**batch.definition()), indexer_logits(**whole.definition())


def check_logits(runner: Runner, batch: IndexerBatch, options: Mapping[str, Any] | None = None) -> None:
    logits_agree(runner.run("indexer_logits", batch, options=options), *expected(batch))


def check_topk(runner: Runner, batch: TopkBatch, options: Mapping[str, Any] | None = None) -> None:
    """Every row is a correct top-k, up to rounding errors in the logits."""
    logits, whole = expected(batch)
    if batch.candidate_blocks is not None and batch.candidate_block_size is not None:
        blocks = np.arange(batch.columns) // batch.candidate_block_size
        listed = (batch.candidate_blocks[:, :, None] == blocks).any(axis=1)
        logits = np.where(listed, logits, -np.inf)
    chosen_agree(runner.run("indexer_topk", batch, options=options), logits, whole, batch.top_k)


def check_exact_topk(runner: Runner, batch: TopkBatch, options: Mapping[str, Any] | None = None) -> None:
    """With exact logits, the top-k is exactly the reference's, including ties."""
    got = runner.run("indexer_topk", batch, options=options)
    identical(got, indexer_topk(**batch.definition()), "positions")


def check_select(runner: Runner, batch: SelectBatch, options: Mapping[str, Any] | None = None) -> None:
    got = runner.run("top_k_indices", batch, options=options)
    identical(got, top_k_indices(**batch.arguments()), "columns")


def check_quantize_keys(runner: Runner, batch: QuantizeKeysBatch) -> None:
    """Codes and scales equal the reference's."""
    codes, scales = runner.run("quantize_indexer_keys", batch)
    want_codes, want_scales = quantize_indexer_keys(**batch.arguments())
    identical(codes, want_codes, "values")
    identical(scales, want_scales, "scale")


def check_write_keys(runner: Runner, batch: WriteKeysBatch) -> None:
    """The keys are in their slots with the reference's bits, and nothing else in the cache has changed."""
    want = write_indexer_cache(**batch.arguments())
    identical(canonical(runner.run("write_indexer_cache", batch)), canonical(want), "cache")


def canonical(cache: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy of the cache in which all NaN scales have the same bits."""
    cache = np.array(cache, order="C")
    scales = planes(cache)[1]
    with np.errstate(invalid="ignore"):
        nan = np.isnan(np.ascontiguousarray(scales).view("<f4")[..., 0])
    scales[nan] = 0xFF
    return cache
