"""The suite catches wrong kernels of latent attention: each mutant is the reference implementation with one fault."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ragged_attention.calls import CACHE_FORMATS
from ragged_attention.reference import _kv_layout
from ragged_attention.reference import dequantize_mla_cache as dequantize
from ragged_attention.reference import make_decode_schedule as schedule
from ragged_attention.reference import mla_decode as decode
from ragged_attention.reference import page_indices_to_slots as slots
from ragged_attention.reference import quantize_mla_cache as quantize
from ragged_attention.reference import sparse_mla_prefill as prefill
from ragged_attention.reference import write_mla_cache as write
from ragged_attention.testing.mla.suite import agreement, corners, laws
from ragged_attention.testing.runner import Runner
from tests.planting import Function, failures

pytest.importorskip("torch", reason="the mutants run through the torch front end")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a mutant may let NaN through

HONEST: dict[str, Function] = {
    module.__name__.rpartition(".")[2]: getattr(module, module.__name__.rpartition(".")[2])
    for module in (prefill, decode, schedule, quantize, dequantize, write, slots)
}
honest_attend, honest_selected, honest_splits = prefill.attend_latent, prefill.selected, decode.attend_in_splits
honest_e2m1, honest_to_e2m1 = _kv_layout.decode_e2m1, _kv_layout.encode_e2m1
honest_groups = _kv_layout.quantize_groups_to_e2m1
honest_planes, honest_rows, honest_dense_slots = _kv_layout.planes, _kv_layout.dequantize_rows, decode.dense_slots
honest_scales, honest_decode, honest_prefill = (
    _kv_layout.group_scales,
    HONEST["mla_decode"],
    HONEST["sparse_mla_prefill"],
)
MODULES = (prefill, decode, schedule, quantize, dequantize, write, slots, _kv_layout)


def with_pieces(operation: str, **pieces: Function) -> Function:
    """An operation's reference implementation with some of its inner functions replaced."""

    def mutant(*arguments: Any, **keywords: Any) -> Any:
        with contextlib.ExitStack() as patches:
            for name, piece in pieces.items():
                for module in MODULES:
                    if hasattr(module, name):
                        patches.enter_context(mock.patch.object(module, name, piece))
            return HONEST[operation](*arguments, **keywords)

    return mutant


def with_changed_arguments(operation: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Function:
    """The reference implementation of an operation, called with changed arguments."""
    return lambda **arguments: HONEST[operation](**(arguments | change(arguments)))


# Faults in the slots that a list's entries select.
def minus_one_is_slot_zero(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return honest_selected(np.where(indices == -1, 0, indices), topk_len, num_slots)


def negative_indices_wrap_around(indices: Any, topk_len: Any, num_slots: int) -> Any:
    back = np.where(indices < 0, indices.astype(np.int64) + num_slots, indices)
    return honest_selected(back, topk_len, num_slots)


def indices_are_held_within(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return honest_selected(np.minimum(indices, num_slots - 1), topk_len, num_slots)


def one_slot_too_few(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return honest_selected(indices, topk_len, num_slots - 1)


def lengths_are_ignored(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return honest_selected(indices, len(indices), num_slots)


def lengths_are_one_too_long(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return honest_selected(indices, topk_len + 1, num_slots)


def long_lengths_are_none(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return honest_selected(indices, topk_len if topk_len <= len(indices) else 0, num_slots)


def negative_lengths_count_from_the_end(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return honest_selected(indices, max(len(indices) + topk_len, 0) if topk_len < 0 else topk_len, num_slots)


def lists_end_at_the_first_invalid_entry(indices: Any, topk_len: Any, num_slots: int) -> Any:
    bad = np.flatnonzero((indices < 0) | (indices >= num_slots))
    return honest_selected(indices, min(topk_len, *bad[:1], len(indices)), num_slots)


def duplicates_are_merged(indices: Any, topk_len: Any, num_slots: int) -> Any:
    return np.unique(honest_selected(indices, topk_len, num_slots))


def last_block_is_skipped(indices: Any, topk_len: Any, num_slots: int) -> Any:
    found = honest_selected(indices, topk_len, num_slots)
    return found[: len(found) // 8 * 8] if len(found) > 8 else found


# Faults in attention over the selected rows.
def rotary_part_is_dropped(q: Any, rows: Any, d_v: int, scale: float, soft_cap: Any = None) -> Any:
    return honest_attend(q[:, :d_v], rows[:, :d_v], d_v, scale, soft_cap)


def values_are_the_last_columns(q: Any, rows: Any, d_v: int, scale: float, soft_cap: Any = None) -> Any:
    _, highest, lse = honest_attend(q, rows, d_v, scale, soft_cap)
    return honest_attend(q[:, ::-1], rows[:, ::-1], d_v, scale, soft_cap)[0][:, ::-1], highest, lse


def logits_are_not_scaled(q: Any, rows: Any, d_v: int, scale: float, soft_cap: Any = None) -> Any:
    return honest_attend(q, rows, d_v, 1.0, soft_cap)


def logarithms_in_base_two(q: Any, rows: Any, d_v: int, scale: float, soft_cap: Any = None) -> Any:
    out, highest, lse = honest_attend(q, rows, d_v, scale, soft_cap)
    return out, highest / np.log(2), lse / np.log(2)


def no_key_gives_plus_infinity(q: Any, rows: Any, d_v: int, scale: float, soft_cap: Any = None) -> Any:
    out, highest, lse = honest_attend(q, rows, d_v, scale, soft_cap)
    return out, highest, np.where(lse == -np.inf, np.inf, lse)


def sinks_of_no_key_are_nan(lse: Any, sinks: Any) -> Any:
    return np.ones(lse.shape) if sinks is None else 1 / (1 + np.exp(np.asarray(sinks, np.float64) - lse))


def sinks_are_ignored(lse: Any, sinks: Any) -> Any:
    return np.ones(lse.shape)


# Faults in the bytes of quantised caches.
def scales_are_truncated_to_powers_of_two(codes: Any, scales: Any, rotary: Any, layout: Any) -> Any:
    if layout.scales == "float32":
        scales = (np.ascontiguousarray(scales).view(np.uint32) & 0xFF800000).astype("<u4").view(np.uint8)
    return honest_rows(codes, scales, rotary, layout)


def first_scale_serves_all(codes: Any, scales: Any, rotary: Any, layout: Any) -> Any:
    size = layout.scale_bytes // layout.num_groups
    return honest_rows(codes, np.tile(scales[..., :size], layout.num_groups), rotary, layout)


def rotary_part_is_scaled(codes: Any, scales: Any, rotary: Any, layout: Any) -> Any:
    rows = honest_rows(codes, scales, rotary, layout)
    if not layout.rotary:
        return rows
    last = scales.view("<f4")[..., -1] if layout.name == "fp8_v32" else _kv_layout.e8m0_values(scales[..., 6])
    rows[..., layout.values :] *= last[..., None]
    return rows


def scales_of_the_first_format(pages: Any, layout: Any) -> Any:
    """Every token's scales are read after its own values, as if "token" were the only layout."""
    if not layout.planar:
        return honest_planes(pages, layout)
    tokens, row = pages.view(np.uint8).reshape(*pages.shape[:2], pages.shape[-1]), layout.row_bytes
    return tokens[..., : layout.value_bytes], tokens[..., row:], tokens[..., layout.value_bytes : row]


def scales_of_the_next_token(pages: Any, layout: Any) -> Any:
    values, scales, rotary = honest_planes(pages, layout)
    return values, np.roll(scales, 1, axis=1) if layout.planar else scales, rotary


def the_layout_is_ignored(pages: Any, layout: Any) -> Any:
    """Every format is read in its default layout, whatever layout is requested."""
    return honest_planes(pages, CACHE_FORMATS[layout.name])


def halves_of_bytes_swapped(codes: Any) -> Any:
    return honest_e2m1(codes >> 4 | codes << 4)


def signs_of_4_bits_are_lost(codes: Any) -> Any:
    return np.abs(honest_e2m1(codes))


def smallest_of_4_bits_is_zero(codes: Any) -> Any:
    """The code of 0.5 decodes to 0, as on machines that flush subnormal numbers to 0."""
    found = honest_e2m1(codes)
    return np.where(np.abs(found) == 0.5, 0.0, found)


def four_bits_to_nearest_away_from_zero(values: Any) -> Any:
    return honest_to_e2m1(values * np.float32(1 + 2**-20))


def four_bits_wrap_around(values: Any) -> Any:
    return np.where(np.abs(values) > 6, 0, honest_to_e2m1(values)).astype(np.uint8)


def scales_of_4_bits_are_powers(groups: Any) -> Any:
    packed, stored = honest_groups(groups)
    return packed, stored & 0xF8


def not_a_number_is_the_largest(groups: Any) -> Any:
    return honest_groups(np.nan_to_num(groups, nan=6.0))


LISTED = (
    minus_one_is_slot_zero, negative_indices_wrap_around, indices_are_held_within, one_slot_too_few,
    lengths_are_ignored, lengths_are_one_too_long, long_lengths_are_none, negative_lengths_count_from_the_end,
    lists_end_at_the_first_invalid_entry, duplicates_are_merged, last_block_is_skipped,
)  # fmt: skip
ATTENDED = (
    rotary_part_is_dropped, values_are_the_last_columns, logits_are_not_scaled, logarithms_in_base_two,
    no_key_gives_plus_infinity,
)  # fmt: skip
READ = (scales_are_truncated_to_powers_of_two, first_scale_serves_all, rotary_part_is_scaled)
PLACED = (scales_of_the_first_format, scales_of_the_next_token, the_layout_is_ignored)


def _both(operation: str) -> dict[str, Function]:
    return (
        {mutant.__name__: with_pieces(operation, selected=mutant) for mutant in LISTED}
        | {mutant.__name__: with_pieces(operation, attend_latent=mutant) for mutant in ATTENDED}
        | {mutant.__name__: with_pieces(operation, dequantize_rows=mutant) for mutant in READ}
        | {mutant.__name__: with_pieces(operation, planes=mutant) for mutant in PLACED}
        | {
            mutant.__name__: with_pieces(operation, share_of_keys=mutant)
            for mutant in (sinks_of_no_key_are_nan, sinks_are_ignored)
        }
    )


# Faults of prefill alone or of decode alone.
def no_row_is_zero_over_zero(**arguments: Any) -> Any:
    out, highest, lse = honest_prefill(**arguments)
    return np.where(lse[..., None] == -np.inf, np.nan, out), highest, lse


def no_key_is_zero_over_zero(**arguments: Any) -> Any:
    out, lse = honest_decode(**arguments)
    return np.where(np.swapaxes(lse, 1, 2)[..., None] == -np.inf, np.nan, out), lse


def sink_counted_in_the_lse_of_prefill(**arguments: Any) -> Any:
    out, highest, lse = honest_prefill(**arguments)
    return out, highest, lse if arguments["sinks"] is None else np.logaddexp(lse, arguments["sinks"])


def sink_counted_in_max_logits(**arguments: Any) -> Any:
    out, highest, lse = honest_prefill(**arguments)
    return out, highest if arguments["sinks"] is None else np.maximum(highest, arguments["sinks"]), lse


def unselected_rows_times_nothing(**arguments: Any) -> Any:
    """NaN in rows that nobody selects leaks into out, because 0 * NaN is NaN."""
    out, highest, lse = honest_prefill(**arguments)
    rows = arguments["kv"] if arguments["kv"].dtype.kind == "f" else np.zeros(1)
    return out + 0.0 * rows.sum(), highest, lse


def kv_heads_share_a_list(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"indices": np.broadcast_to(arguments["indices"][:, :1], arguments["indices"].shape)}


def sink_counted_in_the_lse(**arguments: Any) -> Any:
    out, lse = honest_decode(**arguments)
    return out, lse if arguments["sinks"] is None else np.logaddexp(lse, arguments["sinks"][:, None])


def lse_as_queries_by_heads(**arguments: Any) -> Any:
    """The lse has the right values, but in the order [S, Q, H]."""
    out, lse = honest_decode(**arguments)
    return out, np.swapaxes(lse, 1, 2).reshape(lse.shape)


def unseen_slots_times_nothing(**arguments: Any) -> Any:
    out, lse = honest_decode(**arguments)
    cache = arguments["kv_cache"]
    return out + 0.0 * (cache.sum() if cache.dtype.kind == "f" else 0.0), lse


def causal_mask_hides_the_own_key(arguments: dict[str, Any]) -> dict[str, Any]:
    lens = arguments["kv_lens"]
    return {"kv_lens": lens - 1} if arguments["causal"] and lens is not None else {}


def causal_mask_is_ignored(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"causal": False}


def causal_mask_from_the_top_left(**arguments: Any) -> Any:
    if not arguments["causal"]:
        return honest_decode(**arguments)
    tokens = range(arguments["q"].shape[1])
    parts = [
        honest_decode(**arguments | {
            "q": arguments["q"][:, [token]], "causal": False, "kv_lens": np.minimum(arguments["kv_lens"], token + 1),
        })
        for token in tokens
    ]  # fmt: skip
    return np.concatenate([out for out, _ in parts], axis=1), np.concatenate([lse for _, lse in parts], axis=2)


def lengths_of_the_first_query(lens: Any, lists: Any) -> Any:
    lens = np.full(lists.shape[:1], lists.shape[2]) if lens is None else np.asarray(lens)
    return np.broadcast_to(lens.reshape(len(lens), -1)[:, :1], lists.shape[:2])


def extra_cache_has_the_page_size_of_the_first(arguments: dict[str, Any]) -> dict[str, Any]:
    if arguments["extra_indices"] is None:
        return {}
    slots, sizes = arguments["extra_indices"], [arguments[name].shape[1] for name in ("kv_cache", "extra_kv_cache")]
    page, offset = np.divmod(slots, sizes[0])
    return {"extra_indices": np.where(slots < 0, -1, page * sizes[1] + offset)}


def extra_cache_is_ignored(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"extra_kv_cache": None, "extra_indices": None, "extra_topk_lens": None}


def extra_list_has_the_lengths_of_the_first(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"extra_topk_lens": arguments["topk_lens"]} if arguments["extra_indices"] is not None else {}


def invalid_pages_are_held_within(page_indices: Any, kv_len: Any, num_pages: int, page_size: int) -> Any:
    return honest_dense_slots(np.clip(page_indices, 0, num_pages - 1), kv_len, num_pages, page_size)


def splits_are_averaged(q: Any, rows: Any, d_v: int, scale: float, soft_cap: float | None, num_splits: int) -> Any:
    """The results of two splits are averaged without their softmax weights."""
    halves = [honest_splits(q, part, d_v, scale, soft_cap, 1) for part in (rows[::2], rows[1::2]) if len(part)]
    if not halves:
        return honest_splits(q, rows, d_v, scale, soft_cap, 1)
    return sum(out for out, _ in halves) / len(halves), honest_splits(q, rows, d_v, scale, soft_cap, 1)[1]


PREFILL = _both("sparse_mla_prefill") | {
    mutant.__name__: mutant
    for mutant in (
        no_row_is_zero_over_zero, sink_counted_in_the_lse_of_prefill, sink_counted_in_max_logits,
        unselected_rows_times_nothing,
    )
} | {"kv_heads_share_a_list": with_changed_arguments("sparse_mla_prefill", kv_heads_share_a_list)}  # fmt: skip
DECODE = _both("mla_decode") | {
    mutant.__name__: mutant
    for mutant in (
        no_key_is_zero_over_zero, sink_counted_in_the_lse, lse_as_queries_by_heads, unseen_slots_times_nothing,
        causal_mask_from_the_top_left,
    )
} | {
    mutant.__name__: with_changed_arguments("mla_decode", mutant)
    for mutant in (
        causal_mask_hides_the_own_key, causal_mask_is_ignored, extra_cache_has_the_page_size_of_the_first,
        extra_cache_is_ignored, extra_list_has_the_lengths_of_the_first,
    )
} | {
    "lengths_of_the_first_query": with_pieces("mla_decode", list_lens=lengths_of_the_first_query),
    "invalid_pages_are_held_within": with_pieces("mla_decode", dense_slots=invalid_pages_are_held_within),
    "splits_are_averaged": with_pieces("mla_decode", attend_in_splits=splits_are_averaged),
}  # fmt: skip


# Faults of the operations that serve attention: quantising, writing, slots and schedules.
def scales_are_rounded_down(groups: Any, power_of_two: bool) -> Any:
    scales = honest_scales(groups, False)
    down = (scales.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return down if power_of_two else scales


def scales_have_no_floor(groups: Any, power_of_two: bool) -> Any:
    with mock.patch.object(np, "maximum", lambda scales, floor: scales):
        return honest_scales(groups, power_of_two)


def powers_are_doubled(groups: Any, power_of_two: bool) -> Any:
    """Scales are rounded up by incrementing the exponent, even if they are powers of two already."""
    scales = honest_scales(groups, False)
    up = ((scales.view(np.uint32) & np.uint32(0xFF800000)) + np.uint32(0x800000)).view(np.float32)
    return np.where(np.isfinite(scales), up, scales) if power_of_two else scales


def rotary_part_is_cut_off(values: Any) -> Any:
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def powers_have_bias_128(codes: Any) -> Any:
    return np.where(codes == 0xFF, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 128))


def last_power_is_a_number(codes: Any) -> Any:
    return np.ldexp(1.0, codes.astype(np.int64) - 127)


def minus_one_writes_the_last_slot(arguments: dict[str, Any]) -> dict[str, Any]:
    slots, num_slots = arguments["slot_mapping"], arguments["cache"].shape[0] * arguments["cache"].shape[1]
    return {"slot_mapping": np.where(slots == -1, num_slots - 1, slots), "kv": np.nan_to_num(arguments["kv"])}


def slots_of_32_bits(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"slot_mapping": arguments["slot_mapping"].astype(np.int32), "kv": np.nan_to_num(arguments["kv"])}


def positions_wrap_around(arguments: dict[str, Any]) -> dict[str, Any]:
    num_positions = arguments["page_indices"].shape[1] * arguments["page_size"]
    return {"positions": np.where(arguments["positions"] == -1, num_positions - 1, arguments["positions"])}


def negative_pages_make_slots(**arguments: Any) -> Any:
    table = np.abs(arguments["page_indices"].astype(np.int64))
    return HONEST["page_indices_to_slots"](**arguments | {"page_indices": table})


def overhead_is_forgotten(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"overhead": 0}


def an_empty_list_costs_nothing(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"sparse": False}


OTHERS: dict[str, tuple[str, Function]] = {
    mutant.__name__: (operation, with_pieces(operation, **{piece: mutant}))
    for operation, piece, mutant in (
        ("quantize_mla_cache", "group_scales", scales_are_rounded_down),
        ("quantize_mla_cache", "group_scales", scales_have_no_floor),
        ("quantize_mla_cache", "group_scales", powers_are_doubled),
        ("quantize_mla_cache", "bfloat16_bits", rotary_part_is_cut_off),
        ("dequantize_mla_cache", "e8m0_values", powers_have_bias_128),
        ("dequantize_mla_cache", "e8m0_values", last_power_is_a_number),
        ("write_mla_cache", "planes", scales_of_the_first_format),
        ("quantize_mla_cache", "planes", the_layout_is_ignored),
        ("dequantize_mla_cache", "decode_e2m1", halves_of_bytes_swapped),
        ("dequantize_mla_cache", "decode_e2m1", signs_of_4_bits_are_lost),
        ("dequantize_mla_cache", "decode_e2m1", smallest_of_4_bits_is_zero),
        ("quantize_mla_cache", "encode_e2m1", four_bits_to_nearest_away_from_zero),
        ("quantize_mla_cache", "encode_e2m1", four_bits_wrap_around),
        ("quantize_mla_cache", "quantize_groups_to_e2m1", scales_of_4_bits_are_powers),
        ("quantize_mla_cache", "quantize_groups_to_e2m1", not_a_number_is_the_largest),
    )
} | {
    mutant.__name__: (operation, with_changed_arguments(operation, mutant))
    for operation, mutant in (
        ("write_mla_cache", minus_one_writes_the_last_slot),
        ("write_mla_cache", slots_of_32_bits),
        ("page_indices_to_slots", positions_wrap_around),
        ("make_decode_schedule", overhead_is_forgotten),
        ("make_decode_schedule", an_empty_list_costs_nothing),
    )
} | {"negative_pages_make_slots": ("page_indices_to_slots", negative_pages_make_slots)}  # fmt: skip


def checks_of(word: str) -> dict[str, list[Any]]:
    """The corner and agreement checks of one operation, whose names begin with `word`."""
    return {
        group.__name__: [check for check in group() if check.name.startswith(word)] for group in (corners, agreement)
    }


def test_the_honest_backend_passes(plant: Callable[..., Runner]) -> None:
    """The positive control: the reference implementation, planted as a backend, passes all checks."""
    runner = plant()
    assert list(failures(runner, (*corners(), *agreement(), *laws()), 10)) == []


@pytest.mark.parametrize("name", PREFILL)
def test_a_wrong_prefill_is_caught(plant: Callable[..., Runner], name: str) -> None:
    runner, checks = plant(sparse_mla_prefill=PREFILL[name]), checks_of("sparse prefill")
    assert any(failures(runner, checks["corners"], 1)), "no corner caught it"
    assert any(failures(runner, checks["agreement"], 200)), "no drawn batch caught it"


@pytest.mark.parametrize("name", DECODE)
def test_a_wrong_decode_is_caught(plant: Callable[..., Runner], name: str) -> None:
    runner, checks = plant(mla_decode=DECODE[name]), checks_of("latent decode")
    assert any(failures(runner, checks["corners"], 1)), "no corner caught it"
    assert any(failures(runner, checks["agreement"], 200)), "no drawn batch caught it"


@pytest.mark.parametrize("name", OTHERS)
def test_a_wrong_helper_is_caught(plant: Callable[..., Runner], name: str) -> None:
    operation, function = OTHERS[name]
    assert any(failures(plant(**{operation: function}), corners(), 1))


# Mutants that fail a law, which needs no reference results, and the beginning of that law's name.
NOTICED = {
    "minus_one_is_slot_zero": "decode, a query that sees no key",
    "lists_end_at_the_first_invalid_entry": "decode, the order of a list",
    "duplicates_are_merged": "decode, a double is its multiplicity",
    "scales_are_truncated_to_powers_of_two": "decode, a quantised cache",
    "scales_of_the_first_format": "decode, a quantised cache",
    "sink_counted_in_the_lse": "decode, sinks take their share",
    "logarithms_in_base_two": "decode, a double is its multiplicity",
    "unseen_slots_times_nothing": "decode, what no query sees",
    "extra_cache_has_the_page_size_of_the_first": "decode, a second cache",
    "extra_list_has_the_lengths_of_the_first": "decode, a second cache",
    "lengths_are_one_too_long": "decode, lengths cut lists",
    "causal_mask_from_the_top_left": "decode, a list of all keys",
    "values_are_the_last_columns": "decode, the output is a mixture",
    "splits_are_averaged": "decode, parts merge",
}


@pytest.mark.parametrize("name", NOTICED)
def test_a_law_notices_without_an_oracle(plant: Callable[..., Runner], name: str) -> None:
    law = [check for check in laws() if check.name.startswith(NOTICED[name])]
    assert any(failures(plant(mla_decode=DECODE[name]), law, 60))
