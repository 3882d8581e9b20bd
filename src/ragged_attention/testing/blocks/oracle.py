"""Checks that compare block scores and block selection with the reference."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference.block_scores import block_scores
from ragged_attention.reference.select_blocks import select_blocks
from ragged_attention.reference.top_k_blocks import top_k_blocks
from ragged_attention.testing.blocks.specs import BlocksBatch, ScoresBatch, TopKBatch
from ragged_attention.testing.compare import chosen_agree, identical, logits_agree
from ragged_attention.testing.runner import Runner

Scores = NDArray[np.float64]


def expected(batch: ScoresBatch) -> tuple[Scores, Scores]:
    """The reference scores, and for each score the largest sum of its products' magnitudes, which bounds its error."""
    return block_scores(**batch.definition()), block_scores(**batch.magnitudes().definition())


def check_scores(runner: Runner, batch: BlocksBatch, options: Mapping[str, Any] | None = None) -> None:
    batch_of_scores = batch.scores_call()
    got = runner.run("block_scores", batch_of_scores, options=options)
    logits_agree(got, *expected(batch_of_scores), what="scores")


def check_selected(runner: Runner, batch: BlocksBatch, options: Mapping[str, Any] | None = None) -> None:
    """Every row is a correct selection, up to rounding errors in the scores."""
    num_rows = batch.q.shape[0] * batch.q.shape[1]
    scores, whole = (each.reshape(num_rows, batch.num_blocks) for each in expected(batch.scores_call()))
    forced = forced_blocks(scores, batch.init_blocks, batch.local_blocks)
    got = runner.run("select_blocks", batch, options=options)
    chosen_agree(
        got.reshape(num_rows, batch.top_k), np.where(forced, np.inf, scores), np.where(forced, 0.0, whole), batch.top_k
    )


def forced_blocks(scores: NDArray[Any], init_blocks: int, local_blocks: int) -> NDArray[np.bool_]:
    """Which blocks of each row are always selected: the first and the last visible ones."""
    block, seen = np.arange(scores.shape[-1]), scores != -np.inf
    own = np.max(np.where(seen, block, -1), axis=-1, keepdims=True, initial=-1)
    return seen & ((block < init_blocks) | (block > own - local_blocks))


def check_exactly_selected(runner: Runner, batch: BlocksBatch, options: Mapping[str, Any] | None = None) -> None:
    """With exact scores, the selection is exactly the reference's, including ties."""
    got = runner.run("select_blocks", batch, options=options)
    identical(got, select_blocks(**batch.definition()), "blocks")


def check_top_k(runner: Runner, batch: TopKBatch, options: Mapping[str, Any] | None = None) -> None:
    got = runner.run("top_k_blocks", batch, options=options)
    identical(got, top_k_blocks(**batch.arguments()), "blocks")
