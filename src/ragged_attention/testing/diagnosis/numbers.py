"""Evidence in numbers: whose results those of a backend are, and what changes them that should not, or should."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.diagnosis.candidates import Candidate, candidates, single_keys
from ragged_attention.testing.diagnosis.forms import Form, Results, attended, form_of, logits_of_parts
from ragged_attention.testing.diagnosis.results import (
    alike,
    expected,
    finite_queries,
    results,
    with_other_values,
    with_queries,
)
from ragged_attention.testing.rounded_weights import Allowance, allowance, of_batch
from ragged_attention.testing.runner import Declined, Runner

NAN = "NaN or infinity of cache slots that no query sees reaches the results: mask the values too, since 0 * NaN is NaN"
FINITE = "finite values give NaN"
FULL_SINK = "a sink of +inf gives NaN: it takes all weight, so out is 0"
OF_NO_KEYS = "queries that see no key give NaN: their out is 0 and their lse -inf"
UNLISTED = "it reads pages that the table does not list"
PAST = "it reads cache slots that no query sees, in listed pages: past the lengths or behind a mask"
UNSELECTED = "it reads rows that no list selects"
UNSEEN = "it reads keys that no query sees: of no sequence, or behind a mask"
STRIDES = "it fails only where arguments have strides of 0"
RESCALE = (
    "sums are not rescaled where a later key has a larger logit: the accumulator and the sum of weights are to be "
    "multiplied by exp(old maximum - new maximum)"
)
IMPRECISE = (
    "results are nearly right: something is rounded to 16 bits, such as logits, scaled queries, partial sums, or the "
    "weights before they are added up"
)
OVERFLOW = "exp overflows, or all weights underflow: subtract the largest logit of a query from all of them first"
EXP = 87.0  # exp of more overflows in float32, and of minus as much is 0 or subnormal
COARSE, LEAST = 2.0**-5, 1e-3  # an error of some roundings to bfloat16
ROUNDED = (
    "softmax weights are rounded to 16 bits before the product with values, it seems: rounded_weights=True, or "
    "--rounded-weights, allows that"
)
READ = (UNLISTED, PAST, UNSELECTED, UNSEEN)  # which say less than other causes
LARGE = 3.0  # a logit that is larger than those of other keys, and not so large that their weights would not count


def of_results(runner: Runner, batch: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the results of a batch; NaN is left out of the cache if they are wrong without it."""
    if (form := form_of(batch)) is None:
        return
    clean = finite_queries(with_other_values(batch, form, ~form.read()))
    batches = [clean, batch]
    if hasattr(batch, "poisoned"):
        batches += [clean.poisoned("nan"), clean.poisoned("inf")]
    for each in batches:
        try:
            got, want = results(runner, each, options), expected(each)
        except Declined:  # of NaN and infinity
            continue
        if any(array.shape != want[name].shape for name, array in got.items()):
            return
        rounding = allowance(runner, each)
        if not alike(got, want, each, rounding):
            form = form_of(each)
            assert form is not None
            if each is batch and batch.alike and alike(results(runner, batch.change(alike={}), options), want, batch):
                yield STRIDES
            elif each is not clean and not form.finite():
                yield NAN
            else:
                found = list(of_numbers(got, want, each, form, rounding))
                if not found and not runner.rounded_weights and alike(got, want, each, of_batch(each)):
                    found = [ROUNDED]
                elif not found and nearly(got, want, each):
                    found = [IMPRECISE]
                yield from found
                if form.finite():
                    yield from of_unseen(runner, each, form, options)
                    yield from of_order(runner, each, form, options)
            return


def nearly(got: Results, want: Results, batch: Any) -> bool:
    """Whether results are as far from the right ones as computing in 16 bits may bring them."""
    for name, array in got.items():
        finite = np.isfinite(want[name])
        bound = np.reshape(batch.mean_magnitudes(), array.shape) if name == "out" else np.ones(array.shape)
        near = np.abs(array - np.where(finite, want[name], 0.0)) <= COARSE * bound + LEAST
        if not (near | ~finite).all() or not np.isfinite(array[finite]).all():
            return False
    return True


def of_numbers(got: Results, want: Results, batch: Any, form: Form, rounding: Allowance = 0.0) -> Iterator[str]:
    """The candidates that have these results, then plain relations to the right ones, then single keys."""
    if alike(without_nan(got, want), want, batch, rounding):
        yield OF_NO_KEYS
        return
    of_all, of_out = matching(got, want, batch, candidates(batch, form), rounding)
    found = of_all or of_out
    yield from found
    nan = any(np.isnan(array).any() and not np.isnan(want[name]).any() for name, array in got.items())
    if nan and not found:
        yield FULL_SINK if _of_full_sinks(got, form) else OVERFLOW if _overflow(form) else FINITE
    if nan or of_all:
        return
    for name, array in got.items():
        yield from of_scale(name, array.astype(np.float64), want[name])
    if not found:
        yield from matching(got, want, batch, single_keys(form), rounding)[0][:1]


def _of_full_sinks(got: Results, form: Form) -> bool:
    """Whether only heads whose sink is +inf have NaN."""
    full = form.sinks == np.inf
    return bool(full.any()) and not np.isnan(got["out"][:, ~full]).any()


def _overflow(form: Form) -> bool:
    """Whether some query's largest logit is beyond what exp can take in float32."""
    largest = attended(form)["max_logits"]
    return bool((np.abs(largest[np.isfinite(largest)]) > EXP).any())


def is_right(runner: Runner, batch: Any, options: Mapping[str, Any]) -> bool:
    """Whether the results of a batch, if it is one of an attention, are right."""
    if form_of(batch) is None:
        return False
    try:
        return alike(results(runner, batch, options), expected(batch), batch, allowance(runner, batch))
    except Exception:  # whatever a kernel may raise, Declined included
        return False


def without_nan(got: Results, want: Results) -> Results:
    """The results in which NaN for queries without keys, and so without any weight, is what it should be."""
    return {
        name: np.where(np.isnan(array) & _without_keys(name, want), want[name], array) for name, array in got.items()
    }


def _without_keys(name: str, want: Results) -> NDArray[np.bool_]:
    if "lse" not in want:
        return (want[name] == 0).all(axis=-1, keepdims=True)
    empty = want["lse"] == -np.inf
    return empty[..., None] if name == "out" else empty


def matching(
    got: Results, want: Results, batch: Any, others: Iterator[Candidate], rounding: Allowance = 0.0
) -> tuple[list[str], list[str]]:
    """The causes of the candidates that have all of these results, and of those that have this wrong out."""
    of_all: list[str] = []
    of_out: list[str] = []
    if not np.isfinite(got["out"]).any():
        return of_all, of_out
    wrong = not alike({"out": got["out"]}, want, batch, rounding)
    for cause, other in others:
        given = computed(other)
        these = without_nan(got, given)
        if alike(these, given, batch, rounding):
            of_all.append(cause)
        elif wrong and alike({"out": these["out"]}, given, batch, rounding):
            of_out.append(cause)
    return of_all, of_out


def computed(other: Any) -> Results:
    """The results of a candidate."""
    if isinstance(other, dict):
        return other
    return attended(other) if isinstance(other, Form) else expected(other)


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
    if name != "out" and abs(factor * np.log(2) - 1) < 0.01:
        yield f"{name} is in base 2: multiply it by ln 2"
    elif where.sum() > 1:
        yield f"every {name} is {factor:.3g} times the right one"


# ---- evidence in further calls


def of_unseen(runner: Runner, batch: Any, form: Form, options: Mapping[str, Any]) -> Iterator[str]:
    """Whether other finite values in slots that no query sees change the results."""
    before = results(runner, batch.change(alike={}), options)
    read = form.read()
    listed = np.zeros(form.zeros, bool)
    for part in form.parts:
        pages = part.slots[: -(-part.kv_len // form.page_size) * form.page_size]
        listed[pages[pages >= 0]] = True
    masks = {
        "paged": ((UNLISTED, ~listed), (PAST, listed)),
        "lists": ((UNSELECTED, ~read),),
        "packed": ((UNSEEN, ~read),),
    }[form.kind]
    for cause, where in masks:
        after = results(runner, with_other_values(batch, form, where & ~read, seed=1), options)
        if any(not np.array_equal(array, after[name], equal_nan=True) for name, array in before.items()):
            yield cause


def of_order(runner: Runner, batch: Any, form: Form, options: Mapping[str, Any]) -> Iterator[str]:
    """Whether results are right if every query's first key has its largest logit, and wrong if its last key has."""
    passes = []
    for last in (False, True):
        if (q := towards(form, last=last)) is None:
            return
        other = with_queries(batch, q)
        passes.append(alike(results(runner, other, options), expected(other), other, allowance(runner, other)))
    if passes == [True, False]:
        yield RESCALE


def towards(form: Form, *, last: bool) -> NDArray[np.float64] | None:
    """Queries that have their largest logit at the first or the last key that they see; None if some have not."""
    new = form.q.copy()
    for part in form.parts:
        seen = form.seen(part)
        if not seen.shape[1]:
            continue
        key = seen.shape[1] - 1 - seen[:, ::-1].argmax(axis=1) if last else seen.argmax(axis=1)
        rows = np.arange(part.rows.start, part.rows.stop)[seen.any(axis=1)]
        heads = form.heads(part)
        keys = form.k[part.slots[key[seen.any(axis=1)]]][:, form.kv_heads[heads]]  # [rows, heads, D]
        size = form.scale * (keys**2).sum(axis=2, keepdims=True)
        if (size == 0).any():
            return None
        new[np.ix_(rows, heads)] = keys * LARGE / size
    turned = form.change(q=new)
    for part in form.parts:
        seen = form.seen(part)
        if not seen.any():
            continue
        used = np.flatnonzero(seen.any(axis=0))
        shown = seen[:, None, used]
        for _, logits, _ in logits_of_parts(turned, part, used):
            masked = np.where(shown, logits, -np.inf)
            best = np.flip(masked, axis=2).argmax(axis=2) if last else masked.argmax(axis=2)
            own = (np.flip(shown, axis=2) if last else shown).argmax(axis=2)
            if (best != own)[seen.any(axis=1)].any():
                return None
    return new
