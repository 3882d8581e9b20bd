"""The suite catches wrong packed attention and wrong gradients: reference implementations with one planted fault."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ragged_attention.reference import sparse_mla_prefill_backward as sparse
from ragged_attention.reference import varlen_attention as packed
from ragged_attention.reference import varlen_attention_backward as packed_backward
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.varlen.suite import agreement, corners, laws
from tests.planting import Function, failures

pytest.importorskip("torch", reason="the mutants run through the torch front end")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a mutant may let NaN through

HONEST: dict[str, Function] = {
    module.__name__.rpartition(".")[2]: getattr(module, module.__name__.rpartition(".")[2])
    for module in (packed, packed_backward, sparse)
}
FORWARD, DENSE, SPARSE = HONEST
honest_largest = packed.largest_logit
honest_visible, honest_attend, honest_sequences = packed.visible, packed.attend, packed.sequences
honest_backward, honest_terms, honest_selected = (
    packed_backward.attend_backward,
    packed_backward.row_terms,
    sparse.selected,
)
honest_dense, honest_sparse = HONEST[DENSE], HONEST[SPARSE]
honest_table = packed_backward.add_to_table


def with_pieces(operation: str, **pieces: Function) -> Function:
    """An operation's reference implementation with some of its inner functions replaced."""

    def mutant(**arguments: Any) -> Any:
        with contextlib.ExitStack() as patches:
            for name, piece in pieces.items():
                for module in (packed, packed_backward, sparse):
                    if hasattr(module, name):
                        patches.enter_context(mock.patch.object(module, name, piece))
            return HONEST[operation](**arguments)

    return mutant


def with_arguments(operation: str, **change: Any) -> Function:
    """An operation's reference implementation, called with some arguments replaced."""
    return lambda **arguments: HONEST[operation](**(arguments | change))


def with_other(operation: str, name: str, change: Callable[[Any], Any]) -> Function:
    """An operation's reference implementation, called with the argument `name` changed unless it is None."""

    def mutant(**arguments: Any) -> Any:
        array = arguments[name]
        return HONEST[operation](**arguments | {name: None if array is None else change(array)})

    return mutant


def with_lists_of_32_bits(operation: str) -> Function:
    """An operation's reference implementation, in which a block's first key overflows 32 bits."""

    def mutant(**arguments: Any) -> Any:
        lists, size = arguments["selected"], arguments["block_size"]
        if lists is None:
            return HONEST[operation](**arguments)
        return HONEST[operation](**arguments | {"selected": (lists.astype(np.int64) * size).astype(np.int32) // size})

    return mutant


def _moved_ranges(begin: int, end: int) -> Callable[[Any], Any]:
    """A function that adds `begin` to the starts and `end` to the ends of key ranges."""
    return lambda ranges: np.add(ranges, [begin, end], dtype=np.int64)


# Faults in the keys that a query sees.
def causal_from_the_top_left(q_len: int, kv_len: int, valid: Any, causal: bool, window: Any, ranges: Any) -> Any:
    seen = honest_visible(q_len, kv_len, valid, False, window, ranges=ranges)
    return seen & (np.arange(kv_len) <= np.arange(q_len)[:, None]) if causal else seen


def causal_hides_the_own_key(q_len: int, kv_len: int, valid: Any, causal: bool, window: Any, ranges: Any) -> Any:
    seen = honest_visible(q_len, kv_len, valid, causal, window, ranges=ranges)
    return seen & (np.arange(kv_len) < kv_len - q_len + np.arange(q_len)[:, None]) if causal else seen


def window_is_one_too_wide(q_len: int, kv_len: int, valid: Any, causal: bool, window: Any, ranges: Any) -> Any:
    return honest_visible(q_len, kv_len, valid, causal, window and window + 1, ranges=ranges)


def window_bounds_the_right_side(q_len: int, kv_len: int, valid: Any, causal: bool, window: Any, ranges: Any) -> Any:
    return honest_visible(q_len, kv_len, valid, causal or window is not None, window, ranges=ranges)


def keys_of_the_next_sequence(*arguments: Any) -> Any:
    for rows, keys, seen in honest_sequences(*arguments):
        more = slice(keys.start, min(keys.stop + 1, arguments[3])) if keys.stop > keys.start else keys
        wider = np.pad(seen, ((0, 0), (0, 0), (0, more.stop - keys.stop)), mode="edge") if seen.size else seen
        yield rows, more if seen.size else keys, wider


def sequences_of_no_key_end_the_batch(*arguments: Any) -> Any:
    for rows, keys, seen in honest_sequences(*arguments):
        if not seen.size:
            return
        yield rows, keys, seen


# Faults in the results of a row.
def share_is_not_applied(q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any) -> Any:
    return honest_attend(q, k, v, seen, scale, cap, -np.inf, *bias)


def sink_counted_in_the_lse(q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any) -> Any:
    out, lse = honest_attend(q, k, v, seen, scale, cap, sink, *bias)
    return out, np.where(lse == -np.inf, lse, np.logaddexp(lse, sink))


def cap_before_scale(q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any) -> Any:
    return honest_attend(q, k, v, seen, scale, cap if cap is None else cap * scale, sink, *bias)


def values_of_width_of_keys(q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any) -> Any:
    out, lse = honest_attend(q, k, v, seen, scale, cap, sink, *bias)
    out[:, q.shape[1] :] = 0
    return out, lse


def no_key_is_zero_over_zero(q: Any, k: Any, v: Any, seen: Any, scale: float, cap: Any, sink: float, *bias: Any) -> Any:
    out, lse = honest_attend(q, k, v, seen, scale, cap, sink, *bias)
    return np.where(lse[:, None] == -np.inf, np.nan, out), lse


# Faults in the gradient of one head. The arguments are d_out, q, k, v, seen, lse, share, delta, d_lse, scale, soft_cap
# and, for packed sequences, bias.
def _with_changes(**change: Callable[..., Any]) -> Function:
    """The correct gradient function, called with changed arguments. Each change is a function of all arguments."""
    names = ("d_out", "q", "k", "v", "seen", "lse", "share", "delta", "d_lse", "scale", "soft_cap")

    def mutant(*arguments: Any) -> Any:
        named = dict(zip((*names, "bias"), arguments, strict=False))
        return honest_backward(*(named | {name: make(**named) for name, make in change.items()}).values())

    return mutant


def share_is_missing_in_dv(*arguments: Any) -> Any:
    dq, dk, _, d_bias = honest_backward(*arguments)
    whole = list(arguments)
    whole[6] = (arguments[6] > 0) * 1.0
    return dq, dk, honest_backward(*whole)[2], d_bias


def slope_of_the_cap_is_forgotten(*arguments: Any) -> Any:
    d_out, q, k, v, seen, lse, share, delta, d_lse, scale, cap, *bias = arguments
    if cap is None:
        return honest_backward(*arguments)
    with np.errstate(all="ignore"):
        logits = cap * np.tanh(q @ k.T * scale / cap) + sum(bias)
        weights = np.exp(np.where(seen, logits, -np.inf) - lse[:, None])
        d_logits = weights * (share[:, None] * (d_out @ v.T - delta[:, None]) + d_lse[:, None])
        d_products = np.where(seen, scale * d_logits, 0.0)
    return d_products @ np.nan_to_num(k), d_products.T @ np.nan_to_num(q), *honest_backward(*arguments)[2:]


def last_keys_get_no_dk(*arguments: Any) -> Any:
    dq, dk, dv, d_bias = honest_backward(*arguments)
    if len(dk) > 8:
        dk[len(dk) // 8 * 8 :] = 0
    return dq, dk, dv, d_bias


def last_rows_give_no_dv(*arguments: Any) -> Any:
    dq, dk, _, d_bias = honest_backward(*arguments)
    some = list(arguments)
    rows = np.arange(len(arguments[0]))
    some[4] = arguments[4] & ((len(rows) <= 8) | (rows < len(rows) // 8 * 8))[:, None]
    return dq, dk, honest_backward(*some)[2], d_bias


def scale_is_missing_in_dk(*arguments: Any) -> Any:
    dq, dk, dv, d_bias = honest_backward(*arguments)
    return dq, dk * arguments[1].shape[1] ** 0.5, dv, d_bias


def dq_is_of_one_key(*arguments: Any) -> Any:
    """dq is the sum over the last block of keys only, as if each block restarted the sum."""
    dq, dk, dv, d_bias = honest_backward(*arguments)
    late = list(arguments)
    late[4] = arguments[4] & (np.arange(len(arguments[2])) >= len(arguments[2]) - 9)
    return honest_backward(*late)[0] if len(arguments[2]) > 9 else dq, dk, dv, d_bias


# The terms of a row that its gradients need.
def sinks_have_the_wrong_sign(*arguments: Any) -> Any:
    *terms, d_sinks = honest_terms(*arguments)
    return *terms, None if d_sinks is None else -d_sinks


def sinks_are_given_all(*arguments: Any) -> Any:
    """d_sinks is the sum of -delta instead of (share - 1) * delta."""
    share, delta, d_lse, d_sinks = honest_terms(*arguments)
    return share, delta, d_lse, None if d_sinks is None else -delta.sum(axis=0)


def delta_is_of_the_unsunk_out(*arguments: Any) -> Any:
    share, delta, d_lse, d_sinks = honest_terms(*arguments)
    return share, np.where(share > 0, delta / np.where(share > 0, share, 1), delta), d_lse, d_sinks


def fully_masked_rows_are_nan(d_out: Any, out: Any, lse: Any, d_lse: Any, sinks: Any) -> Any:
    share, delta, more, d_sinks = honest_terms(d_out, out, lse, d_lse, sinks)
    leaked = d_sinks if d_sinks is None else d_sinks + 0 * d_out.sum()
    return share, delta, more, leaked


# Faults in the whole gradient.
def groups_interleave(**arguments: Any) -> Any:
    """Query head h reads KV head h % K instead of h // (H / K)."""
    heads, kv_heads = arguments["q"].shape[1], arguments["k"].shape[1]
    order = np.arange(heads).reshape(-1, kv_heads).T.ravel()
    back = np.argsort(order)
    rows = {name: arguments[name][:, order] for name in ("q", "d_out", "out", "lse")}
    rows["d_lse"] = None if arguments["d_lse"] is None else arguments["d_lse"][:, order]
    rows["sinks"] = None if arguments["sinks"] is None else arguments["sinks"][order]
    dq, dk, dv, d_sinks, d_bias = honest_dense(**arguments | rows)
    return dq[:, back], dk, dv, None if d_sinks is None else d_sinks[back], d_bias


def the_last_head_of_a_group_counts(**arguments: Any) -> Any:
    group = arguments["q"].shape[1] // arguments["k"].shape[1]
    mute = (np.arange(arguments["q"].shape[1]) + 1) % group > 0
    alone = {"d_out": np.where(mute[None, :, None], 0, arguments["d_out"])}
    if arguments["d_lse"] is not None:
        alone["d_lse"] = np.where(mute, 0, arguments["d_lse"])
    quiet = arguments | alone | {"out": np.where(mute[None, :, None], 0, arguments["out"])}
    dq, _, _, *others = honest_dense(**arguments)
    _, dk, dv, *_ = honest_dense(**quiet)
    return dq, dk, dv, *others


def unseen_keys_are_not_written(**arguments: Any) -> Any:
    dq, dk, *others = honest_dense(**arguments)
    return dq, np.where(dk.any(axis=-1, keepdims=True) | np.isnan(dk), dk, np.nan), *others


def keys_times_nothing(**arguments: Any) -> Any:
    """NaN in keys that nobody sees leaks into dq, because 0 * NaN is NaN."""
    dq, *others = honest_dense(**arguments)
    return dq + 0.0 * arguments["k"].sum(), *others


# Faults in the gradient of the relative bias.
def keys_beyond_the_table_are_lost(d_table: Any, d_bias: Any, at_own: int) -> None:
    q_len, kv_len = d_bias.shape
    columns = (kv_len - q_len + np.arange(q_len))[:, None] - np.arange(kv_len) + at_own
    honest_table(d_table, np.where((columns >= 0) & (columns < d_table.shape[-1]), d_bias, 0.0), at_own)


def columns_begin_at_the_own_key(d_table: Any, d_bias: Any, at_own: int) -> None:
    del at_own
    honest_table(d_table, d_bias, 0)


def the_bias_is_inside_the_cap(*arguments: Any) -> Any:
    """The gradient of the bias is multiplied by the slope of the soft cap."""
    _, q, k, _, _, _, _, _, _, scale, cap, *_ = arguments
    *others, d_bias = honest_backward(*arguments)
    return *others, d_bias if cap is None else d_bias * (1 - np.tanh(np.nan_to_num(q @ k.T * scale) / cap) ** 2)


def the_bias_is_scaled(*arguments: Any) -> Any:
    *others, d_bias = honest_backward(*arguments)
    return *others, d_bias * arguments[9]


# Lists of rows.
def duplicates_count_once(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return np.unique(honest_selected(indices, topk_len, num_slots))


def minus_one_is_row_zero(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return honest_selected(np.where(indices == -1, 0, indices), topk_len, num_slots)


def lengths_are_ignored(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return honest_selected(indices, len(indices), num_slots)


def indices_are_held_within(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return honest_selected(np.minimum(indices, num_slots - 1), topk_len, num_slots)


def _without_dv(*arguments: Any) -> Any:
    dq, dk, dv, d_bias = honest_backward(*arguments)
    return dq, dk, 0 * dv, d_bias


def _only_dv(*arguments: Any) -> Any:
    """The value's columns of a row's gradient hold dv alone, instead of dk + dv."""
    dq, dk, dv, d_bias = honest_backward(*arguments)
    dk[:, : dv.shape[1]] = 0
    return dq, dk, dv, d_bias


def the_last_duplicate_wins(**arguments: Any) -> Any:
    """A slot that is listed twice is added once, as in NumPy's `d_rows[slots] += dk`."""
    with mock.patch.object(sparse.np, "add", _Overwriting()):
        return honest_sparse(**arguments)


class _Overwriting:
    def at(self, array: Any, indices: Any, values: Any) -> None:
        array[indices] += values


def tokens_overwrite_rows(**arguments: Any) -> Any:
    """If two tokens list a row, its gradient is that of one token instead of their sum."""
    dq, dkv, d_sinks = honest_sparse(**arguments)
    per_token = ("d_out", "q", "indices", "out", "lse", "d_lse", "topk_lens")
    total = np.zeros_like(dkv)
    for token in range(len(arguments["q"])):
        own = {name: arguments[name][token : token + 1] for name in per_token if arguments[name] is not None}
        more = honest_sparse(**arguments | own)[1]
        total = np.where(more != 0, more, total)
    return dq, total, d_sinks


def rows_nobody_lists_are_not_written(**arguments: Any) -> Any:
    dq, dkv, d_sinks = honest_sparse(**arguments)
    return dq, np.where(dkv.any(axis=-1, keepdims=True), dkv, np.nan), d_sinks


def max_logits_of_hidden_keys(q: Any, k: Any, seen: Any, scale: float) -> float:
    return honest_largest(q, k, np.ones_like(seen), scale)


FORWARDS: dict[str, Function] = {
    mutant.__name__: with_pieces(FORWARD, **{piece: mutant})
    for piece, mutant in (
        ("visible", causal_from_the_top_left),
        ("visible", causal_hides_the_own_key),
        ("visible", window_is_one_too_wide),
        ("visible", window_bounds_the_right_side),
        ("sequences", keys_of_the_next_sequence),
        ("sequences", sequences_of_no_key_end_the_batch),
        ("attend", share_is_not_applied),
        ("attend", sink_counted_in_the_lse),
        ("attend", cap_before_scale),
        ("attend", values_of_width_of_keys),
        ("attend", no_key_is_zero_over_zero),
        ("largest_logit", max_logits_of_hidden_keys),
    )
} | {
    "scale_is_ignored": with_arguments(FORWARD, sm_scale=None),
    "cap_is_ignored": with_arguments(FORWARD, soft_cap=None),
    "slopes_are_ignored": with_arguments(FORWARD, alibi_slopes=None),
    "slopes_are_of_the_first_head": with_other(FORWARD, "alibi_slopes", lambda slopes: np.full_like(slopes, slopes[0])),
    "only_the_first_range_counts": with_other(FORWARD, "key_ranges", lambda ranges: ranges[:, :1]),
    "ranges_include_their_end": with_other(FORWARD, "key_ranges", _moved_ranges(0, 1)),
    "lists_are_ignored": with_arguments(FORWARD, selected=None),
    "one_list_for_all_heads": with_other(FORWARD, "selected", lambda lists: lists[:, :1]),
    "blocks_of_32_bits": with_lists_of_32_bits(FORWARD),
}
OF_BOTH: dict[str, Function] = {
    "delta_is_forgotten": _with_changes(delta=lambda delta, **_: 0 * delta),
    "d_lse_is_ignored": _with_changes(d_lse=lambda d_lse, **_: 0 * d_lse),
    "share_is_ignored": _with_changes(share=lambda share, **_: np.ones_like(share)),
}
DENSES: dict[str, Function] = {
    mutant.__name__: with_pieces(DENSE, **{piece: mutant})
    for piece, mutant in (
        ("visible", causal_from_the_top_left),
        ("visible", causal_hides_the_own_key),
        ("visible", window_is_one_too_wide),
        ("sequences", keys_of_the_next_sequence),
        ("sequences", sequences_of_no_key_end_the_batch),
        ("attend_backward", share_is_missing_in_dv),
        ("attend_backward", slope_of_the_cap_is_forgotten),
        ("attend_backward", last_keys_get_no_dk),
        ("attend_backward", last_rows_give_no_dv),
        ("attend_backward", scale_is_missing_in_dk),
        ("attend_backward", dq_is_of_one_key),
        ("attend_backward", the_bias_is_inside_the_cap),
        ("attend_backward", the_bias_is_scaled),
        ("add_to_table", keys_beyond_the_table_are_lost),
        ("add_to_table", columns_begin_at_the_own_key),
        ("row_terms", sinks_have_the_wrong_sign),
        ("row_terms", sinks_are_given_all),
        ("row_terms", delta_is_of_the_unsunk_out),
        ("row_terms", fully_masked_rows_are_nan),
    )
} | {
    mutant.__name__: mutant
    for mutant in (
        groups_interleave, the_last_head_of_a_group_counts, unseen_keys_are_not_written, keys_times_nothing,
    )
} | {name: with_pieces(DENSE, attend_backward=mutant) for name, mutant in OF_BOTH.items()} | {
    "window_is_ignored": with_arguments(DENSE, sliding_window=None),
    "scale_is_ignored": with_arguments(DENSE, sm_scale=None),
    "cap_is_ignored": with_arguments(DENSE, soft_cap=None),
    "slopes_are_ignored": with_arguments(DENSE, alibi_slopes=None),
    "slopes_have_the_wrong_sign": with_other(DENSE, "alibi_slopes", np.negative),
    "ranges_are_ignored": with_arguments(DENSE, key_ranges=None),
    "ranges_exclude_their_begin": with_other(DENSE, "key_ranges", _moved_ranges(1, 0)),
    "lists_are_ignored": with_arguments(DENSE, selected=None),
    "one_list_for_all_heads": with_other(DENSE, "selected", lambda lists: lists[:, :1]),
    "blocks_of_32_bits": with_lists_of_32_bits(DENSE),
}  # fmt: skip
SPARSES: dict[str, Function] = {
    mutant.__name__: with_pieces(SPARSE, selected=mutant)
    for mutant in (duplicates_count_once, minus_one_is_row_zero, lengths_are_ignored, indices_are_held_within)
} | {
    "value_columns_are_forgotten": with_pieces(SPARSE, attend_backward=_without_dv),
    "value_columns_are_overwritten": with_pieces(SPARSE, attend_backward=_only_dv),
    "sinks_have_the_wrong_sign": with_pieces(SPARSE, row_terms=sinks_have_the_wrong_sign),
} | {name: with_pieces(SPARSE, attend_backward=mutant) for name, mutant in OF_BOTH.items()} | {
    mutant.__name__: mutant
    for mutant in (the_last_duplicate_wins, tokens_overwrite_rows, rows_nobody_lists_are_not_written)
}  # fmt: skip


def expect_caught(runner: Runner, word: str | tuple[str, ...]) -> None:
    """Check that named and drawn batches both expose the fault, in checks whose names begin with `word`."""
    for group, examples in ((corners, 1), (agreement, 60)):
        chosen = [check for check in group() if check.name.startswith(word)]
        assert any(failures(runner, chosen, examples)), f"no check of {group.__name__} caught it"


def test_the_honest_backend_passes(plant: Callable[..., Runner]) -> None:
    """The positive control: the reference implementation, planted as a backend, passes all checks."""
    assert list(failures(plant(), (*corners(), *agreement(), *laws()), 4)) == []


@pytest.mark.parametrize("name", FORWARDS)
def test_wrong_packed_attention_is_caught(plant: Callable[..., Runner], name: str) -> None:
    expect_caught(plant(varlen_attention=FORWARDS[name]), ("packed,", "packed on drawn"))


@pytest.mark.parametrize("name", DENSES)
def test_a_wrong_dense_gradient_is_caught(plant: Callable[..., Runner], name: str) -> None:
    expect_caught(plant(varlen_attention_backward=DENSES[name]), "packed gradient")


@pytest.mark.parametrize("name", SPARSES)
def test_a_wrong_sparse_gradient_is_caught(plant: Callable[..., Runner], name: str) -> None:
    expect_caught(plant(sparse_mla_prefill_backward=SPARSES[name]), "sparse gradient")


# Mutants that fail a law, which needs no reference results, and the beginning of that law's name.
NOTICED = {
    (FORWARD, "max_logits_of_hidden_keys"): "packed, nothing that no query sees is in max_logits",
    (FORWARD, "causal_from_the_top_left"): "packed keys are keys in pages",
    (FORWARD, "share_is_not_applied"): "packed, sinks take their share",
    (FORWARD, "keys_of_the_next_sequence"): "packed, sequences do not mix",
    (FORWARD, "slopes_are_ignored"): "packed, slopes of zero",
    (FORWARD, "only_the_first_range_counts"): "packed, ranges are a union",
    (FORWARD, "ranges_include_their_end"): "packed, ranges of a mask",
    (DENSE, "slopes_have_the_wrong_sign"): "packed, gradients are slopes",
    (DENSE, "ranges_exclude_their_begin"): "packed, ranges of a mask",
    (FORWARD, "lists_are_ignored"): "packed, gradients are slopes",
    (DENSE, "lists_are_ignored"): "packed, gradients are slopes",
    (DENSE, "delta_is_forgotten"): "packed, gradients have their sums",
    (DENSE, "d_lse_is_ignored"): "packed, gradients have their sums",
    (DENSE, "keys_beyond_the_table_are_lost"): "packed, gradients have their sums",
    (DENSE, "columns_begin_at_the_own_key"): "packed, gradients are slopes",
    (DENSE, "share_is_missing_in_dv"): "packed, gradients have their sums",
    (DENSE, "last_keys_get_no_dk"): "packed, gradients have their sums",
    (DENSE, "slope_of_the_cap_is_forgotten"): "packed, gradients are slopes",
    (DENSE, "window_is_ignored"): "packed, gradients are slopes",
    (DENSE, "groups_interleave"): "packed, groups share a head",
    (DENSE, "the_last_head_of_a_group_counts"): "packed, groups share a head",
    (DENSE, "sinks_have_the_wrong_sign"): "packed, sinks lose what they take",
    (DENSE, "share_is_ignored"): "packed, sinks take their share",
    (DENSE, "unseen_keys_are_not_written"): "packed, nothing comes from nothing",
    (DENSE, "keys_times_nothing"): "packed, nothing comes from nothing",
    (DENSE, "keys_of_the_next_sequence"): "packed, sequences do not mix",
    (DENSE, "sequences_of_no_key_end_the_batch"): "packed, sequences may stand in any order",
    (SPARSE, "duplicates_count_once"): "sparse gradient, a double is two rows",
    (SPARSE, "the_last_duplicate_wins"): "sparse gradient, a double is two rows",
    (SPARSE, "lengths_are_ignored"): "sparse gradient, lengths cut lists",
    (SPARSE, "minus_one_is_row_zero"): "sparse gradient, nothing comes from nothing",
    (SPARSE, "value_columns_are_forgotten"): "sparse gradient, all rows listed is dense",
    (SPARSE, "value_columns_are_overwritten"): "sparse gradient, all rows listed is dense",
    (SPARSE, "tokens_overwrite_rows"): "sparse gradient, tokens add up",
    (SPARSE, "d_lse_is_ignored"): "sparse gradient, gradients are slopes",
}
MUTANTS = {FORWARD: FORWARDS, DENSE: DENSES, SPARSE: SPARSES}


@pytest.mark.parametrize(("operation", "name"), NOTICED)
def test_a_law_notices_without_an_oracle(plant: Callable[..., Runner], operation: str, name: str) -> None:
    law = [check for check in laws() if check.name.startswith(NOTICED[operation, name])]
    assert any(failures(plant(**{operation: MUTANTS[operation][name]}), law, 200))
