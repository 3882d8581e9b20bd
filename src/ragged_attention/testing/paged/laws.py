"""`LAWS`: properties of every backend that need no reference result. Each key states its property as a sentence.

A law takes a runner and the spec of a clean batch, without poison, garbage or shared pages, which laws add themselves.
It raises AssertionError if the backend breaks it. These are the laws of `reference/README.md`, in its order.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ragged_attention.key_ranges import causal_ranges
from ragged_attention.reference._kv_layout import per_head
from ragged_attention.reference._scaled_rows import quantized
from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.paged.specs import (
    MergeBatch,
    RaggedTables,
    Spec,
    WriteBatch,
    like_pages,
    pages_of,
    split,
)
from ragged_attention.testing.rounded_weights import allowance
from ragged_attention.testing.runner import Runner

RaggedSpec = Any  # a `Spec`, or another spec of ragged queries over pages
Law = Callable[[Runner, Any], None]
BLOCK_SIZES = (1, 2, 4, 8, 64, 256)


def same(runner: Runner, batch: RaggedTables, other: RaggedTables, kind: str | None = None) -> None:
    """Check that two batches have the same out and lse."""
    out, lse = runner.run(batch.OPERATION, batch, return_lse=True)
    other_out, other_lse = runner.run(other.OPERATION, other, return_lse=True)
    agrees(out, other_out, kind or batch.kind, allowance=allowance(runner, batch, other))
    agrees(lse, other_lse, f"lse {kind or batch.kind}", "lse")


def fully_masked_queries_give_nothing(runner: Runner, spec: RaggedSpec) -> None:
    batch = spec.build()
    for case in (batch, batch.change(kv_lens=np.zeros_like(batch.kv_lens)), _without_pages(batch)):
        out, lse = runner.run(case.OPERATION, case, return_lse=True)
        rows = case.fully_masked()
        identical(out[rows], np.zeros_like(out[rows]), "out of queries that see no key")
        identical(lse[rows], np.full_like(lse[rows], -np.inf), "lse of queries that see no key")
        if not np.isfinite(lse[~rows]).all():
            raise AssertionError("lse of queries that see a key: expected finite values, got others")


def _without_pages(batch: RaggedTables) -> RaggedTables:
    return batch.change(page_indices=np.full_like(batch.page_indices, -1))


def unseen_takes_no_part(runner: Runner, spec: RaggedSpec) -> None:
    batch = spec.build()
    same(runner, batch.poisoned("nan", spec.seed).with_garbage_tails(spec.seed), batch)
    same(runner, batch.poisoned("inf", spec.seed), batch)


def pages_may_move(runner: Runner, spec: RaggedSpec) -> None:
    batch = spec.build()
    order = np.random.default_rng(spec.seed).permutation(batch.num_pages)
    moved = batch.with_pages([pages[order] for pages in batch.pages])
    table = np.argsort(order)[batch.page_indices].astype(np.int32)
    same(runner, moved.change(page_indices=table), batch)


def pages_may_be_shared(runner: Runner, spec: Spec) -> None:
    """Sequences that share pages have the same results as with their own copies of these pages."""
    shared = dataclasses.replace(spec, sharing="prefix").build()
    if not shared.page_indices.size:
        return
    copies = shared.with_pages([pages[shared.page_indices.reshape(-1)] for pages in shared.pages])
    tables = np.arange(shared.page_indices.size, dtype=np.int32).reshape(shared.page_indices.shape)
    same(runner, shared, copies.change(page_indices=tables))


def sequences_do_not_mix(runner: Runner, spec: RaggedSpec) -> None:
    """A batch has the same results as separate calls for its sequences."""
    batch = spec.build()
    out, lse = runner.run(batch.OPERATION, batch, return_lse=True)
    for seq, (start, stop) in enumerate(batch.bounds()):
        alone = batch.alone(seq)
        out_alone, lse_alone = runner.run(batch.OPERATION, alone, return_lse=True)
        rounding = allowance(runner, alone, alone)
        agrees(out[start:stop], out_alone, batch.kind, f"out of sequence {seq}", allowance=rounding)
        agrees(lse[start:stop], lse_alone, f"lse {batch.kind}", f"lse of sequence {seq}")


def output_is_a_mixture(runner: Runner, spec: Spec) -> None:
    """If all values are equal, `out` is this value times `v_scale` and the share of weight that sinks leave.

    For any values, |out| does not exceed the largest |value|.
    """
    batch = spec.build()
    arrays = [pages.copy() for pages in pages_of(batch.kv_pages)]
    ones = batch.change(kv_pages=like_pages(batch.kv_pages, arrays))
    values, form = split(ones.kv_pages)[1], ones.formats.get("v_format")
    if form is not None and form.scaled:
        row = np.ones((1, 1, values.shape[3] * form.columns_per_element), np.float32)
        codes, scales = quantized(row, np.ones(1, np.float32), form)
        values[...] = codes[0, 0]
        scale_pages: Any = ones.v_scale_pages
        ones = ones.change(v_scale_pages=np.broadcast_to(scales[0, 0], scale_pages.shape).astype(scales.dtype))
    else:
        values[...] = formats.stored(np.float32(1), "float32" if form is None else form.codes)
    constant = ones.values()[1].max(initial=0)
    out, lse = runner.run("ragged_paged_attention", ones, return_lse=True)
    share = constant * _share(batch, lse) * np.repeat(per_head(batch.v_scale, batch.num_kv_heads), batch.group)
    agrees(out, np.broadcast_to(share[..., None], out.shape), batch.kind, "out of constant values", constant=True)
    highest = np.abs(batch.values()[1]).max(initial=0) * np.abs(per_head(batch.v_scale, batch.num_kv_heads)).max()
    out, _ = runner.run("ragged_paged_attention", batch, return_lse=True)
    what = "|out| over the largest |value|"
    agrees(np.maximum(np.abs(out), highest), np.full_like(out, highest), batch.kind, what, constant=True)


def _share(batch: RaggedTables, lse: np.ndarray) -> np.ndarray:
    """The share of weight that sinks leave to the keys, [T, H]; 0 without keys."""
    lse = lse.astype(np.float64)
    sinks = np.full(lse.shape[1], -np.inf) if batch.sinks is None else batch.sinks.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(lse == -np.inf, 0.0, 1 / (1 + np.exp(sinks - lse)))


def parts_merge(runner: Runner, spec: RaggedSpec) -> None:
    expect_parts_to_merge(runner, spec.build().widened().change(sinks=None))


def expect_parts_to_merge(runner: Runner, batch: RaggedTables) -> None:
    """Results over disjoint sets of keys merge into the result over all keys; here each part has every other page."""
    odd = np.arange(batch.page_indices.shape[1])[None] % 2 == 1
    tables = [np.where(hidden, np.int32(-1), batch.page_indices) for hidden in (odd, ~odd)]
    expect_to_merge(runner, batch, [batch.change(page_indices=table) for table in tables])


def expect_to_merge(runner: Runner, batch: RaggedTables, parts: list[RaggedTables]) -> None:
    results = [runner.run(part.OPERATION, part, return_lse=True) for part in parts]
    outs, lses = (np.stack(arrays) for arrays in zip(*results, strict=True))
    out, lse = runner.run("merge_attention_states", MergeBatch(outs=outs, lses=lses))
    whole_out, whole_lse = runner.run(batch.OPERATION, batch, return_lse=True)
    agrees(out, whole_out, batch.kind, allowance=allowance(runner, batch, batch))
    agrees(lse, whole_lse, f"lse {batch.kind}", "lse")


def a_causal_draft_mask_is_causal(runner: Runner, spec: Spec) -> None:
    batch = spec.build().masked(causal=True)
    longest = max((stop - start for start, stop in batch.bounds()), default=0)
    mask = np.zeros((len(batch.q), longest), bool)
    for start, stop in batch.bounds():
        mask[start:stop] = np.tri(stop - start, longest, dtype=bool)
    same(runner, batch.change(draft_mask=mask), batch)


def ranges_of_a_mask_are_that_mask(runner: Runner, spec: RaggedSpec) -> None:
    batch = spec.build().masked(causal=True)
    plain = batch.change(**dict.fromkeys(batch.arguments().keys() & {"draft_mask", "relative_bias"}))
    window, tables = plain.sliding_window, (plain.cu_q_lens, plain.kv_lens, len(plain.q))
    ranges = causal_ranges(*tables, sliding_window=window, num_seqs=plain.num_seqs)
    same(runner, plain.change(sliding_window=None, key_ranges=ranges), plain)


def ranges_are_a_union(runner: Runner, spec: RaggedSpec) -> None:
    """Key ranges may come in any order, be cut in two, and overlap; results over disjoint ranges merge."""
    batch, rng = spec.build().masked(causal=True, sliding_window=None), np.random.default_rng(spec.seed)
    if "draft_mask" in batch.arguments():
        batch = batch.change(draft_mask=None)
    capacity = batch.page_indices.shape[1] * batch.page_size
    edges = np.sort(rng.integers(0, capacity + 2, (4, len(batch.q), 1)).astype(np.int32), axis=0)
    first, middle, last, whole = (
        np.stack([edges[start], edges[end]], -1) for start, end in ((0, 1), (1, 2), (2, 3), (0, 3))
    )
    batch = batch.change(key_ranges=whole)
    for parts in ([first, middle, last], [middle, last, first], [last, whole, first, first]):
        same(runner, batch.change(key_ranges=np.concatenate(parts, axis=1)), batch)
    wide = batch.widened().change(sinks=None, key_ranges=np.concatenate([last, first], axis=1))
    expect_to_merge(runner, wide, [wide.change(key_ranges=part) for part in (first, last)])


def all_blocks_named_are_all_keys(runner: Runner, spec: Spec) -> None:
    """Lists of all blocks change nothing, also with duplicates and invalid entries."""
    batch, size = spec.build().masked(), BLOCK_SIZES[spec.seed % len(BLOCK_SIZES)]
    rng, count = np.random.default_rng(spec.seed), -(-int(batch.kv_lens.max(initial=0)) // size)
    every = np.broadcast_to(np.arange(count, dtype=np.int32), (len(batch.q), batch.num_kv_heads, count))
    lists = np.concatenate([every, np.full_like(every[..., :2], -1), every[..., :3]], axis=2)
    for selected in (every.copy(), rng.permuted(lists, axis=2)):
        same(runner, batch.change(selected=selected, block_size=size), batch)


def lists_are_sets_of_keys(runner: Runner, spec: Spec) -> None:
    """Order and duplicates in a list do not matter, two half blocks equal a block, and results over parts merge."""
    batch, rng = spec.build().masked(), np.random.default_rng(spec.seed)
    size, length = BLOCK_SIZES[1 + spec.seed % (len(BLOCK_SIZES) - 1)], 5
    count = -(-int(batch.kv_lens.max(initial=0)) // size)
    # All entries of a list are different blocks, so that two parts of it share no key.
    shape = len(batch.q), batch.num_kv_heads, count + length
    blocks = rng.permuted(np.broadcast_to(np.arange(count + length), shape), axis=2)[..., :length]
    nothing = rng.choice([-1, count, 2**31 // size, 2**31 - 1, -(2**31)], blocks.shape)
    lists = np.where(blocks < count, blocks, nothing).astype(np.int32)
    batch = batch.change(selected=lists, block_size=size)
    same(runner, batch.change(selected=rng.permuted(lists, axis=2)), batch)
    same(runner, batch.change(selected=np.concatenate([lists, lists[..., ::-1]], axis=2)), batch)
    halves = [np.where(blocks < count, 2 * blocks + half, -1) for half in (0, 1)]
    same(runner, batch.change(selected=np.concatenate(halves, axis=2, dtype=np.int32), block_size=size // 2), batch)
    wide = batch.widened().change(sinks=None)
    expect_to_merge(runner, wide, [wide.change(selected=lists[..., :2]), wide.change(selected=lists[..., 2:])])


def each_kv_head_has_its_list(runner: Runner, spec: Spec) -> None:
    """A KV head's query heads have the same results as in a call that uses its list for all heads."""
    batch, size = spec.build().masked(), BLOCK_SIZES[spec.seed % len(BLOCK_SIZES)]
    count = -(-int(batch.kv_lens.max(initial=0)) // size)
    shape = len(batch.q), batch.num_kv_heads, 3
    batch = batch.change(
        selected=np.random.default_rng(spec.seed).integers(-1, count + 1, shape, np.int32), block_size=size
    )
    out, lse = runner.run(batch.OPERATION, batch, return_lse=True)
    for kv_head in range(batch.num_kv_heads):
        of_all = batch.change(selected=batch.selected[:, kv_head : kv_head + 1])  # type: ignore[index]
        out_of_all, lse_of_all = runner.run(batch.OPERATION, of_all, return_lse=True)
        heads = slice(kv_head * batch.group, (kv_head + 1) * batch.group)
        rounding = np.broadcast_to(allowance(runner, of_all, of_all), out.shape)[:, heads]
        agrees(out[:, heads], out_of_all[:, heads], batch.kind, f"out of KV head {kv_head}", allowance=rounding)
        agrees(lse[:, heads], lse_of_all[:, heads], f"lse {batch.kind}", f"lse of KV head {kv_head}")


def a_window_of_blocks_is_that_window(runner: Runner, spec: Spec) -> None:
    """A list of one-key blocks equals the sliding window with the same keys."""
    batch = spec.build().masked(causal=True, draft_mask=None)
    window = min(batch.sliding_window or 7, 9)
    positions = np.full(len(batch.q), -1)
    for seq, (start, stop) in enumerate(batch.bounds()):
        positions[start:stop] = batch.kv_len(seq) - (stop - start) + np.arange(stop - start)
    lists = (positions[:, None] - np.arange(window)).astype(np.int32)[:, None]
    batch = batch.change(sliding_window=None)
    same(runner, batch.change(selected=lists, block_size=1), batch.change(sliding_window=window))


def hints_change_nothing(runner: Runner, spec: RaggedSpec) -> None:
    """`max_q_len` changes no result, even if it is wrong."""
    batch = spec.build().change(max_q_len=None)
    for limit in (0, 1, 71):
        same(runner, batch.change(max_q_len=limit), batch)


def a_huge_window_is_none(runner: Runner, spec: RaggedSpec) -> None:
    batch = spec.build().masked(sliding_window=None)
    longest = int(batch.kv_lens.max(initial=1)) + len(batch.q) + 1
    same(runner, batch.change(sliding_window=longest), batch)
    same(runner, batch.change(sliding_window=2**31 - 1), batch)


def a_far_cap_is_nearly_none(runner: Runner, spec: Spec) -> None:
    batch = spec.build().change(soft_cap=None)
    reach = np.abs(batch.values()[0]).max(initial=1)
    reach *= np.abs(per_head(batch.k_scale, batch.num_kv_heads)).max() * np.abs(batch.q).max(initial=1)
    scale = batch.q.shape[2] ** -0.5 if batch.sm_scale is None else batch.sm_scale
    # The cap is so far above the logits that its effect is lost in 16 bits, but low enough for float32.
    cap = 30.0 * float(reach) * max(1.0, scale * batch.q.shape[2] ** 0.5)
    same(runner, batch.change(soft_cap=cap), batch, "bfloat16")


def quantised_is_dequantised(runner: Runner, spec: RaggedSpec) -> None:
    batch = spec.build()
    same(runner, batch.change(dtype="float32"), batch.widened(), batch.kind)


def sinks_take_their_share(runner: Runner, spec: RaggedSpec) -> None:
    """A sink of -inf changes nothing, and a sink of +inf makes `out` 0.

    A finite sink scales `out` by the share of weight that it leaves. No sink changes `lse`.
    """
    batch = spec.build().change(sinks=None)
    out, lse = runner.run(batch.OPERATION, batch, return_lse=True)
    heads = batch.q.shape[1]
    normal = np.random.default_rng(spec.seed).standard_normal(heads).astype(np.float32)
    for sinks in (np.full(heads, -np.inf, np.float32), np.full(heads, np.inf, np.float32), normal):
        sunk = batch.change(sinks=sinks)
        out_sunk, lse_sunk = runner.run(sunk.OPERATION, sunk, return_lse=True)
        agrees(lse_sunk, lse, f"lse {batch.kind}", "lse with sinks")
        want, rounding = out * _share(sunk, lse)[..., None], allowance(runner, sunk, sunk)
        agrees(out_sunk, want, batch.kind, f"out with sinks {sinks[0]}", allowance=rounding)


def slopes_of_zero_are_none(runner: Runner, spec: Spec) -> None:
    batch = spec.build().change(alibi_slopes=None)
    same(runner, batch.change(alibi_slopes=np.zeros(batch.q.shape[1], np.float32)), batch)


def a_steep_slope_is_a_window_of_one(runner: Runner, spec: Spec) -> None:
    """For a causal query that sees its own key, a very steep slope leaves only this key."""
    lens = tuple((min(lens), lens[1]) for lens in spec.lens)
    clean = dataclasses.replace(spec, lens=lens, alibi=None)
    batch = clean.build().masked(causal=True)
    steep = np.full(batch.q.shape[1], 1e6, np.float32)
    same(runner, batch.change(alibi_slopes=steep), batch.change(sliding_window=1))


def slopes_shift_the_lse(runner: Runner, spec: Spec) -> None:
    """If all logits are 0, the slopes alone determine lse."""
    batch = spec.build().change(sm_scale=0.0, soft_cap=None, sinks=None, relative_bias=None)
    rng = np.random.default_rng(spec.seed)
    slopes = rng.uniform(-0.5, 0.5, batch.q.shape[1]).astype(np.float32)
    batch = batch.change(alibi_slopes=slopes)
    _, lse = runner.run(batch.OPERATION, batch, return_lse=True)
    want = np.full(lse.shape, -np.inf)
    for seq, (start, stop) in enumerate(batch.bounds()):
        distance = (
            np.arange(batch.kv_len(seq)) - (batch.kv_len(seq) - (stop - start) + np.arange(stop - start))[:, None]
        )
        bias = slopes.astype(np.float64)[:, None] * distance[:, None]
        seen = batch.seen(seq)
        seen = np.repeat(seen, len(slopes) // len(seen), axis=0).swapaxes(0, 1)
        seen = np.where(seen, bias, -np.inf)
        want[start:stop] = np.logaddexp.reduce(seen, axis=2, initial=-np.inf)
    agrees(lse, want, f"lse {batch.kind}", "lse")


def slopes_are_a_relative_bias(runner: Runner, spec: Spec) -> None:
    """A relative bias table with a slope's biases for all distances equals the slope.

    A table with only one column of 0 equals no bias.
    """
    batch = spec.build().masked(relative_bias=None, causal=True, draft_mask=None)
    heads, reach = batch.q.shape[1], max((batch.kv_len(seq) for seq in range(len(batch.bounds()))), default=0) + 1
    slopes = np.linspace(-0.25, 0.5, heads, dtype=np.float32)
    table = -slopes[:, None] * np.arange(reach, dtype=np.float32)
    sloped, plain = batch.change(alibi_slopes=slopes), batch.change(alibi_slopes=None)
    same(runner, plain.change(relative_bias=table), sloped)
    tables = np.broadcast_to(table, (len(batch.q), *table.shape)).copy()
    same(runner, plain.change(relative_bias=tables), sloped)
    same(runner, plain.change(relative_bias=np.zeros((heads, 1), np.float32)), plain)


def writing_is_having(runner: Runner, spec: Spec) -> None:
    """Attention after a write equals attention over a cache that already held the tokens."""
    batch = spec.build()
    if batch.stored is not None:
        return
    if not batch.quantized:  # with scales, rounding to the cache's dtype would lose bits
        batch = batch.change(k_scale=None, v_scale=None)
    dtype = "float32" if batch.quantized else batch.dtype
    arrays = [pages.copy() for pages in pages_of(batch.kv_pages)]
    emptied = like_pages(batch.kv_pages, arrays)
    tokens = [np.zeros((len(batch.q), *side.shape[2:]), np.float32) for side in split(emptied)]
    scales = [per_head(scale, batch.num_kv_heads)[:, None] for scale in (batch.k_scale, batch.v_scale)]
    for seq, (start, stop) in enumerate(batch.bounds()):
        step = range(max(start, stop - batch.kv_len(seq)), stop)
        slots = batch.slots(seq)[batch.kv_len(seq) - len(step) :]
        for side, token, scale in zip(split(emptied), tokens, scales, strict=True):
            rows = side.reshape(-1, *side.shape[2:])[slots]
            token[step.start : step.stop] = formats.values_of(rows, batch.cache_dtype) * scale
            side[slots // batch.page_size, slots % batch.page_size] = 0
    tables = {name: getattr(batch, name) for name in ("page_indices", "kv_lens", "cu_q_lens", "num_seqs")}
    written = runner.run("write_kv_pages", WriteBatch(
            k=formats.rounded(tokens[0], dtype), v=formats.rounded(tokens[1], dtype), kv_pages=emptied, **tables,
            k_scale=batch.k_scale, v_scale=batch.v_scale, dtype=dtype, cache_dtype=batch.cache_dtype,
        ))  # fmt: skip
    same(runner, batch.change(kv_pages=written), batch)


def a_double_is_its_multiplicity(runner: Runner, spec: RaggedSpec) -> None:
    """Listing each page twice does not change `out`, and adds log 2 to `lse`."""
    batch = spec.build()
    whole_pages = (batch.kv_lens // batch.page_size * batch.page_size).astype(np.int32)
    plain = dict.fromkeys(batch.arguments().keys() & {"sliding_window", "sinks", "alibi_slopes", "relative_bias"})
    once = batch.masked(causal=False, **plain, kv_lens=whole_pages)
    twice = once.change(kv_lens=2 * whole_pages, page_indices=_doubled(once))
    out, lse = runner.run(once.OPERATION, once, return_lse=True)
    out_twice, lse_twice = runner.run(twice.OPERATION, twice, return_lse=True)
    agrees(out_twice, out, batch.kind, allowance=allowance(runner, once, once))
    agrees(lse_twice, lse.astype(np.float64) + np.log(2), f"lse {batch.kind}", "lse")


def _doubled(batch: RaggedTables) -> np.ndarray:
    table = np.zeros((batch.page_indices.shape[0], 2 * batch.page_indices.shape[1]), np.int32)
    for row, pages, kv_len in zip(table, batch.page_indices, batch.kv_lens, strict=True):
        used = kv_len // batch.page_size
        row[: 2 * used] = np.tile(pages[:used], 2)
    return table


LAWS: dict[str, Law] = {
    "a query that sees no key gives 0 and -inf": fully_masked_queries_give_nothing,
    "what no query sees takes no part": unseen_takes_no_part,
    "pages may move": pages_may_move,
    "pages may be shared": pages_may_be_shared,
    "sequences do not mix": sequences_do_not_mix,
    "the output is a mixture of the values": output_is_a_mixture,
    "parts merge through their lse": parts_merge,
    "a causal draft mask is causal": a_causal_draft_mask_is_causal,
    "ranges of a mask are that mask": ranges_of_a_mask_are_that_mask,
    "ranges are a union": ranges_are_a_union,
    "all blocks named are all keys": all_blocks_named_are_all_keys,
    "lists of blocks are sets of keys": lists_are_sets_of_keys,
    "each KV head has its list of blocks": each_kv_head_has_its_list,
    "a window of blocks is that window": a_window_of_blocks_is_that_window,
    "hints change nothing": hints_change_nothing,
    "a huge window is none": a_huge_window_is_none,
    "a far cap is nearly none": a_far_cap_is_nearly_none,
    "a quantised cache is its dequantised values": quantised_is_dequantised,
    "sinks take their share and leave the lse": sinks_take_their_share,
    "slopes of zero are none": slopes_of_zero_are_none,
    "a steep slope is a window of one": a_steep_slope_is_a_window_of_one,
    "slopes alone make the lse": slopes_shift_the_lse,
    "slopes are a relative bias": slopes_are_a_relative_bias,
    "writing is having": writing_is_having,
    "a double is its multiplicity": a_double_is_its_multiplicity,
}
