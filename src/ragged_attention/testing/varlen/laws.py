"""Properties of attention over packed sequences and of gradients that need no reference result.

`VARLEN_LAWS` are laws of `varlen_attention` and its gradient, `SPARSE_GRADIENT_LAWS` are laws of the gradient of
`sparse_mla_prefill`. A law takes a runner and the spec of a clean batch, without poison, which laws add themselves. It
raises AssertionError if the backend breaks it.
"""

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragged_attention.key_ranges import causal_ranges
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.mla.laws import Law
from ragged_attention.testing.mla.specs import PrefillBatch
from ragged_attention.testing.paged.specs import Batch
from ragged_attention.testing.rounded_weights import allowance
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.varlen.gradients import GradientBatch, Gradients, GradientSpec
from ragged_attention.testing.varlen.oracle import (
    gradients_agree,
    results_agree,
    rows_without_gradient,
    varlen_agrees,
)
from ragged_attention.testing.varlen.specs import VarlenBatch, VarlenSpec
from ragged_attention.testing.varlen.strategies import sparse_gradient_specs, varlen_gradient_specs, varlen_specs

BLOCK_SIZES = (1, 2, 4, 16, 64, 256)
OF_QUERIES = ("q", "indices", "topk_lens", "d_out", "d_lse")


def built(spec: GradientSpec) -> Any:
    """The batch in float32, for laws that compare sums in different orders."""
    return dataclasses.replace(spec, of=dataclasses.replace(spec.of, dtype="float32")).build()


def same(runner: Runner, got: Gradients, want: Gradients, batch: GradientBatch, what: str = "") -> None:
    """Check that results and gradients agree with those expected, which also come from the backend."""
    rounding = allowance(runner, batch.forward, batch.forward)
    results_agree(got, want.out, want.lse, batch, what, rounding=rounding)
    gradients_agree(got.of, want.of, batch.forward.dtype, what)


def _same_batches(runner: Runner, batch: GradientBatch, other: GradientBatch, what: str = "") -> None:
    same(runner, runner.gradients(batch), runner.gradients(other), batch, what)


def _share(lse: NDArray[Any], sinks: NDArray[Any] | None) -> NDArray[Any]:
    """The share of weight that sinks leave to the keys of each row and head; 0 without keys."""
    lse = lse.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        share = 1 / (1 + np.exp((-np.inf if sinks is None else sinks.astype(np.float64)) - lse))
    return np.where(lse == -np.inf, 0.0, share)


# ---- laws of the gradients of packed and of sparse attention


def nothing_comes_from_nothing(runner: Runner, spec: GradientSpec) -> None:
    """NaN in unseen keys and in queries that see no key changes nothing, and the gradients there are 0."""
    batch = spec.build()
    want = runner.gradients(batch)
    for kind in ("nan", "inf"):
        got = runner.gradients(batch.poisoned(kind, spec.of.seed))
        same(runner, got, want, batch, f" with {kind} in what takes no part")
        for name, rows in rows_without_gradient(batch).items():
            identical(got.of[name][rows], np.zeros_like(got.of[name][rows]), f"d{name} of what takes no part")
        fully_masked = batch.forward.fully_masked_heads()
        identical(got.out[fully_masked], np.zeros_like(got.out[fully_masked]), "out of queries that see no key")
        identical(got.lse[fully_masked], np.full_like(got.lse[fully_masked], -np.inf), "lse of queries that see no key")


def sinks_take_their_share(runner: Runner, spec: GradientSpec) -> None:
    """A sink of -inf changes nothing. With a sink of +inf, `out` is 0 and gradients come only from `lse`."""
    batch = built(spec).change(sinks=None)
    plain = runner.gradients(batch)
    of_lse = runner.gradients(batch.change(d_out=np.zeros_like(batch.d_out)))
    none = np.zeros(spec.of.heads, np.float32)
    for sink, want in ((-np.inf, plain), (np.inf, dataclasses.replace(of_lse, out=0 * plain.out))):
        sunk = runner.gradients(batch.change(sinks=none + np.float32(sink)))
        same(runner, sunk, dataclasses.replace(want, of=want.of | {"sinks": none}), batch, f" with sinks {sink}")


def sinks_lose_what_they_take(runner: Runner, spec: GradientSpec) -> None:
    """A sink's gradient is minus the sum of its share of weight times `out . d_out`."""
    normal = np.random.default_rng(spec.of.seed).standard_normal(spec.of.heads).astype(np.float32)
    batch = built(spec).change(sinks=normal)
    got = runner.gradients(batch)
    delta = (got.out.astype(np.float64) * batch.d_out).sum(axis=-1)
    taken = np.where(got.lse == -np.inf, 0.0, (_share(got.lse, normal) - 1) * delta)
    agrees(got.of["sinks"], taken.sum(axis=0), "float32", "dsinks")


def _scalar_terms(batch: GradientBatch, out: NDArray[Any], lse: NDArray[Any]) -> NDArray[Any]:
    """The terms of the scalar that is differentiated."""
    lse = np.where(np.isfinite(lse), lse, 0.0).astype(np.float64)
    of_lse = np.zeros(0) if batch.d_lse is None else lse * batch.d_lse
    return np.concatenate([(out.astype(np.float64) * batch.d_out).ravel(), of_lse.ravel()])


def gradients_are_slopes(runner: Runner, spec: GradientSpec) -> None:
    """The gradients predict the change of the backend's own results along a direction."""
    batch = built(spec)
    got, forward = runner.gradients(batch), batch.forward
    if not forward.q.size:
        return
    rng = np.random.default_rng(spec.of.seed)
    step: dict[str, NDArray[np.float64]] = {}
    for name, gradient in got.of.items():
        size = max(float(np.sqrt((gradient.astype(np.float64) ** 2).mean())) if gradient.size else 0.0, 1e-30)
        along = gradient / size * rng.uniform(0.5, 1.5, gradient.shape)
        step[name] = np.clip(along, -4, 4) + rng.standard_normal(gradient.shape)
    # The bias is tested separately, because its slope would outweigh the others.
    bias = {name: step.pop(name) for name in ("relative_bias",) if name in step}
    for ways in (step, bias) if bias else (step,):
        _expect_slope(runner, batch, got, ways)


def _expect_slope(runner: Runner, batch: GradientBatch, got: Gradients, step: dict[str, NDArray[np.float64]]) -> None:
    """Raise AssertionError unless the results change along `step` as the gradients predict."""
    forward = batch.forward

    def height(far: float) -> float:
        moved = {name: (getattr(forward, name) + far * way).astype(np.float32) for name, way in step.items()}
        other = forward.change(**moved)
        results = (
            runner.run("varlen_attention", other, return_lse=True)
            if isinstance(other, VarlenBatch)
            else runner.run("sparse_mla_prefill", other)
        )
        return _scalar_terms(batch, results[0], results[-1]).sum()

    width = forward.q.shape[2]
    # A step of this size moves a logit by a few hundredths.
    far = 0.01 / (1 + width * abs(width**-0.5 if forward.sm_scale is None else forward.sm_scale))
    near, wide = ((height(times * far) - height(-times * far)) / (2 * times * far) for times in (1, 2))
    slope = (4 * near - wide) / 3
    terms = np.concatenate([(got.of[name] * way).ravel() for name, way in step.items()])
    rounding = 2e-7 * np.abs(_scalar_terms(batch, got.out, got.lse)).sum() / far
    if abs(slope - terms.sum()) > 5e-3 * np.abs(terms).sum() + rounding:
        want = terms.sum()
        raise AssertionError(f"expected a slope of {want:.6g} from the gradients, got {slope:.6g} from the results")


# ---- packed sequences


def _part(batch: GradientBatch, order: Any) -> tuple[GradientBatch, NDArray[Any], NDArray[Any]]:
    """The batch of the sequences in `order`, with the indices of their query rows and of their keys."""
    forward: Any = batch.forward
    parts = forward.parts()
    queries = [np.arange(len(forward.q))[parts[seq][0]] for seq in order]
    keys = [np.arange(len(forward.k))[parts[seq][1]] for seq in order]
    rows, columns = (np.concatenate([np.empty(0, int), *each]) for each in (queries, keys))
    d_lse = None if batch.d_lse is None else batch.d_lse[rows]
    part = dataclasses.replace(batch, forward=forward.of(order), d_out=batch.d_out[rows], d_lse=d_lse)
    return part, rows, columns


def _at(whole: Gradients, rows: NDArray[Any], keys: NDArray[Any]) -> Gradients:
    """The results and gradients at some query rows and keys, without gradients that all queries share."""
    slices = {"q": rows, "k": keys, "v": keys, "relative_bias": rows}
    of = {name: array[slices[name]] for name, array in whole.of.items() if not _belongs_to_all(name, array)}
    return Gradients(whole.out[rows], whole.lse[rows], of)


def _belongs_to_all(name: str, gradient: NDArray[Any]) -> bool:
    """Whether all queries contribute to each entry of a gradient, as for sinks and for a shared bias table."""
    return name == "sinks" or (name == "relative_bias" and gradient.ndim == 2)


def _of_all(whole: Gradients) -> dict[str, NDArray[Any]]:
    return {name: array for name, array in whole.of.items() if _belongs_to_all(name, array)}


def _of_each(whole: Gradients) -> Gradients:
    gradients = {name: array for name, array in whole.of.items() if not _belongs_to_all(name, array)}
    return dataclasses.replace(whole, of=gradients)


def sequences_in_any_order(runner: Runner, spec: GradientSpec) -> None:
    batch = spec.build()
    order = np.random.default_rng(spec.of.seed).permutation(batch.forward.num_seqs)  # type: ignore[union-attr]
    part, rows, keys = _part(batch, order)
    whole, got = runner.gradients(batch), runner.gradients(part)
    same(runner, _of_each(got), _at(whole, rows, keys), part)
    gradients_agree(_of_all(got), _of_all(whole), batch.forward.dtype)


def sequences_do_not_mix(runner: Runner, spec: GradientSpec) -> None:
    """A batch has the same results as separate calls for its sequences, with shared gradients summed."""
    batch = spec.build()
    whole = runner.gradients(batch)
    sums = {name: np.zeros(array.shape) for name, array in _of_all(whole).items()}
    for seq in range(batch.forward.num_seqs):  # type: ignore[union-attr]
        part, rows, keys = _part(batch, [seq])
        got = runner.gradients(part)
        same(runner, _of_each(got), _at(whole, rows, keys), part, f" of sequence {seq}")
        sums = {name: total + got.of[name] for name, total in sums.items()}
    gradients_agree(_of_all(whole), sums, batch.forward.dtype, " of all sequences")


def hints_change_nothing(runner: Runner, spec: GradientSpec) -> None:
    """Maximum lengths, a huge window and `deterministic` change no result."""
    batch: Any = spec.build()
    batch = dataclasses.replace(
        batch, forward=batch.forward.masked(max_q_len=None, max_kv_len=None, sliding_window=None)
    )
    hints = {"max_q_len": 71, "max_kv_len": 71, "deterministic": not spec.of.deterministic}
    _same_batches(runner, batch, batch.change(**hints, sliding_window=2**31 - 1))


def ranges_of_a_mask_are_that_mask(runner: Runner, spec: GradientSpec) -> None:
    batch: Any = built(spec)
    plain = dataclasses.replace(batch, forward=batch.forward.masked(causal=True, relative_bias=None))
    forward = plain.forward
    kv_lens = np.diff(forward.cu_kv_lens)
    ranges = causal_ranges(forward.cu_q_lens, kv_lens, len(forward.q), sliding_window=forward.sliding_window)
    _same_batches(runner, plain.change(causal=False, sliding_window=None, key_ranges=ranges), plain)


def ranges_are_a_union(runner: Runner, spec: GradientSpec) -> None:
    """Key ranges may come in any order, be cut in two, and overlap."""
    batch: Any = built(spec)
    batch, rng = (
        dataclasses.replace(batch, forward=batch.forward.masked(causal=False, sliding_window=None)),
        spec.of.seed,
    )
    shape, longest = (3, len(batch.forward.q), 1), int(np.diff(batch.forward.cu_kv_lens).max(initial=0))
    edges = np.random.default_rng(rng).integers(0, longest + 2, shape).astype(np.int32)
    begin, cut, end = np.sort(edges, axis=0)
    whole, first, second = (np.stack(pair, -1) for pair in ((begin, end), (begin, cut), (cut, end)))
    batch = batch.change(key_ranges=whole)
    for parts in ([second, first], [first, whole, second, first]):
        _same_batches(runner, batch.change(key_ranges=np.concatenate(parts, axis=1)), batch)


def all_blocks_named_are_all_keys(runner: Runner, spec: GradientSpec) -> None:
    batch: Any = built(spec)
    batch = dataclasses.replace(batch, forward=batch.forward.masked())
    size = BLOCK_SIZES[spec.of.seed % len(BLOCK_SIZES)]
    count = -(-int(np.diff(batch.forward.cu_kv_lens).max(initial=0)) // size)
    every = np.broadcast_to(np.arange(count, dtype=np.int32), (len(batch.forward.q), 1, count))
    lists = np.random.default_rng(spec.of.seed).permuted(every, axis=2)
    _same_batches(runner, batch.change(selected=lists, block_size=size), batch)


def lists_are_sets_of_keys(runner: Runner, spec: GradientSpec) -> None:
    """Order and duplicates in a list do not matter, and two half blocks equal a block."""
    batch: Any = built(spec)
    batch, rng = dataclasses.replace(batch, forward=batch.forward.masked()), np.random.default_rng(spec.of.seed)
    size = BLOCK_SIZES[1 + spec.of.seed % (len(BLOCK_SIZES) - 1)]
    count = -(-int(np.diff(batch.forward.cu_kv_lens).max(initial=0)) // size)
    lists = rng.integers(-1, count + 1, (len(batch.forward.q), batch.forward.k.shape[1], 4), np.int32)
    halves = np.concatenate([np.where(lists < 0, -1, 2 * lists), np.where(lists < 0, -1, 2 * lists + 1)], axis=2)
    batch = batch.change(selected=lists, block_size=size)
    twice = rng.permuted(np.concatenate([lists, lists], axis=2), axis=2)
    _same_batches(runner, batch.change(selected=twice), batch)
    _same_batches(runner, batch.change(selected=halves.astype(np.int32), block_size=size // 2), batch)


def packed_is_paged(runner: Runner, spec: VarlenSpec) -> None:
    """Packed keys give the same results as the same keys in pages."""
    widths = {name: max(16, -(-getattr(spec, name) // 8) * 8) for name in ("d", "d_v")}  # head sizes that pages support
    batch = dataclasses.replace(spec, **widths, dtype="float32", limits=None).build()
    size = 4
    lens = np.diff(batch.cu_kv_lens)
    columns = -(-int(max(lens, default=0)) // size)
    table = np.arange(len(lens) * columns, dtype=np.int32).reshape(len(lens), columns)
    pages = [np.zeros((len(lens) * columns, size, *array.shape[1:]), np.float32) for array in (batch.k, batch.v)]
    for seq, (_, keys, _) in enumerate(batch.parts()):
        for target, array in zip(pages, (batch.k, batch.v), strict=True):
            target.reshape(len(lens), columns * size, *array.shape[1:])[seq, : lens[seq]] = array[keys]
    options = (
        "sm_scale", "sliding_window", "soft_cap", "sinks", "alibi_slopes", "relative_bias", "key_ranges", "selected",
        "block_size", "strided",
    )  # fmt: skip
    paged = Batch(
        q=batch.q, kv_pages=(pages[0], pages[1]), kv_lens=lens.astype(np.int32), page_indices=table,
        cu_q_lens=batch.cu_q_lens, causal=batch.causal or batch.key_ranges is not None,
        **{name: getattr(batch, name) for name in options},
    )  # fmt: skip
    varlen_agrees(
        runner.run("varlen_attention", batch, return_lse=True),
        runner.run("ragged_paged_attention", paged, return_lse=True),
        "float32",
    )


def slopes_have_limits(runner: Runner, spec: GradientSpec) -> None:
    """Slopes of 0 change nothing. Very steep slopes leave a causal query only its own key, like a window of 1."""
    batch = built(spec)
    batch = dataclasses.replace(batch, forward=batch.forward.masked(alibi_slopes=None, causal=True))
    none = np.zeros(spec.of.heads, np.float32)
    _same_batches(runner, batch.change(alibi_slopes=none), batch)
    _same_batches(runner, batch.change(alibi_slopes=none + np.float32(1e6)), batch.change(sliding_window=1))


def groups_share_a_head(runner: Runner, spec: GradientSpec) -> None:
    """Query heads that share a KV head have the same results as with separate copies of it.

    The KV head's gradients are the sums of the copies' gradients.
    """
    batch: Any = built(spec)
    copies = {name: np.repeat(getattr(batch.forward, name), spec.of.group, axis=1) for name in ("k", "v")}  # type: ignore[union-attr]
    if (lists := batch.forward.selected) is not None and lists.shape[1] > 1:
        copies["selected"] = np.repeat(lists, spec.of.group, axis=1)  # type: ignore[union-attr]
    copied = runner.gradients(batch.change(**copies))
    shape = len(batch.forward.k), spec.of.kv_heads, batch.forward.group
    summed = {name: copied.of[name].reshape(*shape, copied.of[name].shape[-1]).sum(axis=2) for name in ("k", "v")}
    same(runner, runner.gradients(batch), dataclasses.replace(copied, of=copied.of | summed), batch)


def gradients_have_sums(runner: Runner, spec: GradientSpec) -> None:
    """The gradients' sums over a sequence satisfy four identities.

    The dv of all keys sum to d_out times the share of weight that sinks leave, summed over the rows. A row's bias
    gradients sum to the effect of shifting all its logits, which changes `lse`, and changes `out` only through the
    sinks. The dk of all keys sum to the effect of moving all keys by a vector, which shifts each row's logits. The sums
    of q . dq and of k . dk are equal. The last two identities hold only without a soft cap.
    """
    batch = built(spec)
    got, forward, capped = runner.gradients(batch), batch.forward, spec.of.soft_cap is not None  # type: ignore[union-attr]
    share = _share(got.lse, forward.sinks)
    delta = (got.out.astype(np.float64) * batch.d_out).sum(axis=-1)
    fully_masked = got.lse == -np.inf
    pull = np.where(fully_masked, 0.0, (1 - share) * delta + (0.0 if batch.d_lse is None else batch.d_lse))
    q, wide = forward.q.astype(np.float64), {name: array.astype(np.float64) for name, array in got.of.items()}
    if "relative_bias" in wide:
        of_rows = pull if wide["relative_bias"].ndim == 3 else pull.sum(axis=0)
        agrees(wide["relative_bias"].sum(axis=-1), of_rows, "float32", "drelative_bias, summed,")
    shared_d_out, moved = share[..., None] * batch.d_out, forward.scale * pull[..., None] * q  # type: ignore[union-attr]
    for seq, (rows, keys, _) in enumerate(forward.parts()):  # type: ignore[union-attr]
        for head in range(spec.of.kv_heads):
            group = slice(head * forward.group, (head + 1) * forward.group)
            where = f", summed, of sequence {seq} and head {head}"
            agrees(
                wide["v"][keys, head].sum(axis=0), shared_d_out[rows, group].sum(axis=(0, 1)), "float32", f"dv{where}"
            )
            if capped:
                continue
            agrees(wide["k"][keys, head].sum(axis=0), moved[rows, group].sum(axis=(0, 1)), "float32", f"dk{where}")
            products = (wide["k"][keys, head] * forward.k[keys, head]).sum()  # type: ignore[union-attr]
            agrees((wide["q"][rows, group] * q[rows, group]).sum(), products, "float32", f"q . dq{where}")


# ---- lists of rows


def order_is_free(runner: Runner, spec: GradientSpec) -> None:
    batch: Any = spec.build().change(topk_lens=None)
    shuffled = np.random.default_rng(spec.of.seed).permuted(batch.forward.indices, axis=-1)
    _same_batches(runner, batch.change(indices=shuffled), batch)


def _cut(batch: GradientBatch) -> Any:
    """The batch without list lengths, and with -1 in place of list entries that select nothing."""
    forward: Any = batch.forward
    indices = np.where(forward.selection.selects, forward.indices, np.int32(-1))
    return batch.change(indices=indices, topk_lens=None)


def lengths_cut_lists(runner: Runner, spec: GradientSpec) -> None:
    """A length has the effect of cutting the list there, and `deterministic` changes no value."""
    batch: Any = spec.build()
    _same_batches(runner, batch, _cut(batch).change(deterministic=not batch.forward.deterministic))


def tokens_add_up(runner: Runner, spec: GradientSpec) -> None:
    """If tokens are divided between two calls, the gradients of rows and sinks add up to those of one call."""
    batch = built(spec)
    whole, middle = runner.gradients(batch), len(batch.d_out) // 2
    halves = []
    for rows in (slice(0, middle), slice(middle, None)):
        arrays = {name: getattr(batch, name, getattr(batch.forward, name, None)) for name in OF_QUERIES}
        part = batch.change(**{name: array[rows] for name, array in arrays.items() if array is not None})
        halves.append(runner.gradients(part))
    first, second = halves
    joined = {
        name: np.concatenate([array, second.of[name]]) if name == "q" else array.astype(np.float64) + second.of[name]
        for name, array in first.of.items()
    }
    out, lse = (np.concatenate([getattr(half, name) for half in halves]) for name in ("out", "lse"))
    same(runner, whole, Gradients(out, lse, joined), batch)


def a_double_is_two_rows(runner: Runner, spec: GradientSpec) -> None:
    """A row that is listed twice has the sum of the gradients of two rows with the same values."""
    batch = _cut(built(spec))
    forward = batch.forward
    beyond = np.where(forward.indices >= 0, forward.indices + forward.selection.num_slots, np.int32(-1))
    double = {"kv": np.concatenate([forward.kv, forward.kv])}
    separate = runner.gradients(
        batch.change(**double, indices=np.concatenate([forward.indices, beyond], -1, dtype=np.int32))
    )
    twice = runner.gradients(batch.change(indices=np.concatenate([forward.indices, forward.indices], -1)))
    summed = separate.of["kv"].astype(np.float64).reshape(2, *forward.kv.shape).sum(axis=0)
    same(runner, twice, dataclasses.replace(separate, of=separate.of | {"kv": summed}), batch)


def pages_are_rows(runner: Runner, spec: GradientSpec) -> None:
    """The gradient of a paged cache is, slot by slot, the gradient of packed rows."""
    batch: Any = built(spec)
    rows = batch.forward.kv.reshape(-1, *batch.forward.kv.shape[-2:])
    if batch.forward.kv.ndim == 3:
        return
    packed, paged = runner.gradients(batch.change(kv=rows)), runner.gradients(batch)
    same(runner, packed, dataclasses.replace(paged, of=paged.of | {"kv": paged.of["kv"].reshape(rows.shape)}), batch)


def all_rows_listed_is_dense(runner: Runner, spec: GradientSpec) -> None:
    """Lists of all rows, or of those that a causal query sees, give the results of dense attention over the rows.

    A row's gradient is then the sum of its gradients as key and as value.
    """
    batch: Any = built(spec)
    forward: PrefillBatch = batch.forward
    tokens, kv_heads = forward.q.shape[0], forward.kv.shape[-2]
    rows = forward.kv.reshape(-1, kv_heads, forward.kv.shape[-1])
    if not len(rows) or rows.shape[-1] > 256:
        return
    causal, rng = bool(spec.of.seed % 2), np.random.default_rng(spec.of.seed)
    every = np.broadcast_to(np.arange(len(rows), dtype=np.int32), (tokens, kv_heads, len(rows)))
    listed = {
        "kv": rows,
        "indices": np.array(every) if causal else rng.permuted(every, axis=-1),
        "topk_lens": np.arange(len(rows) - tokens + 1, len(rows) + 1, dtype=np.int32) if causal else None,
    }
    dense = VarlenBatch(
        q=forward.q, k=rows, v=rows[..., : forward.d_v], cu_q_lens=np.array([0, tokens], np.int32),
        cu_kv_lens=np.array([0, len(rows)], np.int32), sm_scale=forward.sm_scale, causal=causal, sinks=forward.sinks,
    )  # fmt: skip
    got, want = runner.gradients(batch.change(**listed)), runner.gradients(dataclasses.replace(batch, forward=dense))
    as_key = want.of.pop("k").astype(np.float64)
    as_key[..., : forward.d_v] += want.of.pop("v")
    same(runner, got, dataclasses.replace(want, of=want.of | {"kv": as_key}), batch)


_DENSE = varlen_gradient_specs(clean=True)
_SPARSE = sparse_gradient_specs(clean=True)
_PAGED: st.SearchStrategy[Any] = _SPARSE.filter(lambda spec: spec.of.page_size is not None)  # type: ignore[union-attr]

VARLEN_LAWS: dict[str, Law] = {
    "packed, sequences may stand in any order": Law(sequences_in_any_order, _DENSE),
    "packed, sequences do not mix": Law(sequences_do_not_mix, _DENSE),
    "packed, nothing comes from nothing": Law(nothing_comes_from_nothing, _DENSE),
    "packed, sinks take their share, of gradients too": Law(sinks_take_their_share, _DENSE),
    "packed, sinks lose what they take": Law(sinks_lose_what_they_take, _DENSE),
    "packed, a huge window and hints change nothing": Law(hints_change_nothing, _DENSE),
    "packed, ranges of a mask are that mask": Law(ranges_of_a_mask_are_that_mask, _DENSE),
    "packed, ranges are a union": Law(ranges_are_a_union, _DENSE),
    "packed, all blocks named are all keys": Law(all_blocks_named_are_all_keys, _DENSE),
    "packed, lists of blocks are sets of keys": Law(lists_are_sets_of_keys, _DENSE),
    "packed keys are keys in pages": Law(packed_is_paged, varlen_specs(clean=True)),
    "packed, slopes of zero are none, steep ones a window": Law(slopes_have_limits, _DENSE),
    "packed, groups share a head": Law(groups_share_a_head, _DENSE),
    "packed, gradients have their sums": Law(gradients_have_sums, _DENSE),
    "packed, gradients are slopes": Law(gradients_are_slopes, _DENSE),
}
SPARSE_GRADIENT_LAWS: dict[str, Law] = {
    "sparse gradient, nothing comes from nothing": Law(nothing_comes_from_nothing, _SPARSE),
    "sparse gradient, sinks take their share": Law(sinks_take_their_share, _SPARSE),
    "sparse gradient, sinks lose what they take": Law(sinks_lose_what_they_take, _SPARSE),
    "sparse gradient, the order of a list is free": Law(order_is_free, _SPARSE),
    "sparse gradient, lengths cut lists": Law(lengths_cut_lists, _SPARSE),
    "sparse gradient, tokens add up": Law(tokens_add_up, _SPARSE),
    "sparse gradient, a double is two rows": Law(a_double_is_two_rows, _SPARSE),
    "sparse gradient, pages are rows": Law(pages_are_rows, _PAGED),
    "sparse gradient, all rows listed is dense": Law(all_rows_listed_is_dense, _SPARSE),
    "sparse gradient, gradients are slopes": Law(gradients_are_slopes, _SPARSE),
}
