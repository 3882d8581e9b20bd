"""The suite catches wrong kernels: each mutant is the reference implementation with one planted fault and must fail.

A mutant is registered like another package's backend, so these tests also show that the suite can judge such backends.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ragged_attention.reference import merge_attention_states as merge
from ragged_attention.reference import ragged_paged_attention as attention
from ragged_attention.reference import write_kv_pages as write
from ragged_attention.reference._kv_layout import encode
from ragged_attention.testing.drawing import Check
from ragged_attention.testing.mla import suite as mla_suite
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.suite import agreement, corners, laws
from ragged_attention.testing.varlen import suite as varlen_suite
from tests.planting import Function, failures

pytest.importorskip("torch", reason="the mutants run through the torch front end")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a mutant may let NaN through

honest_attention, honest_visible, honest_attend = attention.ragged_paged_attention, attention.visible, attention.attend
honest_largest = attention.largest_logit
honest_bias, honest_named, honest_by_heads = attention.bias_of, attention.named, attention.seen_by_heads
honest_write, honest_merge = write.write_kv_pages, merge.merge_attention_states


def attention_with(**pieces: Function) -> Function:
    """The reference implementation with some of its functions replaced."""

    def mutant(*arguments: Any, **keywords: Any) -> Any:
        with contextlib.ExitStack() as patches:
            for name, piece in pieces.items():
                patches.enter_context(mock.patch.object(attention, name, piece))
            return honest_attention(*arguments, **keywords)

    return mutant


def attention_with_arguments(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Function:
    """The reference implementation, called with changed arguments."""
    return lambda **arguments: honest_attention(**(arguments | change(arguments)))


def causal_mask_hides_the_own_key(q_len: int, kv_len: int, valid: Any, causal: bool, window: Any, *masks: Any) -> Any:
    seen = honest_visible(q_len, kv_len, valid, causal, window, *masks)
    return seen & (np.arange(kv_len)[None] < (kv_len - q_len + np.arange(q_len))[:, None]) if causal else seen


def causal_mask_from_the_top_left(q_len: int, kv_len: int, valid: Any, causal: bool, window: Any, *masks: Any) -> Any:
    seen = honest_visible(q_len, kv_len, valid, False, window, *masks)
    return seen & (np.arange(kv_len)[None] <= np.arange(q_len)[:, None]) if causal else seen


def window_one_too_wide(q_len: int, kv_len: int, valid: Any, causal: bool, window: int | None, *masks: Any) -> Any:
    return honest_visible(q_len, kv_len, valid, causal, window and window + 1, *masks)


def invalid_pages_stay_visible(q_len: int, kv_len: int, valid: Any, causal: bool, window: Any, *masks: Any) -> Any:
    return honest_visible(q_len, kv_len, np.ones_like(valid), causal, window, *masks)


def draft_mask_hides_earlier_keys(
    q_len: int, kv_len: int, valid: Any, causal: bool, window: Any, drafted: Any, ranges: Any
) -> Any:
    seen = honest_visible(q_len, kv_len, valid, causal, window, drafted, ranges)
    return seen if drafted is None else seen & (np.arange(kv_len) >= kv_len - q_len)


def draft_mask_and_causal(
    q_len: int, kv_len: int, valid: Any, causal: bool, window: Any, drafted: Any, ranges: Any
) -> Any:
    """The causal mask still applies. Only a draft mask that lets a token see a later token exposes this."""
    seen = honest_visible(q_len, kv_len, valid, causal, window, drafted, ranges)
    return seen & honest_visible(q_len, kv_len, valid, causal, window, None, ranges)


def with_other_ranges(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(given: dict[str, Any]) -> dict[str, Any]:
        ranges = given["key_ranges"]
        return {"key_ranges": None if ranges is None else change(ranges.astype(np.int64))}

    return changed


def ranges_and_causal(q_len: int, kv_len: int, valid: Any, causal: bool, window: Any, drafted: Any, ranges: Any) -> Any:
    """The causal mask still applies. Only a range beyond a query's own position exposes this."""
    seen = honest_visible(q_len, kv_len, valid, causal, window, drafted, ranges)
    return seen if ranges is None else seen & honest_visible(q_len, kv_len, valid, causal, window)


def ranges_of_the_hull(
    q_len: int, kv_len: int, valid: Any, causal: bool, window: Any, drafted: Any, ranges: Any
) -> Any:
    """A query sees all keys from its first to its last, including those between two ranges."""
    seen = honest_visible(q_len, kv_len, valid, causal, window, drafted, ranges)
    if ranges is None:
        return seen
    before, behind = (np.logical_or.accumulate(seen[:, ::way], axis=1)[:, ::way] for way in (1, -1))
    return before & behind & valid[None, :kv_len]


def with_other_lists(change: Callable[[Any, int, dict[str, Any]], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A change of arguments that replaces block lists with `change(lists, block_size, arguments)`, if there are any."""

    def changed(given: dict[str, Any]) -> dict[str, Any]:
        lists = given["selected"]
        return {} if lists is None else {"selected": change(lists.astype(np.int64), given["block_size"], given)}

    return changed


def blocks_of_32_bits(lists: Any, size: int, given: dict[str, Any]) -> Any:
    """The first position of a block overflows, because it is computed in 32 bits."""
    return (lists * size).astype(np.int32) // size


def only_blocks_at_the_start_of_a_list(lists: Any, size: int, given: dict[str, Any]) -> Any:
    """A list ends at its first entry below 0."""
    return np.where(np.logical_or.accumulate(lists < 0, axis=2), -1, lists)


def one_list_for_all_heads(lists: Any, size: int, given: dict[str, Any]) -> Any:
    return lists[:, :1]


def heads_take_the_lists_in_turn(**given: Any) -> Any:
    """Query head h has list h % K instead of that of its KV head."""
    lists = given["selected"]
    pages = given["kv_pages"]
    kv_heads = pages[0].shape[2] if isinstance(pages, tuple) else pages.shape[2] // 2
    if lists is None or lists.shape[1] == 1:
        return honest_attention(**given)
    heads = given["q"].shape[1]
    results = []
    for head in range(heads):
        own = lists[:, [head % kv_heads] * kv_heads]
        found = honest_attention(**given | {"selected": own})
        results.append(tuple(part[:, head] for part in (found if given["return_lse"] else (found,))))
    stacked = tuple(np.stack(parts, axis=1) for parts in zip(*results, strict=True))
    return stacked if given["return_lse"] else stacked[0]


def a_block_has_a_key_less(selected: Any, block_size: int, kv_len: int) -> Any:
    seen = honest_named(selected, block_size, kv_len)
    return seen if block_size == 1 else seen & (np.arange(kv_len) % block_size < block_size - 1)


def a_block_has_a_key_more(selected: Any, block_size: int, kv_len: int) -> Any:
    seen = honest_named(selected, block_size, kv_len)
    more = np.zeros_like(seen)
    more[..., 1:] = seen[..., :-1]
    return seen | more


def lists_replace_the_other_masks(seen: Any, selected: Any, block_size: Any) -> Any:
    return honest_by_heads(seen if selected is None else np.ones_like(seen) & seen.any(axis=0), selected, block_size)


def lists_of_the_next_query(lists: Any, size: int, given: dict[str, Any]) -> Any:
    return np.roll(lists, -1, axis=0)


def the_own_block_is_seen_too(lists: Any, size: int, given: dict[str, Any]) -> Any:
    own = np.full(len(lists), -1)
    edges = np.asarray(given["cu_q_lens"])
    for seq, kv_len in enumerate(np.asarray(given["kv_lens"])):
        start, stop = (int(edge) for edge in np.clip(edges[seq : seq + 2], 0, len(lists)))
        own[start:stop] = (kv_len - (stop - start) + np.arange(max(stop - start, 0))) // size
    return np.concatenate([lists, np.broadcast_to(own[:, None, None], (*lists.shape[:2], 1))], axis=2)


def times_seen(seen: Any, selected: Any, block_size: Any) -> Any:
    """How often each query sees a key, [H, q_len, kv_len], if a block counts once for each time a list names it."""
    if selected is None:
        return seen[None].astype(int)
    named = selected[..., None] == np.arange(seen.shape[1]) // block_size
    return seen * named.sum(axis=2).swapaxes(0, 1)


def attend_as_often(
    q: Any, k: Any, v: Any, times: Any, scale: float, cap: Any, sink: float, bias: Any
) -> Any:  # fmt: skip
    return honest_attend(q, k, v, times > 0, scale, cap, sink, bias + np.log(np.maximum(times, 1)))


def softmax_of_unscaled_logits(
    q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any
) -> Any:
    return honest_attend(q, k, v, seen, 1.0, cap, sink, *bias)


def cap_before_scale(q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any) -> Any:
    return honest_attend(q, k, v, seen, scale, cap and cap * scale, sink, *bias)


def sink_once_for_each_of_two_splits(
    q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any
) -> Any:
    return honest_attend(q, k, v, seen, scale, cap, sink + np.log(2), *bias)


def sink_counted_in_the_lse(q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any) -> Any:
    out, lse = honest_attend(q, k, v, seen, scale, cap, sink, *bias)
    return out, np.where(lse == -np.inf, lse, np.logaddexp(lse, sink))


def lse_in_base_two(q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any) -> Any:
    out, lse = honest_attend(q, k, v, seen, scale, cap, sink, *bias)
    return out, lse / np.log(2)


def masked_keys_weigh_nothing_times_nan(
    q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any
) -> Any:
    """NaN in values that nobody sees leaks through P @ V, because 0 * NaN is NaN."""
    out, lse = honest_attend(q, k, v, seen, scale, cap, sink, *bias)
    return out + np.zeros(seen.shape) @ v, lse


def no_key_is_a_mean(q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any) -> Any:
    out, lse = honest_attend(q, k, v, seen, scale, cap, sink, *bias)
    fully_masked = ~seen.any(axis=1)
    return np.where(fully_masked[:, None], np.nan_to_num(v).mean(axis=0) if len(v) else out, out), lse


def next_page_of_the_table(given: dict[str, Any]) -> dict[str, Any]:
    return {"page_indices": np.roll(given["page_indices"], 1, axis=1)}


def tail_keys_skipped(given: dict[str, Any]) -> dict[str, Any]:
    """Keys past the last whole block of 8 are left out."""
    lens = given["kv_lens"]
    return {} if given["causal"] else {"kv_lens": np.where(lens > 8, lens // 8 * 8, lens).astype(np.int32)}


def scale_of_v_forgotten(given: dict[str, Any]) -> dict[str, Any]:
    return {"v_scale": None}


def scale_of_k_is_the_first_heads(given: dict[str, Any]) -> dict[str, Any]:
    return {"k_scale": None if given["k_scale"] is None else np.asarray(given["k_scale"]).reshape(-1)[0]}


def num_seqs_ignored(given: dict[str, Any]) -> dict[str, Any]:
    return {"num_seqs": None}


def slopes_are_ignored(given: dict[str, Any]) -> dict[str, Any]:
    return {"alibi_slopes": None}


def slopes_have_the_wrong_sign(given: dict[str, Any]) -> dict[str, Any]:
    return {"alibi_slopes": None if given["alibi_slopes"] is None else -given["alibi_slopes"]}


def slopes_of_keys_from_the_first_new_token(q_len: int, kv_len: int, slope: float, *table: Any) -> Any:
    """Distances count from the first new token, as in vLLM. Without sinks this changes lse but not out."""
    return slope * (np.arange(kv_len) - (kv_len - q_len)) + honest_bias(q_len, kv_len, 0.0, *table)


def tables_turn_round(q_len: int, kv_len: int, slope: float, table: Any, at_own: int) -> Any:
    """Distances in the relative bias table have the wrong sign."""
    if table is None:
        return honest_bias(q_len, kv_len, slope)
    return honest_bias(q_len, kv_len, slope, table[..., ::-1], table.shape[-1] - 1 - at_own)


def tables_end_in_zero(q_len: int, kv_len: int, slope: float, table: Any, at_own: int) -> Any:
    """Keys beyond the last column of the bias table get no bias."""
    bias = honest_bias(q_len, kv_len, slope, table, at_own)
    if table is None:
        return bias
    distance = (kv_len - q_len + np.arange(q_len))[:, None] - np.arange(kv_len)
    return np.where(distance + at_own < table.shape[-1], bias, honest_bias(q_len, kv_len, slope))


def slopes_before_the_cap(
    q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any
) -> Any:  # fmt: skip
    """The soft cap is also applied to the bias of the slopes."""
    if cap is None:
        return honest_attend(q, k, v, seen, scale, cap, sink, *bias)
    capped = [cap * np.tanh(each / cap) for each in bias]
    return honest_attend(q, k, v, seen, scale, cap, sink, *capped)


def query_heads_interleaved(**given: Any) -> Any:
    """Query head h reads KV head h % K instead of h // (H / K)."""
    heads, pages = given["q"].shape[1], given["kv_pages"]
    kv_heads = pages[0].shape[2] if isinstance(pages, tuple) else pages.shape[2] // 2
    order = np.arange(heads).reshape(heads // kv_heads, kv_heads).T.reshape(-1)
    own = {name: array[order] for name in ("sinks", "alibi_slopes") if (array := given[name]) is not None}
    result = honest_attention(**(given | {"q": given["q"][:, order], **own}))
    back = np.argsort(order)
    return tuple(part[:, back] for part in result) if given["return_lse"] else result[:, back]


def negative_slots_wrap_around(*arguments: Any, **given: Any) -> Any:
    if given.get("slot_mapping") is not None:
        slots, pages = given["slot_mapping"], given["kv_pages"]
        shape = (pages[0] if isinstance(pages, tuple) else pages).shape
        given["slot_mapping"] = np.where(slots == -1, shape[0] * shape[1] - 1, slots)
    return honest_write(*arguments, **given)


def codes_are_truncated(**given: Any) -> Any:
    """Quantising truncates instead of rounding to the nearest."""
    if given.get("cache_dtype") == "int8":
        with mock.patch.object(write, "encode", lambda values, name: encode(np.trunc(np.nan_to_num(values)), name)):
            return honest_write(**given)
    return honest_write(**given)


def written_from_the_start(**given: Any) -> Any:
    """Token i goes to position i instead of kv_len - q_len + i."""
    if given.get("kv_lens") is not None:
        given["kv_lens"] = np.minimum(given["kv_lens"], np.diff(given["cu_q_lens"].astype(np.int64)))
    return honest_write(**given)


def parts_merge_unweighted(outs: Any, lses: Any, **others: Any) -> Any:
    _, lse = honest_merge(outs, lses, **others)
    return np.nan_to_num(outs, posinf=0.0).mean(axis=0), lse


def empty_parts_leak(outs: Any, lses: Any, **others: Any) -> Any:
    out, lse = honest_merge(outs, lses, **others)
    return out + (0.0 * outs).sum(axis=0), lse


def merged_sinks_are_ignored(outs: Any, lses: Any, **others: Any) -> Any:
    return honest_merge(outs, lses, **others | {"sinks": None})


def merged_sinks_count_in_the_lse(outs: Any, lses: Any, **others: Any) -> Any:
    out, lse = honest_merge(outs, lses, **others)
    sinks = others.get("sinks")
    return out, lse if sinks is None else np.logaddexp(lse, sinks)


def max_logits_of_hidden_keys(q: Any, k: Any, seen: Any, scale: float) -> float:
    return honest_largest(q, k, np.ones_like(seen), scale)


def max_logits_of_magnitudes(q: Any, k: Any, seen: Any, scale: float) -> float:
    return max(honest_largest(q, k, seen, scale), honest_largest(-q, k, seen, scale))


def max_logits_of_queries_that_see_the_first_key(q: Any, k: Any, seen: Any, scale: float) -> float:
    return honest_largest(q, k, seen & seen[:, :1], scale)


ATTENTION: dict[str, Function] = {
    mutant.__name__: attention_with(visible=mutant)
    for mutant in (
        causal_mask_hides_the_own_key, causal_mask_from_the_top_left, window_one_too_wide, invalid_pages_stay_visible,
        draft_mask_hides_earlier_keys, draft_mask_and_causal, ranges_and_causal, ranges_of_the_hull,
    )
} | {
    mutant.__name__: attention_with(attend=mutant)
    for mutant in (
        softmax_of_unscaled_logits, cap_before_scale, sink_once_for_each_of_two_splits, sink_counted_in_the_lse,
        lse_in_base_two, masked_keys_weigh_nothing_times_nan, no_key_is_a_mean, slopes_before_the_cap,
    )
} | {
    mutant.__name__: attention_with(bias_of=mutant)
    for mutant in (slopes_of_keys_from_the_first_new_token, tables_turn_round, tables_end_in_zero)
} | {
    mutant.__name__: attention_with(largest_logit=mutant)
    for mutant in (
        max_logits_of_hidden_keys, max_logits_of_magnitudes, max_logits_of_queries_that_see_the_first_key,
    )
} | {
    mutant.__name__: attention_with_arguments(mutant)
    for mutant in (
        next_page_of_the_table, tail_keys_skipped, scale_of_v_forgotten, scale_of_k_is_the_first_heads,
        num_seqs_ignored, slopes_are_ignored, slopes_have_the_wrong_sign,
    )
} | {
    name: attention_with_arguments(with_other_ranges(change))
    for name, change in {
        "ranges_include_their_end": lambda ranges: np.add(ranges, [0, 1]),
        "ranges_exclude_their_begin": lambda ranges: np.add(ranges, [1, 0]),
        "only_the_first_range_counts": lambda ranges: ranges[:, :1],
        "ranges_of_the_next_query": lambda ranges: np.roll(ranges, -1, axis=0),
        "empty_ranges_turn_round": lambda ranges: np.sort(ranges, axis=-1),
    }.items()
} | {
    change.__name__: attention_with_arguments(with_other_lists(change))
    for change in (
        blocks_of_32_bits, only_blocks_at_the_start_of_a_list, one_list_for_all_heads, lists_of_the_next_query,
        the_own_block_is_seen_too,
    )
} | {
    mutant.__name__: attention_with(named=mutant) for mutant in (a_block_has_a_key_less, a_block_has_a_key_more)
} | {
    "lists_replace_the_other_masks": attention_with(seen_by_heads=lists_replace_the_other_masks),
    "heads_take_the_lists_in_turn": heads_take_the_lists_in_turn,
    "blocks_count_as_often_as_they_are_named": attention_with(seen_by_heads=times_seen, attend=attend_as_often),
} | {"query_heads_interleaved": query_heads_interleaved}  # fmt: skip
WRITE = {m.__name__: m for m in (negative_slots_wrap_around, codes_are_truncated, written_from_the_start)}
MERGE = {
    mutant.__name__: mutant
    for mutant in (
        parts_merge_unweighted, empty_parts_leak, merged_sinks_are_ignored, merged_sinks_count_in_the_lse,
    )
}  # fmt: skip


def paged(checks: Iterable[Check]) -> list[Check]:
    """The checks of paged attention, writes and merges: all except those of the latent and packed suites."""
    others = {
        check.name
        for of in (mla_suite, varlen_suite)
        for group in (of.corners, of.agreement, of.laws)
        for check in group()
    }
    return [check for check in checks if check.name not in others]


def test_the_honest_backend_passes(plant: Callable[..., Runner]) -> None:
    """The positive control: the reference implementation, planted as a backend, passes all checks."""
    for checks in (corners, agreement, laws):
        assert list(failures(plant(), paged(checks()), 10)) == []


@pytest.mark.parametrize("name", ATTENTION)
def test_a_wrong_attention_is_caught(plant: Callable[..., Runner], name: str) -> None:
    runner = plant(ragged_paged_attention=ATTENTION[name])
    assert any(failures(runner, paged(corners()), 1)), "no corner caught it"
    assert any(failures(runner, paged(agreement()), 200)), "no drawn batch caught it"


@pytest.mark.parametrize("name", WRITE)
def test_a_wrong_write_is_caught(plant: Callable[..., Runner], name: str) -> None:
    assert any(failures(plant(write_kv_pages=WRITE[name]), paged(corners()), 1))


@pytest.mark.parametrize("name", MERGE)
def test_a_wrong_merge_is_caught(plant: Callable[..., Runner], name: str) -> None:
    assert any(failures(plant(merge_attention_states=MERGE[name]), paged(corners()), 1))


# Mutants that fail a law, which needs no reference results, and the beginning of that law's name.
NOTICED = {
    "causal_mask_hides_the_own_key": "a query that sees no key",
    "sink_once_for_each_of_two_splits": "sinks take their share",
    "sink_counted_in_the_lse": "sinks take their share",
    "lse_in_base_two": "a double is its multiplicity",
    "masked_keys_weigh_nothing_times_nan": "what no query sees",
    "max_logits_of_hidden_keys": "attention, nothing that no query sees is in max_logits",
    "no_key_is_a_mean": "a query that sees no key",
    "scale_of_v_forgotten": "a quantised cache",
    "slopes_are_ignored": "a steep slope",
    "slopes_have_the_wrong_sign": "slopes alone",
    "slopes_of_keys_from_the_first_new_token": "slopes alone",
    "invalid_pages_stay_visible": "parts merge",
    "ranges_include_their_end": "ranges of a mask",
    "only_the_first_range_counts": "ranges are a union",
    "ranges_of_the_hull": "ranges are a union",
    "blocks_of_32_bits": "lists of blocks are sets",
    "a_block_has_a_key_less": "all blocks named",
    "a_block_has_a_key_more": "lists of blocks are sets",
    "one_list_for_all_heads": "each KV head",
    "heads_take_the_lists_in_turn": "each KV head",
    "lists_replace_the_other_masks": "all blocks named",
    "only_blocks_at_the_start_of_a_list": "all blocks named",
    "blocks_count_as_often_as_they_are_named": "all blocks named",
}


@pytest.mark.parametrize("name", NOTICED)
def test_a_law_notices_without_an_oracle(plant: Callable[..., Runner], name: str) -> None:
    law = [check for check in laws() if check.name.startswith(NOTICED[name])]
    assert any(failures(plant(ragged_paged_attention=ATTENTION[name]), law, 40))
