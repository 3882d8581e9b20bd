"""`LAWS` of the indexer: properties that need no reference result. Each key states its property as a sentence.

The logits of these batches are small integers and therefore exact. So selections must be equal, not just equally good.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.compare import identical
from ragged_attention.testing.indexer.gradients import NAMES, LogitsGradientBatch, LogitsGradientSpec
from ragged_attention.testing.indexer.key_specs import SelectBatch
from ragged_attention.testing.indexer.specs import BYTES, IndexerBatch, IndexerSpec, TopkBatch
from ragged_attention.testing.indexer.table_writes import tables_are_slots
from ragged_attention.testing.runner import Runner

Law = Callable[[Runner, IndexerSpec], None]


def same(runner: Runner, one: TopkBatch, other: TopkBatch) -> None:
    """Check that two calls have the same logits and select the same positions."""
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
    """A call has the same results as separate calls for its sequences or, with packed keys, halves of its queries."""
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
    """A paged sequence has the same logits as its keys in a packed call with each query's causal range."""
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
    """With `relative`, a row has the same logits as without it, moved left by the start of the row's range."""
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


# ---- the gradient of the logits; its inputs are integers too, so that sums are exact in any order


def gradient_of(runner: Runner, batch: LogitsGradientBatch) -> tuple[NDArray[Any], ...]:
    return runner.run("indexer_logits_backward", batch)


def same_gradients(got: Iterable[Any], want: Iterable[Any]) -> None:
    for name, mine, theirs in zip(NAMES, got, want, strict=True):
        identical(mine, theirs, name)


def linear_in_d_logits(runner: Runner, spec: LogitsGradientSpec) -> None:
    batch = spec.build()
    other = np.random.default_rng(spec.of.seed).integers(-2, 3, batch.d_logits.shape).astype(np.float32)
    parts = gradient_of(runner, batch), gradient_of(runner, batch.change(d_logits=other))
    sums = gradient_of(runner, batch.change(d_logits=2 * batch.d_logits - other))
    same_gradients(sums, [2 * one - another for one, another in zip(*parts, strict=True)])


def queries_add_up(runner: Runner, spec: LogitsGradientSpec) -> None:
    """Separate calls for parts of the queries give the same d_q and d_weights, and their d_keys add up to the whole."""
    batch = spec.build()
    d_q, d_keys, d_weights = gradient_of(runner, batch)
    d_keys_of_parts = np.zeros_like(d_keys)
    for rows, alone in batch.parts():
        part = gradient_of(runner, alone)
        identical(part[0], d_q[rows], "d_q of a part")
        identical(part[2], d_weights[rows], "d_weights of a part")
        d_keys_of_parts += part[1]
    identical(d_keys_of_parts, d_keys, "d_keys")


def ranges_are_lists(runner: Runner, spec: LogitsGradientSpec) -> None:
    """A list of a row's range, in any order, gives the same gradients as the range."""
    batch = dataclasses.replace(spec, of=dataclasses.replace(spec.of, listed=None)).build()
    rng, most = np.random.default_rng(spec.of.seed), max((len(columns) for _, columns, _ in batch.seen()), default=0)
    indices, d_logits = np.full((len(batch.q), most + 1), -1, np.int32), np.full((len(batch.q), most + 1), np.nan)
    for token, columns, rows in batch.seen():
        order = rng.permutation(len(columns))
        indices[token, : len(columns)], d_logits[token, : len(columns)] = (
            rows[order],
            batch.d_logits[token, columns[order]],
        )
    none = {"starts": None, "stops": None, "relative": False, "max_keys": None}
    listed = batch.change(indices=indices, d_logits=d_logits.astype(np.float32), **none)
    same_gradients(gradient_of(runner, listed), gradient_of(runner, batch))


def keys_may_move(runner: Runner, spec: LogitsGradientSpec) -> None:
    """Permuting the listed keys permutes their gradients and changes nothing else."""
    batch = dataclasses.replace(
        spec, of=dataclasses.replace(spec.of, listed=spec.of.listed or 5, relative=False, max_keys=None)
    ).build()
    assert batch.indices is not None
    order = np.random.default_rng(spec.of.seed).permutation(len(batch.keys))
    known = (batch.indices >= 0) & (batch.indices < len(order))
    places = np.argsort(order).astype(np.int32)
    moved = batch.indices.copy()
    moved[known] = places[batch.indices[known]]
    scale = None if batch.key_scale is None else batch.key_scale[order]
    d_q, d_keys, d_weights = gradient_of(runner, batch.change(keys=batch.keys[order], key_scale=scale, indices=moved))
    same_gradients((d_q, d_keys[places], d_weights), gradient_of(runner, batch))


def unseen_has_no_gradient(runner: Runner, spec: LogitsGradientSpec) -> None:
    """Unseen keys and idle queries change no gradient, and their own gradients are 0."""
    batch = spec.build()
    d_q, d_keys, d_weights = got = gradient_of(runner, batch.poisoned())
    same_gradients(got, gradient_of(runner, batch))
    idle, unread = np.ones(len(d_q), bool), np.ones(len(d_keys), bool)
    for token, _, rows in batch.seen():
        idle[token], unread[rows] = False, False
    if d_q[idle].any() or d_keys[unread].any() or d_weights[idle].any():
        raise AssertionError("expected gradients of 0 for what takes no part, got others")


def the_same_gradients_again(runner: Runner, spec: LogitsGradientSpec) -> None:
    batch = dataclasses.replace(spec, of=dataclasses.replace(spec.of, exact=False)).build()
    first = gradient_of(runner, batch)
    for _ in range(3):
        same_gradients(gradient_of(runner, batch), first)


GradientLaw = Callable[[Runner, LogitsGradientSpec], None]
GRADIENT_LAWS: dict[str, GradientLaw] = {
    "gradients are linear": linear_in_d_logits,
    "gradients of parts of the queries add up": queries_add_up,
    "ranges are lists": ranges_are_lists,
    "listed keys may move": keys_may_move,
    "what takes no part has no gradient": unseen_has_no_gradient,
    "the same gradients again": the_same_gradients_again,
}
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
    "keys are written to the slots that tables give": tables_are_slots,
}
