"""The checks of attention over packed sequences and of gradients, as `suite` takes them up."""

from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from ragged_attention.testing import varlen_corners
from ragged_attention.testing.drawing import Check, built, drawn, on_corner, on_drawn, paths
from ragged_attention.testing.runners import Runner
from ragged_attention.testing.varlen_laws import SPARSE_GRADIENT_LAWS, VARLEN_LAWS
from ragged_attention.testing.varlen_oracle import (
    check_gradients,
    check_same_bits,
    check_varlen,
    check_varlen_without_lse,
)
from ragged_attention.testing.varlen_strategies import sparse_gradient_specs, varlen_gradient_specs, varlen_specs

CHECKS_OF_PATHS: dict[str, Any] = {
    "varlen_attention": check_varlen,
    "varlen_attention_backward": check_gradients,
    "sparse_mla_prefill_backward": check_gradients,
}


def _on_drawn_paths(operation: str, strategy: st.SearchStrategy[Any]) -> Callable[[Runner, int], int]:
    check = CHECKS_OF_PATHS[operation]

    def run(runner: Runner, examples: int) -> int:
        pairs = st.tuples(strategy, st.sampled_from(paths(runner, operation)))
        return drawn(runner, pairs, lambda pair: check(runner, pair[0].build(), pair[1]), examples)

    return run


def _on_every_path(operation: str, build: Callable[[], Any]) -> Callable[[Runner, int], int]:
    check = CHECKS_OF_PATHS[operation]

    def run(runner: Runner, examples: int) -> int:
        del examples
        batch, others = build(), paths(runner, operation)[1:]
        for options in others:
            check(runner, batch, options)
        return len(others)

    return run


def corners() -> Iterator[Check]:
    """Every named batch, once, as the backend's own heuristics would run it; some on every path."""
    for name, spec in varlen_corners.VARLENS.items():
        yield Check("corner", f"packed, {name}", on_corner(check_varlen, spec.build))
    gradients = (
        ("varlen_attention_backward", "packed gradient", varlen_corners.DENSE_GRADIENTS, varlen_corners.ON_EVERY_PATH),
        (
            "sparse_mla_prefill_backward", "sparse gradient", varlen_corners.SPARSE_GRADIENTS,
            varlen_corners.SPARSES_ON_EVERY_PATH,
        ),
    )  # fmt: skip
    for operation, what, builders, on_every_path in gradients:
        for name, build in builders.items():
            yield Check("corner", f"{what}, {name}", on_corner(check_gradients, build))
        for name in on_every_path:
            yield Check("corner", f"{what} on every path, {name}", _on_every_path(operation, builders[name]))
    for name in varlen_corners.ON_EVERY_PATH:
        run = _on_every_path("varlen_attention", varlen_corners.VARLENS[name].build)
        yield Check("corner", f"packed on every path, {name}", run)
    for name, spec in varlen_corners.SAME_BITS.items():
        yield Check("corner", f"{name} gradients, the same bits in every run", on_corner(check_same_bits, spec.build))


def agreement() -> Iterator[Check]:
    """Drawn batches against the definition, and what must not change a bit."""
    for name, operation, strategy in (
        ("packed", "varlen_attention", varlen_specs()),
        ("packed gradient", "varlen_attention_backward", varlen_gradient_specs()),
        ("sparse gradient", "sparse_mla_prefill_backward", sparse_gradient_specs()),
    ):
        yield Check("agreement", f"{name} on drawn batches", _on_drawn_paths(operation, strategy))
    for name, check, strategy in (
        ("packed without lse", check_varlen_without_lse, varlen_specs()),
        ("packed gradients, the same bits again", check_same_bits, varlen_gradient_specs()),
        ("sparse gradients, the same bits again", check_same_bits, sparse_gradient_specs()),
    ):
        yield Check("agreement", name, on_drawn(built(check), strategy, 0.1))


def laws() -> Iterator[Check]:
    """What holds of both without an oracle."""
    for name, law in (VARLEN_LAWS | SPARSE_GRADIENT_LAWS).items():
        yield Check("law", name, on_drawn(law.holds, law.specs, 0.5))
