"""The suite catches wrong block selections: variants of the reference with one planted fault each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ragged_attention.reference.block_scores import block_scores as honest_scores
from ragged_attention.reference.top_k_blocks import top_k_blocks as honest_top_k
from ragged_attention.testing.blocks.suite import agreement, corners, laws
from ragged_attention.testing.runner import Runner
from tests.planting import Function, failures

pytest.importorskip("torch", reason="the mutants run through the torch front end")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # mutants may produce NaN


# ---- scores


def blocks_count_among_all_packed_keys(q: Any, keys: Any, *, block_size: int, starts: Any = None, **others: Any) -> Any:
    if starts is not None:
        starts = np.asarray(starts) // block_size * block_size
    return honest_scores(q, keys, block_size=block_size, starts=starts, **others)


def the_own_key_is_hidden(q: Any, keys: Any, *, kv_lens: Any = None, **others: Any) -> Any:
    kv_lens = None if kv_lens is None else np.asarray(kv_lens) - 1
    return honest_scores(q, keys, kv_lens=kv_lens, **others)


def the_mean_of_halves(q: Any, keys: Any, *, block_size: int, **others: Any) -> Any:
    scores = honest_scores(q, keys, block_size=block_size, **others)
    if block_size == 1:
        return scores
    halves = honest_scores(q, keys, block_size=block_size // 2, **others)
    first, second = (np.where(np.isinf(half), 0, half) for half in (halves[..., 0::2], halves[..., 1::2]))
    mixed = scores.copy()
    both = second.shape[2]
    finite = np.isfinite(scores[..., :both])
    mixed[..., :both] = np.where(finite, (first[..., :both] + second) / 2, scores[..., :both])
    return mixed


def negative_products_count_as_zero(*arguments: Any, **others: Any) -> Any:
    scores = honest_scores(*arguments, **others)
    return np.where(np.isneginf(scores), scores, np.maximum(scores, 0))


def nan_is_dropped(*arguments: Any, **others: Any) -> Any:
    return np.nan_to_num(honest_scores(*arguments, **others), nan=0.0, posinf=np.inf, neginf=-np.inf)


def heads_share_the_first_keys(q: Any, keys: Any, *, key_scale: Any = None, **others: Any) -> Any:
    if np.ndim(keys) > 2 and np.shape(keys)[-1] == np.shape(q)[-1]:
        keys = np.asarray(keys)[..., :1, :]
        key_scale = None if key_scale is None else np.asarray(key_scale)[..., :1]
    return honest_scores(q, keys, key_scale=key_scale, **others)


def scales_are_ignored(q: Any, keys: Any, *, key_scale: Any = None, **others: Any) -> Any:
    return honest_scores(q, keys, **others)


SCORES = (
    blocks_count_among_all_packed_keys,
    the_own_key_is_hidden,
    the_mean_of_halves,
    negative_products_count_as_zero,
    nan_is_dropped,
    heads_share_the_first_keys,
    scales_are_ignored,
)


# ---- selections


def ties_go_to_the_older(scores: Any, top_k: int, **forced: Any) -> Any:
    scores = np.asarray(scores, np.float64)
    return honest_top_k(scores - 1e-9 * np.arange(scores.shape[2]), top_k, **forced)


def nothing_is_forced(scores: Any, top_k: int, *, init_blocks: int = 0, local_blocks: int = 0) -> Any:
    return honest_top_k(scores, top_k)


def one_local_block_too_few(scores: Any, top_k: int, *, init_blocks: int = 0, local_blocks: int = 0) -> Any:
    return honest_top_k(scores, top_k, init_blocks=init_blocks, local_blocks=max(local_blocks - 1, 0))


def the_last_column_is_local(scores: Any, top_k: int, *, init_blocks: int = 0, local_blocks: int = 0) -> Any:
    """A mutant that treats the last blocks of a row as local, instead of the last blocks that the query sees."""
    scores = np.array(scores, np.float64)
    last = scores[:, :, scores.shape[2] - local_blocks :]
    last[~np.isneginf(last)] = np.inf
    return honest_top_k(scores, top_k, init_blocks=init_blocks)


def forced_blocks_are_infinite(scores: Any, top_k: int, *, init_blocks: int = 0, local_blocks: int = 0) -> Any:
    """A mutant that gives forced blocks infinite scores. A later block of infinite score can displace them."""
    scores = np.array(scores, np.float64)
    seen = ~np.isneginf(scores)
    block = np.arange(scores.shape[2])
    own = np.max(np.where(seen, block, -1), axis=2, initial=-1, keepdims=True)
    forced = seen & ((block < init_blocks) | (block > own - local_blocks))
    return honest_top_k(np.where(forced, np.inf, scores), top_k)


def unseen_blocks_are_selected(scores: Any, top_k: int, **forced: Any) -> Any:
    scores = np.asarray(scores, np.float64)
    return honest_top_k(np.where(np.isneginf(scores), -1e300, scores), top_k, **forced)


def nan_is_the_largest(scores: Any, top_k: int, **forced: Any) -> Any:
    return honest_top_k(np.nan_to_num(scores, nan=np.inf, posinf=np.inf, neginf=-np.inf), top_k, **forced)


def unsorted(scores: Any, top_k: int, **forced: Any) -> Any:
    return honest_top_k(scores, top_k, **forced)[..., ::-1].copy()


SELECTIONS = (
    ties_go_to_the_older,
    nothing_is_forced,
    one_local_block_too_few,
    the_last_column_is_local,
    forced_blocks_are_infinite,
    unseen_blocks_are_selected,
    nan_is_the_largest,
    unsorted,
)


def selecting_by(top_k_blocks: Function) -> Function:
    """`select_blocks` with another selection function."""

    def select_blocks(q: Any, keys: Any, top_k: int, *, init_blocks: int = 0, local_blocks: int = 0, **others: Any):
        scores = honest_scores(q, keys, **others)
        return top_k_blocks(scores, top_k, init_blocks=init_blocks, local_blocks=local_blocks)

    return select_blocks


def caught(runner: Runner, words: tuple[str, ...]) -> None:
    """Assert that a corner whose name begins with one of `words` shows the fault."""
    chosen = [check for check in corners() if check.name.startswith(words)]
    assert chosen
    assert any(failures(runner, chosen, 1)), "no corner caught it"


def test_the_honest_backend_passes(plant: Callable[..., Runner]) -> None:
    """A planted backend without a fault passes all checks."""
    assert list(failures(plant(), (*corners(), *agreement(), *laws()), 4)) == []


@pytest.mark.parametrize("mutant", SCORES)
def test_wrong_scores_are_caught(plant: Callable[..., Runner], mutant: Function) -> None:
    caught(plant(block_scores=mutant), ("block scores",))


@pytest.mark.parametrize("mutant", SELECTIONS)
def test_a_wrong_selection_is_caught(plant: Callable[..., Runner], mutant: Function) -> None:
    caught(plant(top_k_blocks=mutant), ("selection of given blocks",))


@pytest.mark.parametrize("mutant", [mutant for mutant in SELECTIONS if mutant is not forced_blocks_are_infinite])
def test_a_wrong_selection_from_keys_is_caught(plant: Callable[..., Runner], mutant: Function) -> None:
    """Wrong selections from keys are caught; infinite scores are left out because keys rarely produce them."""
    caught(plant(select_blocks=selecting_by(mutant)), ("block selection",))
