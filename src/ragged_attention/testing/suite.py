"""The suite: the list of all checks, which both pytest and `ragged-attention conformance` run.

A check takes a runner and a number of examples, raises AssertionError if the backend is wrong, and returns the number
of examples that the backend took. A backend that declines a batch (`why_not`) is not wrong. If it declines all of
them, nothing was tested, and the check raises `Declined`.
"""

from collections.abc import Iterator

from ragged_attention.testing import empties, expanded, formats, invariance, large_logits, max_logits
from ragged_attention.testing.blocks import suite as blocks_suite
from ragged_attention.testing.drawing import Check, built, on_corner, on_drawn, on_drawn_paths, on_every_path
from ragged_attention.testing.heads_first import suite as heads_first_suite
from ragged_attention.testing.indexer import suite as indexer_suite
from ragged_attention.testing.mla import suite as mla_suite
from ragged_attention.testing.paged import kv_rows, norm_rope, scaled, updates
from ragged_attention.testing.paged.corners import CORNERS, MERGE_CORNERS, WRITE_CORNERS
from ragged_attention.testing.paged.laws import LAWS, quantised_is_dequantised
from ragged_attention.testing.paged.oracle import (
    check_attention,
    check_determinism,
    check_merge,
    check_without_lse,
    check_write,
)
from ragged_attention.testing.paged.strategies import merge_specs, specs, write_specs
from ragged_attention.testing.safety import check_garbage
from ragged_attention.testing.varlen import suite as varlen_suite

ON_EVERY_PATH = (
    "decode of a long sequence",
    "sinks over a long sequence",
    "window in a long sequence",
    "every edge at once",
    "speculative",
    "invalid page indices with sinks",
)


def corners() -> Iterator[Check]:
    """Checks that run every named batch once, most of them with the backend's own choice of options."""
    for name, build in CORNERS.items():
        yield Check("corner", f"attention, {name}", on_corner(check_attention, build))
    for name in ON_EVERY_PATH:
        yield Check(
            "corner",
            f"attention on every path, {name}",
            on_every_path("ragged_paged_attention", check_attention, CORNERS[name]),
        )
    for name, build in WRITE_CORNERS.items():
        yield Check("corner", f"write, {name}", on_corner(check_write, build))
    for name, build in MERGE_CORNERS.items():
        yield Check("corner", f"merge, {name}", on_corner(check_merge, build))
    yield from updates.corners()
    yield from scaled.corners()
    yield from kv_rows.corners()
    yield from norm_rope.corners()
    yield from heads_first_suite.corners()
    yield from mla_suite.corners()
    yield from varlen_suite.corners()
    yield from indexer_suite.corners()
    yield from blocks_suite.corners()
    yield from empties.corners()
    yield from expanded.corners()
    yield from max_logits.corners("ragged_paged_attention")


def agreement() -> Iterator[Check]:
    """Checks that compare drawn batches with the reference."""
    yield Check(
        "agreement", "attention on drawn batches", on_drawn_paths("ragged_paged_attention", check_attention, specs())
    )
    yield Check("agreement", "attention without lse", on_drawn(built(check_without_lse), specs(), 0.2))
    yield Check("agreement", "the same bits again", on_drawn(built(check_determinism), specs(), 0.1))
    yield Check("agreement", "write on drawn batches", on_drawn(built(check_write), write_specs))
    yield Check("agreement", "merge on drawn batches", on_drawn(built(check_merge), merge_specs))
    yield from updates.agreement()
    yield from scaled.agreement()
    yield from kv_rows.agreement()
    yield from norm_rope.agreement()
    yield from heads_first_suite.agreement()
    yield from mla_suite.agreement()
    yield from varlen_suite.agreement()
    yield from indexer_suite.agreement()
    yield from blocks_suite.agreement()
    yield from large_logits.agreement()
    yield from max_logits.agreement("ragged_paged_attention")


def laws() -> Iterator[Check]:
    """Checks of properties that need no reference result."""
    for name, law in LAWS.items():
        quantized = formats.QUANTIZED if law is quantised_is_dequantised else None
        yield Check("law", name, on_drawn(law, specs(clean=True, cache_dtypes=quantized), 0.5))
    yield from scaled.laws()
    yield from kv_rows.laws()
    yield from norm_rope.laws()
    yield from heads_first_suite.laws()
    yield from mla_suite.laws()
    yield from varlen_suite.laws()
    yield from indexer_suite.laws()
    yield from blocks_suite.laws()
    yield from invariance.laws()
    yield from max_logits.laws("ragged_paged_attention")


def memory() -> Iterator[Check]:
    yield Check("memory", "no index value makes it read or write outside", check_garbage)


def checks() -> list[Check]:
    """All checks; cheap and informative checks come first."""
    return [*corners(), *agreement(), *laws(), *memory()]
