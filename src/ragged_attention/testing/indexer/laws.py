"""What holds of the indexer without asking the definition: `LAWS`, by the sentence each one states.

Logits are exact in these batches, small integers, so that a choice has to be the same and not only as good.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from ragged_attention.testing.compare import identical
from ragged_attention.testing.indexer.key_specs import SelectBatch
from ragged_attention.testing.indexer.specs import BYTES, IndexerBatch, IndexerSpec, TopkBatch
from ragged_attention.testing.runner import Runner

Law = Callable[[Runner, IndexerSpec], None]


def same(runner: Runner, one: TopkBatch, other: TopkBatch) -> None:
    """Two calls have the same logits and choose the same."""
    identical(
        runner.run("indexer_logits", one.logits_call()), runner.run("indexer_logits", other.logits_call()), "logits"
    )
    identical(runner.run("indexer_topk", one), runner.run("indexer_topk", other), "positions")


def all_that_is_seen(runner: Runner, spec: IndexerSpec) -> None:
    batch = dataclasses.replace(spec, top_k=4096).build_topk()
    want = np.full((len(batch.q), 4096), -1)
    for token, columns, _ in batch.seen():
        want[token, : len(columns)] = columns
    identical(runner.run("indexer_topk", batch), want, "positions")


def unseen_takes_no_part(runner: Runner, spec: IndexerSpec) -> None:
    batch = spec.build_topk()
    same(runner, batch.poisoned().with_garbage_tails(spec.seed), batch)


def pages_may_move(runner: Runner, spec: IndexerSpec) -> None:
    batch = dataclasses.replace(spec, packed=False, relative=False, max_keys=None).build_topk()
    same(runner, batch.with_pages_moved(spec.seed), batch)


def larger_weights_choose_the_same(runner: Runner, spec: IndexerSpec) -> None:
    batch = spec.build_topk()
    factors = 2.0 ** np.random.default_rng(spec.seed).integers(-3, 4, (len(batch.q), 1))
    larger = batch.change(weights=(batch.weights * factors).astype(np.float32))
    identical(runner.run("indexer_topk", larger), runner.run("indexer_topk", batch), "positions")


def queries_do_not_mix(runner: Runner, spec: IndexerSpec) -> None:
    """One call over all queries equals one for each sequence, or, where keys are packed, for each part of them."""
    batch = spec.build_topk()
    logits, chosen = runner.run("indexer_logits", batch.logits_call()), runner.run("indexer_topk", batch)
    for rows, alone in batch.parts():
        identical(runner.run("indexer_logits", alone.logits_call()), logits[rows], "logits of a part")
        identical(runner.run("indexer_topk", alone), chosen[rows], "positions of a part")


def the_largest_of_its_logits(runner: Runner, spec: IndexerSpec) -> None:
    batch = spec.build_topk()
    logits = runner.run("indexer_logits", batch.logits_call())
    chosen = runner.run("top_k_indices", SelectBatch(logits=logits, top_k=batch.top_k))
    identical(runner.run("indexer_topk", batch), chosen, "positions")


def pages_are_where_keys_lie(runner: Runner, spec: IndexerSpec) -> None:
    """A sequence alone has the logits of its keys packed, each query with its range."""
    batch = dataclasses.replace(
        spec, packed=False, relative=False, max_keys=None, lens=spec.lens[:1], padding=0, count="none", cache_dtype=None
    ).build()
    assert batch.page_indices is not None and batch.kv_lens is not None  # noqa: PT018
    pages = batch.page_indices[0]
    rows = (len(pages) * batch.keys.shape[1],)
    q_len, kv_len = len(batch.q), int(batch.kv_lens[0])
    packed = IndexerBatch(
        q=batch.q, weights=batch.weights, dtype=batch.dtype, cache_dtype=batch.cache_dtype,
        keys=batch.keys[pages].reshape(*rows, batch.keys.shape[-1]),
        key_scale=None if batch.key_scale is None else batch.key_scale[pages].reshape(rows),
        starts=np.zeros(q_len, np.int32),
        stops=(np.maximum(kv_len - q_len + np.arange(q_len) + 1, 0) // batch.ratio).astype(np.int32),
    )  # fmt: skip
    identical(runner.run("indexer_logits", packed), runner.run("indexer_logits", batch), "logits")


def rows_from_their_own_start(runner: Runner, spec: IndexerSpec) -> None:
    """A row counted from its start holds the same logits, further to the left."""
    fixed = {"packed": True, "relative": False, "max_keys": None}
    stored = None if spec.cache_dtype == BYTES else spec.cache_dtype
    batch = dataclasses.replace(spec, **fixed, cache_dtype=stored, ratio=1).build()
    whole = runner.run("indexer_logits", batch)
    moved = np.full_like(whole, -np.inf)
    for token, columns, _ in batch.seen():
        moved[token, : len(columns)] = whole[token, columns]
    identical(runner.run("indexer_logits", batch.change(relative=True)), moved, "logits")


def all_blocks_are_no_choice(runner: Runner, spec: IndexerSpec) -> None:
    batch = dataclasses.replace(spec, candidate_block_size=None).build_topk()
    blocks = np.random.default_rng(spec.seed).permutation(-(-batch.columns // 3) + 1).astype(np.int32)
    listed = batch.change(candidate_blocks=np.tile(blocks, (len(batch.q), 1)), candidate_block_size=3)
    identical(runner.run("indexer_topk", listed), runner.run("indexer_topk", batch), "positions")


def the_same_bits_again(runner: Runner, spec: IndexerSpec) -> None:
    batch = dataclasses.replace(spec, exact=False).build_topk()
    first = runner.run("indexer_logits", batch.logits_call()), runner.run("indexer_topk", batch)
    for _ in range(3):
        same(runner, batch, batch)
    identical(runner.run("indexer_logits", batch.logits_call()), first[0], "logits")
    identical(runner.run("indexer_topk", batch), first[1], "positions")


LAWS: dict[str, Law] = {
    "a top-k of more than is seen lists all of it": all_that_is_seen,
    "keys that no query sees take no part": unseen_takes_no_part,
    "pages may move": pages_may_move,
    "larger weights choose the same": larger_weights_choose_the_same,
    "queries do not mix": queries_do_not_mix,
    "the top-k is that of the logits": the_largest_of_its_logits,
    "pages are but where keys lie": pages_are_where_keys_lie,
    "a relative row is the same further to the left": rows_from_their_own_start,
    "a list of all blocks leaves everything": all_blocks_are_no_choice,
    "the same bits again": the_same_bits_again,
}
