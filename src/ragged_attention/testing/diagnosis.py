"""What is probably wrong with a backend that fails on a batch, in words.

Three kinds of evidence are sought. The results may be those that the definition gives for another call, such as one
with a wider window, or may have a plain relation to the right results. They may change when keys that no query sees are
changed. And the check may pass when one field of the batch is plain, or when sequences are shorter.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference._softmax import logits_of
from ragged_attention.testing import formats, steering
from ragged_attention.testing.compare import agrees
from ragged_attention.testing.heads_first.specs import ChunkBatch, PagedBatch
from ragged_attention.testing.paged.specs import Batch, RaggedTables
from ragged_attention.testing.runner import Declined, Runner

Results = dict[str, NDArray[Any]]
Changed = tuple[str, Any, Callable[[Results], Results]]  # a cause, the batch of another call, what its results become
NAN = "NaN or infinity of cache slots that no query sees reaches the results: mask the values too, since 0 * NaN is NaN"
WHATEVER = "the plainest batch fails too, whatever the features: look at the scale, the softmax and the masks of tails"
UNLISTED = "it reads pages that the table does not list"
PAST = "it reads cache slots that no query sees, in listed pages: past the lengths or behind a mask"
UNTOLD = ("seed", "page_size", "lens", "strided")
SIZES = ("dtype", "head_dim", "cache_dtype", "combined", "v_head_dim")  # of which a partial backend may take one only
BLOCKS = (4, 8, 16, 32, 64, 128)


def spec_of(value: Any) -> Any:
    """The structure of a drawn value, which may come with options."""
    return next((part for part in value if dataclasses.is_dataclass(part)), None) if isinstance(value, tuple) else value


def causes(runner: Runner, value: Any, check: Callable[[Any], object]) -> tuple[str, ...]:
    """The likely causes of a check's failure on a value, the most telling first."""
    spec, options = spec_of(value), {}
    if isinstance(value, tuple):
        options = next((part for part in value if isinstance(part, Mapping)), {})
    if not hasattr(spec, "build"):  # arrays without a structure
        return tuple(dict.fromkeys(of_results(runner, spec, options)))
    numbers = list(of_results(runner, spec.build(), options)) or list(of_results(runner, larger(spec).build(), options))
    return tuple(dict.fromkeys([*numbers, *of_fields(value, lambda other: outcome(check, other))]))


def larger(spec: Any) -> Any:
    """The structure with two more sequences of several pages, because one key may leave several causes possible."""
    size = steering.page_size_of(spec) or 1
    more = ((1, 3 * size + 5), (1, size + 1))
    return steering.replaced(spec, {path: (*lens, *more) for path, lens in steering.lens_of(spec).items()})


def outcome(check: Callable[[Any], object], value: Any) -> bool | None:
    """Whether a check passes, or None if the backend declines the batch."""
    try:
        check(value)
    except Declined:
        return None
    except Exception:  # a kernel may raise anything, and each error is a failure
        return False
    return True


# ---- evidence in results


def of_results(runner: Runner, batch: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the results of a batch; NaN is left out of the cache if they are wrong without it."""
    if not isinstance(batch, (Batch, PagedBatch, ChunkBatch)):
        return
    batches = [batch]
    if isinstance(batch, Batch):
        clean = with_other_values(batch, ~batch.read_slots()).change(q=np.nan_to_num(batch.q, posinf=0.0, neginf=0.0))
        batches = [clean, batch, clean.poisoned("nan"), clean.poisoned("inf")]
    for each in batches:
        got, want = results(runner, each, options), expected(each)
        if not alike(got, want, each):
            yield from of_numbers(got, want, each)
            if isinstance(each, Batch):
                yield from of_unseen(runner, each, options)
            return


def results(runner: Runner, batch: Any, options: Mapping[str, Any]) -> Results:
    if isinstance(batch, RaggedTables):
        out, lse = runner.run(batch.OPERATION, batch, options=options, return_lse=True)
        return {"out": out, "lse": lse}
    operation = "paged_attention" if isinstance(batch, PagedBatch) else "prefill_attention"
    return {"out": runner.run(operation, batch, options=options)}


def expected(batch: Any) -> Results:
    if isinstance(batch, RaggedTables):
        return dict(zip(("out", "lse"), batch.expected(), strict=True))
    return {"out": batch.expected()}


def alike(got: Results, want: Results, batch: Any) -> bool:
    """Whether results agree within the bounds of the suite."""
    try:
        for name, array in got.items():
            agrees(array, want[name], batch.kind if name == "out" else f"lse {batch.kind}", name)
    except AssertionError:
        return False
    return True


def of_numbers(got: Results, want: Results, batch: Any) -> Iterator[str]:
    """The calls whose right results these are, and plain relations to the right results of this call."""
    if any(np.isnan(array).any() and not np.isnan(want[name]).any() for name, array in got.items()):
        yield "finite values give NaN" if finite_pages(batch) else NAN
        return
    for cause, other, turned in other_calls(batch):
        if alike(got, turned(expected(other)), batch):
            yield cause
    for name, array in got.items():
        yield from of_scale(name, array.astype(np.float64), want[name])
    if isinstance(batch, Batch) and (cause := of_single_keys(got["lse"], want["lse"], batch)):
        yield cause


def finite_pages(batch: Any) -> bool:
    pages = batch.pages if isinstance(batch, Batch) else [batch.k_pages, batch.v_pages]
    arrays = [array for each in pages for array in (each if isinstance(each, tuple) else (each,))]
    return all(np.isfinite(formats.values_of(array, batch.cache_dtype)).all() for array in arrays)


def of_scale(name: str, got: NDArray[np.float64], want: NDArray[np.float64]) -> Iterator[str]:
    """Whether an array is a multiple of the right one."""
    where = np.isfinite(got) & np.isfinite(want)
    size = float((want[where] ** 2).sum())
    if size == 0:
        return
    factor = float((got[where] * want[where]).sum() / size)
    left = float(((got[where] - factor * want[where]) ** 2).sum()) / size
    if abs(factor - 1) < 0.01 or left > 1e-4 * factor**2:
        return
    if name == "lse" and abs(factor * np.log(2) - 1) < 0.01:
        yield "lse is in base 2: multiply it by ln 2"
    elif where.sum() > 1:
        yield f"every {name} is {factor:.3g} times the right one"


def same(results: Results) -> Results:
    return results


def other_calls(batch: Any) -> Iterator[Changed]:
    """Calls that a kernel with a known fault would have computed instead of this one."""
    yield from other_options(batch)
    yield from other_lengths(batch)
    yield from other_pages(batch)
    heads, num_kv_heads = batch.q.shape[1], batch.num_kv_heads
    if 1 < num_kv_heads < heads:
        head = np.arange(heads)
        place = head % num_kv_heads * (heads // num_kv_heads) + head // num_kv_heads
        changes: dict[str, Any] = {"q": batch.q[:, np.argsort(place)]}
        if getattr(batch, "sinks", None) is not None:
            changes["sinks"] = batch.sinks[np.argsort(place)]
        cause = "query heads read the wrong KV head: head h belongs to KV head h // group, not h % num_kv_heads"
        yield cause, batch.change(**changes), lambda found: {name: array[:, place] for name, array in found.items()}


def other_options(batch: Any) -> Iterator[Changed]:
    """Calls in which an option has another value, or is left out, as a kernel may have it by mistake."""
    if batch.sm_scale is None:
        yield (
            "the logits are not scaled: sm_scale is head_dim ** -0.5 where it is left out",
            batch.change(sm_scale=1.0),
            same,
        )
    if (window := getattr(batch, "sliding_window", None)) is not None:
        yield "the window is one key too wide", batch.change(sliding_window=window + 1), same
        if window > 1:
            yield "the window is one key too narrow", batch.change(sliding_window=window - 1), same
        else:
            yield "the window is one key too narrow", without_keys(batch), same
    for name in ("sliding_window", "soft_cap", "sm_scale", "sinks", "k_scale", "v_scale", "draft_mask", "num_seqs"):
        if getattr(batch, name, None) is not None and not (name.endswith("_scale") and batch.cache_dtype == "int8"):
            yield f"{name} is ignored", batch.change(**{name: None}), same
    if hasattr(batch, "causal"):
        yield (
            "the causal mask is wrong: results are those of the other choice",
            batch.change(causal=not batch.causal),
            same,
        )


def lens_name(batch: Any) -> str:
    return "kv_lens" if hasattr(batch, "kv_lens") else "lengths" if hasattr(batch, "lengths") else "length"


def without_keys(batch: Any) -> Any:
    return batch.change(**{lens_name(batch): np.zeros_like(getattr(batch, lens_name(batch)))})


def other_lengths(batch: Any) -> Iterator[Changed]:
    """Calls with fewer or more keys, as a kernel has them that drops the last ones or reads past the end."""
    name = lens_name(batch)
    lens = np.asarray(getattr(batch, name), np.int32)
    if name == "length":  # a chunk's place follows from it
        return

    def changed(new: Any) -> Any:
        return batch.change(**{name: np.maximum(new, 0).astype(np.int32)})

    later = getattr(batch, "causal", False) is False or len(batch.q) == len(lens)  # a mask does not depend on lengths
    if later:
        for block in BLOCKS:
            cause = f"the last keys are dropped, after a multiple of {block}"
            yield cause, changed(np.where(lens > block, lens // block * block, lens)), same
        yield "the last key is dropped", changed(lens - 1), same
        yield "one slot past the length is read as a key", changed(np.where(lens > 0, lens + 1, lens)), same
    for seq in {0, lens.size - 1}:
        yield (
            f"every sequence has the length of sequence {seq}",
            changed(np.full_like(lens, lens.reshape(-1)[seq])),
            same,
        )


def other_pages(batch: Any) -> Iterator[Changed]:
    """Calls over other pages, as a kernel reads them that takes a wrong entry of the page table."""
    table = np.atleast_2d(batch.page_indices)
    lens = np.atleast_1d(np.asarray(getattr(batch, lens_name(batch))))
    last = np.clip(-(-lens // batch.page_size), 0, table.shape[1]) - 1
    stale = table.copy()
    for row, index in zip(stale, last, strict=False):
        if index > 0:
            row[index] = row[index - 1]

    def changed(new: NDArray[np.int32]) -> Any:
        return batch.change(page_indices=new.reshape(batch.page_indices.shape))

    yield "the last page of a sequence is a stale one: the page before it is read again", changed(stale), same
    zero = np.where((np.arange(table.shape[1]) == last[:, None]) & (last[:, None] > 0), 0, table)
    yield "page 0 is read in place of the last page of a sequence", changed(zero), same
    for count in range(1, min(table.shape[1], 9)):
        cause = f"the wrong page is read in sequences of more than {count} pages"
        again, first = np.arange(table.shape[1]) % count, table.copy()
        first[:, count:] = first[:, :1]
        yield cause, changed(table[:, again]), same
        yield cause, changed(first), same
    yield "the table is read one entry too far", changed(np.roll(table, -1, axis=1)), same
    yield "the table is read one entry too early", changed(np.roll(table, 1, axis=1)), same


def of_single_keys(got: NDArray[Any], want: NDArray[np.float64], batch: Batch) -> str | None:
    """Whether the lse shows that a key is left out or counted twice, or that pages listed twice are counted once."""
    if alike({"lse": got}, {"lse": want}, batch):
        return None
    shares = [share_of_each_key(batch, seq, want) for seq in range(len(batch.bounds()))]
    rows = [slice(start, stop) for start, stop in batch.bounds()]
    longest = max((share.shape[-1] for share in shares), default=0)
    patterns: list[tuple[str, Callable[[int], NDArray[np.float64]]]] = []
    for key in range(longest):
        patterns.append((f"key {key} is counted twice", lambda seq, key=key: 1.0 + (np.arange(longest) == key)))
        patterns.append((f"key {key} is left out", lambda seq, key=key: 1.0 - (np.arange(longest) == key)))
    patterns.append(("pages that the table lists twice are counted once", lambda seq: of_first(batch, seq, longest)))
    for cause, weight in patterns:
        turned = want.copy()
        for seq, (where, share) in enumerate(zip(rows, shares, strict=True)):
            with np.errstate(divide="ignore"):
                turned[where] += np.log((share * weight(seq)[: share.shape[-1]]).sum(axis=-1))
        if not np.array_equal(turned, want) and alike({"lse": got}, {"lse": turned}, batch):
            return cause
    return None


def share_of_each_key(batch: Batch, seq: int, lse: NDArray[np.float64]) -> NDArray[np.float64]:
    """The softmax of one sequence, [q_len, H, kv_len]; all of it lies on the first key where no key is seen."""
    start, stop = batch.bounds()[seq]
    seen, wide = batch.seen(seq), batch.widened()
    shares = np.zeros((stop - start, batch.q.shape[1], max(seen.shape[1], 1)))
    keys = wide.pages[0] if len(wide.pages) == 2 else wide.pages[0][:, :, 0::2]
    slots = np.where(seen.any(axis=0), batch.slots(seq), 0)
    keys = keys.reshape(-1, *keys.shape[2:])[slots]
    scale = batch.q.shape[2] ** -0.5 if batch.sm_scale is None else batch.sm_scale
    for head in range(batch.q.shape[1]):
        logits = logits_of(
            batch.q[start:stop, head].astype(np.float64), keys[:, head // batch.group], scale, batch.soft_cap
        )
        with np.errstate(invalid="ignore"):
            shares[:, head, : seen.shape[1]] = np.where(seen, np.exp(logits - lse[start:stop, head, None]), 0.0)
    shares[..., 0] += np.logical_not(seen).all(axis=1, keepdims=True)
    return shares


def of_first(batch: Batch, seq: int, longest: int) -> NDArray[np.float64]:
    """1 for each key of the first of the pages that are one and the same, else 0."""
    slots = batch.slots(seq)
    weight = np.zeros(max(longest, 1))
    weight[np.unique(slots, return_index=True)[1]] = 1
    return weight


# ---- evidence in keys that no query sees


def of_unseen(runner: Runner, batch: Batch, options: Mapping[str, Any]) -> Iterator[str]:
    """Whether other finite values in slots that no query sees change the results."""
    if not finite_pages(batch):
        return
    before = results(runner, batch, options)
    unread, listed = ~batch.read_slots(), np.zeros(batch.num_pages, bool)
    for seq in range(len(batch.bounds())):
        used = batch.page_indices[seq, : -(-batch.kv_len(seq) // batch.page_size)]
        listed[used[(used >= 0) & (used < batch.num_pages)]] = True
    for cause, pages in ((UNLISTED, ~listed), (PAST, listed)):
        after = results(runner, with_other_values(batch, unread & pages[:, None]), options)
        if any(not np.array_equal(array, after[name], equal_nan=True) for name, array in before.items()):
            yield cause


def with_other_values(batch: Batch, where: NDArray[np.bool_]) -> Batch:
    """The batch with other finite values in some slots [P, G]."""
    rng, arrays = np.random.default_rng(0), [pages.copy() for pages in batch.pages]
    for pages in arrays:
        pages[where] = formats.stored(rng.standard_normal(pages[where].shape) * 3, batch.cache_dtype)
    return batch.with_pages(arrays)


# ---- evidence in the fields of a structure


def of_fields(value: Any, passes: Callable[[Any], bool | None]) -> Iterator[str]:
    """The fields without which the check passes, and the shortest sequence that fails."""
    plain, now = steering.leaves(steering.plain(value)), steering.leaves(value)
    changed = [path for path in now if path in plain and plain[path] != now[path] and path[-1] not in UNTOLD]
    needed = [path for path in changed if passes(steering.replaced(value, {path: plain[path]}))]
    if needed:
        yield f"it fails only with {' and '.join(f'{path[-1]}={now[path]!r}' for path in needed)}"
    lengths = [*of_lengths(value, passes)]
    yield from lengths
    features = [{path: plain[path] for path in changed if path[-1] not in kept} for kept in ((), SIZES)]
    answers = [passes(steering.replaced(value, changes)) for changes in features]
    if not needed and not lengths and next((answer for answer in answers if answer is not None), None) is False:
        yield WHATEVER


def of_lengths(value: Any, passes: Callable[[Any], bool | None]) -> Iterator[str]:
    """Causes that the lengths of a failing batch show: tails of pages, and the number of keys where failures begin."""
    size = steering.page_size_of(value)
    for path, lens in steering.lens_of(value).items():
        whole = tuple((q_len, -(-kv_len // size) * size) for q_len, kv_len in lens) if size else lens
        if whole != lens and passes(steering.replaced(value, {path: whole})):
            yield "it fails only where a sequence's length is no multiple of the page size"

        def cut(most: int, path: steering.Path = path, lens: steering.Lens = lens) -> Any:
            shorter = tuple((min(q_len, most), min(kv_len, most)) for q_len, kv_len in lens)
            return steering.replaced(value, {path: shorter})

        passing, failing = 0, max(kv_len for _, kv_len in lens)
        while failing - passing > 1:
            middle = (passing + failing) // 2
            passing, failing = (middle, failing) if passes(cut(middle)) else (passing, middle)
        if passing:
            pages = f", as many as {passing // size} pages of {size} hold" if size and passing % size == 0 else ""
            yield f"it fails only for sequences of more than {passing} keys{pages}"


def brief(value: Any) -> str:
    """A structure as the expression that makes it, without the fields that have their defaults, except for dtypes."""
    if steering.is_structure(value):
        told = {
            field.name: brief(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name == "dtype" or getattr(value, field.name) != field.default
        }
        return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in told.items())})"
    if isinstance(value, tuple) and any(map(steering.is_structure, value)):
        return ", ".join(brief(part) for part in value if part != {})
    return repr(value)
