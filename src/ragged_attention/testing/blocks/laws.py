"""`LAWS` of block selection: properties that need no reference result. Each key states its property as a sentence.

The scores of these batches are small integers and therefore exact. So selections must be equal, not just equally good.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from ragged_attention.testing.blocks.oracle import forced_blocks
from ragged_attention.testing.blocks.specs import BlocksBatch, BlocksSpec, ScoresBatch
from ragged_attention.testing.compare import identical
from ragged_attention.testing.indexer.specs import BYTES, IndexerBatch
from ragged_attention.testing.runner import Runner

Law = Callable[[Runner, BlocksSpec], None]


def same(runner: Runner, one: BlocksBatch, other: BlocksBatch) -> None:
    """Check that two calls have the same scores and select the same blocks."""
    scores, other_scores = (runner.run("block_scores", batch.scores_call()) for batch in (one, other))
    identical(scores, other_scores, "scores")
    identical(runner.run("select_blocks", one), runner.run("select_blocks", other), "blocks")


def _of_keys(spec: BlocksSpec, **changed: object) -> BlocksSpec:
    return dataclasses.replace(spec, keys=dataclasses.replace(spec.keys, **changed))


def halves_make_a_block(runner: Runner, spec: BlocksSpec) -> None:
    batch = dataclasses.replace(spec, block_size=max(spec.block_size, 2)).build().scores_call()
    halves = runner.run("block_scores", batch.change(block_size=batch.block_size // 2))
    if halves.shape[2] % 2:
        halves = np.pad(halves, ((0, 0), (0, 0), (0, 1)), constant_values=-np.inf)
    identical(runner.run("block_scores", batch), np.maximum(halves[..., 0::2], halves[..., 1::2]), "scores")


def single_keys_are_the_indexers(runner: Runner, spec: BlocksSpec) -> None:
    """With one key per block, each head's scores, clamped at 0, are the logits of an indexer with one head."""
    batch = dataclasses.replace(spec, block_size=1).build().scores_call()
    scores = runner.run("block_scores", batch)
    heads, key_heads = batch.q.shape[1], batch.keys.shape[-2]
    for head in range(heads):
        of_head = head // (heads // key_heads)
        stored = batch.cache_dtype == BYTES
        scale = None if batch.key_scale is None else np.ascontiguousarray(batch.key_scale[..., of_head])
        logits = runner.run(
            "indexer_logits",
            IndexerBatch(
                q=np.ascontiguousarray(batch.q[:, head : head + 1]),
                keys=batch.keys if stored else np.ascontiguousarray(batch.keys[..., of_head, :]), key_scale=scale,
                weights=np.ones((len(batch.q), 1), np.float32), starts=batch.starts, stops=batch.stops,
                relative=not batch.paged, max_keys=batch.max_keys, page_indices=batch.page_indices,
                kv_lens=batch.kv_lens, cu_q_lens=batch.cu_q_lens, num_seqs=batch.num_seqs, dtype=batch.dtype,
                cache_dtype=batch.cache_dtype,
            ),
        )  # fmt: skip
        seen = scores[:, head] != -np.inf
        identical(logits, np.where(seen, np.maximum(scores[:, head], 0), -np.inf), f"logits of head {head}")


def all_that_is_seen(runner: Runner, spec: BlocksSpec) -> None:
    batch = dataclasses.replace(spec, top_k=4096).build()
    want = np.full((len(batch.q), batch.q.shape[1], 4096), -1)
    for token, columns, _ in batch.seen():
        blocks = np.unique(columns // batch.block_size)
        want[token, :, : len(blocks)] = blocks
    identical(runner.run("select_blocks", batch), want, "blocks")


def unseen_takes_no_part(runner: Runner, spec: BlocksSpec) -> None:
    batch = spec.build()
    same(runner, batch.poisoned().with_garbage_tails(spec.keys.seed), batch)


def pages_may_move(runner: Runner, spec: BlocksSpec) -> None:
    batch = _of_keys(spec, packed=False, max_keys=None).build()
    same(runner, batch.with_pages_moved(spec.keys.seed), batch)


def larger_queries_choose_the_same(runner: Runner, spec: BlocksSpec) -> None:
    batch = _of_keys(spec, dtype="float32", cache_dtype=None).build()
    factors = 2.0 ** np.random.default_rng(spec.keys.seed).integers(-3, 4, (*batch.q.shape[:2], 1))
    larger = batch.change(q=(batch.q * factors).astype(batch.q.dtype))
    identical(runner.run("select_blocks", larger), runner.run("select_blocks", batch), "blocks")


def queries_do_not_mix(runner: Runner, spec: BlocksSpec) -> None:
    """A call has the same results as separate calls for each sequence or, with packed keys, each group of queries."""
    batch = spec.build()
    scores, chosen = runner.run("block_scores", batch.scores_call()), runner.run("select_blocks", batch)
    for rows, alone in batch.parts():
        identical(runner.run("block_scores", alone.scores_call()), scores[rows], "scores of a part")
        identical(runner.run("select_blocks", alone), chosen[rows], "blocks of a part")


def heads_do_not_mix(runner: Runner, spec: BlocksSpec) -> None:
    batch = spec.build()
    scores, chosen = runner.run("block_scores", batch.scores_call()), runner.run("select_blocks", batch)
    group = batch.q.shape[1] // batch.keys.shape[-2]
    for head in range(batch.keys.shape[-2]):
        heads, key_heads = slice(head * group, (head + 1) * group), slice(head, head + 1)
        scale = None if batch.key_scale is None else batch.key_scale[..., key_heads]
        alone = batch.change(q=batch.q[:, heads], keys=batch.keys[..., key_heads, :], key_scale=scale)
        identical(runner.run("block_scores", alone.scores_call()), scores[:, heads], "scores of a head")
        identical(runner.run("select_blocks", alone), chosen[:, heads], "blocks of a head")


def the_largest_of_its_scores(runner: Runner, spec: BlocksSpec) -> None:
    batch = spec.build()
    scores = runner.run("block_scores", batch.scores_call())
    chosen = runner.run("top_k_blocks", batch.selection(scores))
    identical(runner.run("select_blocks", batch), chosen, "blocks")


def forced_blocks_are_chosen(runner: Runner, spec: BlocksSpec) -> None:
    """The forced blocks are selected, and the remaining places go to the best of the other blocks."""
    batch = spec.build()
    scores = runner.run("block_scores", batch.scores_call())
    chosen = runner.run("select_blocks", batch)
    forced = forced_blocks(scores, batch.init_blocks, batch.local_blocks)
    listed = (chosen[..., None] == np.arange(scores.shape[2])).any(axis=2)
    identical(listed & forced, forced, "forced blocks among the chosen ones")
    free = np.where(forced, np.float32(-np.inf), scores)
    for index in np.ndindex(scores.shape[:2]):
        left = batch.top_k - int(forced[index].sum())
        others = np.flatnonzero(listed[index] & ~forced[index])
        if left:
            want = runner.run("top_k_blocks", batch.change(top_k=left, init_blocks=0, local_blocks=0)
                              .selection(free[index][None, None]))  # fmt: skip
            identical(others, want[want >= 0], "blocks beside the forced ones")
        else:
            identical(others, np.array([], int), "blocks beside the forced ones")


def pages_are_where_keys_lie(runner: Runner, spec: BlocksSpec) -> None:
    """A paged sequence has the same scores as its keys in a packed call with each query's causal range."""
    of_one = {"packed": False, "max_keys": None, "lens": spec.keys.lens[:1], "padding": 0, "count": "none"}
    batch = _of_keys(spec, **of_one, cache_dtype=None).build().scores_call()
    assert batch.page_indices is not None and batch.kv_lens is not None  # noqa: PT018
    pages = batch.page_indices[0]
    rows = (len(pages) * batch.keys.shape[1],)
    q_len, kv_len = len(batch.q), int(batch.kv_lens[0])
    scale = batch.key_scale
    packed = ScoresBatch(
        q=batch.q, dtype=batch.dtype, cache_dtype=batch.cache_dtype, block_size=batch.block_size,
        keys=batch.keys[pages].reshape(*rows, *batch.keys.shape[2:]),
        key_scale=None if scale is None else scale[pages].reshape(*rows, *scale.shape[2:]),
        starts=np.zeros(q_len, np.int32),
        stops=np.maximum(kv_len - q_len + np.arange(q_len) + 1, 0).astype(np.int32),
    )  # fmt: skip
    identical(runner.run("block_scores", packed), runner.run("block_scores", batch), "scores")


def the_same_bits_again(runner: Runner, spec: BlocksSpec) -> None:
    batch = _of_keys(spec, exact=False).build()
    first = runner.run("block_scores", batch.scores_call()), runner.run("select_blocks", batch)
    for _ in range(3):
        identical(runner.run("block_scores", batch.scores_call()), first[0], "scores")
        identical(runner.run("select_blocks", batch), first[1], "blocks")


LAWS: dict[str, Law] = {
    "the score of a block is the larger of its halves'": halves_make_a_block,
    "blocks of one key have the logits of an indexer": single_keys_are_the_indexers,
    "a top-k of more than is seen lists all of it": all_that_is_seen,
    "keys that no query sees take no part": unseen_takes_no_part,
    "pages may move": pages_may_move,
    "larger queries choose the same": larger_queries_choose_the_same,
    "queries do not mix": queries_do_not_mix,
    "heads do not mix": heads_do_not_mix,
    "the selection is that of the scores": the_largest_of_its_scores,
    "forced blocks leave the others their order": forced_blocks_are_chosen,
    "pages are but where keys lie": pages_are_where_keys_lie,
    "the same bits again": the_same_bits_again,
}
