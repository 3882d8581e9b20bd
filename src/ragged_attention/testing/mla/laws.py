"""`MLA_LAWS`: properties of operations on latent caches that need no reference result. Each key states its property.

A law takes a runner and the spec of a clean batch, without poison or garbage, which laws add themselves. It raises
AssertionError if the backend breaks it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla.cache_specs import (
    DequantizeBatch,
    LatentWriteBatch,
    LatentWriteSpec,
    QuantizeBatch,
    QuantizeSpec,
    SlotsBatch,
    SlotsSpec,
    schedule_batch,
)
from ragged_attention.testing.mla.oracle import canonical, decode_agrees, prefill_agrees
from ragged_attention.testing.mla.specs import DecodeBatch, DecodeSpec, PrefillBatch, PrefillSpec, Selection
from ragged_attention.testing.mla.strategies import (
    QUANTISED,
    decode_specs,
    latent_write_specs,
    prefill_specs,
    quantize_specs,
    slots_specs,
)
from ragged_attention.testing.paged.specs import MergeBatch
from ragged_attention.testing.rounded_weights import allowance
from ragged_attention.testing.runner import Runner

LISTS = ("indices", "extra_indices")
LENS = ("topk_lens", "extra_topk_lens")


def same_decode(runner: Runner, batch: DecodeBatch, other: DecodeBatch) -> None:
    got, want = runner.run("mla_decode", batch), runner.run("mla_decode", other)
    decode_agrees(got, want, rounding=allowance(runner, batch, other))


def same_prefill(runner: Runner, batch: PrefillBatch, other: PrefillBatch) -> None:
    got, want = runner.run("sparse_mla_prefill", batch), runner.run("sparse_mla_prefill", other)
    prefill_agrees(got, want, rounding=allowance(runner, batch, other))


def _each(batch: DecodeBatch | PrefillBatch, names: tuple[str, ...], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The named arrays that the batch has, with `change` applied to each."""
    arrays = {name: getattr(batch, name, None) for name in names}
    return {name: change(value) for name, value in arrays.items() if value is not None}


def _cut(batch: DecodeBatch) -> DecodeBatch:
    """The batch without list lengths, and with -1 in place of list entries that select nothing."""
    lists = {
        name: np.where(part.selects, part.indices, np.int32(-1))
        for name, part in zip(LISTS, batch.selections(), strict=False)
    }
    return batch.change(**lists, topk_lens=None, extra_topk_lens=None)


def _cut_prefill(batch: PrefillBatch) -> PrefillBatch:
    return batch.change(indices=np.where(batch.selection.selects, batch.indices, np.int32(-1)), topk_lens=None)


def _expect_nothing(out: NDArray[Any], *logs: NDArray[Any]) -> None:
    identical(out, np.zeros_like(out), "out of queries that see no key")
    for log in logs:
        identical(log, np.full_like(log, -np.inf), "the logarithm of queries that see no key")


def fully_masked_decode(runner: Runner, spec: DecodeSpec) -> None:
    batch = spec.build()
    nothing = _each(batch, (*LISTS, "page_indices"), lambda lists: np.full_like(lists, -1))
    short = _each(batch, ("indices", "extra_indices", "kv_lens"), lambda array: np.zeros(array.shape[:1], np.int32))
    short = {{"indices": "topk_lens", "extra_indices": "extra_topk_lens"}.get(n, n): v for n, v in short.items()}
    for case in (batch.change(**nothing), batch.change(**short)):
        _expect_nothing(*runner.run("mla_decode", case))
    out, lse = runner.run("mla_decode", batch)
    fully_masked = batch.fully_masked()
    _expect_nothing(out[fully_masked], np.swapaxes(lse, 1, 2)[fully_masked])
    if not np.isfinite(np.swapaxes(lse, 1, 2)[~fully_masked]).all():
        raise AssertionError("lse of queries that see a key: expected finite values, got others")


def fully_masked_prefill(runner: Runner, spec: PrefillSpec) -> None:
    batch = spec.build()
    _expect_nothing(*runner.run("sparse_mla_prefill", batch.change(indices=np.full_like(batch.indices, -1))))
    _expect_nothing(*runner.run("sparse_mla_prefill", batch.change(topk_lens=np.zeros(len(batch.q), np.int32))))


def unread_in_decode(runner: Runner, spec: DecodeSpec) -> None:
    batch = spec.build()
    for kind in ("nan", "inf"):
        same_decode(runner, batch.poisoned(kind, spec.seed), batch)


def unread_in_prefill(runner: Runner, spec: PrefillSpec) -> None:
    batch = spec.build()
    for kind in ("nan", "inf"):
        same_prefill(runner, batch.poisoned(kind, spec.seed), batch)


def pages_may_move(runner: Runner, spec: DecodeSpec) -> None:
    """Permuting the pages of every cache, with tables and lists to match, changes nothing."""
    batch = spec.build()
    rng = np.random.default_rng(spec.seed)
    moved: dict[str, Any] = {}
    for selection in batch.selections():
        num_pages, page_size = selection.cache.shape[:2]
        order = rng.permutation(num_pages)
        new_page = np.argsort(order)
        moved[selection.name] = selection.cache[order]
        if batch.page_indices is not None:
            valid = (batch.page_indices >= 0) & (batch.page_indices < num_pages)
            moved["page_indices"] = batch.page_indices.copy()
            moved["page_indices"][valid] = new_page[batch.page_indices[valid]]
            continue
        name = {"kv_cache": "indices", "extra_kv_cache": "extra_indices"}[selection.name]
        inside = (selection.indices >= 0) & (selection.indices < selection.num_slots)
        slots = selection.indices[inside]
        moved[name] = selection.indices.copy()
        moved[name][inside] = new_page[slots // page_size] * page_size + slots % page_size
    same_decode(runner, batch.change(**moved), batch)


def page_size_is_immaterial(runner: Runner, spec: DecodeSpec) -> None:
    """The same slots in pages of another size give the same results."""
    batch = spec.build()
    caches = {
        selection.name: latents.repaged(selection.cache, selection.format, np.arange(selection.num_slots), size)
        for selection, size in zip(batch.selections(), (1 + spec.page_size % 5, 4), strict=False)
    }
    # The last page may have additional slots. Entries outside the old cache become -1, or they might name such slots.
    lists = {
        {"kv_cache": "indices", "extra_kv_cache": "extra_indices"}[selection.name]: _without_outside(selection)
        for selection in batch.selections()
    }
    same_decode(runner, batch.change(**caches, **lists), batch)


def _without_outside(selection: Selection) -> NDArray[np.int32]:
    """The lists with -1 in place of every entry that exceeds the cache's last slot."""
    return np.where(selection.indices < selection.num_slots, selection.indices, np.int32(-1))


def sequences_do_not_mix(runner: Runner, spec: DecodeSpec) -> None:
    """A batch has the same results as separate calls for its sequences."""
    batch = spec.build()
    out, lse = runner.run("mla_decode", batch)
    for seq in range(batch.num_seqs):
        alone = batch.alone(seq)
        want, rounding = (out[seq : seq + 1], lse[seq : seq + 1]), allowance(runner, alone, alone)
        decode_agrees(runner.run("mla_decode", alone), want, f" of sequence {seq}", rounding=rounding)


def tokens_do_not_mix(runner: Runner, spec: PrefillSpec) -> None:
    batch = spec.build()
    whole = runner.run("sparse_mla_prefill", batch)
    for token in range(len(batch.q)):
        row = slice(token, token + 1)
        alone = batch.change(**_each(batch, ("q", "indices", "topk_lens"), lambda array, row=row: array[row]))
        want, rounding = [part[row] for part in whole], allowance(runner, alone, alone)
        prefill_agrees(runner.run("sparse_mla_prefill", alone), want, f" of token {token}", rounding=rounding)


def order_is_free(runner: Runner, spec: DecodeSpec) -> None:
    batch = spec.build().change(topk_lens=None, extra_topk_lens=None)
    rng = np.random.default_rng(spec.seed)
    same_decode(runner, batch.change(**_each(batch, LISTS, lambda lists: rng.permuted(lists, axis=-1))), batch)


def order_is_free_in_prefill(runner: Runner, spec: PrefillSpec) -> None:
    batch = spec.build().change(topk_lens=None)
    shuffled = np.random.default_rng(spec.seed).permuted(batch.indices, axis=-1)
    same_prefill(runner, batch.change(indices=shuffled), batch)


def all_keys_listed_is_dense(runner: Runner, spec: DecodeSpec) -> None:
    """Lists of all keys that the dense call sees, in any order, give the dense call's results, also if it is causal."""
    batch = spec.build()
    listed = np.random.default_rng(spec.seed).permuted(batch.listed(), axis=-1)
    if not listed.shape[-1] or batch.kv_cache.shape[2] > 1:
        return
    same_decode(
        runner, batch.change(indices=listed, page_indices=None, kv_lens=None, causal=False, sliding_window=None), batch
    )


def prefill_is_decode(runner: Runner, spec: PrefillSpec) -> None:
    """Sparse prefill from a cache gives the same results as decode with one query token in each sequence."""
    batch = spec.build()
    if batch.kv.ndim == 3 or batch.kv.shape[2] > 1:
        return
    decode = DecodeBatch(
        q=batch.q[:, None], kv_cache=batch.kv, indices=batch.indices, topk_lens=batch.topk_lens, d_v=batch.d_v,
        sm_scale=batch.sm_scale, sinks=batch.sinks, dtype=batch.dtype, cache_dtype=batch.cache_dtype,
        cache_layout=batch.cache_layout,
    )  # fmt: skip
    out, _, lse = runner.run("sparse_mla_prefill", batch)
    rounding = allowance(runner, decode, decode)
    decode_agrees(runner.run("mla_decode", decode), (out[:, None], lse[..., None]), rounding=rounding)


def extra_cache_is_a_longer_list(runner: Runner, spec: DecodeSpec) -> None:
    """Two caches with two lists give the same results as their concatenation with one list."""
    batch = spec.build()
    if batch.extra_kv_cache is None:
        return
    first, second = batch.selections()
    if first.format != second.format:
        batch = batch.widened()
        first, second = batch.selections()
    rows = [latents.repaged(part.cache, part.format, np.arange(part.num_slots), 1) for part in (first, second)]
    lists = [np.where(part.selects, part.indices, -1) for part in (first, second)]
    lists[1] = np.where(lists[1] >= 0, lists[1] + first.num_slots, -1)
    joined = np.concatenate(rows)
    one = batch.change(
        kv_cache=latents.repaged(joined, first.format, np.arange(len(joined)), spec.page_size),
        indices=np.concatenate(lists, axis=-1).astype(np.int32),
        topk_lens=None, extra_kv_cache=None, extra_indices=None, extra_topk_lens=None,
    )  # fmt: skip
    same_decode(runner, batch, one)


def quantised_is_dequantised(runner: Runner, spec: DecodeSpec) -> None:
    batch = spec.build()
    same_decode(runner, batch, batch.widened())


def quantised_is_dequantised_in_prefill(runner: Runner, spec: PrefillSpec) -> None:
    batch = spec.build()
    same_prefill(runner, batch, batch.widened())


def a_double_is_its_multiplicity(runner: Runner, spec: DecodeSpec) -> None:
    """Lists that name each key twice do not change `out`, and add log 2 to `lse`."""
    batch = _cut(spec.build().change(sinks=None))
    out, lse = runner.run("mla_decode", batch)
    twice = batch.change(**_each(batch, LISTS, lambda lists: np.concatenate([lists, lists], axis=-1)))
    want, rounding = (out, lse.astype(np.float64) + np.log(2)), allowance(runner, batch, twice)
    decode_agrees(runner.run("mla_decode", twice), want, rounding=rounding)


def a_double_is_its_multiplicity_in_prefill(runner: Runner, spec: PrefillSpec) -> None:
    batch = spec.build()
    batch = _cut_prefill(batch.change(sinks=None))
    out, max_logits, lse = runner.run("sparse_mla_prefill", batch)
    twice = batch.change(indices=np.concatenate([batch.indices, batch.indices], axis=-1))
    want, rounding = (out, max_logits, lse.astype(np.float64) + np.log(2)), allowance(runner, batch, twice)
    prefill_agrees(runner.run("sparse_mla_prefill", twice), want, rounding=rounding)


def lengths_cut_lists(runner: Runner, spec: DecodeSpec) -> None:
    """A length has the effect of cutting the list there. Lengths by sequence and by query are equivalent."""
    batch = spec.build()
    same_decode(runner, batch, _cut(batch))
    by_query = {
        name: np.ascontiguousarray(part.lens)
        for name, part in zip(LENS, batch.selections(), strict=False)
        if getattr(batch, name) is not None
    }
    same_decode(runner, batch, batch.change(**by_query))


def lengths_cut_lists_in_prefill(runner: Runner, spec: PrefillSpec) -> None:
    batch = spec.build()
    same_prefill(runner, batch, _cut_prefill(batch))


def parts_merge(runner: Runner, spec: DecodeSpec) -> None:
    """Results over disjoint parts of the lists merge, by their lse, into the result over the whole lists."""
    batch = spec.build().widened().change(sinks=None)
    first = np.arange(max(batch.indices.shape[-1], spec.extra_topk)) % 2 == 0  # type: ignore[union-attr]
    parts = []
    for listed in (first, ~first):
        lists = _each(batch, LISTS, lambda lists, listed=listed: np.where(listed[: lists.shape[-1]], lists, -1))
        parts.append(runner.run("mla_decode", batch.change(**lists)))
    shape = batch.q.shape[:3]
    outs = np.stack([out.reshape(-1, *out.shape[2:]) for out, _ in parts])
    lses = np.stack([np.swapaxes(lse, 1, 2).reshape(-1, shape[2]) for _, lse in parts])
    out, lse = runner.run("merge_attention_states", MergeBatch(outs=outs, lses=lses))
    whole_out, whole_lse = runner.run("mla_decode", batch)
    got = out.reshape(whole_out.shape), np.swapaxes(lse.reshape(shape), 1, 2)
    decode_agrees(got, (whole_out, whole_lse))


def _share(sinks: NDArray[np.float32] | None, lse: NDArray[Any]) -> NDArray[np.float64]:
    """The share of weight that sinks leave to the keys. The last axis of lse is that of the heads, as in `sinks`."""
    lse = lse.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        left = 1 / (1 + np.exp((-np.inf if sinks is None else sinks.astype(np.float64)) - lse))
    return np.where(lse == -np.inf, 0.0, left)


def _sinks(spec: DecodeSpec | PrefillSpec) -> list[NDArray[np.float32]]:
    normal = np.random.default_rng(spec.seed).standard_normal(spec.heads).astype(np.float32)
    return [np.full_like(normal, -np.inf), np.full_like(normal, np.inf), normal]


def sinks_take_their_share(runner: Runner, spec: DecodeSpec) -> None:
    """A sink of -inf changes nothing, and a sink of +inf makes `out` 0.

    A finite sink scales `out` by the share of weight that it leaves. No sink changes `lse`.
    """
    batch = spec.build().change(sinks=None)
    out, lse = runner.run("mla_decode", batch)
    for sinks in _sinks(spec):
        sunk = batch.change(sinks=sinks)
        want = out * _share(sinks, np.swapaxes(lse, 1, 2))[..., None], lse
        rounding = allowance(runner, sunk, sunk)
        decode_agrees(runner.run("mla_decode", sunk), want, f" with sink {sinks[0]}", rounding=rounding)


def sinks_take_their_share_in_prefill(runner: Runner, spec: PrefillSpec) -> None:
    batch = spec.build().change(sinks=None)
    out, max_logits, lse = runner.run("sparse_mla_prefill", batch)
    for sinks in _sinks(spec):
        sunk = batch.change(sinks=sinks)
        want = out * _share(sinks, lse)[..., None], max_logits, lse
        rounding = allowance(runner, sunk, sunk)
        prefill_agrees(runner.run("sparse_mla_prefill", sunk), want, f" with sink {sinks[0]}", rounding=rounding)


def output_is_a_mixture(runner: Runner, spec: DecodeSpec) -> None:
    """If values are 1, `out` is the share of weight that sinks leave. The keys' other columns do not matter."""
    batch = spec.build()
    ones = {selection.name: _with_ones(selection, batch.d_v) for selection in batch.selections()}
    out, lse = runner.run("mla_decode", batch.change(**ones))
    share = _share(batch.sinks, np.swapaxes(lse, 1, 2))
    agrees(out, np.broadcast_to(share[..., None], out.shape), "decode out", "out of constant values")


def _with_ones(selection: Selection, d_v: int) -> latents.Cache:
    cache, name = selection.cache.copy(), selection.format
    if name == "plain":
        cache[..., :d_v] = 1
        return cache
    layout, fields = latents.LAID_OUT[name], latents.fields_of(cache, name)
    fields.values[...] = latents.codes_of(np.ones(layout.values), name)
    fields.scales[...] = {
        "float32": np.full(layout.values // layout.group, 1, "<f4").view(np.uint8),
        "float8_e8m0fnu": 127,
        "float8_e4m3fn": formats.stored(np.float32(1), "float8_e4m3fn"),
    }[layout.scales]
    if d_v > layout.values:
        fields.rotary[...] = latents.bits_of_bfloat16(np.ones(layout.rotary, np.float32))
    return cache


def a_schedule_changes_nothing(runner: Runner, spec: DecodeSpec) -> None:
    """A schedule changes no result, even if it was made for other lengths."""
    batch = spec.build()
    want, rounding = runner.run("mla_decode", batch), allowance(runner, batch, batch)
    for num_parts, made_for in ((1, batch), (5, batch), (7, _of_other_lengths(batch))):
        schedule = runner.schedule(schedule_batch(made_for, num_parts, overhead=num_parts % 3))
        got = runner.run("mla_decode", batch, schedule=schedule)
        decode_agrees(got, want, f" by a schedule of {num_parts} parts", rounding=rounding)


def _of_other_lengths(batch: DecodeBatch) -> DecodeBatch:
    if batch.indices is None:
        return batch.change(**_each(batch, ("kv_lens",), lambda lens: 1000 - np.clip(lens, 0, 999)))
    return batch.change(topk_lens=np.arange(batch.num_seqs, dtype=np.int32))


def writing_is_quantising(runner: Runner, spec: LatentWriteSpec) -> None:
    """Writing rows into a quantised cache gives the same bytes as quantising the whole cache."""
    batch = spec.build()
    num_pages, page_size = batch.cache.shape[:2]
    rng = np.random.default_rng(spec.seed)
    slots = rng.permutation(num_pages * page_size)
    rows = formats.rounded(rng.standard_normal((len(slots), 1, batch.kv.shape[2])), spec.dtype)
    kv = np.zeros((num_pages, page_size, *rows.shape[1:]), np.float32)
    kv[slots // page_size, slots % page_size] = rows
    options = {
        "power_of_two_scales": spec.power_of_two_scales,
        "dtype": spec.dtype,
        "cache_layout": latents.layout_of(spec.format),
    }
    name = latents.LAID_OUT[spec.format].name
    whole = runner.run("quantize_mla_cache", QuantizeBatch(kv=kv, format=name, **options))
    empty = np.zeros_like(batch.cache)
    written = runner.run(
        "write_mla_cache", LatentWriteBatch(kv=rows, cache=empty, slot_mapping=slots.astype(np.int32), **options)
    )
    identical(canonical(written, spec.format), canonical(whole, spec.format), "cache")


def what_is_dequantised_can_be_quantised(runner: Runner, spec: QuantizeSpec) -> None:
    """Quantising has an error of at most half a step, and quantising the dequantised result again has no error."""
    batch = spec.build()
    name, layout = spec.format, latents.LAID_OUT[spec.format]

    def around(kv: NDArray[np.float32], dtype: str) -> NDArray[Any]:
        cache = runner.run("quantize_mla_cache", batch.change(kv=kv, dtype=dtype))
        return runner.run("dequantize_mla_cache", DequantizeBatch(cache=cache, cache_layout=batch.cache_layout))

    once = around(batch.kv, batch.dtype)
    rows = batch.kv[..., : layout.values].astype(np.float64)
    groups = np.abs(rows.reshape(*once.shape[:3], layout.values // layout.group, layout.group)).max(axis=-1)
    if layout.codes == "float8_e4m3fn":
        scale = np.maximum(groups / 448, 1e-4) * (2 if batch.power_of_two_scales else 1)
        half, least, is_exact = 1 / 16, 2.0**-10, np.full(groups.shape, batch.power_of_two_scales)
    else:  # a scale may be rounded down, by up to half if it is subnormal
        rows = np.clip(rows, -448 * 6, 448 * 6)
        scale = np.clip(groups / 6, 2.0**-9, 448)
        half, least, is_exact = 1 / 4, 0.25, scale > 2.0**-6
        scale = np.maximum(scale * (1 + 1 / 16), scale + 2.0**-10)
        least = np.where(np.repeat(is_exact, layout.group, axis=-1), least, 1.0)
    error = np.abs(once[..., : layout.values] - rows)
    bound = np.abs(rows) * half * 1.0001 + np.repeat(scale, layout.group, axis=-1) * least
    worst = (error / bound).max(initial=0)
    if worst > 1:
        raise AssertionError(f"expected a {name} cache within half a step, got {worst:.3g} times that")
    identical(once[..., layout.values :], formats.rounded(batch.kv[..., layout.values :], "bfloat16"), "rotary columns")
    is_exact = np.repeat(is_exact, layout.group, axis=-1)
    again = around(once, "float32")
    identical(again[..., : layout.values][is_exact], once[..., : layout.values][is_exact], "rows quantised again")


def positions_become_slots(runner: Runner, spec: SlotsSpec) -> None:
    """With consecutive pages, a position's slot is the position plus the first slot of its sequence."""
    batch = dataclasses.replace(spec, q_lens=None).build()
    num_seqs, columns = batch.page_indices.shape
    page_size = min(spec.page_size, 1000)
    table = np.arange(num_seqs * columns, dtype=np.int32).reshape(num_seqs, columns)
    got = runner.run(
        "page_indices_to_slots", SlotsBatch(positions=batch.positions, page_indices=table, page_size=page_size)
    )
    first = (np.arange(num_seqs) * columns * page_size).reshape(-1, *(1,) * (batch.positions.ndim - 1))
    inside = (batch.positions >= 0) & (batch.positions < columns * page_size)
    identical(got, np.where(inside, batch.positions + first, -1), "slots")


def ragged_rows_become_slots(runner: Runner, spec: SlotsSpec) -> None:
    """A ragged batch has the slots of a batch in which each row has a block table of its own."""
    q_lens = spec.q_lens or (2, 1)
    batch = dataclasses.replace(spec, q_lens=q_lens, spare_rows=0).build()
    got = runner.run("page_indices_to_slots", batch)
    tables = batch.page_indices[np.repeat(np.arange(len(q_lens)), q_lens)]
    alone = batch.change(page_indices=tables, cu_q_lens=None, num_seqs=None)
    identical(got, runner.run("page_indices_to_slots", alone), "slots")


@dataclasses.dataclass(frozen=True, slots=True)
class Law:
    """A law, and the strategy for the specs that it applies to."""

    holds: Callable[[Runner, Any], None]
    specs: st.SearchStrategy[Any]


_ANY = decode_specs(clean=True)
_DENSE = decode_specs(clean=True, sparse=False)
_SPARSE = decode_specs(clean=True, sparse=True)
_PREFILL = prefill_specs(clean=True)
_WRITES = latent_write_specs(formats=QUANTISED)
_QUANTISED_VALUES = quantize_specs(special=False)

MLA_LAWS: dict[str, Law] = {
    "decode, a query that sees no key gives 0 and -inf": Law(fully_masked_decode, _ANY),
    "prefill, a query that selects no row gives 0 and -inf": Law(fully_masked_prefill, _PREFILL),
    "decode, what no query sees takes no part": Law(unread_in_decode, _ANY),
    "prefill, what no query selects takes no part": Law(unread_in_prefill, _PREFILL),
    "decode, pages may move": Law(pages_may_move, _ANY),
    "decode, the page size is immaterial": Law(page_size_is_immaterial, _SPARSE),
    "decode, sequences do not mix": Law(sequences_do_not_mix, _ANY),
    "prefill, tokens do not mix": Law(tokens_do_not_mix, _PREFILL),
    "decode, the order of a list is free": Law(order_is_free, _SPARSE),
    "prefill, the order of a list is free": Law(order_is_free_in_prefill, _PREFILL),
    "decode, a list of all keys is the dense call": Law(all_keys_listed_is_dense, _DENSE),
    "prefill from a cache is decode": Law(prefill_is_decode, _PREFILL),
    "decode, a second cache is one longer list": Law(
        extra_cache_is_a_longer_list, decode_specs(clean=True, extra=True)
    ),
    "decode, a quantised cache is its dequantised values": Law(
        quantised_is_dequantised, decode_specs(clean=True, formats=QUANTISED)
    ),
    "prefill, a quantised cache is its dequantised values": Law(
        quantised_is_dequantised_in_prefill, prefill_specs(clean=True, formats=QUANTISED)
    ),
    "decode, a double is its multiplicity": Law(a_double_is_its_multiplicity, _SPARSE),
    "prefill, a double is its multiplicity": Law(a_double_is_its_multiplicity_in_prefill, _PREFILL),
    "decode, lengths cut lists": Law(lengths_cut_lists, _SPARSE),
    "prefill, lengths cut lists": Law(lengths_cut_lists_in_prefill, _PREFILL),
    "decode, parts merge through their lse": Law(parts_merge, _SPARSE),
    "decode, sinks take their share and leave the lse": Law(sinks_take_their_share, _ANY),
    "prefill, sinks take their share and leave the lse": Law(sinks_take_their_share_in_prefill, _PREFILL),
    "decode, the output is a mixture of the values": Law(output_is_a_mixture, _ANY),
    "decode, a schedule changes nothing": Law(a_schedule_changes_nothing, _ANY),
    "latents, writing is quantising": Law(writing_is_quantising, _WRITES),
    "latents, quantising loses half a step, and once": Law(what_is_dequantised_can_be_quantised, _QUANTISED_VALUES),
    "latents, positions become slots": Law(positions_become_slots, slots_specs),
    "latents, rows of a ragged batch become slots": Law(ragged_rows_become_slots, slots_specs),
}
