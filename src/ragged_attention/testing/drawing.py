"""The checks of the suite, which run on a named batch or on batches that Hypothesis draws and shrinks."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from ragged_attention.testing import steering
from ragged_attention.testing.runner import (
    ANSWERED,
    DECLINED,
    Absent,
    Declined,
    Runner,
    Taken,
    asking,
    reason_of,
)

PROFILES = {"dev": 25, "ci": 200, "nightly": 2000}
PROFILE_VARIABLE = "HYPOTHESIS_PROFILE"
ATTEMPTS = 10  # drawn batches per requested batch, after which a check gives up
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
# Tunables that the suite also tests on backends that offer them, so that small batches take every code path.
PATHS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "ragged_paged_attention": (
        {"num_splits": 1},
        {"num_splits": 3},
        {"num_splits": 5, "split_block_kv": 16},
        {"split_block_q": 64},
        {"block_q": 16, "block_kv": 16},
        {"split_weights_below": 10**6},
        {"segment_kv": 16, "block_kv": 16},
        {"segment_kv": 128, "block_q": 16},
        {"num_kv_pages_per_block": 1, "num_queries_per_block": 16},
        {"num_kv_pages_per_block": 3, "num_queries_per_block": 16},
    ),
    "paged_attention": (
        {"num_splits": 1},
        {"num_splits": 3},
        {"split_block_q": 32, "split_block_kv": 16},
        {"pages_per_compute_block": 1},
        {"inline_seq_dim": False},
        {"inline_seq_dim": False, "pages_per_compute_block": 1},
    ),
    "prefill_attention": (
        {"num_splits": 3},
        {"block_q": 16, "block_kv": 16},
        {"num_kv_pages_per_block": 1, "num_queries_per_block": 8},
        {"num_kv_pages_per_block": 3},
    ),
    "sparse_mla_prefill": (
        {"num_splits": 1},
        {"num_splits": 3},
        {"block_h": 16, "block_kv": 16},
        {"block_h": 32, "block_kv": 32, "num_splits": 2},
        {"num_keys_per_block": 16},
        {"narrow": False, "num_splits": 2},
    ),
    "mla_decode": (
        {"num_splits": 1},
        {"num_splits": 3},
        {"num_splits": 5, "block_kv": 16},
        {"block_h": 32, "block_kv": 32, "num_splits": 2},
        {"num_keys_per_block": 16, "num_queries_per_block": 2},
        {"narrow": False, "num_splits": 2},
    ),
    "ragged_mla_attention": (
        {"num_splits": 1},
        {"num_splits": 3},
        {"num_splits": 5, "split_block_kv": 16},
        {"num_splits": 2, "invariant": True},
        {"num_splits": 2, "split_rows": 1, "block_h": 32, "block_kv": 32},
        {"num_keys_per_block": 16, "num_queries_per_block": 2},
    ),
    "varlen_attention": (
        {"segment_kv": 16, "block_kv": 16},
        {"block_q": 16},
        {"block_q": 16, "block_kv": 16},
        {"block_q": 32, "block_kv": 128},
    ),
    "varlen_attention_backward": (
        {"block_q": 16},
        {"block_q": 16, "block_kv": 16, "dq_block_q": 16, "dq_block_kv": 16},
        {"block_q": 16, "block_kv": 128, "dq_block_q": 128, "dq_block_kv": 32},
    ),
    "sparse_mla_prefill_backward": (
        {"block_kv": 16},
        {"block_h": 16, "block_kv": 16, "chunk_tokens": 1},
        {"block_h": 32, "block_kv": 32, "chunk_tokens": 3},
        {"block_h": 32, "block_kv": 32, "chunk_tokens": 3, "keys_first": True},
    ),
    "indexer_logits": (
        {"walk": True},
        {"walk": False},
        {"walk": True, "num_parts": 3, "block_n": 16},
        {"walk": False, "block_n": 32, "block_t": 4},
        {"block_q": 1, "block_kv": 8},
        {"block_q": 3, "block_kv": 24},
        {"num_queries_per_block": 1, "num_keys_per_block": 128},
        {"num_queries_per_block": 3, "num_keys_per_block": 384},
    ),
    "indexer_logits_backward": (
        {"block_n": 16, "chunk_tokens": 1},
        {"block_h": 32, "block_n": 32, "chunk_tokens": 3},
        {"block_rows": 4, "block_kv": 8},
        {"block_q": 1, "block_kv": 8},
        {"block_q": 3, "block_kv": 24},
    ),
    "attention_target": (
        {"block_h": 32, "block_n": 16, "block_d": 16},
        {"block_rows": 4, "block_kv": 8},
        {"block_q": 1, "block_kv": 8},
        {"block_q": 3, "block_kv": 24},
    ),
    "indexer_topk": (
        {"walk": True, "chunk": 3, "num_splits": 3, "select_block": 64},
        {"walk": False, "block_n": 32, "block_t": 2, "chunk": 5},
        {"block_q": 1, "block_kv": 8},
        {"block_q": 3, "block_kv": 24},
        {"num_queries_per_block": 2, "num_keys_per_block": 128, "num_rows_per_chunk": 5, "num_rows_per_block": 3},
    ),
    "block_scores": (
        {"block_n": 32, "block_t": 4},
        {"block_kv": 8},
        {"block_q": 1, "block_kv": 8},
        {"block_q": 3, "block_kv": 24},
    ),
    "select_blocks": (
        {"block_n": 16, "block_t": 2, "chunk": 3, "num_splits": 3, "select_block": 64},
        {"block_kv": 8},
        {"block_q": 1, "block_kv": 8},
        {"block_q": 3, "block_kv": 24},
    ),
    "top_k_blocks": ({"block": 64, "num_splits": 3},),
    "top_k_indices": (
        {"block": 64},
        {"block": 64, "num_splits": 3},
        {"num_splits": 7},
        {"num_rows_per_block": 1},
        {"num_rows_per_block": 3},
    ),
}


def paths(runner: Runner, operation: str) -> list[Mapping[str, Any]]:
    """The sets of options with which to test an operation of the runner's backend. The first set is empty."""
    known = runner.tunables(operation)
    return [{}, *(options for options in PATHS.get(operation, ()) if set(options) <= set(known))]


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of the suite, which is one line of the summary table."""

    kind: str  # corner | agreement | law | memory
    name: str
    run: Callable[[Runner, int], int]

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def examples_of(profile: str | None = None) -> int:
    """The number of batches to draw for each check, by profile (default: HYPOTHESIS_PROFILE, else dev)."""
    return PROFILES[profile or os.environ.get(PROFILE_VARIABLE) or "dev"]


def drawn(runner: Runner, strategy: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int) -> int:
    """Run a check on drawn batches, shrink the first failure, and return the number of batches that the backend took.

    Batches that the backend declines do not count. If it declines some, more are drawn until it has taken `examples`.
    If it declines most, the search in `steering` finds out which batches it takes, and only such batches are drawn. If
    it takes none, a refusal with the most common reason is raised.
    """
    tally = _Tally(check)

    @_hypothesis_test(strategy, examples)
    def as_drawn(value: Any) -> None:
        tally.attempt(value)

    as_drawn()
    if tally.missing(examples) and not tally.lacks_operation():
        most = 2 * tally.judged > examples or not tally.refusals
        by = {} if most else steering.learn(_to_learn_from(tally, strategy), lambda value: _refusal(check, value))
        if by or tally.judged:
            refusals, tally.refusals = tally.refusals, []
            _draw_more(tally, steering.steered(strategy, by), examples)
            tally.refusals = tally.refusals or refusals  # refusals of steered batches are more informative
    if tally.refusals and not tally.judged:
        raise tally.commonest()
    return tally.judged


def _to_learn_from(tally: "_Tally", strategy: st.SearchStrategy[Any]) -> list[Any]:
    """The values tried so far.

    If they are few, more are drawn and added, because the first batches of a hypothesis run are almost empty.
    """
    values = [*tally.values]
    if len(values) < ATTEMPTS:
        _hypothesis_test(strategy, ATTEMPTS, start=2)(lambda value: values.append(value))()
    return values


def _draw_more(tally: "_Tally", strategy: st.SearchStrategy[tuple[Any, bool]], examples: int) -> None:
    """Draw steered batches until the backend has taken enough or declined too many."""
    attempts = itertools.count(1)
    hopeless = max(ATTEMPTS, examples)  # if the backend declines this many batches and takes none, the check gives up

    @_hypothesis_test(strategy, examples - tally.judged, start=1)  # a new seed, to draw new batches
    def as_taken(drawn_value: tuple[Any, bool]) -> None:
        value, changed = drawn_value
        attempt = next(attempts)
        spent = attempt > ATTEMPTS * examples or (not tally.judged and attempt > hopeless)
        if spent and not tally.failed:  # once a check has failed, attempts to shrink and repeat it are unlimited
            reject()
        if (changed and _refusal(tally.check, value) is not None) or not tally.attempt(value):
            reject()

    with contextlib.suppress(Unsatisfiable):  # the batches taken so far still count
        as_taken()


def _hypothesis_test(
    strategy: st.SearchStrategy[Any], examples: int, *, start: int = 0
) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Hypothesis's decorators with the settings of the suite.

    `start` is a seed, so that each run draws the same batches and can be repeated. Nightly runs draw other batches each
    time.
    """
    configured = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=PHASES,
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],  # type: ignore[list-item]
        print_blob=False,
    )
    from_start = seed(start) if examples < PROFILES["nightly"] else lambda function: function
    return lambda function: from_start(configured(given(strategy)(function)))  # type: ignore[return-value]


class _Tally:
    """Counts the batches of one check that were tried, taken and declined."""

    def __init__(self, check: Callable[[Any], None]) -> None:
        self.check = check
        self.judged = self.tried = 0
        self.failed = False
        self.values: list[Any] = []
        self.refusals: list[Declined] = []

    def attempt(self, value: Any) -> bool:
        """Whether the backend returned results for a value; raises the error, with a `Failure`, if the check fails."""
        self.tried += 1
        self.values.append(value)
        try:
            took = answers(self.check, value)
        except Declined as refusal:
            if not self.failed:
                self.refusals.append(refusal)
                DECLINED[reason_of(refusal)] += 1
            return False
        except Exception:
            self.failed = True
            raise
        self.judged += took
        return took

    def commonest(self) -> Declined:
        """The refusal with the most common reason."""
        counts = collections.Counter(map(reason_of, self.refusals))
        return max(self.refusals, key=lambda refusal: counts[reason_of(refusal)])

    def missing(self, examples: int) -> bool:
        return self.judged < min(examples, self.tried)

    def lacks_operation(self) -> bool:
        """Whether no batch was taken because the backend does not offer the operation."""
        return not self.judged and bool(self.refusals) and isinstance(self.refusals[0], Absent)


@dataclasses.dataclass(frozen=True)
class Failure:
    """The batch on which a check failed, and the check, which repeats the failure.

    The error of the check has this object as its attribute `failure`.
    """

    batch: Any
    check: Callable[[Any], object]


@contextlib.contextmanager
def _separate_answers() -> Iterator[None]:
    """A context in which `ANSWERED` has only the calls made inside it. On exit, the earlier calls are added again."""
    before = set(ANSWERED)
    ANSWERED.clear()
    try:
        yield
    finally:
        ANSWERED.update(before)


def in_frame(name: str, call: Callable[[], Any]) -> Any:
    """The result of `call`, in a stack frame called `name`, which faulthandler prints if the process dies inside."""

    def frame() -> Any:
        return call()

    frame.__code__ = frame.__code__.replace(co_name=name or "batch")
    return frame()


def answers(check: Callable[[Any], object], batch: Any) -> bool:
    """Whether the check of this batch got results from the backend; adds a `Failure` to any error."""
    try:
        with _separate_answers():
            in_frame(steering.told(batch), lambda: check(batch))
            return bool(ANSWERED)
    except Exception as error:
        error.failure = Failure(batch, check)  # type: ignore[attr-defined]
        raise


def _refusal(check: Callable[[Any], None], value: Any) -> str | None:
    """The reason why the check cannot run on a batch, or None.

    The backend is only asked whether it takes the call. A runner that cannot ask makes the call.
    """
    with _separate_answers():
        try:
            with asking():
                check(value)
        except Taken:
            return None
        except Declined as refusal:
            return reason_of(refusal)
        except Exception:  # either a fault, which drawn batches also find, or an invalid batch
            return None if ANSWERED else steering.CONTRADICTION
        return None if ANSWERED else "the check asks nothing of the backend"


def built(check: Callable[[Runner, Any], None]) -> Callable[[Runner, Any], None]:
    """A check of specs from a check of batches, so that failures print the spec."""
    return lambda runner, spec: check(runner, spec.build())


def taken_of(attempts: Iterable[Callable[[], object]]) -> int:
    """The number of attempts that the backend takes; raises the first refusal if it declines all.

    An attempt that returns False did not call the backend.
    """
    count, refusals = 0, []
    for attempt in attempts:
        try:
            count += attempt() is not False
        except Declined as refusal:
            refusals.append(refusal)
            DECLINED[reason_of(refusal)] += 1
    if refusals and not count:
        raise refusals[0]
    return count


@dataclasses.dataclass(frozen=True)
class Case:
    """One of several batches that a check tests."""

    name: str  # reported with a failure
    check: Callable[[Runner, Any], None]
    build: Callable[[], Any]

    def attempt(self, runner: Runner) -> bool:
        try:
            return answers(functools.partial(self.check, runner), self.build())
        except Exception as error:
            error.add_note(self.name)
            raise


def on_cases(cases: Callable[[], Iterable[Case]]) -> Callable[[Runner, int], int]:
    """The `run` of a check that tests several cases. The backend need not take all of them."""

    def run(runner: Runner, examples: int) -> int:
        del examples
        return taken_of(functools.partial(case.attempt, runner) for case in cases())

    return run


def on_corner(check: Callable[[Runner, Any], None], build: Callable[[], Any]) -> Callable[[Runner, int], int]:
    def run(runner: Runner, examples: int) -> int:
        del examples
        return int(answers(functools.partial(check, runner), build()))

    return run


def on_drawn(
    check: Callable[[Runner, Any], None], strategy: st.SearchStrategy[Any], share: float = 1.0
) -> Callable[[Runner, int], int]:
    def run(runner: Runner, examples: int) -> int:
        return drawn(runner, strategy, lambda batch: check(runner, batch), max(1, int(examples * share)))

    return run


def on_every_path(
    operation: str, check: Callable[[Runner, Any, Mapping[str, Any]], None], build: Callable[[], Any]
) -> Callable[[Runner, int], int]:
    """The `run` of a check that tests one batch with each non-empty set of options. A set may not fit the device."""

    def run(runner: Runner, examples: int) -> int:
        del examples
        if not paths(runner, operation)[1:]:
            raise Absent(f"{runner.backend} has no options for {operation} that change its path")
        pairs = [(build(), options) for options in paths(runner, operation)[1:]]
        return taken_of(
            functools.partial(answers, lambda pair: check(runner, pair[0], pair[1]), pair) for pair in pairs
        )

    return run


def on_drawn_paths(
    operation: str, check: Callable[[Runner, Any, Mapping[str, Any]], None], strategy: st.SearchStrategy[Any]
) -> Callable[[Runner, int], int]:
    """The `run` of a check that draws specs, each with a set of options."""

    def run(runner: Runner, examples: int) -> int:
        pairs = st.tuples(strategy, st.sampled_from(paths(runner, operation)))
        return drawn(runner, pairs, lambda pair: check(runner, pair[0].build(), pair[1]), examples)

    return run
