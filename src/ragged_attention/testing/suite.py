"""The suite: every check there is, as a list that pytest and `ragged-attention conformance` both walk.

A check takes a runner and a number of examples, raises AssertionError where the backend is wrong, and returns how
many examples the backend took. A backend that declines a batch (`why_not`) is not wrong; one that declines them all
has shown nothing, which is a `Declined` check.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ragged_attention.testing import compare, formats
from ragged_attention.testing.batches import Batch, Spec, expected
from ragged_attention.testing.corners import CORNERS, MERGE_CORNERS, WRITE_CORNERS
from ragged_attention.testing.laws import LAWS, quantised_is_dequantised
from ragged_attention.testing.oracle import check_merge, check_write
from ragged_attention.testing.runners import Declined, Runner
from ragged_attention.testing.safety import check_in_a_process_apart
from ragged_attention.testing.strategies import merge_specs, specs, write_specs

PROFILES = {"dev": 25, "ci": 200, "nightly": 2000}
PROFILE_VARIABLE = "HYPOTHESIS_PROFILE"
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
# Where a backend offers such tunables, the suite also asks for these, so that small batches take every path.
PATHS: tuple[Mapping[str, Any], ...] = (
    {},
    {"num_splits": 1},
    {"num_splits": 3},
    {"num_splits": 5, "split_block_kv": 16},
    {"split_block_q": 64},
    {"block_q": 16, "block_kv": 16},
    {"careful_keys": 10**6},
)
ON_EVERY_PATH = (
    "decode of a long sequence",
    "sinks over a long sequence",
    "window in a long sequence",
    "every edge at once",
    "speculative",
    "invalid page indices with sinks",
)


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the summary table."""

    kind: str  # corner | agreement | law | memory
    name: str
    run: Callable[[Runner, int], int]

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def examples_of(profile: str | None = None) -> int:
    """How many batches are drawn for each check, by the profile's name or that in HYPOTHESIS_PROFILE."""
    return PROFILES[profile or os.environ.get(PROFILE_VARIABLE) or "dev"]


def drawn(runner: Runner, strategy: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int) -> int:
    """Run a check on drawn batches, shrinking what fails; returns how many the backend took."""
    taken, reasons = 0, []

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        # The same batches each time, so that a run says the same thing twice; nightly runs look further.
        derandomize=examples < PROFILES["nightly"],
        phases=PHASES,
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],  # type: ignore[list-item]
        print_blob=False,
    )
    @given(strategy)
    def run(drawn_batch: Any) -> None:
        nonlocal taken
        try:
            check(drawn_batch)
            taken += 1
        except Declined as refusal:
            reasons.append(str(refusal))

    run()
    if reasons and not taken:
        raise Declined(reasons[0])
    return taken


def paths(runner: Runner) -> list[Mapping[str, Any]]:
    """The options under which a backend's attention is checked."""
    known = runner.tunables("ragged_paged_attention")
    return [options for options in PATHS if set(options) <= set(known)]


def check_attention(runner: Runner, batch: Batch, options: Mapping[str, Any] | None = None) -> None:
    """A batch's out and lse agree with the definition."""
    out, lse = runner.attention(batch, options=options)
    want_out, want_lse = expected(batch)
    compare.agrees(out, want_out, batch.kind)
    compare.agrees(lse, want_lse, f"lse {batch.kind}", "lse")


def check_without_lse(runner: Runner, spec: Spec) -> None:
    batch = spec.build()
    out, _ = runner.attention(batch, return_lse=False)
    compare.agrees(out, expected(batch)[0], batch.kind)


def check_determinism(runner: Runner, spec: Spec) -> None:
    batch = spec.build()
    first, again = runner.attention(batch), runner.attention(batch)
    compare.identical(first[0], again[0])
    compare.identical(first[1], again[1], "lse")


def _built(check: Callable[[Runner, Any], None]) -> Callable[[Runner, Any], None]:
    """A check of batches as a check of what they are built from, which is what a failure then prints."""
    return lambda runner, spec: check(runner, spec.build())


def _on_corner(check: Callable[[Runner, Any], None], build: Callable[[], Any]) -> Callable[[Runner, int], int]:
    def run(runner: Runner, examples: int) -> int:
        del examples
        check(runner, build())
        return 1

    return run


def _on_drawn(
    check: Callable[[Runner, Any], None], strategy: st.SearchStrategy[Any], share: float = 1.0
) -> Callable[[Runner, int], int]:
    def run(runner: Runner, examples: int) -> int:
        return drawn(runner, strategy, lambda batch: check(runner, batch), max(1, int(examples * share)))

    return run


def _on_drawn_paths(runner: Runner, examples: int) -> int:
    strategy = st.tuples(specs(), st.sampled_from(paths(runner)))
    return drawn(runner, strategy, lambda pair: check_attention(runner, pair[0].build(), pair[1]), examples)


def _on_every_path(build: Callable[[], Batch]) -> Callable[[Runner, int], int]:
    def run(runner: Runner, examples: int) -> int:
        del examples
        batch, others = build(), paths(runner)[1:]
        for options in others:
            check_attention(runner, batch, options)
        return len(others)

    return run


def corners() -> Iterator[Check]:
    """Every named batch, once, as the backend's own heuristic would run it."""
    for name, build in CORNERS.items():
        yield Check("corner", f"attention, {name}", _on_corner(check_attention, build))
    for name in ON_EVERY_PATH:
        yield Check("corner", f"attention on every path, {name}", _on_every_path(CORNERS[name]))
    for name, build in WRITE_CORNERS.items():
        yield Check("corner", f"write, {name}", _on_corner(check_write, build))
    for name, build in MERGE_CORNERS.items():
        yield Check("corner", f"merge, {name}", _on_corner(check_merge, build))


def agreement() -> Iterator[Check]:
    yield Check("agreement", "attention on drawn batches", _on_drawn_paths)
    yield Check("agreement", "attention without lse", _on_drawn(check_without_lse, specs(), 0.2))
    yield Check("agreement", "the same bits again", _on_drawn(check_determinism, specs(), 0.1))
    yield Check("agreement", "write on drawn batches", _on_drawn(_built(check_write), write_specs))
    yield Check("agreement", "merge on drawn batches", _on_drawn(_built(check_merge), merge_specs))


def laws() -> Iterator[Check]:
    for name, law in LAWS.items():
        quantized = formats.QUANTIZED if law is quantised_is_dequantised else None
        yield Check("law", name, _on_drawn(law, specs(clean=True, cache_dtypes=quantized), 0.5))


def memory() -> Iterator[Check]:
    yield Check("memory", "no index value makes it read or write outside", check_in_a_process_apart)


def checks() -> list[Check]:
    """All of it, the cheap and telling first."""
    return [*corners(), *agreement(), *laws(), *memory()]
