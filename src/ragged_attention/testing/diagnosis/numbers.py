"""Evidence from results: which faulty computation gives them, and which changes of the input affect them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.diagnosis.candidates import Candidate, candidates, single_keys
from ragged_attention.testing.diagnosis.forms import Form, Results, attended, form_of, logits_of_parts
from ragged_attention.testing.diagnosis.results import (
    agree,
    expected,
    finite_queries,
    results,
    with_other_values,
    with_queries,
)
from ragged_attention.testing.rounded_weights import Allowance, allowance, of_batch
from ragged_attention.testing.runner import Declined, Runner

NAN = "NaN or infinity in cache slots that no query sees reaches the results: mask the values too, since 0 * NaN is NaN"
FINITE = "finite values give NaN"
FULL_SINK = "a sink of +inf gives NaN: it takes all weight, so out is 0"
OF_NO_KEYS = "queries that see no key give NaN: their out is 0 and their lse -inf"
UNLISTED = "it reads pages that the table does not list"
PAST = "it reads cache slots that no query sees, in listed pages: past the lengths or hidden by a mask"
UNSELECTED = "it reads rows that no list selects"
UNSEEN = "it reads keys that no query sees: outside all sequences, or hidden by a mask"
STRIDES = "it fails only if arguments have strides of 0"
GAPS = "it fails only if arguments are views with gaps"
RESCALE = (
    "sums are not rescaled if a later key has a larger logit: multiply the accumulator and the sum of weights by "
    "exp(old maximum - new maximum)"
)
IMPRECISE = (
    "results are nearly right: something is rounded to 16 bits, such as logits, scaled queries, partial sums, or the "
    "weights before they are added up"
)
OVERFLOW = "exp overflows, or all weights underflow: subtract the largest logit of a query from all of them first"
EXP = 87.0  # in float32, exp(x) overflows for slightly larger x, and exp(-x) is 0 or subnormal
COARSE, LEAST = 2.0**-5, 1e-3  # relative and absolute error of several roundings to bfloat16
ROUNDED = (
    "softmax weights are probably rounded to 16 bits before the product with values: rounded_weights=True or "
    "--rounded-weights allows that"
)
READ = (UNLISTED, PAST, UNSELECTED, UNSEEN)  # less specific than other causes
LARGE = 3.0  # a logit that exceeds those of the other keys, but leaves them weights that matter


def of_results(runner: Runner, batch: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """Likely causes of wrong results on a batch, from its first variant that fails; variants without NaN come first."""
    if (form := form_of(batch)) is None:
        return
    if batch.strided and (gaps := of_gaps(runner, batch, options)):
        yield gaps
        return
    clean = finite_queries(with_other_values(batch, form, ~form.read()))
    batches = [clean, batch]
    if hasattr(batch, "poisoned"):
        batches += [clean.poisoned("nan"), clean.poisoned("inf")]
    for each in batches:
        try:
            got, want = results(runner, each, options), expected(each)
        except Declined:  # some backends decline NaN and infinity
            continue
        if any(array.shape != want[name].shape for name, array in got.items()):
            return
        rounding = allowance(runner, each)
        if not agree(got, want, each, rounding):
            form = form_of(each)
            assert form is not None
            if (
                each is batch
                and batch.expanded
                and agree(results(runner, batch.change(expanded={}), options), want, batch)
            ):
                yield STRIDES
            elif each is not clean and not form.finite():
                yield NAN
            else:
                causes = list(of_numbers(got, want, each, form, rounding))
                if not causes and not runner.rounded_weights and agree(got, want, each, of_batch(each)):
                    causes = [ROUNDED]
                elif not causes and nearly(got, want, each):
                    causes = [IMPRECISE]
                yield from causes
                if form.finite():
                    yield from of_unseen(runner, each, form, options)
                    yield from of_order(runner, each, form, options)
            return


def of_gaps(runner: Runner, batch: Any, options: Mapping[str, Any]) -> str | None:
    """The cause, if results are wrong only for views with gaps. It names the arguments that must not be such views."""

    def is_right_if_strided(names: frozenset[str] | None) -> bool:
        return is_right(dataclasses.replace(runner, strided_only=names), batch, options)

    if is_right_if_strided(None) or not is_right_if_strided(frozenset()):
        return None
    arrays = [name for name, value in batch.arguments().items() if isinstance(value, np.ndarray | tuple)]
    wrong = [name for name in arrays if not is_right_if_strided(frozenset({name}))]
    texts = [
        f"{name}'s last axis is not contiguous" if batch.layout_of(name) == "rows" else f"{name} has gaps between rows"
        for name in wrong
    ]
    return f"it fails only if {' or '.join(texts)}" if texts else GAPS


def nearly(got: Results, want: Results, batch: Any) -> bool:
    """Whether results differ from the right ones by no more than the errors of a computation in 16 bits."""
    for name, array in got.items():
        finite = np.isfinite(want[name])
        bound = np.reshape(batch.mean_magnitudes(), array.shape) if name == "out" else np.ones(array.shape)
        near = np.abs(array - np.where(finite, want[name], 0.0)) <= COARSE * bound + LEAST
        if not (near | ~finite).all() or not np.isfinite(array[finite]).all():
            return False
    return True


def of_numbers(got: Results, want: Results, batch: Any, form: Form, rounding: Allowance = 0.0) -> Iterator[str]:
    """The causes of candidates with these results, then simple relations to the right results, then single keys."""
    if agree(without_nan(got, want), want, batch, rounding):
        yield OF_NO_KEYS
        return
    of_all, of_out = matching(got, want, batch, candidates(batch, form), rounding)
    causes = of_all or of_out
    yield from causes
    nan = any(np.isnan(array).any() and not np.isnan(want[name]).any() for name, array in got.items())
    if nan and not causes:
        yield FULL_SINK if _of_full_sinks(got, form) else OVERFLOW if _overflow(form) else FINITE
    if nan or of_all:
        return
    for name, array in got.items():
        yield from of_scale(name, array.astype(np.float64), want[name])
    if not causes:
        yield from matching(got, want, batch, single_keys(form), rounding)[0][:1]


def _of_full_sinks(got: Results, form: Form) -> bool:
    """Whether some sinks are +inf, and only the heads of these sinks have NaN."""
    full = form.sinks == np.inf
    return bool(full.any()) and not np.isnan(got["out"][:, ~full]).any()


def _overflow(form: Form) -> bool:
    """Whether the largest logit of some query is too large or too small for exp in float32."""
    largest = attended(form)["max_logits"]
    return bool((np.abs(largest[np.isfinite(largest)]) > EXP).any())


def is_right(runner: Runner, batch: Any, options: Mapping[str, Any]) -> bool:
    """Whether the batch is an attention call and its results are right."""
    if form_of(batch) is None:
        return False
    try:
        return agree(results(runner, batch, options), expected(batch), batch, allowance(runner, batch))
    except Exception:  # includes Declined and any error of a kernel
        return False


def without_nan(got: Results, want: Results) -> Results:
    """The results, with the right values in place of NaN for queries without keys."""
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
    """The causes of the candidates that match all results, and of the candidates that match only a wrong out."""
    of_all: list[str] = []
    of_out: list[str] = []
    if not np.isfinite(got["out"]).any():
        return of_all, of_out
    wrong = not agree({"out": got["out"]}, want, batch, rounding)
    for cause, other in others:
        expected_results = computed(other)
        these = without_nan(got, expected_results)
        if agree(these, expected_results, batch, rounding):
            of_all.append(cause)
        elif wrong and agree({"out": these["out"]}, expected_results, batch, rounding):
            of_out.append(cause)
    return of_all, of_out


def computed(other: Any) -> Results:
    """The results of a candidate."""
    if isinstance(other, dict):
        return other
    return attended(other) if isinstance(other, Form) else expected(other)


def of_scale(name: str, got: NDArray[np.float64], want: NDArray[np.float64]) -> Iterator[str]:
    """A cause, if an array is a multiple of the right one."""
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


# ---- evidence from further calls


def of_unseen(runner: Runner, batch: Any, form: Form, options: Mapping[str, Any]) -> Iterator[str]:
    """Causes, if other finite values in slots that no query sees change the results."""
    before = results(runner, batch.change(expanded={}), options)
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
    """Yield `RESCALE` if only the order of keys makes results wrong.

    Then they are right if each query's largest logit is at its first visible key, and wrong if it is at its last.
    """
    passes = []
    for last in (False, True):
        if (q := towards(form, last=last)) is None:
            return
        other = with_queries(batch, q)
        passes.append(agree(results(runner, other, options), expected(other), other, allowance(runner, other)))
    if passes == [True, False]:
        yield RESCALE


def towards(form: Form, *, last: bool) -> NDArray[np.float64] | None:
    """Queries whose largest logit is at the first or last key that they see; None if this fails for some query."""
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
    changed = form.change(q=new)
    for part in form.parts:
        seen = form.seen(part)
        if not seen.any():
            continue
        used = np.flatnonzero(seen.any(axis=0))
        visible = seen[:, None, used]
        for _, logits, _ in logits_of_parts(changed, part, used):
            masked = np.where(visible, logits, -np.inf)
            best_key = np.flip(masked, axis=2).argmax(axis=2) if last else masked.argmax(axis=2)
            target = (np.flip(visible, axis=2) if last else visible).argmax(axis=2)
            if (best_key != target)[seen.any(axis=1)].any():
                return None
    return new
