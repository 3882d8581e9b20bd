"""The suite catches wrong indexers: variants of the reference with one planted fault each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ragged_attention.reference import _indexer as pieces
from ragged_attention.reference import _kv_layout
from ragged_attention.reference import attention_target as target_module
from ragged_attention.reference import indexer_logits as logits_module
from ragged_attention.reference import indexer_logits_backward as gradient_module
from ragged_attention.reference import indexer_topk as topk_module
from ragged_attention.reference import quantize_indexer_keys as quantize_module
from ragged_attention.reference import top_k_indices as select_module
from ragged_attention.reference import write_indexer_cache as write_module
from ragged_attention.testing.indexer.suite import agreement, corners, laws
from ragged_attention.testing.runner import Runner
from tests.planting import Function, failures

pytest.importorskip("torch", reason="the mutants run through the torch front end")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # mutants may produce NaN

honest_logits, honest_topk = logits_module.indexer_logits, topk_module.indexer_topk
honest_gradient, honest_lists = gradient_module.indexer_logits_backward, pieces.seen_of_lists
honest_target = target_module.attention_target
honest_select, honest_quantize = select_module.top_k_indices, quantize_module.quantize_indexer_keys
honest_write, honest_largest = write_module.write_indexer_cache, pieces.largest
honest_pages, honest_ranges = pieces.seen_in_pages, pieces.seen_of_ranges


def given(**change: Callable[[Any], Any]) -> Function:
    """A mutant that computes the logits of arguments that are changed by the given functions."""
    return lambda q, keys, weights, **others: honest_logits(
        **{name: change.get(name, lambda value: value)(value)
           for name, value in {"q": q, "keys": keys, "weights": weights, **others}.items()}
    )  # fmt: skip


def with_seen(change: Callable[[Any], Any], which: str = "both") -> Function:
    """A mutant that computes logits with a changed set of visible keys."""

    def mutant(*arguments: Any, **keywords: Any) -> Any:
        patches: dict[str, Any] = {
            "seen_in_pages": lambda *given: map(change if which != "ranges" else keep, honest_pages(*given)),
            "seen_of_ranges": lambda *given: map(change if which != "pages" else keep, honest_ranges(*given)),
        }
        with mock.patch.multiple(logits_module, **patches):
            return honest_logits(*arguments, **keywords)

    return mutant


def keep(seen: Any) -> Any:
    return seen


def but_the_last_key(seen: Any) -> Any:
    return seen._replace(columns=seen.columns[:-1], keys=seen.keys[:-1], scales=seen.scales[:-1])


def of_other_columns(seen: Any) -> Any:
    return seen._replace(columns=np.arange(len(seen.columns)))


def without_relu(*arguments: Any, **keywords: Any) -> Any:
    with mock.patch.object(logits_module.np, "maximum", lambda products, zero: products):
        return honest_logits(*arguments, **keywords)


def weights_inside_relu(q: Any, keys: Any, weights: Any, **others: Any) -> Any:
    if others.get("q_dtype") == "float8_e4m3fn":
        return honest_logits(q, keys, np.abs(weights), **others)
    return honest_logits(q * np.asarray(weights)[..., None], keys, np.ones_like(weights), **others)


def unseen_is_zero(*arguments: Any, **keywords: Any) -> Any:
    logits = honest_logits(*arguments, **keywords)
    return np.where(logits == -np.inf, 0.0, logits)


def nan_is_lost(*arguments: Any, **keywords: Any) -> Any:
    return np.nan_to_num(honest_logits(*arguments, **keywords), nan=0.0, posinf=np.inf, neginf=-np.inf)


def rounded_to_bfloat16(*arguments: Any, **keywords: Any) -> Any:
    logits = honest_logits(*arguments, **keywords).astype(np.float32)
    return ((logits.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


def scales_before_values(q: Any, keys: Any, weights: Any, **others: Any) -> Any:
    keys = np.roll(keys.reshape(len(keys), -1), 4, axis=1).reshape(keys.shape) if np.ndim(keys) == 4 else keys
    return honest_logits(q, keys, weights, **others)


def a_head_is_forgotten(q: Any, keys: Any, weights: Any, **others: Any) -> Any:
    return honest_logits(q, keys, weights * (np.arange(np.shape(weights)[1]) < 16), **others)


LOGITS: dict[str, Function] = {
    "without_relu": without_relu,
    "weights_inside_relu": weights_inside_relu,
    "unseen_is_zero": unseen_is_zero,
    "nan_is_lost": nan_is_lost,
    "rounded_to_bfloat16": rounded_to_bfloat16,
    "scales_before_values": scales_before_values,
    "a_head_is_forgotten": a_head_is_forgotten,
    "the_own_key_is_not_seen": with_seen(but_the_last_key, "pages"),
    "ranges_end_early": with_seen(but_the_last_key, "ranges"),
    "columns_begin_at_zero": with_seen(of_other_columns, "ranges"),
    "key_scale_is_ignored": with_seen(lambda seen: seen._replace(scales=np.ones_like(seen.scales))),
    "ratio_is_ignored": given(ratio=lambda _: 1),
    "ratio_rounds_up": given(kv_lens=lambda lens: None if lens is None else np.asarray(lens) + 1),
    "num_seqs_is_ignored": given(num_seqs=lambda _: None),
    "pages_are_held_within": given(page_indices=lambda table: None if table is None else np.maximum(table, 0)),
    "max_keys_is_one_less": with_seen(lambda seen: but_the_last_key(seen) if len(seen.columns) > 5 else seen, "ranges"),
}


def listed(change: Callable[[Any], Any]) -> Function:
    """A mutant that computes the logits of changed lists."""

    def mutant(*arguments: Any, indices: Any = None, **keywords: Any) -> Any:
        indices = None if indices is None else change(np.asarray(indices))
        return honest_logits(*arguments, indices=indices, **keywords)

    return mutant


LISTED: dict[str, Function] = {
    "no_entry_is_the_first_key": listed(lambda lists: np.maximum(lists, 0)),
    "the_last_entry_is_not_seen": listed(
        lambda lists: np.where(np.arange(lists.shape[1]) + 1 < lists.shape[1], lists, -1)
    ),
    "lists_are_sorted": listed(lambda lists: np.sort(lists, axis=1)),
    "a_double_is_not_seen": listed(lambda lists: np.where(np.diff(lists, axis=1, prepend=-1) == 0, -1, lists)),
}


def reference_with_seen(module: Any, honest: Function, change: Callable[[Any], Any]) -> Function:
    """A mutant of a function of a reference module with a changed set of visible keys."""

    def mutant(*arguments: Any, **keywords: Any) -> Any:
        patches: dict[str, Any] = {
            "seen_of_lists": lambda *given: map(change, honest_lists(*given)),
            "seen_of_ranges": lambda *given: map(change, honest_ranges(*given)),
        }
        with mock.patch.multiple(module, **patches):
            return honest(*arguments, **keywords)

    return mutant


def gradient_with_seen(change: Callable[[Any], Any]) -> Function:
    return reference_with_seen(gradient_module, honest_gradient, change)


def gradient_with(index: int, change: Callable[[Any], Any]) -> Function:
    """A mutant of the gradient that changes one of the results."""

    def mutant(*arguments: Any, **keywords: Any) -> Any:
        results = list(honest_gradient(*arguments, **keywords))
        results[index] = change(results[index])
        return tuple(results)

    return mutant


def derivative_at_zero_is_one(d_logits: Any, q: Any, keys: Any, weights: Any, **others: Any) -> Any:
    """A mutant in which relu's derivative at 0 is 1, because each product is increased by a tiny number."""
    q = np.concatenate([np.asarray(q, np.float64), np.full((*np.shape(q)[:2], 16), 1e-9)], axis=2)
    keys = np.concatenate([np.asarray(keys, np.float64), np.ones((len(keys), 16))], axis=1)
    d_q, d_keys, d_weights = honest_gradient(d_logits, q, keys, weights, **others)
    return d_q[..., :-16], d_keys[:, :-16], d_weights


def without_relu_in_the_gradient(d_logits: Any, q: Any, keys: Any, weights: Any, **others: Any) -> Any:
    ahead = honest_gradient(d_logits, q, keys, weights, **others)
    behind = honest_gradient(d_logits, -np.asarray(q), keys, weights, **others)
    return ahead[0] + behind[0], ahead[1] - behind[1], ahead[2] - behind[2]


def doubles_count_once(*arguments: Any, **keywords: Any) -> Any:
    def assign(total: Any, rows: Any, more: Any) -> None:
        total[rows] += more

    with mock.patch.object(gradient_module.np, "add", SimpleNamespace(at=assign)):
        return honest_gradient(*arguments, **keywords)


def every_logit_has_a_gradient(d_logits: Any, q: Any, keys: Any, weights: Any, **others: Any) -> Any:
    d_q, d_keys, d_weights = honest_gradient(d_logits, q, keys, weights, **others)
    return d_q + 0 * np.sum(d_logits, axis=1)[:, None, None], d_keys, d_weights


GRADIENTS: dict[str, Function] = {
    "derivative_at_zero_is_one": derivative_at_zero_is_one,
    "without_relu": without_relu_in_the_gradient,
    "doubles_count_once": doubles_count_once,
    "every_logit_has_a_gradient": every_logit_has_a_gradient,
    "key_scale_is_ignored": gradient_with_seen(lambda seen: seen._replace(scales=np.ones_like(seen.scales))),
    "the_last_key_is_not_seen": gradient_with_seen(lambda seen: but_the_last_key(seen)._replace(rows=seen.rows[:-1])),
    "columns_begin_at_zero": gradient_with_seen(of_other_columns),
    "keys_are_shifted": gradient_with(1, lambda d_keys: np.roll(d_keys, 1, axis=0)),
    "a_head_is_forgotten": gradient_with(0, lambda d_q: d_q * (np.arange(d_q.shape[1]) < 16)[None, :, None]),
    "d_weights_are_of_one_sign": gradient_with(2, np.abs),
    "d_weights_are_rounded": gradient_with(2, lambda d_weights: np.round(d_weights, 2)),
    "queries_without_keys_have_nan": gradient_with(
        0, lambda d_q: np.where(d_q.any(axis=2, keepdims=True), d_q, np.nan)
    ),
}


def target_with_seen(change: Callable[[Any], Any]) -> Function:
    return reference_with_seen(target_module, honest_target, change)


def not_normalised(q: Any, keys: Any, lse: Any, *arguments: Any, **keywords: Any) -> Any:
    return honest_target(q, keys, lse, *arguments, **keywords) * 0.999


def lse_is_ignored(q: Any, keys: Any, lse: Any, *arguments: Any, **keywords: Any) -> Any:
    return honest_target(q, keys, np.where(np.isneginf(lse), lse, 0.0), *arguments, **keywords)


def lse_in_base_2(q: Any, keys: Any, lse: Any, *arguments: Any, **keywords: Any) -> Any:
    return honest_target(q, keys, np.asarray(lse) * np.log(2), *arguments, **keywords)


def heads_without_keys_count(q: Any, keys: Any, lse: Any, *arguments: Any, **keywords: Any) -> Any:
    return honest_target(q, keys, np.where(np.isneginf(lse), 0.0, lse), *arguments, **keywords)


def the_first_head_alone(q: Any, keys: Any, lse: Any, *arguments: Any, **keywords: Any) -> Any:
    return honest_target(np.asarray(q)[:, :1], keys, np.asarray(lse)[:, :1], *arguments, **keywords)


def lengths_are_ignored(*arguments: Any, topk_lens: Any = None, **keywords: Any) -> Any:
    return honest_target(*arguments, **keywords)


def the_scale_is_ignored(*arguments: Any, sm_scale: Any = None, **keywords: Any) -> Any:
    return honest_target(*arguments, **keywords)


def empty_rows_are_even(*arguments: Any, **keywords: Any) -> Any:
    target = honest_target(*arguments, **keywords)
    return np.where(target.any(axis=1, keepdims=True), target, 1 / max(target.shape[1], 1))


TARGETS: dict[str, Function] = {
    function.__name__: function
    for function in (
        not_normalised, lse_is_ignored, lse_in_base_2, heads_without_keys_count, the_first_head_alone,
        lengths_are_ignored, the_scale_is_ignored, empty_rows_are_even,
    )
} | {
    "the_last_key_is_not_seen": target_with_seen(but_the_last_key),
    "columns_begin_at_zero": target_with_seen(of_other_columns),
}  # fmt: skip


def largest_with(operation: str, change: Callable[[Any, int], Any]) -> Function:
    """A mutant of an operation with another selection of the largest logits."""

    def mutant(*arguments: Any, **keywords: Any) -> Any:
        with mock.patch.object(select_module, "largest", change), mock.patch.object(topk_module, "largest", change):
            return HONEST_SELECTION[operation](*arguments, **keywords)

    return mutant


HONEST_SELECTION = {"indexer_topk": honest_topk, "top_k_indices": honest_select}


def ties_to_the_smaller(logits: Any, top_k: int) -> Any:
    columns = logits.shape[1]
    chosen = honest_largest(logits[:, ::-1], top_k)
    turned = np.where(chosen < 0, columns, columns - 1 - chosen)
    return np.where(np.sort(turned) == columns, -1, np.sort(turned)).astype(np.int32)


def negative_zero_is_less(logits: Any, top_k: int) -> Any:
    return honest_largest(np.where((logits == 0) & np.signbit(logits), -1e-30, logits), top_k)


def nan_is_the_largest(logits: Any, top_k: int) -> Any:
    return honest_largest(np.where(np.isnan(logits), np.inf, logits), top_k)


def infinities_are_chosen(logits: Any, top_k: int) -> Any:
    return honest_largest(np.where(logits == -np.inf, -1e300, logits), top_k)


def by_magnitude(logits: Any, top_k: int) -> Any:
    return honest_largest(np.where(np.isneginf(logits), logits, np.abs(logits)), top_k)


def in_order_of_logits(logits: Any, top_k: int) -> Any:
    chosen = honest_largest(logits, top_k)
    if not logits.shape[1]:
        return chosen
    values = np.where(chosen < 0, -np.inf, np.take_along_axis(logits, np.maximum(chosen, 0), axis=1))
    return np.take_along_axis(chosen, np.argsort(-np.nan_to_num(values), axis=1, kind="stable"), axis=1)


def of_upper_bits(logits: Any, top_k: int) -> Any:
    """The selection of a radix sort that compares only the upper 16 bits."""
    bits = np.ascontiguousarray(logits, np.float32).view(np.uint32) & 0xFFFF0000
    return honest_largest(bits.view(np.float32).astype(np.float64), top_k)


def one_too_few(logits: Any, top_k: int) -> Any:
    chosen = honest_largest(logits, top_k)
    chosen[:, top_k // 2 :] = np.where(chosen[:, -1:] >= 0, -1, chosen[:, top_k // 2 :])
    return chosen


SELECTIONS = {
    function.__name__: function
    for function in (
        ties_to_the_smaller, nan_is_the_largest, infinities_are_chosen, by_magnitude, in_order_of_logits, of_upper_bits,
        one_too_few,
    )
}  # fmt: skip


def candidates_are_ignored(*arguments: Any, **keywords: Any) -> Any:
    return honest_topk(*arguments, **keywords | {"candidate_blocks": None})


def candidates_count_from_the_end(*arguments: Any, **keywords: Any) -> Any:
    lists, size = keywords.get("candidate_blocks"), keywords.get("candidate_block_size")
    if lists is not None:
        lists = np.where(np.asarray(lists) == -1, 0, lists)
    return honest_topk(*arguments, **keywords | {"candidate_blocks": lists, "candidate_block_size": size})


def scale_is_not_floored(k: Any, power_of_two: bool = False) -> Any:
    with mock.patch.object(_kv_layout, "group_scales", lambda rows, _: np.abs(rows).max(axis=-1) / np.float32(448)):
        return honest_quantize(k, power_of_two)


def rounded_towards_zero(k: Any, power_of_two: bool = False) -> Any:
    codes, scales = honest_quantize(k, power_of_two)
    above = np.abs(pieces.decode(codes, pieces.E4M3)) > np.abs(np.asarray(k) / scales[:, None])
    return codes - above.astype(np.uint8), scales


def powers_round_down(k: Any, power_of_two: bool = False) -> Any:
    codes, scales = honest_quantize(k, False)
    return codes, (scales.view(np.uint32) & 0xFF800000).view(np.float32) if power_of_two else scales


def written_at_slot_zero(k: Any, cache: Any, slot_mapping: Any, **others: Any) -> Any:
    if slot_mapping is not None:
        slot_mapping = np.where(np.asarray(slot_mapping) < 0, 0, slot_mapping)
    return honest_write(k, cache, slot_mapping, **others)


def written_one_early(k: Any, cache: Any, slot_mapping: Any, kv_lens: Any, **others: Any) -> Any:
    return honest_write(k, cache, slot_mapping, kv_lens=None if kv_lens is None else kv_lens - 1, **others)


def written_from_every_sequence(k: Any, cache: Any, slot_mapping: Any, num_seqs: Any, **others: Any) -> Any:
    del num_seqs
    return honest_write(k, cache, slot_mapping, **others)


def scales_beside_values(k: Any, cache: Any, slot_mapping: Any, **others: Any) -> Any:
    new = honest_write(k, cache, slot_mapping, **others)
    values, scales = (np.array(plane) for plane in pieces.planes(new))
    return np.concatenate([values, scales], axis=-1).reshape(new.shape)


# Mutants that 120 random calls may miss. They need nearly equal logits, or a table with sequences that are not live.
RARE = {"num_seqs_is_ignored", "written_from_every_sequence", "of_upper_bits", "negative_zero_is_less"}


def caught(runner: Runner, words: tuple[str, ...], name: str = "") -> None:
    """Assert that corners and random calls both expose the fault, in checks whose names begin with one of `words`.

    Random calls need not expose the mutants in RARE.
    """
    for group in (corners,) if name in RARE else (corners, agreement):
        chosen = [check for check in group() if check.name.startswith(words)]
        assert any(failures(runner, chosen, 120)), f"no check of {group.__name__} caught it"


def test_the_honest_backend_passes(plant: Callable[..., Runner]) -> None:
    """A planted backend without a fault passes all checks."""
    assert list(failures(plant(), (*corners(), *agreement(), *laws()), 4)) == []


@pytest.mark.parametrize("name", LOGITS)
def test_wrong_logits_are_caught(plant: Callable[..., Runner], name: str) -> None:
    caught(plant(indexer_logits=LOGITS[name]), ("indexer logits",), name)


@pytest.mark.parametrize("name", LISTED)
def test_wrong_lists_are_caught(plant: Callable[..., Runner], name: str) -> None:
    caught(plant(indexer_logits=LISTED[name]), ("indexer logits of drawn lists", "indexer logits, lists"))


@pytest.mark.parametrize("name", GRADIENTS)
def test_wrong_gradients_are_caught(plant: Callable[..., Runner], name: str) -> None:
    caught(plant(indexer_logits_backward=GRADIENTS[name]), ("indexer gradient",))


@pytest.mark.parametrize("name", TARGETS)
def test_wrong_targets_are_caught(plant: Callable[..., Runner], name: str) -> None:
    caught(plant(attention_target=TARGETS[name]), ("indexer target",))


@pytest.mark.parametrize("operation", HONEST_SELECTION)
@pytest.mark.parametrize("name", SELECTIONS)
def test_a_wrong_selection_is_caught(plant: Callable[..., Runner], name: str, operation: str) -> None:
    mutant = largest_with(operation, SELECTIONS[name])
    words = {"indexer_topk": ("indexer top-k",), "top_k_indices": ("indexer selection",)}[operation]
    caught(plant(**{operation: mutant}), words, name)


def test_an_order_of_zeros_is_caught(plant: Callable[..., Runner]) -> None:
    """A selection that orders -0 before 0 is caught by the checks of `top_k_indices`, which always get both zeros."""
    mutant = largest_with("top_k_indices", negative_zero_is_less)
    caught(plant(top_k_indices=mutant), ("indexer selection",), negative_zero_is_less.__name__)


@pytest.mark.parametrize("mutant", [candidates_are_ignored, candidates_count_from_the_end])
def test_wrong_candidates_are_caught(plant: Callable[..., Runner], mutant: Function) -> None:
    caught(plant(indexer_topk=mutant), ("indexer top-k",))


@pytest.mark.parametrize("mutant", [scale_is_not_floored, rounded_towards_zero, powers_round_down])
def test_wrong_codes_are_caught(plant: Callable[..., Runner], mutant: Function) -> None:
    caught(plant(quantize_indexer_keys=mutant), ("indexer keys quantised",))


@pytest.mark.parametrize(
    "mutant", [written_at_slot_zero, written_one_early, written_from_every_sequence, scales_beside_values]
)
def test_a_wrong_write_is_caught(plant: Callable[..., Runner], mutant: Function) -> None:
    caught(plant(write_indexer_cache=mutant), ("indexer keys written",), mutant.__name__)
